"""Steps that have ended: their marks, and how these become times."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from lightning_gputime._record.clock import TimingEvent
from lightning_gputime._record.steps import StepRecord

Mark = tuple[str, TimingEvent, int]
"""A label, the event from which on the time belongs to it, and the host's time there (in ns)."""


class Sampler(Protocol):
    """Reads numbers at the marks of some steps, which their records then hold."""

    def is_due(self, index: int) -> bool:
        """Return whether to sample a step, by its place among the timed ones."""

    def sample(self) -> tuple[int, int]:
        """Return what is read at a mark."""


class EndedStep:
    """The marks of one step, the last of which is its end and has no label of its own.

    It lives from the end of the step until `read`; then only the record is left.

    Args:
        marks: All of them, in order.
        number: The number that the step is logged under.
        ended: How many steps had ended then, itself included, timed or not.
        untimed: How many steps without marks came before it: its wait makes up for them, too.
        skipped_update: As in `StepRecord`.
    """

    wait_ms = 0.0
    """How long the host waited for it and for each of those (in milliseconds)."""
    finished_ns = 0
    """The host's time when a wait for it ended that did block (in nanoseconds); 0 without one."""
    filled: bool | None = None
    after_spin = 0
    """These two as in `StepRecord`."""
    load: tuple[float, ...] = ()
    """As in `StepRecord`, too."""
    memory: tuple[tuple[int, int], ...] = ()
    owns_end = False
    """Whether the last event is this step's alone, and not also the first of the next."""

    def __init__(
        self, marks: list[Mark], number: int, ended: int, untimed: int, skipped_update: bool
    ) -> None:
        self.marks = marks
        self.number = number
        self.ended = ended
        self.untimed = untimed
        self.skipped_update = skipped_update


def read(step: EndedStep, marks: Sequence[Mark]) -> tuple[StepRecord, Sequence[TimingEvent]]:
    """Reads the events of a step that the device has finished.

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
        step.after_spin,
        step.load,
        step.memory,
    )
    return record, events


@lru_cache(maxsize=256)
def _the_same(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the labels of the first step that had these: the history holds them once."""
    return labels


def elapsed_ms(events: Sequence[TimingEvent]) -> tuple[float, ...]:
    """Returns the time from each event to the next (in milliseconds)."""
    # Without a loop in Python: this runs at every step.
    return tuple(map(type(events[0]).elapsed_time, events, events[1:]))
