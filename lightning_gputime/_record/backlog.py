"""The steps that have ended and are not read: the one wait, and the reading."""

from collections import deque
from collections.abc import Callable

from lightning_gputime._record.clock import Clock, TimingEvent
from lightning_gputime._record.graphs import Graphs
from lightning_gputime._record.reading import EndedStep, Mark, read
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._untraced import untraced

BATCH = 25
"""How many steps are read together where nobody waits for them.

It divides the 50 steps between the logs of a Trainer: no small batch is left over.
"""

BLOCKED_NS = 20_000
"""A wait shorter than this did not block: it found the step finished."""


@untraced
class Backlog:
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
        leave_out: Called with the error that kept a step from being read.
        fail: Called with one after which the pending steps are forgotten.
        reading_begins: Called just before steps are read.
    """

    def __init__(
        self,
        clock: Clock,
        graphs: Graphs,
        *,
        lag: int,
        batch: int,
        emit: Callable[[list[StepRecord]], object],
        leave_out: Callable[[Exception], None],
        fail: Callable[[Exception], None],
        reading_begins: Callable[[], object] | None = None,
    ) -> None:
        self._host_ns = clock.host_ns
        self._is_capturing = clock.is_capturing
        self._graphs = graphs
        self._lag = lag
        self._batch = batch
        self._emit = emit
        self._leave_out = leave_out
        self._fail = fail
        self._reading_begins = reading_begins
        self.free: list[TimingEvent] = []
        """Events that were read, to be used again."""
        self._pending: deque[EndedStep] = deque()
        self._finished: list[EndedStep] = []
        self.blocked_ns = (0, 0)
        """The host's time when it last waited for a step, and when that was over."""
        self.ended = 0
        """How many steps have ended, with marks or without."""
        # How many without since the last one that has some.
        self._untimed = 0

    def add(
        self,
        marks: list[Mark],
        number: int,
        skipped_update: bool,
        read: bool,
        after_spin: int = 0,
        load: tuple[float, ...] = (),
        memory: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Takes a step that has ended, and finishes those that are due.

        Args:
            marks: All of its marks; the last one is its end.
            number: The number that it is logged under.
            skipped_update: Whether no optimizer ran its update.
            read: Whether to read the finished steps now.
            after_spin: The index of the mark behind a spin; then it is waited for, and all is read.
            load: What it has worked on, see `StepRecord`.
            memory: What was sampled at its marks.
        """
        self.ended += 1
        step = EndedStep(marks, number, self.ended, self._untimed, skipped_update)
        step.load, step.memory = load, memory
        self._pending.append(step)
        self._untimed = 0
        try:
            if after_spin:
                step.after_spin = after_spin
                # Before the wait, after which the device has passed this mark in any case.
                step.filled = not marks[after_spin][1].query()
                self._finish_all()
            else:
                self._finish_due(read)
        except Exception as error:
            self.give_up(error)

    def add_unread(
        self,
        marks: list[Mark],
        number: int,
        load: tuple[float, ...],
        memory: tuple[tuple[int, int], ...],
    ) -> None:
        """Takes a step that has ended with an update, and reads nothing now.

        Args:
            marks: All of its marks; the last one is its end.
            number: The number that it is logged under.
            load: What it has worked on, see `StepRecord`.
            memory: What was sampled at its marks.
        """
        self.ended += 1
        step = EndedStep(marks, number, self.ended, self._untimed, False)
        step.load, step.memory = load, memory
        self._pending.append(step)
        self._untimed = 0

    def end_untimed(self, read: bool = False) -> None:
        """Counts a step that ended without times: the one wait may be due there.

        Args:
            read: Whether to read the finished steps now.
        """
        self.ended += 1
        self._untimed += 1
        if self._pending or (read and self._finished):
            self._unless_capturing(self._finish_due, read)

    def flush(self) -> None:
        """Waits for all, and reads them."""
        self._unless_capturing(self._finish_all)

    def drain(self) -> None:
        """Reads those that the device has finished, without waiting for the others."""
        if self._pending or self._finished:
            self._unless_capturing(self._read_finished)

    def take_back(self, events: list[TimingEvent]) -> None:
        """Takes the events of an open step that is dropped."""
        last = [*self._finished[-1:], *self._pending][-1:]
        # The first event may be the end of the step before, which is not read yet and needs it.
        if events and last and last[0].marks[-1][1] is events[0]:
            last[0].owns_end = True
            del events[0]
        self.free.extend(events)

    def _unless_capturing(self, call: Callable[..., None], *args: bool) -> None:
        try:
            # Even the query of an event that is not in the graph breaks the capture.
            if not self._is_capturing():
                call(*args)
        except Exception as error:
            self.give_up(error)

    def newest_ms(self) -> tuple[float, float] | None:
        """Returns how long the newest step took host and device; None if there is none unread."""
        if not self._finished or self._is_capturing():
            return None
        (_, first, begun), *_, (_, last, ended) = self._finished[-1].marks
        # A mark on another stream can lag behind the last one.
        return ((ended - begun) / 1e6, first.elapsed_time(last)) if first.query() else None

    def forget(self) -> None:
        """Forgets all steps that are not read."""
        self._pending.clear()
        self._finished = []

    def give_up(self, error: Exception) -> None:
        """Forgets the pending steps, whose events cannot be trusted; what is finished is read."""
        self._pending.clear()
        self._fail(error)

    def _finish_due(self, read: bool) -> None:
        """Finishes the step that ended `lag` steps ago, if it was timed, and reads a batch."""
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
        """Takes the oldest step off the pending ones, after the one wait if the device needs it."""
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
        if self._reading_begins is not None:
            self._reading_begins()
        records = []
        for step in finished:
            marks = step.marks
            try:
                if self._graphs.closed:
                    marks = self._graphs.with_replays(marks)
                record, events = read(step, marks)
            except Exception as error:
                # The others are finished, and an error in one costs none of them.
                self._leave_out(error)
                continue
            records.append(record)
            if marks is not step.marks:
                # Those of a graph stay the graph's: its next replay records them again.
                events = [event for _, event, _ in step.marks]
            # The last event is also the first of the next step, which still needs it.
            self.free.extend(events if step.owns_end else events[:-1])
        if records:
            self._emit(records)
