"""Distribution of steps that were read, to statistics and to the user's observers."""

from collections.abc import Sequence
from typing import Any

from lightning_gputime._causes.analyzer import SlowStepAnalyzer
from lightning_gputime._measurement.observers import ReadSteps, call_safely, methods, step_calls
from lightning_gputime._measurement.wall_clock import EVALUATION, FIRST_STEP, STEPS, WallClock
from lightning_gputime._phases import EVALUATED, StepRecord
from lightning_gputime._record.pending_steps import BATCH
from lightning_gputime._session.timing_plan import TimingPlan


class StepReader:
    """Distributor of the steps that were read, in order and in the training thread.

    Args:
        plan: Receives the probed steps, and the cost of timing.
        wall_clock: Receives the time of evaluations inside steps.
        warmup_steps: Number of timed steps at the start that are warm-up.
    """

    def __init__(self, plan: TimingPlan, wall_clock: WallClock, warmup_steps: int) -> None:
        self._plan, self._wall_clock, self._warmup_left = plan, wall_clock, warmup_steps
        self._has_read = False
        self._readers: list[Any] = []

    def connect(self, readers: Sequence[Any]) -> None:
        """Set the objects whose method `steps_read` receives the steps, in this order."""
        self._readers = methods(readers, "steps_read")

    def take(self, records: list[StepRecord], since_ns: int) -> None:
        """Take steps whose reading started at the host time `since_ns` (in nanoseconds)."""
        for record in records:
            if EVALUATED in record.labels:
                is_first = not self._has_read and record is records[0]
                source = FIRST_STEP if is_first else STEPS
                self._wall_clock.move(source, EVALUATION, record.evaluation_ms)
        self._has_read = True
        if self._plan.probe is not None:
            records = self._plan.probe.take(records)
        if records:
            warmup = min(self._warmup_left, len(records))
            self._warmup_left -= warmup
            call_safely(self._readers, ReadSteps(records, warmup, since_ns))
        if self._plan.is_auto:
            self._plan.cost.add_timed(records, since_ns)


class UserCalls:
    """Calls of user observers with the steps that were read.

    Args:
        observers: Observers of the option `observers`.
        analyzer: Provides the slow steps, and receives the time that observers take.
    """

    def __init__(self, observers: Sequence[Any], analyzer: SlowStepAnalyzer) -> None:
        self._on_step = step_calls(observers)
        self._on_slow_step = methods(observers, "on_slow_step")
        self._analyzer = analyzer

    @property
    def takes_steps(self) -> bool:
        return bool(self._on_step)

    @property
    def batch(self) -> int:
        """Number of steps to read together: 1 if observers receive each step at once."""
        return 1 if self._on_step else BATCH

    def steps_read(self, steps: ReadSteps) -> None:
        """Call the observers, right after the analyzer. They may read or remove the timer."""
        slow_steps = self._analyzer.newest
        if not self._on_step and not slow_steps:
            return
        for step in steps if self._on_step else ():
            call_safely(self._on_step, step.times())
        for slow_step in slow_steps:
            call_safely(self._on_slow_step, slow_step)
        self._analyzer.end_callback("observers")
        self._analyzer.start_callback()  # Loggers are next.
