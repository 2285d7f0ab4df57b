"""Steps: the marks of the open step, and the steps that have ended but have not been read.

The host waits only here. A step is *pending* until the device has finished it, then *finished*
until its times are read.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from math import nan
from typing import Any, NamedTuple

from lightning_gputime._messages import WarnOnce
from lightning_gputime._phases import (
    BACKWARD,
    DATA,
    EVALUATION_IN_STEP,
    EXCLUDED,
    FORWARD,
    INTERRUPTIONS,
    LEFT,
    LOSS,
    OTHER,
    RECEIVES,
    WAITS,
    LineTime,
    StepRecord,
)
from lightning_gputime._record.clock import Clock, Mark, TimingEvent, elapsed_ms

READ_SIZE = 50
"""Number of finished steps that are read together. Half of the cost of a read is independent of the
number of steps. A Trainer logs every 50 steps, and each log reads."""

_MAX_UNREAD_NS = 2_000_000_000  # Chosen: slow steps are explained after reads, which take 1 ms.

LEFT_OUT = "Skipped a step that could not be timed: %r"

Emit = Callable[[list[StepRecord], int], object]
"""Receives the steps that were read, and the host time when reading started (in nanoseconds)."""

_MIN_BLOCKED_NS = 20_000  # If a wait is shorter, the device had already finished the step.
_IN_NO_STEP = {EXCLUDED, EVALUATION_IN_STEP, *INTERRUPTIONS}


def is_fetch(labels: Sequence[str]) -> bool:
    """Return True if a step with these labels has only fetched data so far."""
    return {*labels} <= {DATA, *_IN_NO_STEP}


class Wait(Enum):
    """Steps that the host may wait for when a step ends."""

    NEVER = 0
    FOR_EARLIER = 1  # Those that ended `lag` steps ago or earlier.
    FOR_THIS_STEP = 2  # Also the step that ends, to set the clocks side by side.


class LineMark(NamedTuple):
    """Mark of a line of the user's code, in an examined step."""

    start_ns: int  # Host time at which the mark started.
    end_ns: int  # Host time at which it ended. The line runs from then on.
    event: TimingEvent | None  # Event between the two; None on the host's clock.
    line: Any  # Line that runs after the mark.
    starts: bool  # False if the line continues, or if its backward runs.


@dataclass(slots=True)
class StepMarks:
    """Marks of a step, in order. The first mark starts the step; its last mark ends it."""

    marks: list[Mark] = field(default_factory=list)
    lines: list[LineMark] | None = None  # Marks of lines, if the step is examined.
    _cached_phases: set[str] = field(default_factory=set)  # Phases of the first `_n_cached` marks.
    _n_cached: int = 0

    @property
    def labels(self) -> list[str]:
        return [label for label, _, _ in self.marks]

    @property
    def phases(self) -> set[str]:
        """Top-level phases of the marks."""
        # Cached, because loops that skip batches read this many times per step. The labels of the
        # last two marks may still change, so they are not in the cache.
        n_fixed = max(len(self.marks) - 2, 0)
        new, last = self.marks[self._n_cached : n_fixed], self.marks[n_fixed:]
        self._cached_phases.update(label.partition("/")[0] for label, _, _ in new)
        self._n_cached = n_fixed
        return self._cached_phases.union(label.partition("/")[0] for label, _, _ in last)

    @property
    def is_all_excluded(self) -> bool:
        """True if all time is in pauses and evaluations, so that none is left for the step."""
        return {*self.labels} <= _IN_NO_STEP

    @property
    def is_waiting(self) -> bool:
        return bool(self.marks) and self.marks[-1][0] in (WAITS, RECEIVES)

    def relabel(self, label: str) -> None:
        """Replace the label of the last mark. If it is part of a wait, relabel the phase around."""
        self._relabel_at(self._index_without_waits(len(self.marks) - 1), label)

    def relabel_before(self, old: str, label: str) -> None:
        """Replace the label `old` of the mark before the last, if it has this label.

        The newest mark may show what the phase before it was: if a call returns a loss, and its
        mark was `forward`, then the newest mark is `after_forward`, and the call becomes `loss`.
        That is, `[..., forward, after_forward]` becomes `[..., loss, after_forward]`. If the mark
        before the last is part of a wait, this applies to the phase around the wait.
        """
        index = self._index_without_waits(len(self.marks) - 2)
        if index >= 0 and self.marks[index][0] == old:
            self._relabel_at(index, label)

    def exclude(self, first: int, stop: int | None = None, *, label: str = EXCLUDED) -> None:
        """Attribute the marks from `first` to `stop` to a pause or an evaluation.

        Marks that already belong to a pause or an evaluation keep their label.
        """
        self.marks[first:stop] = [
            mark if mark[0] in (EXCLUDED, EVALUATION_IN_STEP) else (label, *mark[1:])
            for mark in self.marks[first:stop]
        ]
        self._forget_phases()

    def exclude_after(self, label: str) -> bool:
        """Exclude the time from the last mark of `label` on.

        Return False, without any change, if there is no such mark or if that time includes work.
        """
        labels = self.labels
        if label not in labels:
            return False
        index = len(labels) - 1 - labels[::-1].index(label)  # The last mark of this label.
        if {name.partition("/")[0] for name in labels[index:]} & {FORWARD, LOSS, BACKWARD}:
            return False
        self.exclude(index)
        # `LEFT` is also excluded, but shows that an update precedes it.
        self.marks[index] = (LEFT, *self.marks[index][1:])
        return True

    def relabel_replay(self) -> None:
        """Relabel a step without inner marks: a replay of a CUDA graph, which calls no hooks."""
        # The timer may have excluded something at the start or the end.
        inside = [index for index, label in enumerate(self.labels[:-1]) if label != EXCLUDED]
        if len(inside) == 1 and self.marks[inside[0]][0] == DATA:
            self._relabel_at(inside[0], OTHER)

    def _relabel_at(self, index: int, label: str) -> None:
        self.marks[index] = (label, *self.marks[index][1:])
        if index < self._n_cached:
            self._forget_phases()

    def _forget_phases(self) -> None:
        self._cached_phases, self._n_cached = set(), 0

    def _index_without_waits(self, index: int) -> int:
        """Return this index or, if its mark is part of a wait, that of the interrupted phase."""
        while index > 0 and self.marks[index][0] in INTERRUPTIONS:
            index -= 1
        return index


@dataclass(slots=True, eq=False)
class _PendingStep:
    """Step that has ended, but has not been read; see `StepRecord` for the other fields."""

    marks: StepMarks  # The last mark ends the step, and has the first label of the next step.
    number: int
    step_index: int
    items: float
    skipped_update: bool
    ended_ns: int
    n_ended: int  # Number of steps up to this step, timed or not.
    n_untimed: int  # Number of untimed steps between the previous timed step and this step.
    wait_ms: float = 0.0  # Wait of the host, per step since the previous timed step.
    finished_ns: int = 0
    reached_ns: int = 0
    # False while the last event is also the first event of the next step.
    owns_last_event: bool = False

    @property
    def last_event(self) -> TimingEvent:
        return self.marks.marks[-1][1]

    def wait(self, host_ns: Callable[[], int]) -> None:
        """Block the host until the device has finished the step."""
        start_ns = host_ns()
        # Wait for one event, never for the device. With `lag=1` another step is queued after this
        # event, so the GPU does not run dry. A step of a ResNet-50 on an H200 takes 1.0006 times as
        # long as without a timer, and 1.1445 times with four `torch.cuda.synchronize` calls.
        self.last_event.synchronize()
        now_ns = self.reached_ns = host_ns()
        waited_ns = now_ns - start_ns
        # Divide by the number of steps since the previous timed step, so that the wait does not
        # grow with `every_n_steps`.
        self.wait_ms = waited_ns / 1e6 / (1 + self.n_untimed)
        # If the host was blocked, the device has just finished the step.
        if waited_ns >= _MIN_BLOCKED_NS:
            self.finished_ns = now_ns


class PendingSteps:
    """Steps that have ended, in order.

    A step is finished at the latest `lag` steps after its end: the host waits for its last event.
    Nothing is read while a CUDA graph is captured, because that would break the capture.

    There is no lock: `Session` admits another thread only after the thread of the loop has ended or
    is no longer timed.

    Args:
        clock: See `Recorder`, also for `lag`, `read_size` and `emit`.
        fail: Called with the error when all pending steps are dropped because of an error.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        lag: int,
        read_size: int,
        emit: Emit,
        fail: Callable[[Exception], None],
    ) -> None:
        self._host_ns, self._is_capturing = clock.host_ns, clock.is_capturing
        self._lag, self._read_size = lag, read_size
        self._emit, self._fail = emit, fail
        self._elapsed_ms = getattr(clock, "elapsed_ms", elapsed_ms)
        self.warn_once = WarnOnce()
        self.free: list[TimingEvent] = []
        """Events to reuse. `Recorder` shares this list."""
        self._pending: deque[_PendingStep] = deque()
        self._finished: list[_PendingStep] = []
        self.ended = 0
        """Number of steps that have ended, timed or not."""
        self._n_untimed = 0  # Number of untimed steps since the last timed step.

    @property
    def count(self) -> int:
        return len(self._pending)

    def add(
        self,
        step: StepMarks,
        number: int,
        index: int,
        items: float,
        skipped_update: bool,
        ended_ns: int,
        *,
        read: bool,
        wait: Wait,
    ) -> None:
        """Add a timed step that has ended; see `Recorder.end_step` for the arguments."""
        self.ended += 1
        try:
            pending = _PendingStep(
                step, number, index, items, skipped_update, ended_ns, self.ended, self._n_untimed
            )
            self._pending.append(pending)
            self._n_untimed = 0
            if wait is Wait.FOR_EARLIER:
                self._finish(self._lag, read)
            elif wait is Wait.FOR_THIS_STEP:
                pending.wait(self._host_ns)
                self._finish(0, read)
        except Exception as error:
            self.give_up(error)

    def end_untimed(self, read: bool = False, *, steps: int = 1) -> bool:
        """Count untimed steps that have ended. Finish the steps that ended `lag` steps ago.

        Return True if there are other steps to finish.
        """
        self.ended += steps
        self._n_untimed += steps
        if self._pending or (read and self._finished):
            self._finish_safely(self._lag, read)
        return len(self._pending) > 0

    def flush(self) -> None:
        """Wait for all steps that have ended, and read them."""
        self._finish_safely(0, read=True)

    def drain(self) -> None:
        """Read the steps that the device has finished, without waiting."""
        self._finish_safely(0, read=True, may_wait=False)

    def take_back(self, step: StepMarks) -> None:
        """Reclaim the events of a dropped step."""
        self.free.extend(mark.event for mark in step.lines or () if mark.event is not None)
        events = [event for _, event, _ in step.marks]
        unread = [*self._finished[-1:], *self._pending]
        # The first event may be the end of the previous step, which still has to be read.
        if events and unread and unread[-1].last_event is events[0]:
            unread[-1].owns_last_event = True
            del events[0]
        self.free.extend(events)

    def forget(self) -> list[Any]:
        """Forget all unread steps and all events. Return them; see `Recorder.abandon`."""
        forgotten = [*self._pending, *self._finished, *self.free]
        self._pending.clear()
        self._finished = []
        self.free.clear()
        return forgotten

    def end(self) -> None:
        """Forget all steps and events, and `emit`, because it refers to the model."""
        self.forget()
        self._emit = lambda *_: None

    def give_up(self, error: Exception) -> None:
        """Drop the pending steps, whose events may be broken. Finished steps are still read."""
        self._pending.clear()
        self._fail(error)

    def _finish_safely(self, lag: int, read: bool, may_wait: bool = True) -> None:
        try:
            # Any query of an event would break the capture of a CUDA graph.
            if not self._is_capturing():
                self._finish(lag, read, may_wait)
        except Exception as error:
            self.give_up(error)

    def _finish(self, lag: int, read: bool, may_wait: bool = True) -> None:
        """Finish the steps that ended `lag` steps ago or earlier.

        Read all finished steps if `read` is set, if there are enough, or if the first of them
        started two seconds ago: causes of slow steps are searched after reads. `lag` counts untimed
        steps, too, so that all ranks have read the same steps.
        """
        while self._pending and self._pending[0].n_ended <= self.ended - lag:
            step = self._pending[0]
            # Inlined `last_event`, because this runs for every timed step.
            is_finished = step.marks.marks[-1][1].query()
            if not is_finished and not may_wait:
                break
            if not is_finished:
                step.wait(self._host_ns)
            self._finished.append(self._pending.popleft())
        finished = self._finished
        if finished and (
            read
            or len(finished) >= self._read_size
            or finished[-1].marks.marks[-1][2] - finished[0].marks.marks[0][2] >= _MAX_UNREAD_NS
        ):
            self._read()

    def _read(self) -> None:
        """Read the times of all finished steps from their events, and emit them."""
        # Empty the list first: `emit` may remove the timer, which reads again.
        finished, self._finished = self._finished, []
        since_ns = self._host_ns()
        records = []
        # No function per step, because this runs for every timed step.
        for step in finished:
            try:
                labels, events, host_ns = zip(*step.marks.marks, strict=True)
                try:
                    device_ms = self._elapsed_ms(events)
                except RuntimeError:
                    # The device has reached the last event, but maybe not one on another stream.
                    for event in events:
                        event.synchronize()
                    device_ms = self._elapsed_ms(events)
                lines = step.marks.lines
                line_times = None if lines is None else self._read_lines(lines, events[0])
                # Do not reuse the last event while the next step needs it as its first.
                self.free.extend(events if step.owns_last_event else events[:-1])
                records.append(
                    StepRecord(
                        number=step.number,
                        labels=_shared(labels[:-1]),
                        device_ms=device_ms,
                        host_ns=host_ns,
                        wait_ms=step.wait_ms,
                        finished_ns=step.finished_ns,
                        skipped_update=step.skipped_update,
                        reached_ns=step.reached_ns,
                        items=step.items,
                        step_index=step.step_index,
                        lines=line_times,
                        ended_ns=step.ended_ns,
                    )
                )
            except Exception as error:
                # The other steps are still read.
                self.warn_once(LEFT_OUT, error)
        if records:
            self._emit(records, since_ns)

    def _read_lines(self, marks: Sequence[LineMark], first: TimingEvent) -> tuple[LineTime, ...]:
        """Return the times of marks of lines since the first event of their step.

        Reclaim their events.
        """
        times = []
        for start_ns, end_ns, event, line, starts in marks:
            ms = nan
            if event is not None:
                ms = first.elapsed_time(event)
                self.free.append(event)
            times.append(LineTime(start_ns, end_ns, ms, line, starts))
        return tuple(times)


@lru_cache(maxsize=256)
def _shared(labels: tuple[str, ...]) -> tuple[str, ...]:
    # The cache returns the tuple of an earlier step with equal labels: memory has it only once.
    return labels
