"""Marks on a timeline, cut into steps, and read back with at most one wait a step."""

from collections import deque
from collections.abc import Callable
from threading import get_ident

from lightning_gputime._events import Clock, TimingEvent, log
from lightning_gputime._marks import BLOCKED_NS, Mark, Marks, read
from lightning_gputime._phases import BACKWARD, DATA, EXCLUDED, FOLLOWED_BY
from lightning_gputime._raw import RawStep
from lightning_gputime._untraced import untraced

BATCH = 25
"""How many steps are read together where nobody waits for them.

It divides the 50 steps between the logs of a Trainer: no small batch is left over.
"""


@untraced
class Recorder:
    """Records marks, cuts them into steps, and emits the times of each step once it can be read.

    A mark says: from here on the time belongs to this label. The end of a step is the first mark
    of the next. When more than `lag` steps are pending, the host waits for the oldest of them,
    unless the device has finished it. Steps that are finished are read together, `batch` at a time:
    the code that reads them is then in the processor's cache, and costs a step a fraction.

    Nothing here raises into the training loop: after an error the step is dropped, and a logger
    says so once. Calls from any thread but the one that last called `begin` do nothing.

    Args:
        clock: Where events and host times come from.
        lag: How many ended steps may be pending.
        batch: How many finished steps are read together.
        emit: Called with the steps that were read, in order, in the training thread.
        annotate: Called with each new label, and with None at the end.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        lag: int,
        emit: Callable[[list[RawStep]], object],
        batch: int = 1,
        annotate: Callable[[str | None], None] | None = None,
    ) -> None:
        self._clock = clock
        # Events that were read, to be used again.
        self._free: list[TimingEvent] = []
        self._host_ns = clock.host_ns
        self._is_capturing = clock.is_capturing
        self.lag = lag
        """How many ended steps may be pending."""
        self._batch = batch
        self._emit = emit
        self._annotate = annotate
        self.thread = -1
        """The thread that is timed; -1 while nothing is recorded."""
        # The same, at rest, too.
        self._home = -1
        self._timing = False
        self._paused = False
        self._told: set[str] = set()
        self._pending: deque[Marks] = deque()
        self._finished: list[Marks] = []
        self._open: list[Mark] = []
        self._captured: list[Mark] = []
        self._graphs: list[list[Mark]] = []
        self._spoiled = False
        self._after_spin = 0
        # Phases that were named by hand and are not left yet, and what follows the outermost.
        self._named: list[str] = []
        self._base = DATA
        # How many steps have ended, and how many without marks since the last one that has some.
        self._ended = self._untimed = 0
        self.label: str | None = None
        """The label that time is going to now; None while no step is timed."""

    def is_resting_here(self) -> bool:
        """Tells whether the calling thread is the one that is timed, in some steps but not now."""
        return self.thread == -1 and get_ident() == self._home

    # Marks

    def begin(self, label: str = DATA) -> None:
        """Starts a step here, in the calling thread. What the open step held is dropped."""
        self.thread = self._home = get_ident()
        self._drop()
        self._timing, self._paused, self._spoiled = True, False, False
        self._record(self._first_label(label))

    def mark(self, label: str) -> None:
        """Says that from here on the time belongs to `label`.

        Inside a phase that was named by hand that name wins, and `label` is what follows it.
        """
        if label == self.label or not self._timing or get_ident() != self.thread:
            return
        if self._named:
            self._base = label
        else:
            self._record(label)

    def mark_in_backward(self, label: str) -> None:
        """As `mark`, from the thread that runs a backward while the timed one waits for it."""
        is_open = self._timing and self._named in ([], [BACKWARD])
        if is_open and (self.label or "").startswith(BACKWARD) and label != self.label:
            # A profiler's range must not begin here and end in the other thread.
            self._record(label, annotate=False)

    def turn(self, label: str, into: str) -> None:
        """Marks `into`; if the time is going to `label`, then what it got since its mark too."""
        if self.label == label and self._timing and get_ident() == self.thread:
            self._rename(into)
        else:
            self.mark(into)

    def enter(self, name: str) -> None:
        """Begins a phase that was named by hand; `leave` ends it."""
        if get_ident() != self._home:
            return
        if self.thread == -1:
            self.starts_in_capture()
        if not self._named:
            self._base = self.label if self.label and self._timing else DATA
        self._named.append(name)
        if self._timing and name != self.label:
            self._record(name)

    def leave(self, name: str) -> None:
        """Ends a phase that `enter` began: time goes back to where it went before."""
        if get_ident() != self._home or name not in self._named:
            return
        if name != self._named[-1]:
            # Left out of order, as by a generator that suspends inside its phase.
            del self._named[len(self._named) - 1 - self._named[::-1].index(name)]
            return
        self._named.pop()
        label = self._named[-1] if self._named else FOLLOWED_BY.get(name, self._base)
        if self._timing and label != self.label:
            self._record(label)

    def pause(self) -> None:
        """Lets the time since the last mark, and until `resume`, belong to no step."""
        if self._timing and get_ident() == self.thread:
            self._rename(EXCLUDED)
            self._timing, self._paused = False, True
            self._tell_annotator(None)

    def resume(self, label: str = DATA) -> None:
        """Ends a `pause`: from here on the time belongs to `label`."""
        if self._paused and get_ident() == self.thread:
            self._timing, self._paused = True, False
            self._record(self._first_label(label))

    # Steps

    def end_step(self, number: int, skipped_update: bool = False, read: bool = False) -> None:
        """Ends the open step under `number`, and begins the next.

        This is the only place where the host may wait in a training loop.

        Args:
            number: Its number.
            skipped_update: Whether no optimizer ran its update.
            read: Whether to read the finished steps now.
        """
        if get_ident() != self.thread:
            return
        if self._timing and not self._spoiled:
            self._record(self._first_label(DATA))
        if not self._timing or self._spoiled:
            self.begin()
            self.pass_over(read)
            return
        # A replay calls no hook of the optimizer.
        skipped_update = skipped_update and not self._graphs
        self._ended += 1
        self._pending.append(Marks(self._open, number, self._ended, self._untimed, skipped_update))
        self._open = self._open[-1:]
        self._untimed = 0
        try:
            if self._after_spin:
                self._finish_probed()
            self._finish_due(read)
        except Exception as error:
            self._fail(error)

    def pass_over(self, read: bool = False) -> None:
        """Must be called where a step ends that has no times: the one wait may be due there.

        Args:
            read: Whether to read the finished steps now.
        """
        self._ended += 1
        self._untimed += 1
        if self._pending or (read and self._finished):
            try:
                if not self._is_capturing():
                    self._finish_due(read)
            except Exception as error:
                self._fail(error)

    def rest(self) -> None:
        """Ends recording until the next `begin`; until then only named phases are noted."""
        self._home = get_ident()
        if self.thread != -1:
            self._drop()
            self.thread = -1
            self._tell_annotator(None)
            if self._captured and not self._is_capturing():
                self._end_capture()

    def starts_in_capture(self) -> bool:
        """Ends a rest if a graph is captured, whose replays may be timed. Tells if it did."""
        if not self._is_capturing():
            return False
        self.thread, self._timing, self._spoiled = self._home, True, True
        return True

    def fill(self, spin: Callable[[], None]) -> None:
        """Lets `spin` keep the device busy; what the open step held so far belongs to no step.

        Then `end_step` waits for its end, and reads all.
        """
        label = self.label
        if label is None or not self._timing:
            return
        self._rename(EXCLUDED)
        self._tell_annotator(None)
        self._record(EXCLUDED, annotate=False)
        spin()
        self._record(label)
        self._after_spin = len(self._open) - 1

    def flush(self) -> None:
        """Waits for the ended steps that are unread, and emits them."""
        try:
            if not self._is_capturing():
                self._finish_all()
        except Exception as error:
            self._fail(error)

    def drain(self) -> None:
        """Emits the ended steps that the device has finished, without waiting for the others."""
        if not self._pending and not self._finished:
            return
        try:
            if not self._is_capturing():
                while self._pending and self._pending[0].marks[-1][1].query():
                    self._finish_oldest()
                self._read()
        except Exception as error:
            self._fail(error)

    def tell_once(self, message: str, *args: object) -> None:
        """Logs a warning, the first time that it is called with `message`."""
        if message not in self._told:
            self._told.add(message)
            log.warning(message, *args)

    def _record(self, label: str, *, annotate: bool = True) -> None:
        try:
            if self._is_capturing():
                self._capture(label)
                return
            if self._captured:
                self._end_capture()
            event = self._free.pop() if self._free else self._clock.event()
            event.record()
            self._open.append((label, event, self._host_ns()))
        except Exception as error:
            self._fail(error)
            return
        self.label = label
        if annotate and self._annotate is not None:
            self._tell_annotator(label)

    def _rename(self, label: str) -> None:
        """Gives the time since the last mark to `label`."""
        if self._open:  # Not where recording has started in a capture.
            self._open[-1] = (label, *self._open[-1][1:])
        self.label = label

    def _tell_annotator(self, label: str | None) -> None:
        if self._annotate is not None:
            try:
                self._annotate(label)
            except Exception as error:
                self._annotate = None
                self.tell_once("Phases are no longer shown in other profilers: %r", error)

    def _capture(self, label: str) -> None:
        """Records a mark into the graph that is being captured. The step itself is not timed."""
        self._spoiled = True
        self.label = label
        clock = self._clock.for_graphs()
        if clock is None:
            self.tell_once("What runs inside a captured graph is not timed.")
            return
        event = clock.event()
        event.record()
        self._captured.append((label, event, 0))
        self._clock = clock

    def _end_capture(self) -> None:
        """Keeps the marks of a graph for its replays. Events of two kinds cannot be compared."""
        self.flush()
        self._graphs.append(self._captured)
        self._captured, self._open = [], []
        self._free = []

    def _first_label(self, label: str) -> str:
        """The label that a step begins with: a phase named by hand reaches across steps."""
        self._base = label
        return self._named[-1] if self._named else label

    def _drop(self) -> None:
        """Forgets the open step; only `begin` starts another."""
        self._timing, self.label, self._after_spin = False, None, 0
        events, self._open = [event for _, event, _ in self._open], []
        last = [*self._finished[-1:], *self._pending][-1:]
        if events and last and last[0].marks[-1][1] is events[0]:
            last[0].owns_end = True
            del events[0]
        self._free.extend(events)

    def _finish_due(self, read: bool) -> None:
        """Finishes the step that ended `lag` steps ago, if it was timed, and reads a batch."""
        # The next replay records a graph's events again, so they must be read before.
        due = self._ended if self._graphs else self._ended - self.lag
        while self._pending and self._pending[0].ended <= due:
            self._finish_oldest()
        if self._finished and (read or self._graphs or len(self._finished) >= self._batch):
            self._read()

    def _finish_all(self) -> None:
        """Finishes the ended steps and reads them."""
        # In their order, so that each is told what it kept the host waiting for.
        while self._pending:
            self._finish_oldest()
        self._read()

    def _finish_oldest(self) -> None:
        """Takes the oldest step off the pending ones, after the one wait if the device needs it."""
        step = self._pending[0]
        end = step.marks[-1][1]
        if not end.query():
            start = self._host_ns()
            end.synchronize()
            now = self._host_ns()
            step.wait_ms = (now - start) / 1e6 / (1 + step.untimed)
            if now - start >= BLOCKED_NS:
                step.met_ns = now
        self._finished.append(self._pending.popleft())

    def _finish_probed(self) -> None:
        """Waits for the newest step, which was probed, and reads all."""
        step = self._pending[-1]
        step.after_spin, self._after_spin = self._after_spin, 0
        step.filled = not step.marks[step.after_spin][1].query()
        self._finish_all()

    def _read(self) -> None:
        finished, self._finished = self._finished, []
        steps = []
        for step in finished:
            try:
                times, free = read(step, self._graphs)
            except Exception as error:
                self._tell_left_out(error)
                continue
            steps.append(times)
            self._free.extend(free)
        if steps:
            self._emit(steps)

    def _fail(self, error: Exception) -> None:
        self._tell_left_out(error)
        # What is finished will be read.
        self._pending.clear()
        self._open = []
        self._timing, self._paused, self.label = False, False, None

    def _tell_left_out(self, error: Exception) -> None:
        self.tell_once("A step could not be timed and is left out: %r", error)
