"""How much a rank's own time changes from step to step: what is less than that says nothing."""

from collections.abc import Iterable
from functools import lru_cache

from lightning_gputime._phases import is_wait, settle
from lightning_gputime._record.steps import StepRecord


class Noise:
    """Adds up the changes of a rank's local time, that without the waits for other ranks.

    Changes, and not squares: one step that took very long must not hide what all others show.

    Attributes:
        sum_ms: Of the changes from one step to the next, without their sign (in milliseconds).
        n: Number of the changes.
    """

    def __init__(self) -> None:
        self.sum_ms = 0.0
        self.n = 0
        self._last_ms: float | None = None

    def add(self, steps: Iterable[StepRecord]) -> None:
        """Adds the next steps."""
        for step in steps:
            local_ms = sum(map(step.device_ms.__getitem__, _own_marks(step.labels)))
            if self._last_ms is not None:
                self.sum_ms += abs(local_ms - self._last_ms)
                self.n += 1
            self._last_ms = local_ms


@lru_cache(maxsize=256)
def _own_marks(labels: tuple[str, ...]) -> tuple[int, ...]:
    settled = settle(labels)
    return tuple(i for i, names in enumerate(settled) if names and not is_wait(names[-1]))
