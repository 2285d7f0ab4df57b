"""A recorder that reads, at the marks of some steps, the most memory since the mark before."""

from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import Any

from lightning_gputime._messages import messages
from lightning_gputime._phases import DATA, settle
from lightning_gputime._record.memory import Meter
from lightning_gputime._record.reading import Mark
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._untraced import untraced

FIRST, EVERY = 3, 20
"""So many of the first steps are sampled, as optimizers allocate in the first; then one in so
many. A mark of a sampled step costs the host some 20 us, one of another step nothing."""

_GRAPHS = (
    "memory=True: a captured graph has its own memory, allocated once; what is replayed has no"
    " peaks, and no further step is sampled."
)


Deliver = Callable[[int, Mapping[str, int], int], object]
"""Gets the number of a sampled step, the peak of each phase in it, and what was allocated where it
began (in bytes)."""


@untraced
class MeteredMarks(list[Mark]):
    """The marks of an open step, each of which ends an interval whose peak is read.

    They die with the step: where it is dropped, or goes on after a capture, its peaks do, too.

    Args:
        marks: Those that the step has.
        meter: Reads the peaks.
        deliver: Gets them.
    """

    __slots__ = ("_deliver", "_held", "_is_whole", "_meter", "_peaks", "number")

    def __init__(self, marks: Sequence[Mark], meter: Meter, deliver: Deliver) -> None:
        super().__init__(marks)
        self.number: int | None = None
        """The number of the step, if the next mark is its end."""
        self._meter, self._deliver = meter, deliver
        # Else only its end is needed: there the peak is reset for the next step.
        self._is_whole = len(marks) == 1
        self._held = meter.now
        self._peaks: list[int | None] = []

    def append(self, mark: Mark) -> None:
        """Adds a mark, and reads the peak since the one before."""
        super().append(mark)
        self._peaks.append(self._meter.cut())
        if self.number is not None and self._is_whole:
            self._end(self.number)

    def _end(self, number: int) -> None:
        labels = tuple(label for label, *_ in self[:-1])
        of_phases: dict[str, int] = {}
        for names, peak in zip(settle(labels), self._peaks, strict=True):
            if peak is None:
                return
            for name in names:
                of_phases[name] = max(of_phases.get(name, 0), peak)
        # A device that does not count tells zeros.
        if any(of_phases.values()):
            self._deliver(number, of_phases, self._held)


@untraced
class MeteredRecorder(Recorder):
    """A recorder that samples the memory of some steps.

    Steps that are probed, dropped, or have graphs are not sampled, and what belongs to no step, as
    an evaluation inside one, counts for no phase.

    Args:
        *args: As those of `Recorder`.
        meter: Reads the counters.
        deliver: Gets what was read.
        **kwargs: As those of `Recorder`.
    """

    def __init__(self, *args: Any, meter: Meter, deliver: Deliver, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.meter = meter
        self._deliver = deliver
        # The index of the open step.
        self._index = 0

    def begin(self, label: str = DATA) -> None:
        """As that of `Recorder`."""
        super().begin(label)
        if self._is_sampled() and len(self._open) == 1:
            self.meter.cut()
            self._sample()

    def end_step(self, number: int, skipped_update: bool = False, read: bool = False) -> None:
        """As that of `Recorder`."""
        if get_ident() != self.thread:
            return
        self._index += 1
        next_is = self._is_sampled()
        if isinstance(self._open, MeteredMarks):
            self._open.number = number
        elif next_is:
            # Its end is the begin of the next: what is allocated from there on counts, also while
            # steps are read.
            self._sample()
        super().end_step(number, skipped_update, read)
        if next_is and len(self._open) == 1 and not isinstance(self._open, MeteredMarks):
            self._sample()

    def end_at(self, label: str, number: int) -> bool:
        """As that of `Recorder`."""
        opened = self._open
        if isinstance(opened, MeteredMarks):
            opened.number = number
        has_ended = super().end_at(label, number)
        if has_ended:
            self._index += 1
        elif isinstance(opened, MeteredMarks):
            opened.number = None
        return has_ended

    def fill(self, spin: Callable[[], None]) -> None:
        """As that of `Recorder`."""
        # Its marks must not be late.
        self._open = [*self._open]
        super().fill(spin)

    def abandon(self) -> None:
        """As that of `Recorder`."""
        self.meter.works = False
        self.meter.memory.abandon()
        super().abandon()

    def _is_sampled(self) -> bool:
        """Tells whether the step of this index is sampled."""
        if not self.meter.works or (self._index >= FIRST and self._index % EVERY):
            return False
        if self._graphs.closed:
            self.meter.works = False
            messages.warning(_GRAPHS)
            return False
        return True

    def _sample(self) -> None:
        self._open = MeteredMarks(self._open, self.meter, self._deliver)
