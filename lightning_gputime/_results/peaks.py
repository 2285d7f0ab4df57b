"""The memory of phases: the highest peak of each, and which would run out first."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_gputime._phases import BACKWARD, CALLBACKS, FORWARD, LOSS, OPTIMIZER

_MIB = 2**20

# From this part of the device's memory on, advice is given.
_NEARLY_FULL = 0.9

# From this part of a peak on, it is what the step allocates, or what is there before, that counts.
_MOST_OF_IT = 0.5
_MUCH_OF_IT = 0.1


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """The most memory that was allocated in each phase, in the steps that were sampled.

    It is what `torch.cuda.max_memory_allocated` tells, of the timed device; memory that torch has
    reserved beyond that, or that others use, is not in it. The warm-up is in it.

    Attributes:
        peak_mb: The highest peak of each phase and sub-phase (in MiB).
        at_step: The number of the step in which it was first seen.
        held_mb: What was allocated where the newest of these steps began (in MiB): parameters, the
            optimizer's state and the like.
        total_mb: The memory of the device (in MiB); None if it is not known.
        steps: How many steps were sampled.
    """

    peak_mb: Mapping[str, float]
    at_step: Mapping[str, int]
    held_mb: float
    total_mb: float | None
    steps: int

    @property
    def sentences(self) -> tuple[str, ...]:
        """What is printed."""
        return (self.sentence,)

    @property
    def sentence(self) -> str:
        """Says which phase would run out first, and what helps where that is near."""
        top_level = [name for name in self.peak_mb if "/" not in name]
        highest, *others = sorted(top_level, key=lambda name: -self.peak_mb[name])
        of_total = "" if self.total_mb is None else f" of {self.total_mb:,.0f}"
        said = (
            f"memory: the highest is `{highest}` with {self.peak_mb[highest]:,.0f}{of_total} MiB,"
            f" at step {self.at_step[highest]}"
        )
        if others:
            said += f"; `{others[0]}` follows with {self.peak_mb[others[0]]:,.0f}"
        return said + self._advice(highest)

    def _advice(self, highest: str) -> str:
        peak_mb = self.peak_mb[highest]
        if self.total_mb is None or peak_mb < _NEARLY_FULL * self.total_mb:
            return ""
        own_mb = peak_mb - self.held_mb
        near = f". That is {peak_mb / self.total_mb:.0%} of the GPU's"
        if highest in (FORWARD, LOSS, BACKWARD) and own_mb >= _MOST_OF_IT * peak_mb:
            return f"{near}, {own_mb:,.0f} of it from the step itself: checkpoint activations"
        if highest == OPTIMIZER and own_mb >= _MUCH_OF_IT * peak_mb:
            return (
                f"{near}, {own_mb:,.0f} of it from the step itself: try foreach=False or fused=True"
            )
        if self.held_mb >= _MOST_OF_IT * peak_mb:
            return (
                f"{near}, {self.held_mb:,.0f} of it there when a step begins: shard parameters and"
                " optimizer state, or keep a smaller state"
            )
        return near


class Peaks:
    """Keeps the peaks of the steps that were sampled.

    Args:
        total: The memory of the device (in bytes); None if it is not known.
    """

    def __init__(self, total: int | None = None) -> None:
        self._total = total
        self._steps = 0
        self._held = 0
        self._highest: Mapping[str, tuple[int, int]] = {}
        # Not logged yet.
        self._window: deque[tuple[int, Mapping[str, int]]] = deque(maxlen=1000)

    def add(self, number: int, peaks: Mapping[str, int], held: int) -> None:
        """Takes a sampled step.

        Args:
            number: The number that it is logged under.
            peaks: Of each phase in it (in bytes).
            held: What was allocated where it began (in bytes).
        """
        highest = {**self._highest}
        for name, peak in peaks.items():
            if peak > highest.get(name, (-1, 0))[0]:
                highest[name] = (peak, number)
        # Replaced whole: another thread may read it.
        self._highest = highest
        self._held = held
        self._steps += 1
        self._window.append((number, peaks))

    def peak_mb(self, name: str) -> float | None:
        """Returns the highest peak of a phase (in MiB); None if it is not known."""
        found = self._highest.get(name)
        return None if found is None else found[0] / _MIB

    @property
    def highest_mb(self) -> float | None:
        """The highest peak of all phases (in MiB); None if none is known."""
        return max((peak for peak, _ in self._highest.values()), default=0) / _MIB or None

    def summary(self) -> MemorySummary | None:
        """Returns all of them; None if no step was sampled."""
        highest = self._highest
        if not highest:
            return None
        return MemorySummary(
            peak_mb={name: peak / _MIB for name, (peak, _) in highest.items()},
            at_step={name: number for name, (_, number) in highest.items()},
            held_mb=self._held / _MIB,
            total_mb=None if self._total is None else self._total / _MIB,
            steps=self._steps,
        )

    def to_log(self, newest: int, *, keep: bool = False) -> dict[str, float]:
        """Returns the highest peaks since the last log.

        Args:
            newest: The number of the last step of the window.
            keep: Whether the next window has them, too.
        """
        due: dict[str, float] = {}
        for number, peaks in [*self._window]:
            if number <= newest:
                for name, peak in peaks.items():
                    if not name.startswith(f"{CALLBACKS}/"):
                        due[f"{name}_peak_mb"] = max(due.get(f"{name}_peak_mb", 0.0), peak / _MIB)
        while not keep and self._window and self._window[0][0] <= newest:
            self._window.popleft()
        return due
