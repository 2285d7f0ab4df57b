"""Marks on a timeline, cut into steps."""

from collections.abc import Callable
from threading import get_ident

from torch._C import _current_graph_task_id

from lightning_gputime._messages import TellOnce
from lightning_gputime._phases import BACKWARD, DATA, EXCLUDED, FOLLOWED_BY, OPTIMIZER
from lightning_gputime._record.backlog import Backlog
from lightning_gputime._record.clock import Clock
from lightning_gputime._record.graphs import Graphs
from lightning_gputime._record.reading import Mark
from lightning_gputime._record.state import AT_REST, LOST, OPEN, PAUSED
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._untraced import untraced

# What the time goes to while a backward runs; an optimizer may run its updates there.
_IN_BACKWARD = (BACKWARD, OPTIMIZER)


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
        emit: Callable[[list[StepRecord]], object],
        batch: int = 1,
        annotate: Callable[[str | None], None] | None = None,
    ) -> None:
        self._host_ns = clock.host_ns
        self._is_capturing = clock.is_capturing
        self._annotate = annotate
        self.tell_once = TellOnce()
        self._graphs = Graphs(clock)
        self._backlog = Backlog(
            clock,
            self._graphs,
            lag=lag,
            batch=batch,
            emit=emit,
            leave_out=self._tell_left_out,
            fail=self._fail,
        )
        self._free = self._backlog.free
        self._captured = self._graphs.open
        self.end_untimed = self._backlog.end_untimed
        self.flush = self._backlog.flush
        self.drain = self._backlog.drain
        self.state = AT_REST
        """What it does with the time."""
        self.thread = -1
        """The thread that is timed; -1 at rest."""
        # The same, at rest, too.
        self._home = -1
        self.label: str | None = None
        """The label that time is going to now; None while no step is timed."""
        # The open step: its marks; whether one of them went into a graph, whose events are of
        # another kind; the index of the mark behind a spin. All three die with the step.
        self._open: list[Mark] = []
        self._is_spoiled = False
        self._after_spin = 0
        # Phases that were named by hand and are not left yet, and what follows the outermost.
        self._named: list[str] = []
        self._base = DATA

    def is_resting_here(self) -> bool:
        """Tells whether the calling thread is the one that is timed, in some steps but not now."""
        return self.thread == -1 and get_ident() == self._home

    # Marks

    def begin(self, label: str = DATA) -> None:
        """Starts a step here, in the calling thread. What the open step held is dropped."""
        self.thread = self._home = get_ident()
        self._drop()
        self.state = OPEN
        self._record(self._first_label(label))

    def mark(self, label: str) -> None:
        """Says that from here on the time belongs to `label`.

        Inside a phase that was named by hand that name wins, and `label` is what follows it.
        """
        if label == self.label or self.state is not OPEN or get_ident() != self.thread:
            return
        if self._named:
            self._base = label
        else:
            self._record(label)

    def mark_in_backward(self, label: str) -> None:
        """As `mark`, from the thread that runs a backward while the timed one waits for it."""
        is_open = self.state is OPEN and self._named in ([], [BACKWARD])
        if is_open and (self.label or "").startswith(_IN_BACKWARD) and label != self.label:
            # A profiler's range must not begin here and end in the other thread.
            self._record(label, annotate=False)

    def mark_instead(self, of: str, label: str) -> None:
        """Marks `label`. If the time is going to `of`, `label` takes its place from its mark on."""
        if self.label == of and self.state is OPEN and get_ident() == self.thread:
            self._rename(label)
        else:
            self.mark(label)

    @property
    def place(self) -> int:
        """The index of the last mark in the open step."""
        return len(self._open) - 1

    def rename(self, place: int, of: str, label: str) -> None:
        """Gives the time of one mark of the open step, which went to `of`, to `label`."""
        if 0 <= place < len(self._open) and self._open[place][0] == of:
            self._open[place] = (label, *self._open[place][1:])

    def enter_phase(self, name: str) -> None:
        """Begins a phase that was named by hand; `leave_phase` ends it."""
        # What runs inside a backward, as checkpointed code does again, is the backward's.
        if get_ident() != self._home or _current_graph_task_id() != -1:
            return
        if self.thread == -1:
            self.starts_in_capture()
        if not self._named:
            self._base = self.label if self.label and self.state is OPEN else DATA
        self._named.append(name)
        if self.state is OPEN and name != self.label:
            self._record(name)

    def leave_phase(self, name: str) -> None:
        """Ends a phase that `enter_phase` began: time goes back to where it went before."""
        is_here = get_ident() == self._home and _current_graph_task_id() == -1
        if not is_here or name not in self._named:
            return
        if name != self._named[-1]:
            # Left out of order, as by a generator that suspends inside its phase.
            del self._named[len(self._named) - 1 - self._named[::-1].index(name)]
            return
        self._named.pop()
        label = self._named[-1] if self._named else FOLLOWED_BY.get(name, self._base)
        if self.state is OPEN and label != self.label:
            self._record(label)

    def pause(self) -> None:
        """Lets the time since the last mark, and until `resume`, belong to no step."""
        if self.state is OPEN and get_ident() == self.thread:
            self._rename(EXCLUDED)
            self.state = PAUSED
            self._tell_annotator(None)

    def resume(self, label: str = DATA) -> None:
        """Ends a `pause`: from here on the time belongs to `label`."""
        if self.state is PAUSED and get_ident() == self.thread:
            self.state = OPEN
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
        if self.state is OPEN and not self._is_spoiled:
            self._base = DATA
            self._record(self._named[-1] if self._named else DATA)
        # Once more: that mark may have failed, or gone into a graph.
        if self.state is not OPEN or self._is_spoiled:
            self.begin()
            self.end_untimed(read)
            return
        marks, self._open = self._open, self._open[-1:]
        spin, self._after_spin = self._after_spin, 0
        # A replay calls no hook of the optimizer.
        skipped_update = skipped_update and not self._graphs.closed
        self._backlog.add(marks, number, skipped_update, read, spin)

    def rest(self) -> None:
        """Ends recording until the next `begin`; until then only named phases are noted."""
        self._home = get_ident()
        if self.thread != -1:
            self._drop()
            self.state, self.thread = AT_REST, -1
            self._tell_annotator(None)
            if self._captured and not self._is_capturing():
                self._end_capture()

    def starts_in_capture(self) -> bool:
        """Ends a rest if a graph is captured, whose replays may be timed. Tells if it did."""
        if not self._is_capturing():
            return False
        self.thread, self.state, self._is_spoiled = self._home, OPEN, True
        return True

    def fill(self, spin: Callable[[], None]) -> None:
        """Lets `spin` keep the device busy; what the open step held so far belongs to no step.

        Then `end_step` waits for its end, and reads all.
        """
        label = self.label
        if label is None or self.state is not OPEN:
            return
        self._rename(EXCLUDED)
        self._tell_annotator(None)
        self._record(EXCLUDED, annotate=False)
        spin()
        self._record(label)
        self._after_spin = len(self._open) - 1

    def _record(self, label: str, *, annotate: bool = True) -> None:
        try:
            if self._is_capturing():
                self._record_in_graph(label)
                return
            if self._captured:
                self._end_capture()
            event = self._free.pop() if self._free else self._graphs.clock.event()
            event.record()
            self._open.append((label, event, self._host_ns()))
        except Exception as error:
            self._backlog.give_up(error)
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

    def _record_in_graph(self, label: str) -> None:
        """Records a mark into the graph that is being captured. The step itself is not timed."""
        self._is_spoiled = True
        self.label = label
        if not self._graphs.capture(label):
            self.tell_once("What runs inside a captured graph is not timed.")

    def _end_capture(self) -> None:
        """Keeps the marks of a graph for its replays. Events of two kinds cannot be compared."""
        self.flush()
        self._graphs.close()
        self._open = []
        self._free.clear()

    def _first_label(self, label: str) -> str:
        """The label that a step begins with: a phase named by hand reaches across steps."""
        self._base = label
        return self._named[-1] if self._named else label

    def _drop(self) -> None:
        """Forgets the open step."""
        events, self._open = [event for _, event, _ in self._open], []
        self.label, self._is_spoiled, self._after_spin = None, False, 0
        self._backlog.take_back(events)

    def _fail(self, error: Exception) -> None:
        self._tell_left_out(error)
        self._open, self.label = [], None
        if self.state is not AT_REST:
            self.state = LOST

    def _tell_left_out(self, error: Exception) -> None:
        self.tell_once("A step could not be timed and is left out: %r", error)
