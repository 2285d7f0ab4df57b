"""Marks inside captured graphs, and where the replays of these fall."""

from collections.abc import Sequence

from lightning_gputime._record.clock import Clock, Mark, elapsed_ms
from lightning_gputime._untraced import untraced


@untraced
class Graphs:
    """The graphs that were captured while steps were timed.

    Args:
        clock: Where events come from, until the first capture.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        """Where events come from: those that a graph holds can be compared with none but their
        own kind."""
        self.open: list[Mark] = []
        """The marks of the graph that is being captured. `Recorder` holds this list, too: it is
        emptied, never replaced."""
        self.closed: list[list[Mark]] = []
        """Those of each graph that was captured; any later step may replay one, so they stay."""

    def capture(self, label: str) -> bool:
        """Record a mark into the graph that is being captured. Return whether it could."""
        clock = self.clock.for_graphs()
        if clock is None:
            return False
        event = clock.event()
        event.record()
        # No host time: it is not known before a replay, see `_with_replay`.
        self.open.append((label, event, 0))
        self.clock = clock
        return True

    def close(self) -> None:
        """Keep the marks of the graph for its replays."""
        self.closed.append([*self.open])
        self.open.clear()

    def with_replays(self, marks: list[Mark]) -> list[Mark]:
        """Put the marks of each graph that was replayed in a step between the step's own."""
        for graph in self.closed:
            marks = _with_replay(marks, graph)
        return marks


def _with_replay(marks: list[Mark], graph: Sequence[Mark]) -> list[Mark]:
    """Put the marks of a graph between a step's own, if it was replayed in that step."""
    events = [event for _, event, _ in marks]
    replayed = [event for _, event, _ in graph]
    first, last = replayed[0], replayed[-1]
    try:
        lies_inside = (
            events[0].elapsed_time(first) >= 0
            and last.elapsed_time(events[-1]) >= 0
            # Else it is two graphs, replayed in turn.
            and all(ms >= 0 for ms in elapsed_ms(replayed))
        )
    except (RuntimeError, ValueError):
        return marks  # Not replayed yet.
    if not lies_inside:
        return marks
    i = sum(event.elapsed_time(first) >= 0 for event in events[:-1])
    # The host launches a graph as a whole: its phases take none of the host's time.
    host_ns = marks[i][2]
    return [*marks[:i], *((label, event, host_ns) for label, event, _ in graph), *marks[i:]]
