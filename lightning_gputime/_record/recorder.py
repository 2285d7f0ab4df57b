"""Marks on a timeline, cut into steps."""

from collections.abc import Callable
from itertools import groupby
from threading import get_ident

from lightning_gputime._phases import DATA, EXCLUDED, INTERRUPTIONS
from lightning_gputime._record.backlog import Backlog
from lightning_gputime._record.clock import Clock, TimingEvent
from lightning_gputime._record.graphs import Graphs
from lightning_gputime._record.pauses import Pauses
from lightning_gputime._record.reading import Sampler
from lightning_gputime._record.state import AT_REST, LOST, OPEN, PAUSED
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._untraced import untraced

MANY_MARKS = 2_000
"""A step of so many boundaries is told of: perhaps none ever ends."""

MOST_EVENTS = 100_000
"""So many events a recorder holds; a step that would need more is dropped."""

_NEVER_ENDS = (
    "A step has %d boundaries and has not ended; with %d it is dropped. If no step ends, call"
    " step() at the end of the loop's body or iterate over steps(loader), and remove() a timer"
    " that is not used any more; where Lightning optimizes by hand, a step ends with the update"
    " of an optimizer that configure_optimizers returned."
)


class TooManyEventsError(Exception):
    """No further event is created."""


@untraced
class Recorder(Pauses):
    """Records marks, cuts them into steps, and emits the times of each step once it can be read.

    The end of a step is the first mark of the next. When more than `lag` steps are pending, the
    host waits for the oldest of them, unless the device has finished it. Steps that are finished
    are read together, `batch` at a time: the code that reads them is then in the processor's cache,
    and costs a step a fraction.

    Nothing here raises into the training loop: after an error the step is dropped, and a logger
    says so once. Calls from any thread but the one that last called `begin` do nothing.

    Args:
        clock: Where events and host times come from.
        lag: How many ended steps may be pending.
        batch: How many finished steps are read together.
        emit: Called with the steps that were read, in order, in the training thread.
        annotate: Called with each new label, and with None at the end.
        reading_begins: Called just before steps are read.
        sampler: Reads more at the marks of some steps.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        lag: int,
        emit: Callable[[list[StepRecord]], object],
        batch: int = 1,
        annotate: Callable[[str | None], None] | None = None,
        reading_begins: Callable[[], object] | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self._graphs = Graphs(clock)
        self._backlog = Backlog(
            clock,
            self._graphs,
            lag=lag,
            batch=batch,
            emit=emit,
            leave_out=self._tell_left_out,
            fail=self._fail,
            reading_begins=reading_begins,
        )
        super().__init__(clock, self._backlog.free, annotate, sampler)
        self._captured = self._graphs.open
        self.end_untimed = self._backlog.end_untimed
        self.flush = self._backlog.flush
        self.drain = self._backlog.drain
        self.newest_ms = self._backlog.newest_ms
        # The place of the open step among the timed ones.
        self._index = 0
        self.begins = 0
        """How often `begin` was called."""
        self.load: tuple[float, ...] = ()
        """What the step that ends next has worked on, see `StepRecord`."""
        # How many events there are: those in use, and those to be used again.
        self._events = 0
        # With so many marks a step is looked at.
        self._many = MANY_MARKS

    @property
    def ended_steps(self) -> int:
        """How many steps have ended, timed or not."""
        return self._backlog.ended

    @property
    def blocked_ns(self) -> tuple[int, int]:
        """The host's time when it last waited for a step, and when that was over."""
        return self._backlog.blocked_ns

    def begin(self, label: str = DATA) -> None:
        """Starts a step here, in the calling thread. What the open step held is dropped."""
        self.thread = self._home = get_ident()
        self._drop()
        self.begins += 1
        self.state = OPEN
        if self._sampler is not None and self._sampler.is_due(self._index):
            self._samples = []
        first = self._first_label(label)
        if self._holds:
            self._held, first = first, EXCLUDED
        self._record(first)
        if self._holds and self.state is OPEN:
            self.state = PAUSED

    def end_step(self, number: int, skipped_update: bool = False, read: bool = False) -> None:
        """Ends the open step under `number`, and begins the next.

        This is the only place where the host may wait in a training loop.

        Args:
            number: The number that it is logged under.
            skipped_update: Whether no optimizer ran its update.
            read: Whether to read the finished steps now.
        """
        if get_ident() != self.thread:
            return
        self._index += 1
        is_next_sampled = self._sampler is not None and self._sampler.is_due(self._index)
        is_sampled = self._samples is not None
        if is_next_sampled and not is_sampled:
            # The end of this step is the first mark of the next.
            self._samples = []
        if self.state is OPEN and not self._is_spoiled:
            self._base = DATA
            self._record(self._named[-1] if self._named else DATA)
        # Once more: that mark may have failed, or gone into a graph.
        if (self.state is not OPEN or self._is_spoiled) and not self._ends_paused():
            self.begin()
            # A step that is dropped has ended all the same: else ranks would compare different
            # steps.
            self.end_untimed(read)
            return
        # One event is the end of this step and the begin of the next: no time is lost between them.
        marks, self._open = self._open, self._open[-1:]
        samples = self._take_samples(is_next_sampled)
        memory = samples if is_sampled else ()
        spin, self._after_spin = self._after_spin, 0
        # A replay calls no hook of the optimizer.
        skipped_update = skipped_update and not self._graphs.closed
        self._backlog.add(marks, number, skipped_update, read, spin, self.load, memory)

    def end_at(self, label: str, number: int) -> bool:
        """Ends the open step at its last mark of `label`, without a wait, and begins the next.

        Returns:
            Whether it did: not if there is no such mark, or a model or a backward after it.
        """
        is_open = self.state in (OPEN, PAUSED) and not self._is_spoiled
        if not is_open or get_ident() != self.thread or not self._cut_after(label):
            return False
        self.state = OPEN
        self._base = DATA
        self._record(self._named[-1] if self._named else DATA)
        if self.state is not OPEN:
            return False
        marks, self._open = self._open, self._open[-1:]
        self._after_spin = 0
        self._index += 1
        self._backlog.add_unread(marks, number, self.load, self._take_samples(False))
        return True

    def _ends_paused(self) -> bool:
        """Ends a step inside a pause, if some of its time was before. Tells if it did."""
        if self.state is not PAUSED or self._is_spoiled:
            return False
        if {label for label, *_ in self._open} <= {EXCLUDED, *INTERRUPTIONS}:
            return False
        if self._holds:
            self._held = DATA
            self._record(EXCLUDED, annotate=False)
        else:
            self.state = OPEN
            self._record(self._first_label(DATA))
        return self.state in (OPEN, PAUSED) and not self._is_spoiled

    def rest(self) -> None:
        """Ends recording until the next `begin`; until then only named phases are noted."""
        self._home = get_ident()
        if self.thread != -1:
            self._drop()
            self.state, self.thread = AT_REST, -1
            self._tell_annotator(None)
            if self._captured and not self._is_capturing():
                self._end_capture()

    def fill(self, spin: Callable[[], None]) -> None:
        """Lets `spin` keep the device busy; what the open step held so far belongs to no step.

        Then `end_step` waits for its end, and reads all.
        """
        label = self.label
        if label is None or self.state is not OPEN:
            return
        self._samples = None  # It would delay the marks.
        self._exclude_from(0)
        self._tell_annotator(None)
        # A mark of its own before the spin: how long it took sets the length of the next one. What
        # came before it, such as logging, must not count for it.
        self._record(EXCLUDED, annotate=False)
        spin()
        self._record(label)
        self._after_spin = len(self._open) - 1

    def abandon(self) -> None:
        """Ends all recording, in a process that was forked off: the events are not its own."""
        self.state, self.thread, self._home = AT_REST, -1, -1
        self._open, self.label = [], None
        self._sampler = self._samples = None
        self._free.clear()
        self._backlog.forget()

    def _new_event(self) -> TimingEvent:
        """Returns a new event; where there are too many, one that the device has reached."""
        if len(self._open) >= self._many:
            self._look_whether_it_ends()
        if self._events >= MOST_EVENTS:
            # Finished steps hold events, many of them with a large `lag`. Nothing is waited for.
            self.drain()
            if self._free:
                return self._free.pop()
            raise TooManyEventsError(f"it has {len(self._open)} boundaries")
        self._events += 1
        return self._graphs.clock.event()

    def _look_whether_it_ends(self) -> None:
        # A step may wait often for other ranks, or have many modules, and end all the same.
        labels = (label for label, *_ in self._open if label not in INTERRUPTIONS)
        boundaries = sum(1 for _ in groupby(label.partition("/")[0] for label in labels))
        if boundaries >= MANY_MARKS:
            self.tell_once(_NEVER_ENDS, MANY_MARKS, MOST_EVENTS)
        self._many += MANY_MARKS

    def _give_up(self, error: Exception) -> None:
        if isinstance(error, TooManyEventsError):
            self._fail(error)  # Those of the pending steps can be trusted.
        else:
            self._backlog.give_up(error)

    def _record_in_graph(self, label: str) -> None:
        """Records a mark into the graph that is being captured. The step itself is not timed."""
        self._is_spoiled = True
        self.label = label
        if not self._graphs.capture(label):
            self.tell_once("What runs inside a captured graph is not timed.")

    def _end_capture(self) -> None:
        """Keeps the marks of a graph for its replays. Events of two kinds cannot be compared."""
        # First: from here on events are of the other kind, and cannot be compared with these.
        self.flush()
        self._graphs.close()
        self._open = []
        self._samples = None
        # Emptied, not replaced: the backlog puts events into the same list.
        self._free.clear()
        self._events = 0

    def _take_samples(self, is_next_sampled: bool) -> tuple[tuple[int, int], ...]:
        """Return what was sampled in the step that ends; the last mark is also the next one's."""
        samples = self._samples
        if samples is None:
            return ()
        self._samples = samples[-1:] if is_next_sampled else None
        return tuple(samples)

    def _drop(self) -> None:
        """Forgets the open step."""
        events, self._open = [event for _, event, _ in self._open], []
        self.label, self._is_spoiled, self._after_spin, self._samples = None, False, 0, None
        self._backlog.take_back(events)

    def _fail(self, error: Exception) -> None:
        self._tell_left_out(error)
        self._open, self.label, self._samples = [], None, None
        # After an error of the device its events cannot be trusted: they are not used again.
        self._events = len(self._free)
        if self.state is not AT_REST:
            self.state = LOST

    def _tell_left_out(self, error: Exception) -> None:
        self.tell_once("A step could not be timed and is left out: %r", error)
