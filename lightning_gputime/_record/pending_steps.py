"""The steps that have ended and are not read: the one wait, and the reading."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

from lightning_gputime._messages import TellOnce
from lightning_gputime._record.clock import Clock, Mark, TimingEvent, elapsed_ms
from lightning_gputime._record.graphs import Graphs
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._untraced import untraced

BATCH = 25
"""This many steps are read together where nobody waits for them.

It divides the 50 steps between the logs of a Trainer: no small batch is left over.
"""

BLOCKED_NS = 20_000
"""A wait shorter than this did not block: it found the step finished."""

LEFT_OUT = "A step could not be timed and is left out: %r"


@untraced
class PendingStep:
    """The marks of a step from its end until it is read; then only its record is left.

    Args:
        marks: All of them, in order; the last one is the end, and has no label of its own.
        number: The number that the step is logged under.
        skipped_update: As in `StepRecord`.
        load: As in `StepRecord`.
    """

    __slots__ = (
        "ended",
        "filled",
        "finished_ns",
        "load",
        "marks",
        "memory",
        "number",
        "owns_end",
        "post_spin_index",
        "skipped_update",
        "untimed",
        "wait_ms",
    )

    def __init__(
        self, marks: list[Mark], number: int, skipped_update: bool, load: tuple[float, ...]
    ) -> None:
        self.marks = marks
        self.number = number
        self.skipped_update = skipped_update
        self.load = load
        self.memory: tuple[tuple[int, int], ...] = ()
        self.post_spin_index = 0
        self.filled: bool | None = None
        # How many steps had ended with it, timed or not, and how many without marks came before it:
        # its wait makes up for them, too.
        self.ended = self.untimed = 0
        self.wait_ms, self.finished_ns = 0.0, 0
        # Whether the last event is this step's alone, and not also the first of the next.
        self.owns_end = False


@untraced
class PendingSteps:
    """Ended steps: pending until the device has finished them, then read together.

    Here alone the host waits: for a step that ended more than `lag` steps ago, on its last event.
    While a graph is captured nothing is read: it would break the capture.

    A step is pending until the device has reached its last event, then finished until it is read;
    both lists are in the order in which the steps ended. No lock guards them: `Session` lets
    another thread than that of the loop in only when that one has ended, or is timed no more.

    Args:
        clock: Where host times come from.
        graphs: Whose replays may fall into the steps.
        lag: How many ended steps may be pending.
        batch: How many finished steps are read together.
        emit: Called with the steps that were read, in order.
        tell_once: Logs that a step could not be read.
        fail: Called with an error after which the pending steps are forgotten.
        on_reading_start: Called just before steps are read.
    """

    def __init__(
        self,
        clock: Clock,
        graphs: Graphs,
        *,
        lag: int,
        batch: int,
        emit: Callable[[list[StepRecord]], object],
        tell_once: TellOnce,
        fail: Callable[[Exception], None],
        on_reading_start: Callable[[], object] | None = None,
    ) -> None:
        self._host_ns = clock.host_ns
        self._is_capturing = clock.is_capturing
        self._graphs = graphs
        self._lag = lag
        self._batch = batch
        self._emit = emit
        self._tell_once = tell_once
        self._fail = fail
        self._on_reading_start = on_reading_start
        self.free: list[TimingEvent] = []
        """Events that were read, to be used again."""
        self._pending: deque[PendingStep] = deque()
        self._finished: list[PendingStep] = []
        self.blocked_ns = (0, 0)
        """The host's time when it last waited for a step, and when that was over."""
        self.ended = 0
        """How many steps have ended, with marks or without."""
        # How many without since the last one that has some.
        self._untimed = 0

    def add(self, step: PendingStep, read: bool = False, *, may_wait: bool = True) -> None:
        """Take a step that has ended, and finish those that are due.

        A step behind a spin is waited for, and all are read.

        Args:
            step: The step.
            read: Whether to read the finished steps now.
            may_wait: Whether the host may wait or read at all.
        """
        self.ended += 1
        step.ended, step.untimed, self._untimed = self.ended, self._untimed, 0
        self._pending.append(step)
        if not may_wait:
            return
        try:
            if step.post_spin_index:
                # Before the wait, after which the device has passed this mark in any case.
                step.filled = not step.marks[step.post_spin_index][1].query()
                self._finish_all()
            else:
                self._finish_due(read)
        except Exception as error:
            self.give_up(error)

    @property
    def has_pending(self) -> bool:
        """Whether steps have ended that the device may still run."""
        return bool(self._pending)

    def end_untimed(self, read: bool = False, *, steps: int = 1) -> None:
        """Count steps that ended without times: the one wait may be due there.

        Args:
            read: Whether to read the finished steps now.
            steps: Number of steps that have ended.
        """
        self.ended += steps
        self._untimed += steps
        if self._pending or (read and self._finished):
            self._unless_capturing(self._finish_due, read)

    def flush(self) -> None:
        """Wait for all, and read them."""
        self._unless_capturing(self._finish_all)

    def drain(self) -> None:
        """Read those that the device has finished, without waiting for the others."""
        if self._pending or self._finished:
            self._unless_capturing(self._read_finished)

    def take_back(self, events: list[TimingEvent]) -> None:
        """Take the events of an open step that is dropped."""
        last = [*self._finished[-1:], *self._pending][-1:]
        # The first event may be the end of the step before, which is not read yet and needs it.
        if events and last and last[0].marks[-1][1] is events[0]:
            last[0].owns_end = True
            del events[0]
        self.free.extend(events)

    def newest_ms(self) -> tuple[float, float] | None:
        """Return how long the newest step took host and device; None if there is none unread."""
        if not self._finished or self._is_capturing():
            return None
        (_, first, begun), *_, (_, last, ended) = self._finished[-1].marks
        # A mark on another stream can lag behind the last one.
        return ((ended - begun) / 1e6, first.elapsed_time(last)) if first.query() else None

    def forget(self) -> None:
        """Forget all steps that are not read."""
        self._pending.clear()
        self._finished = []

    def give_up(self, error: Exception) -> None:
        """Forget the pending steps, whose events cannot be trusted; what is finished is read."""
        self._pending.clear()
        self._fail(error)

    def _unless_capturing(self, call: Callable[..., None], *args: bool) -> None:
        try:
            # Even the query of an event that is not in the graph breaks the capture.
            if not self._is_capturing():
                call(*args)
        except Exception as error:
            self.give_up(error)

    def _finish_due(self, read: bool) -> None:
        """Finish the step that ended `lag` steps ago, if it was timed, and read a batch."""
        # The next replay records a graph's events again, so they must be read before.
        # Counted in steps that have ended, with times or without: so all ranks leave the same ones
        # out.
        graphs = self._graphs.closed
        due = self.ended if graphs else self.ended - self._lag
        while self._pending and self._pending[0].ended <= due:
            self._finish_oldest()
        if self._finished and (read or graphs or len(self._finished) >= self._batch):
            self._read()

    def _finish_all(self) -> None:
        # In their order, so that each is told what it kept the host waiting for.
        while self._pending:
            self._finish_oldest()
        self._read()

    def _read_finished(self) -> None:
        while self._pending and self._pending[0].marks[-1][1].query():
            self._finish_oldest()
        self._read()

    def _finish_oldest(self) -> None:
        """Take the oldest step off the pending ones, after the one wait if the device needs it."""
        step = self._pending[0]
        end = step.marks[-1][1]
        if not end.query():
            start = self._host_ns()
            # For one event, never for the device: with `lag=1` a whole step is queued behind it,
            # and the GPU does not run dry. A step of a ResNet-50 on an H200 takes 1.0006 times as
            # long as untimed, and 1.1445 times with four `torch.cuda.synchronize`.
            end.synchronize()
            now = self._host_ns()
            # The wait makes up for the steps without marks, too: else it would grow with
            # `every_n_steps`.
            step.wait_ms = (now - start) / 1e6 / (1 + step.untimed)
            # Only a wait that has blocked ends in the moment in which the device is there.
            if now - start >= BLOCKED_NS:
                step.finished_ns = now
                self.blocked_ns = start, now
        self._finished.append(self._pending.popleft())

    def _read(self) -> None:
        # First: who takes the steps may remove the timer, which reads again.
        finished, self._finished = self._finished, []
        if self._on_reading_start is not None:
            self._on_reading_start()
        records = []
        for step in finished:
            marks = step.marks
            try:
                if self._graphs.closed:
                    marks = self._graphs.with_replays(marks)
                record, events = _read_step(step, marks)
            except Exception as error:
                # The others are finished, and an error in one costs none of them.
                self._tell_once(LEFT_OUT, error)
                continue
            records.append(record)
            if marks is not step.marks:
                # Those of a graph stay the graph's: its next replay records them again.
                events = [event for _, event, _ in step.marks]
            # The last event is also the first of the next step, which still needs it.
            self.free.extend(events if step.owns_end else events[:-1])
        if records:
            self._emit(records)


def _read_step(
    step: PendingStep, marks: Sequence[Mark]
) -> tuple[StepRecord, Sequence[TimingEvent]]:
    """Read the events of a step that the device has finished.

    Args:
        step: The step, whose last event the device has reached.
        marks: Its marks, and between them those of graphs that were replayed in it.

    Returns:
        The record of the step, and the events of these marks.
    """
    labels, events, host_ns = zip(*marks, strict=True)
    try:
        device_ms = elapsed_ms(events)
    except RuntimeError:
        # A mark that was recorded on another stream can lag behind the last one.
        for event in events:
            event.synchronize()
        device_ms = elapsed_ms(events)
    record = StepRecord(
        step.number,
        _the_same(labels[:-1]),
        device_ms,
        host_ns,
        step.wait_ms,
        step.finished_ns,
        step.skipped_update,
        step.filled,
        step.post_spin_index,
        step.load,
        step.memory,
    )
    return record, events


@lru_cache(maxsize=256)
def _the_same(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of the first step that had these: the history holds them once."""
    return labels
