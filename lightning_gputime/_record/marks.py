"""Marks on a timeline: from each one on, the time belongs to a label."""

from collections.abc import Callable
from threading import get_ident

from torch._C import _current_graph_task_id

from lightning_gputime._messages import TellOnce
from lightning_gputime._phases import (
    BACKWARD,
    COMM,
    DATA,
    FOLLOWED_BY,
    GOES_ON,
    INTERRUPTIONS,
    OPTIMIZER,
    RECEIVES,
    WAITS,
)
from lightning_gputime._record.clock import Clock, TimingEvent
from lightning_gputime._record.reading import Mark, Sampler
from lightning_gputime._record.state import AT_REST, OPEN
from lightning_gputime._untraced import untraced

# What the time goes to while a backward runs; an optimizer may run its updates there.
_IN_BACKWARD = (BACKWARD, OPTIMIZER)


@untraced
class Marks:
    """Records the marks of the open step.

    A mark says: from here on the time belongs to this label. Calls from any thread but the one that
    is timed do nothing, and nothing raises into the training loop. There is no lock: autograd's
    thread marks (`mark_in_backward`) only while the timed one waits for it.

    Args:
        clock: Where events and host times come from.
        free: Events to use again.
        annotate: Called with each new label, and with None at the end.
        sampler: Reads more at the marks of some steps.
    """

    def __init__(
        self,
        clock: Clock,
        free: list[TimingEvent],
        annotate: Callable[[str | None], None] | None,
        sampler: Sampler | None,
    ) -> None:
        self._host_ns = clock.host_ns
        self._is_capturing = clock.is_capturing
        self._free = free
        self.streams = getattr(clock, "streams", None)
        """The streams of the device, if it has some."""
        self._annotate = annotate
        # Reads more at the marks of some steps; what it has read in the open one, if that is one.
        self._sampler = sampler
        self._samples: list[tuple[int, int]] | None = None
        self.tell_once = TellOnce()
        self.state = AT_REST
        """What it does with the time."""
        self.thread = -1
        """The thread that is timed; -1 at rest."""
        # The same, at rest, too.
        self._home = -1
        self.was_elsewhere = False
        """Whether a boundary was seen in another thread."""
        self.label: str | None = None
        """The label that time is going to now; None while no step is timed."""
        # The open step: its marks; whether one of them went into a graph, whose events are of
        # another kind; the index of the mark behind a spin. All three die with the step.
        self._open: list[Mark] = []
        self._is_spoiled = False
        self._after_spin = 0
        # The marks of a graph that is being captured.
        self._captured: list[Mark] = []
        # Phases that were named by hand and are not left yet, and what follows the outermost.
        self._named: list[str] = []
        self._base = DATA

    def is_resting_here(self) -> bool:
        """Tells whether the calling thread is the one that is timed, in some steps but not now."""
        if self.thread == -1:
            return get_ident() == self._home
        self.was_elsewhere = True
        return False

    def mark(self, label: str) -> None:
        """Says that from here on the time belongs to `label`.

        Inside a phase that was named by hand that name wins, and `label` is what follows it.
        """
        # The label first: a boundary that changes nothing must cost no event, and next to no time.
        if label == self.label or self.state is not OPEN or get_ident() != self.thread:
            return
        if self._named:
            self._base = label
        else:
            self._record(label)

    def mark_in_backward(self, label: str) -> None:
        """As `mark`, from the thread that runs a backward while the timed one waits for it."""
        # Any other name that was given by hand wins over what is seen.
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
    def place_before(self) -> int:
        """The index of the mark before the last one in the open step, waits not counted."""
        return self._uninterrupted(len(self._open) - 2)

    def rename(self, place: int, of: str, label: str) -> None:
        """Gives the time of one mark of the open step, which went to `of`, to `label`."""
        if 0 <= place < len(self._open) and self._open[place][0] == of:
            self._open[place] = (label, *self._open[place][1:])

    @property
    def is_named(self) -> bool:
        """Whether a phase that was named by hand is open, at rest, too."""
        return bool(self._named)

    def has_marked(self, phase: str) -> bool:
        """Tells whether the open step has a mark of a phase, or of a part of it."""
        return any(label.partition("/")[0] == phase for label, *_ in self._open)

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

    def starts_in_capture(self) -> bool:
        """Ends a rest if a graph is captured, whose replays may be timed. Tells if it did."""
        if not self._is_capturing():
            return False
        self.thread, self.state, self._is_spoiled = self._home, OPEN, True
        return True

    # Waits

    def wait_begins(self, label: str = WAITS) -> bool:
        """Says that the stream waits for other ranks, or runs their collective, until `wait_ends`.

        It interrupts the label that time goes to, whatever that is renamed to later.

        Args:
            label: `WAITS`, or `RECEIVES` where it is for what follows.

        Returns:
            Whether it does: not where time goes to a wait already, or to no step.
        """
        if self.state is not OPEN or not self.is_here() or self.is_waiting:
            return False
        if self.label is None or self.label.endswith(f"/{COMM}"):
            return False
        self._interrupt(label)
        return True

    def wait_ends(self) -> None:
        """Ends what `wait_begins` began, if nothing else has."""
        if self.state is OPEN and self.is_here() and self.is_waiting:
            self._interrupt(GOES_ON)

    @property
    def is_waiting(self) -> bool:
        """Whether time goes to a wait that `wait_begins` began."""
        marks = self._captured or self._open
        return bool(marks) and marks[-1][0] in (WAITS, RECEIVES)

    def is_here(self) -> bool:
        """Tells whether this thread is timed, or runs a backward while the timed one waits."""
        if get_ident() == self.thread:
            return True
        return _current_graph_task_id() != -1 and (self.label or "").startswith(_IN_BACKWARD)

    def _interrupt(self, label: str) -> None:
        interrupted = self.label
        self._record(label, annotate=False)
        if self.state is OPEN:  # Else the mark has failed.
            self.label = interrupted

    # How a mark is recorded

    def tell_cost(self, took: Callable[[int], None]) -> None:
        """Lets `took` know how long each mark takes the host from here on (in nanoseconds)."""
        record, now_ns = self._record, self._host_ns

        @untraced
        def timed(label: str, *, annotate: bool = True) -> None:
            begun_ns = now_ns()
            record(label, annotate=annotate)
            took(now_ns() - begun_ns)

        self._record = timed  # type: ignore[method-assign]

    def _record(self, label: str, *, annotate: bool = True) -> None:
        try:
            if self._is_capturing():
                self._record_in_graph(label)
                return
            # No call tells that a capture is over: the first mark after it does.
            if self._captured:
                self._end_capture()
            event = self._free.pop() if self._free else self._new_event()
            event.record()
            self._open.append((label, event, self._host_ns()))
            if self._samples is not None:
                self._sample(self._samples)
        except Exception as error:
            self._give_up(error)
            return
        self.label = label
        if annotate and self._annotate is not None:
            self._tell_annotator(label)

    def _sample(self, samples: list[tuple[int, int]]) -> None:
        try:
            if self._sampler is not None:
                samples.append(self._sampler.sample())
        except Exception as error:
            self._sampler = self._samples = None
            self.tell_once("Memory is measured no more: %r", error)

    def _rename(self, label: str) -> None:
        """Gives the time since the last mark to `label`, waits inside included."""
        if self._open:  # Not where recording has started in a capture.
            place = self._uninterrupted(len(self._open) - 1)
            self._open[place] = (label, *self._open[place][1:])
        self.label = label

    def _uninterrupted(self, place: int) -> int:
        """Returns the index of a mark, or of the one that it interrupts."""
        while place > 0 and self._open[place][0] in INTERRUPTIONS:
            place -= 1
        return place

    def _tell_annotator(self, label: str | None) -> None:
        if self._annotate is not None:
            try:
                self._annotate(label)
            except Exception as error:
                self._annotate = None
                self.tell_once("Phases are no longer shown in other profilers: %r", error)

    def _first_label(self, label: str) -> str:
        """The label that a step begins with: a phase named by hand reaches across steps."""
        self._base = label
        return self._named[-1] if self._named else label

    # What the cutting into steps adds

    def _new_event(self) -> TimingEvent:
        """Returns an event that is not in use."""
        raise NotImplementedError

    def _give_up(self, error: Exception) -> None:
        """Loses the open step after an error."""
        raise NotImplementedError

    def _record_in_graph(self, label: str) -> None:
        """Records a mark into the graph that is being captured."""
        raise NotImplementedError

    def _end_capture(self) -> None:
        """Ends what `_record_in_graph` began."""
        raise NotImplementedError
