"""Steps that have ended: wait for the device to finish them, and read their times.

The host waits only here. A step is *pending* until the device has finished it, then *finished*
until its times are read.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import nan
from typing import Any

from lightning_gputime._messages import WarnOnce
from lightning_gputime._phases import LineTime, StepRecord
from lightning_gputime._record.clock import Clock, Mark, TimingEvent, elapsed_ms
from lightning_gputime._record.step_marks import LineMark, StepMarks

BATCH = 25
"""Number of finished steps that are read together. It divides the 50 steps between two logs of a
Trainer, so that no small batch is left over."""

LEFT_OUT = "Skipped a step that could not be timed: %r"

Emit = Callable[[list[StepRecord], int], object]
"""Receives the steps that were read, and the host time when reading started (in nanoseconds)."""

_MIN_BLOCKED_NS = 20_000  # If a wait is shorter, the device had already finished the step.


@dataclass(slots=True, eq=False)
class _PendingStep:
    """Step that has ended, but has not been read; see `StepRecord` for the other fields.

    Attributes:
        marks: Marks of the step. The last mark is the end of the step, and has the first label of
            the next step.
        ended: Number of steps that had ended with this step, timed or not.
        untimed: Number of untimed steps between the previous timed step and this step.
        wait_ms: Time for which the host waited for this step, per step since the previous timed
            step.
        finished_ns: Host time at which the device finished this step; 0 if the host did not block.
        reached_ns: See `StepRecord`.
        lines: Marks of lines, if the step was examined; else None.
        owns_end: True if the next step does not use the event of the last mark.
    """

    marks: list[Mark]
    number: int
    skipped_update: bool
    items: float
    step_index: int
    ended: int
    untimed: int
    lines: list[LineMark] | None = None
    wait_ms: float = 0.0
    finished_ns: int = 0
    reached_ns: int = 0
    owns_end: bool = False

    def own_end(self) -> None:
        self.owns_end = True

    def wait(self, host_ns: Callable[[], int]) -> None:
        """Block the host until the device has finished the step."""
        start = host_ns()
        # Wait for one event, never for the device. With `lag=1` another step is queued after this
        # event, so the GPU does not run dry. A step of a ResNet-50 on an H200 takes 1.0006 times as
        # long as without a timer, and 1.1445 times with four `torch.cuda.synchronize` calls.
        self.marks[-1][1].synchronize()
        now = self.reached_ns = host_ns()
        # Divide by the number of steps since the previous timed step, so that the wait does not
        # grow with `every_n_steps`.
        self.wait_ms = (now - start) / 1e6 / (1 + self.untimed)
        # If the host was blocked, the device has just finished the step.
        if now - start >= _MIN_BLOCKED_NS:
            self.finished_ns = now


class PendingSteps:
    """Steps that have ended, in order.

    A step is finished at the latest `lag` steps after its end: the host waits for its last event.
    Nothing is read while a CUDA graph is captured, because that would break the capture.

    There is no lock: `Session` admits another thread only after the thread of the loop has ended or
    is no longer timed.

    Args:
        clock: See `Recorder`, also for `lag`, `batch` and `emit`.
        fail: Called with the error when all pending steps are dropped because of an error.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        lag: int,
        batch: int,
        emit: Emit,
        fail: Callable[[Exception], None],
    ) -> None:
        self._host_ns, self._is_capturing = clock.host_ns, clock.is_capturing
        self._lag, self._batch = lag, batch
        self._emit, self._fail = emit, fail
        self._elapsed_ms = getattr(clock, "elapsed_ms", elapsed_ms)
        self.warn_once = WarnOnce()
        self.free: list[TimingEvent] = []
        """Events to reuse. `Recorder` shares this list."""
        self._pending: deque[_PendingStep] = deque()
        self._finished: list[_PendingStep] = []
        self.ended = 0
        """Number of steps that have ended, timed or not."""
        self._untimed = 0  # Number of untimed steps since the last timed step.

    @property
    def count(self) -> int:
        """Number of pending steps."""
        return len(self._pending)

    def add(
        self,
        step: StepMarks,
        *,
        number: int,
        skipped_update: bool,
        items: float,
        step_index: int,
        read: bool,
        may_wait: bool,
        waits_now: bool,
    ) -> None:
        """Add a timed step that has ended; see `Recorder.end_step` for the arguments.

        If the host may wait, finish the steps that ended `lag` steps ago or earlier.
        """
        self.ended += 1
        try:
            ended = _PendingStep(
                marks=step.marks,
                number=number,
                skipped_update=skipped_update,
                items=items,
                step_index=step_index,
                ended=self.ended,
                untimed=self._untimed,
                lines=step.lines,
            )
            self._pending.append(ended)
            self._untimed = 0
            if may_wait and waits_now:
                ended.wait(self._host_ns)
            if may_wait:
                self._finish(0 if waits_now else self._lag, read)
        except Exception as error:
            self.give_up(error)

    def end_untimed(self, read: bool = False, *, steps: int = 1) -> None:
        """Count untimed steps that have ended. Finish the steps that ended `lag` steps ago."""
        self.ended += steps
        self._untimed += steps
        if self._pending or (read and self._finished):
            self._finish_safely(self._lag, read)

    def flush(self) -> None:
        """Wait for all steps that have ended, and read them."""
        self._finish_safely(0, read=True)

    def drain(self) -> None:
        """Read the steps that the device has finished, without waiting."""
        self._finish_safely(0, read=True, may_wait=False)

    def take_back(self, step: StepMarks) -> None:
        """Reclaim the events of a dropped step."""
        self.free.extend(mark.event for mark in step.lines or () if mark.event is not None)
        events = [mark[1] for mark in step.marks]
        unread = [*self._finished[-1:], *self._pending]
        # The first event may be the end of the previous step, which still has to be read.
        if events and unread and unread[-1].marks[-1][1] is events[0]:
            unread[-1].own_end()
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
        """Forget all steps, and `emit`, because it refers to the model."""
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

        Read all finished steps if `read` is set, or if they fill a batch. `lag` counts untimed
        steps, too, so that all ranks have read the same steps.
        """
        while self._pending and self._pending[0].ended <= self.ended - lag:
            step = self._pending[0]
            if not step.marks[-1][1].query():
                if not may_wait:
                    break
                step.wait(self._host_ns)
            self._finished.append(self._pending.popleft())
        if self._finished and (read or len(self._finished) >= self._batch):
            self._read()

    def _read(self) -> None:
        # Empty the list first: `emit` may remove the timer, which reads again.
        finished, self._finished = self._finished, []
        since_ns = self._host_ns()
        records = self._records_of(finished)
        if records:
            self._emit(records, since_ns)

    def _records_of(self, steps: Sequence[_PendingStep]) -> list[StepRecord]:
        """Read finished steps, and reclaim their events. Skip steps that cannot be read."""
        # No function per step, because this runs for every timed step.
        records = []
        for step in steps:
            try:
                labels, events, host_ns = zip(*step.marks, strict=True)
                try:
                    device_ms = self._elapsed_ms(events)
                except RuntimeError:
                    device_ms = self._elapsed_ms_after_wait(events)
                lines = None if step.lines is None else self._line_times(step.lines, events[0])
                # The last event is also the first event of the next step, which still needs it.
                self.free.extend(events if step.owns_end else events[:-1])
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
                        lines=lines,
                    )
                )
            except Exception as error:
                # The other steps are still read.
                self.warn_once(LEFT_OUT, error)
        return records

    def _line_times(self, marks: Sequence[LineMark], first: TimingEvent) -> tuple[LineTime, ...]:
        """Read the marks of lines, and reclaim their events.

        Args:
            marks: Marks of lines of a step.
            first: First event of the step.
        """
        times = []
        for start_ns, end_ns, event, line, starts in marks:
            ms = nan
            if event is not None:
                ms = first.elapsed_time(event)
                self.free.append(event)
            times.append(LineTime(start_ns, end_ns, ms, line, starts))
        return tuple(times)

    def _elapsed_ms_after_wait(self, events: Sequence[TimingEvent]) -> Sequence[float]:
        """Wait for all events of a finished step, and return the time from each to the next."""
        # The device has reached the last event, but maybe not an event on another stream.
        for event in events:
            event.synchronize()
        return self._elapsed_ms(events)


@lru_cache(maxsize=256)
def _shared(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the tuple of an earlier step with equal labels, so that memory has it only once."""
    return labels  # The cache returns the first tuple that was passed.
