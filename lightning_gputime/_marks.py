"""The marks of one step, and their reading."""

from collections.abc import Sequence

from lightning_gputime._events import TimingEvent
from lightning_gputime._raw import RawStep

Mark = tuple[str, TimingEvent, int]
"""A label, the event from which on the time belongs to it, and the host's time there (in ns)."""


BLOCKED_NS = 20_000
"""A wait shorter than this did not block: it found the step finished."""


class Marks:
    """The marks of one step, the last of which is its end and has no label of its own.

    Args:
        marks: They.
        number: The number of the step.
        ended: How many steps had ended then, itself included, timed or not.
        untimed: How many steps without marks came before it: its wait makes up for them, too.
        skipped_update: As in `RawStep`.
    """

    wait_ms = 0.0
    """How long the host waited for it and for each of those (in milliseconds)."""
    met_ns = 0
    """The host's time when a wait for it ended that did block (in nanoseconds); 0 without one."""
    filled: bool | None = None
    after_spin = 0
    """These two as in `RawStep`."""
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


def read(step: Marks, graphs: Sequence[Sequence[Mark]]) -> tuple[RawStep, Sequence[TimingEvent]]:
    """Reads the events of a step that the device has finished.

    Args:
        step: Its marks.
        graphs: The marks of captured graphs, which may have been replayed in it.

    Returns:
        The step, and those of its events that nobody needs any more.
    """
    marks = step.marks
    for graph in graphs:
        marks = _with_replay(marks, graph)
    labels, events, host_ns = zip(*marks, strict=True)
    own = [event for _, event, _ in step.marks] if graphs else events
    try:
        device_ms = _elapsed_ms(events)
    except RuntimeError:
        # A mark that was recorded on another stream can lag behind the last one.
        for event in events:
            event.synchronize()
        device_ms = _elapsed_ms(events)
    raw = RawStep(
        step.number,
        labels[:-1],
        device_ms,
        host_ns,
        step.wait_ms,
        step.met_ns,
        step.skipped_update,
        step.filled,
        step.after_spin,
    )
    return raw, own if step.owns_end else own[:-1]


def _elapsed_ms(events: Sequence[TimingEvent]) -> tuple[float, ...]:
    # Without a loop in Python: this runs at every step.
    return tuple(map(type(events[0]).elapsed_time, events, events[1:]))


def _with_replay(marks: list[Mark], graph: Sequence[Mark]) -> list[Mark]:
    """Puts the marks of a graph between a step's own, if it was replayed in that step."""
    events = [event for _, event, _ in marks]
    first, last = graph[0][1], graph[-1][1]
    try:
        lies_inside = events[0].elapsed_time(first) >= 0
        lies_inside &= last.elapsed_time(events[-1]) >= 0
        lies_inside &= first.elapsed_time(last) >= 0  # Else it is two graphs, replayed in turn.
    except (RuntimeError, ValueError):
        return marks  # Not replayed yet.
    if not lies_inside:
        return marks
    i = sum(event.elapsed_time(first) >= 0 for event in events[:-1])
    # The host launches a graph as a whole: its phases take none of the host's time.
    host_ns = marks[i][2]
    return [*marks[:i], *((label, event, host_ns) for label, event, _ in graph), *marks[i:]]
