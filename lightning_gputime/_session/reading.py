"""Distribution of steps to statistics and observers, after the times of their events were read."""

from collections.abc import Sequence
from typing import Any

from lightning_gputime._causes.analyzer import SlowStepAnalyzer
from lightning_gputime._measurement.observers import ReadSteps, call_safely, methods, step_calls
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.wall_clock import EVALUATION, FIRST_STEP, STEPS, WallClock
from lightning_gputime._phases import EVALUATED, StepRecord
from lightning_gputime._record.pending_steps import BATCH
from lightning_gputime._session.timing_plan import TimingPlan

_MIN_EXAMINED, _MIN_COMPARED = 3, 50  # Numbers of examined steps, and of others to compare with.


class StepReader:
    """Distributor of the steps that were read, in order and in the training thread.

    Args:
        plan: Receives the cost of timing.
        results: Receives the examined steps.
        wall_clock: Receives the time of evaluations inside steps.
        warmup_steps: Number of timed steps at the start that are warm-up.
    """

    def __init__(
        self, plan: TimingPlan, results: Results, wall_clock: WallClock, warmup_steps: int
    ) -> None:
        self._plan, self._results, self._wall_clock = plan, results, wall_clock
        self._may_examine_more = True
        self._has_slowed_down = False
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
        self._results.ledger.add(records)
        usual = records
        if not self._plan.times_all and any(record.lines for record in records):
            usual = [record for record in records if not record.lines]
        if usual:
            warmup = min(self._warmup_left, len(usual))
            self._warmup_left -= warmup
            call_safely(self._readers, ReadSteps(usual, warmup, since_ns))
        if self._plan.is_auto:
            self._plan.cost.add_timed(usual, since_ns)
        self._examine_more()

    def _examine_more(self) -> None:
        """Examine more steps if the examined ones lack something, or after a slowdown."""
        results, examinations = self._results, self._plan.examinations
        if results.slowdowns.found is not None and not self._has_slowed_down:
            self._has_slowed_down = True
            examinations.examine_more()
        sums = results.sums
        if self._may_examine_more and sums.step.n >= _MIN_COMPARED:
            n = sums.step.n
            phases_ms = {
                name: phase.device_ms / n for name, phase in sums.phases.items() if "/" not in name
            }
            if len(results.ledger.steps) >= _MIN_EXAMINED:
                self._may_examine_more = False
                if results.ledger.differs_from(phases_ms, sums.step.device_ms / n):
                    examinations.examine_more()


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
