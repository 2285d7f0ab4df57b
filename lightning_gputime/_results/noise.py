"""How much a rank's own time changes: what is less than that says nothing."""

from collections.abc import Iterable, Mapping
from functools import lru_cache

from lightning_gputime._phases import is_wait, settle
from lightning_gputime._record.steps import StepRecord

SCALES = tuple(2**i for i in range(11))
"""Over so many steps each: what slows a rank down may last for some, or for hundreds."""


class Noise:
    """Adds up the changes of a rank's local time, that without the waits for other ranks.

    From one step to the next, from two steps to the next two, and so on. Changes, and not squares:
    one step that took very long must not hide what all others show.
    """

    def __init__(self) -> None:
        self._levels = [_Level() for _ in SCALES]

    def add(self, steps: Iterable[StepRecord]) -> None:
        """Adds the next steps."""
        for step in steps:
            self.take(sum(map(step.device_ms.__getitem__, _own_marks(step.labels))))

    def take(self, local_ms: float) -> None:
        """Adds the local time of the next step (in milliseconds)."""
        mean_ms: float | None = local_ms
        for level in self._levels:
            if mean_ms is None:
                return
            mean_ms = level.take(mean_ms)

    def changes(self) -> Mapping[int, tuple[float, int]]:
        """Returns for each scale the sum of its changes (in milliseconds), and how many."""
        pairs = zip(SCALES, self._levels, strict=True)
        return {scale: (level.sum_ms, level.n) for scale, level in pairs if level.n}


class _Level:
    """The changes at one scale."""

    def __init__(self) -> None:
        self.sum_ms = 0.0
        self.n = 0
        self._last_ms: float | None = None
        self._first_ms: float | None = None

    def take(self, mean_ms: float) -> float | None:
        """Adds the next mean, and returns the mean of a pair where one is complete."""
        if self._last_ms is not None:
            self.sum_ms += abs(mean_ms - self._last_ms)
            self.n += 1
        self._last_ms = mean_ms
        first_ms, self._first_ms = self._first_ms, None
        if first_ms is None:
            self._first_ms = mean_ms
            return None
        return (first_ms + mean_ms) / 2


@lru_cache(maxsize=256)
def _own_marks(labels: tuple[str, ...]) -> tuple[int, ...]:
    settled = settle(labels)
    return tuple(i for i, names in enumerate(settled) if names and not is_wait(names[-1]))
