"""Witnesses: each sees one kind of cause, and is asked only when a step was slow."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from lightning_gputime._causes.scene import Scene, Span
from lightning_gputime._untraced import untraced

# So many spans a witness remembers: those of the steps that are not judged yet, and more.
_MOST = 500

_SHORTEST_NS = 50_000
"""What is over sooner explains no slow step, and is forgotten at once."""


class Witness(Protocol):
    """Sees one kind of cause. Where its source is missing it sees nothing.

    One that also has `step_ends()` is told of the end of each step, one with `steps_pass()` where
    steps begin of whose ends it is not told, one with `loop_begins()` of each start of a loop, and
    one with `steps_were_read(usual)` when what is usual was taken anew. What they do there is paid
    by every step.
    """

    def attach(self) -> None:
        """Begins to look."""

    def remove(self) -> None:
        """Ends that, and leaves nothing. Safe to call twice, and in a process that was forked."""

    def testify(self, scene: Scene) -> None:
        """Claims what it has seen of a slow step."""


@untraced
class Spans:
    """Remembers when something began and ended, the newest times.

    Args:
        now_ns: Returns the host's time (in nanoseconds).
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._newest: deque[Span] = deque(maxlen=_MOST)
        self._begun_ns = 0

    def begin(self) -> None:
        """Says that it begins."""
        self._begun_ns = self._now_ns()

    def end(self, detail: str) -> None:
        """Says that it is over, and what it was."""
        now = self._now_ns()
        if self._begun_ns and now - self._begun_ns >= _SHORTEST_NS:
            self._newest.append(Span(self._begun_ns, now, detail))
        self._begun_ns = 0

    def within(self, scene: Scene) -> list[Span]:
        """Returns what fell into a step, at least with a part."""
        return [
            span
            for span in [*self._newest]
            if span.end_ns > scene.begin_ns and span.begin_ns < scene.end_ns
        ]
