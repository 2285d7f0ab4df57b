"""Steps of a loop: their starts and ends, timed or not."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident

from lightning_gputime._causes.analyzer import SlowStepAnalyzer
from lightning_gputime._instrumentation.boundaries import Boundaries
from lightning_gputime._instrumentation.work import WorkCounter
from lightning_gputime._ledger.examiner import Examiner
from lightning_gputime._ledger.ledger import Ledger
from lightning_gputime._measurement.untimed import UntimedSteps
from lightning_gputime._measurement.wall_clock import WallClock
from lightning_gputime._phases import DATA
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._session.hooks_off import HooksOff
from lightning_gputime._session.logs import LogSchedule
from lightning_gputime._session.open_step import OpenStep
from lightning_gputime._session.rank_comparer import RankComparer
from lightning_gputime._session.state import (
    ENDED,
    EXAMINED,
    NEW,
    OFF,
    TIMED,
    TRANSITIONS,
    UNTIMED,
    State,
)
from lightning_gputime._session.timing_plan import TimingPlan

_FIRST_STEPS = 5  # Number of steps that may take longer than the others.


@dataclass(frozen=True, slots=True)
class StepParts:
    """Parts of a session that `Steps` calls."""

    recorder: Recorder
    boundaries: Boundaries
    open_step: OpenStep
    work: WorkCounter
    analyzer: SlowStepAnalyzer
    examiner: Examiner
    ledger: Ledger
    plan: TimingPlan
    hooks_off: HooksOff
    logs: LogSchedule
    comparison: RankComparer
    untimed: UntimedSteps
    wall_clock: WallClock
    host_ns: Callable[[], int]


class Steps:
    """Steps of a loop, which front ends start and end.

    The thread that calls `begin` is timed. Only this thread may call the other methods.
    """

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self.state = NEW
        self.index = 0
        """Number of steps that have ended, timed or not; stays 0 if every step is timed."""
        self._ended = 0  # The same, also if every step is timed.
        self.newest: int | None = None
        """Number of the last step that ended."""
        # Cumulative time of all steps, updated at the end of each step that runs with hooks.
        self._ended_ns = 0
        self._first_label = DATA  # First label of the open step.
        # True in a step after which the host waited for the device, so that its queue was empty.
        self._starts_drained = False
        # Time of all steps at the end of the first steps, and at the start of the examined step.
        self._first_ns = self._examined_ns = 0.0
        self.plan = parts.plan
        self.times_all = parts.plan.times_all

    def enter(self, state: State) -> None:
        """Change the state. Raise RuntimeError if the transition is not allowed."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a session cannot change from {self.state.name} to {state.name}")
        self.state = state

    def begin(self) -> None:
        """Drop the open step, and start a step in the calling thread."""
        parts = self._parts
        parts.examiner.stop()
        parts.boundaries.step_ended(timed=False, is_dropped=True)
        parts.work.reset()
        parts.analyzer.loop_begins()
        parts.untimed.restart(parts.wall_clock.steps_ns(parts.host_ns()))
        if self.state is OFF:
            parts.recorder.stop()  # Also makes the calling thread the timed thread.
            return
        self._starts_drained = False
        # Do not examine this step, because the first fetch of an epoch may take long.
        self.enter(UNTIMED if parts.plan.kind_at(self.index) is UNTIMED else TIMED)
        if self.state is TIMED:
            parts.recorder.begin()
        else:
            parts.recorder.stop()

    # Ends of steps

    def end_step(self, number: int, label: str = DATA) -> bool:
        """End the open step, and start the next with `label`. Return True if hooks are attached."""
        self._first_label = label
        if self.state is OFF:
            return self._end_step_without_hooks(number)
        parts = self._parts
        is_examined = self.state is EXAMINED
        cost = 0.0
        if is_examined:
            parts.examiner.stop()
            cost = self._cost_of_examined()
        self.newest = number
        self._ended += 1
        now_ns = parts.host_ns()
        if self._ended == _FIRST_STEPS:
            self._first_ns = parts.wall_clock.steps_ns(now_ns)
        parts.analyzer.sampler.end_step(now_ns)
        items = parts.work.take_items()
        if number >= parts.logs.due_at:
            parts.logs.end_step(number, self.index)
        log_is_due = parts.logs.means.is_due
        if self.times_all:
            skipped_update = parts.boundaries.step_ended()
            self._ended_ns = now_ns - parts.wall_clock.outside_ns
            # Read all finished steps if a log is due. That also writes the log.
            parts.recorder.end_step(
                number,
                skipped_update,
                log_is_due,
                label,
                items=items,
                waits_now=is_examined,
            )
            if is_examined:
                self.enter(TIMED)
                self._step_examined(cost)
            elif self._ended >= self.plan.examinations.next_index and self.state is TIMED:
                self._examine()
        else:
            self._end_planned_step(number, items, log_is_due, cost)
            self._ended_ns = now_ns - parts.wall_clock.outside_ns
            if log_is_due:
                parts.logs.log_finished()
        if parts.comparison.due_step is not None:
            # The next step has started, so exclude the exchange between ranks from it.
            parts.recorder.pause()
            parts.comparison.compare_if_due()
            parts.recorder.resume(label)
        # An observer may have removed the timer while steps were read.
        if not self.times_all and self.state is not ENDED:
            self._start_planned_step()
        return self.state is not OFF

    @property
    def ended_ns(self) -> int:
        """Cumulative time of all steps that have ended (in nanoseconds)."""
        return max(self._ended_ns, self._parts.untimed.since_ns)

    def first_step_ended(self) -> None:
        """Start the second step now. Call it when the wall clock has ended the first step.

        The wall clock may have counted the time before the loop as a part of the first step.
        """
        parts = self._parts
        self._ended_ns = parts.wall_clock.steps_ns(parts.host_ns())
        parts.untimed.restart(self._ended_ns)

    def leave(self, number: int) -> bool:
        """Handle an exit from the loop inside the step of this number.

        Return True if the exit ends the step, because its update has run.
        """
        parts = self._parts
        if get_ident() != parts.recorder.threads.home:
            return False
        parts.examiner.stop()
        items = parts.work.take_items()
        index = -1 if self.times_all else self.index  # `Recorder.end_step` explains -1.
        if not parts.open_step.end_at_update(self.state, number, index, items):
            return False
        self.newest = number
        if self.times_all:
            self._ended_ns = parts.host_ns() - parts.wall_clock.outside_ns
        else:
            self._add_duration()
        parts.logs.end_step(number, self.index)
        parts.boundaries.step_ended()
        if self.times_all:
            return True
        self.index += 1
        if self.state is not OFF:
            self._start_planned_step()
        elif self.index >= parts.hooks_off.returns_at:
            self._reattach_hooks()
        return True

    # Loops in which not every step is timed

    def _end_planned_step(self, number: int, items: float, log_is_due: bool, cost: float) -> None:
        """End the open step. If a log is due, read all finished steps."""
        parts, state, plan = self._parts, self.state, self.plan
        is_timed = state in (TIMED, EXAMINED)
        skipped_update = parts.boundaries.step_ended(timed=is_timed)
        self._add_duration()
        self._starts_drained = state is EXAMINED
        if is_timed:
            parts.recorder.end_step(
                number,
                skipped_update,
                log_is_due,
                self._first_label,
                index=self.index,
                items=items,
                waits_now=state is EXAMINED,
            )
        else:
            parts.recorder.pending.end_untimed(log_is_due)
        self.index += 1
        if plan.is_auto:
            plan.cost.end_span(self.index, is_untimed=state is UNTIMED)
        if state is EXAMINED:
            self._step_examined(cost)

    def _add_duration(self) -> None:
        """Add the duration of the step that ends now to the statistics."""
        parts, state = self._parts, self.state
        now_ns = parts.host_ns() - parts.wall_clock.outside_ns
        # An examined step takes longer, and so may a step that starts with an empty queue. Leave
        # both out, unless the step was examined because it was expected to be long: then long steps
        # would be too rare.
        is_unusual = state is EXAMINED and not self.plan.examinations.expects_long
        if is_unusual or self._starts_drained:
            parts.untimed.leave_out(now_ns)
        else:
            parts.untimed.end_step(now_ns)

    def _start_planned_step(self) -> None:
        """Start a step, which the plan may time or examine."""
        parts, plan, before = self._parts, self.plan, self.state
        if plan.is_auto and self.index >= plan.cost.due:
            self._decide()
        self.enter(UNTIMED if self._starts_drained else plan.kind_at(self.index))
        if self.state is UNTIMED:
            parts.recorder.stop()
            if parts.hooks_off.is_due(self.index):
                self._remove_hooks()
        elif before is UNTIMED:  # After a timed step, its last mark has started this step.
            parts.recorder.begin(self._first_label)
        if self.state is EXAMINED:
            self._examine()

    # Examined steps

    def _examine(self) -> None:
        """Examine the step that has just started."""
        parts, plan = self._parts, self.plan
        self._examined_ns = parts.wall_clock.steps_ns(parts.host_ns())
        lines = parts.examiner.start(self._examined_ns / max(self._ended, 1))
        parts.ledger.unavailable = parts.examiner.unavailable
        if lines is None:
            plan.examinations.stop()
            self.enter(TIMED)
            return
        if self.state is TIMED:
            self.enter(EXAMINED)
        parts.recorder.examine(lines)

    def _cost_of_examined(self) -> float:
        """Return how much longer the examined step took, as a fraction of the mean step before."""
        steps_ns = self._parts.wall_clock.steps_ns(self._parts.host_ns())
        n = max(self._ended - _FIRST_STEPS, 1)
        mean_ns = (self._examined_ns - self._first_ns) / n
        return max((steps_ns - self._examined_ns) / mean_ns - 1, 0.0) if mean_ns else 0.0

    def _step_examined(self, cost: float) -> None:
        self._parts.ledger.unavailable = self._parts.examiner.unavailable
        self.plan.examinations.step_examined(self._ended - 1, cost)

    def _decide(self) -> None:
        """Choose anew which steps are timed."""
        recorder, plan = self._parts.recorder, self.plan
        if not plan.asks_ranks:
            plan.decide(self.index)
            return
        # The next step has started, so exclude the wait for other ranks from it.
        recorder.pause()
        plan.decide(self.index)
        recorder.resume(self._first_label)

    # Without hooks

    def keep_hooks(self) -> None:
        """Keep the hooks in untimed steps from now on, because `OpenStep.has_idled` needs them."""
        self._parts.hooks_off.forbid()
        self.wake()

    def wake(self) -> None:
        """Attach the hooks again at the end of the open step."""
        if self.state is OFF:
            self._parts.hooks_off.return_at(self.index + 1)

    def _remove_hooks(self) -> None:
        self.enter(OFF)
        counts_updates = self._parts.open_step.needs_updates
        self._parts.hooks_off.remove(self.index, counts_updates=counts_updates)

    def _end_step_without_hooks(self, number: int) -> bool:
        """End a step that ran without hooks. Return True if the hooks are attached again."""
        parts = self._parts
        self.index += 1
        self.newest = number
        self._ended += 1
        parts.untimed.end_step(parts.host_ns() - parts.wall_clock.outside_ns)
        if parts.open_step.needs_updates:
            parts.boundaries.optimizer.reset()
        if self.index < parts.hooks_off.check_at and number < parts.logs.due_at:
            return False
        steps_since_check = parts.hooks_off.check(self.index)
        if self.plan.is_auto:
            self.plan.cost.end_span(self.index)
        if number >= parts.logs.due_at:
            parts.logs.end_step(number, self.index - 1)
        log_is_due = parts.logs.means.is_due
        parts.recorder.pending.end_untimed(log_is_due, steps=steps_since_check)
        if log_is_due:
            parts.logs.log_finished()
            self.plan.cost.start_span(self.index)  # Exclude the log from the measured host time.
        if self.state is ENDED:  # An observer has removed the timer.
            return False
        if self.index >= parts.hooks_off.returns_at:
            self._reattach_hooks()
            return True
        return False

    def _reattach_hooks(self) -> None:
        """Attach the hooks again, and start a step."""
        parts = self._parts
        parts.hooks_off.reattach(self.index)
        self.enter(parts.plan.kind_at(self.index))
        parts.analyzer.timing_resumes()
        parts.work.reset()
        if self.state is not UNTIMED:
            parts.recorder.begin(self._first_label)
        if self.state is EXAMINED:
            self._examine()
