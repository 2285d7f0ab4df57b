"""The steps that have ended and are not read: the one wait, and the reading."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_gputime._messages import WarnOnce
from lightning_gputime._phases import StepRecord
from lightning_gputime._record.clock import Clock, Mark, TimingEvent

BATCH = 25
"""This many steps are read together where nobody waits for them.

It divides the 50 steps between the logs of a Trainer: no small batch is left over.
"""

LEFT_OUT = "A step could not be timed and is left out: %r"

# A wait shorter than this did not block: it found the step finished.
_BLOCKED_NS = 20_000


@dataclass(slots=True, eq=False)
class PendingStep:
    """The marks of a step from its end until it is read; see `StepRecord` for the rest.

    The last mark is the end, and has no label of its own.
    """

    marks: list[Mark]
    number: int
    skipped_update: bool
    items: float
    index: int = -1
    is_located: bool = False
    post_spin_index: int = 0
    was_fully_queued: bool | None = None
    # How many steps had ended with it, timed or not, and how many without marks came before it.
    ended: int = 0
    untimed: int = 0
    wait_ms: float = 0.0
    finished_ns: int = 0
    # Whether the last event is this step's alone, and not also the first of the next.
    owns_end: bool = False


class PendingSteps:
    """Ended steps: pending until the device has finished them, then read together.

    Here alone the host waits: for a step that ended more than `lag` steps ago, on its last event.
    While a graph is captured nothing is read: it would break the capture.

    A step is pending until the device has reached its last event, then finished until it is read;
    both lists are in the order in which the steps ended. No lock guards them: `Session` lets
    another thread than that of the loop in only when that one has ended, or is timed no more.

    Args are as those of `Recorder`; `fail` is called with an error that costs all pending steps.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        lag: int,
        batch: int,
        emit: Callable[[list[StepRecord]], object],
        fail: Callable[[Exception], None],
    ) -> None:
        self._host_ns, self._is_capturing = clock.host_ns, clock.is_capturing
        self._lag, self._batch = lag, batch
        self._emit, self._fail = emit, fail
        self.reading_since_ns = 0
        """When the newest reading of steps began, by the host's clock."""
        self.warn_once = WarnOnce()
        self.free: list[TimingEvent] = []
        """Events that were read, to be used again. Never replaced: `Recorder` holds it, too."""
        self._pending: deque[PendingStep] = deque()
        self._finished: list[PendingStep] = []
        self.ended = 0
        """How many steps have ended, with marks or without."""
        # How many without since the last one that has some.
        self._untimed = 0

    @property
    def count(self) -> int:
        """The number of steps that have ended, and that the device may still run."""
        return len(self._pending)

    def add(self, step: PendingStep, read: bool = False, may_wait: bool = True) -> None:
        """Take a step that has ended, and finish those that are due, if the host may wait.

        A step behind a spin is waited for, and all are read.
        """
        self.ended += 1
        step.ended, step.untimed, self._untimed = self.ended, self._untimed, 0
        self._pending.append(step)
        if not may_wait:
            return
        try:
            if step.post_spin_index:
                # Before the wait, after which the device has passed this mark in any case.
                step.was_fully_queued = not step.marks[step.post_spin_index][1].query()
                self._finish(0, read=True)
            else:
                self._finish(self._lag, read)
        except Exception as error:
            self.give_up(error)

    def end_untimed(self, read: bool = False, *, steps: int = 1) -> None:
        """Count steps that ended without times: the one wait may be due there."""
        self.ended += steps
        self._untimed += steps
        if self._pending or (read and self._finished):
            self._finish_safely(self._lag, read)

    def flush(self) -> None:
        """Wait for all steps that have ended, and read them."""
        self._finish_safely(0, read=True)

    def drain(self) -> None:
        """Read the steps that the device has finished, without waiting for the others."""
        self._finish_safely(0, read=True, may_wait=False)

    def take_back(self, marks: list[Mark]) -> None:
        """Use the events of an open step that is dropped again."""
        events = [mark[1] for mark in marks]
        last = [*self._finished[-1:], *self._pending][-1:]
        # The first event may be the end of the step before, which is not read yet and needs it.
        if events and last and last[0].marks[-1][1] is events[0]:
            last[0].owns_end = True
            del events[0]
        self.free.extend(events)

    def forget(self) -> list[Any]:
        """Forget all steps that are not read, and all events; return them."""
        forgotten = [*self._pending, *self._finished, *self.free]
        self._pending.clear()
        self._finished = []
        self.free.clear()
        return forgotten

    def end(self) -> None:
        """Forget all, and who takes the steps: that holds the model, which is to be freed."""
        self.forget()
        self._emit = lambda _: None

    def give_up(self, error: Exception) -> None:
        """Forget the pending steps, whose events cannot be trusted; what is finished is read."""
        self._pending.clear()
        self._fail(error)

    def _finish_safely(self, lag: int, read: bool, may_wait: bool = True) -> None:
        try:
            # Even the query of an event that is not in the graph breaks the capture.
            if not self._is_capturing():
                self._finish(lag, read, may_wait)
        except Exception as error:
            self.give_up(error)

    def _finish(self, lag: int, read: bool, may_wait: bool = True) -> None:
        """Finish the steps that ended `lag` steps ago or before, and read if a batch is full.

        It counts the steps that have ended, timed or not: so all ranks leave the same ones out.
        """
        while self._pending and self._pending[0].ended <= self.ended - lag:
            step = self._pending[0]
            if not step.marks[-1][1].query():
                if not may_wait:
                    break
                self._wait_for(step)
            self._finished.append(self._pending.popleft())
        if self._finished and (read or len(self._finished) >= self._batch):
            self._read()

    def _wait_for(self, step: PendingStep) -> None:
        """Block the host until the device has finished a step: the one wait."""
        start = self._host_ns()
        # For one event, never for the device: with `lag=1` a whole step is queued behind it, and
        # the GPU does not run dry. A step of a ResNet-50 on an H200 takes 1.0006 times as long as
        # untimed, and 1.1445 times with four `torch.cuda.synchronize`.
        step.marks[-1][1].synchronize()
        now = self._host_ns()
        # The wait makes up for the steps without marks, too: else it would grow with
        # `every_n_steps`.
        step.wait_ms = (now - start) / 1e6 / (1 + step.untimed)
        # Only a wait that has blocked ends in the moment in which the device is there.
        if now - start >= _BLOCKED_NS:
            step.finished_ns = now

    def _read(self) -> None:
        # First: who takes the steps may remove the timer, which reads again.
        finished, self._finished = self._finished, []
        self.reading_since_ns = self._host_ns()
        records = []
        for step in finished:
            try:
                records.append(self._read_step(step))
            except Exception as error:
                # The others are finished, and an error in one costs none of them.
                self.warn_once(LEFT_OUT, error)
        if records:
            self._emit(records)

    def _read_step(self, step: PendingStep) -> StepRecord:
        # In a located step all marks have a fourth part.
        labels, events, host_ns, *places = zip(*step.marks, strict=False)
        # Without a loop in Python: this runs at every step.
        elapsed_ms = type(events[0]).elapsed_time
        try:
            device_ms = tuple(map(elapsed_ms, events, events[1:]))
        except RuntimeError:
            # A mark that was recorded on another stream can lag behind the last one.
            for event in events:
                event.synchronize()
            device_ms = tuple(map(elapsed_ms, events, events[1:]))
        # The last event is also the first of the next step, which still needs it.
        self.free.extend(events if step.owns_end else events[:-1])
        return StepRecord(
            step.number,
            _the_same(labels[:-1]),
            device_ms,
            host_ns,
            step.wait_ms,
            step.finished_ns,
            step.skipped_update,
            step.was_fully_queued,
            step.post_spin_index,
            step.items,
            step.index,
            places[0] if places else (),
        )


@lru_cache(maxsize=256)
def _the_same(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of the first step that had these: the history holds them once."""
    return labels
