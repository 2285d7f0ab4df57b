"""Distribution of steps to statistics and observers, after the times of their events were read."""

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
        self._plan, self._wall_clock = plan, wall_clock
        self._warmup_left = warmup_steps  # Number of warm-up steps still to be read.
        self._has_read = False  # True once the first step was read.
        self._readers: list[Any] = []  # Methods `steps_read`.

    def connect(self, readers: Sequence[Any]) -> None:
        """Set the objects whose method `steps_read` receives the steps, in this order."""
        self._readers = methods(readers, "steps_read")

    def take(self, records: list[StepRecord], since_ns: int) -> None:
        """Take steps whose reading started at the host time `since_ns` (in nanoseconds)."""
        for record in records:
            if EVALUATED in record.labels:
                # The wall clock has counted the evaluation as part of the step.
                is_first = not self._has_read and record is records[0]
                source = FIRST_STEP if is_first else STEPS
                self._wall_clock.move(source, EVALUATION, record.evaluation_ms)
        self._has_read = True
        probe = self._plan.probe
        unprobed = records if probe is None else probe.take(records)
        if unprobed:
            warmup = min(self._warmup_left, len(unprobed))
            self._warmup_left -= warmup
            call_safely(self._readers, ReadSteps(unprobed, warmup, since_ns))
        if self._plan.is_auto:
            self._plan.cost.add_timed(unprobed, since_ns)


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
        """True if an observer receives each step."""
        return bool(self._on_step)

    @property
    def batch(self) -> int:
        """Number of steps to read together: 1 if an observer receives each step."""
        return 1 if self._on_step else BATCH

    def steps_read(self, steps: ReadSteps) -> None:
        """Call the observers, right after the analyzer. An observer may read or remove the timer.

        The analyzer measures callbacks as causes of slow steps. It has called `start_callback`.
        """
        slow_steps = self._analyzer.newest
        if not self._on_step and not slow_steps:
            return
        for step in steps if self._on_step else ():
            call_safely(self._on_step, step.times())
        for slow_step in slow_steps:
            call_safely(self._on_slow_step, slow_step)
        self._analyzer.end_callback("observers")
        self._analyzer.start_callback()  # For the loggers, which are called next.
