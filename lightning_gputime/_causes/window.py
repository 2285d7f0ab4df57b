"""Some steps under one profiler."""

from dataclasses import dataclass, field
from math import inf
from typing import Any

from lightning_gputime._record.steps import StepRecord


@dataclass
class Window:
    """Some steps under one profiler."""

    opened_ns: int
    """When it began, by the host's clock, as all of these (in nanoseconds)."""
    begins_ns: list[int] = field(default_factory=list)
    """When the range around each step began."""
    closing_ns: int | None = None
    """Just before the profiler was stopped; None while it runs."""
    profile: Any = None
    """What was profiled, from then on; None if another profiler has ended it."""
    steps: list[StepRecord] = field(default_factory=list)
    """The whole steps of it that were read."""
    waited: int = 0
    """For how many steps it has waited to be read."""

    @property
    def until_ns(self) -> float:
        """When the last whole step must have ended."""
        return inf if self.closing_ns is None else self.closing_ns

    @property
    def is_read(self) -> bool:
        """Whether all of its steps were read, or those that are missing have no times."""
        # The last range may hold no whole step.
        ended = sum(begin <= self.until_ns for begin in self.begins_ns[1:])
        return len(self.steps) >= ended or self.waited > 2
