"""Lasting changes: since when steps take longer, or shorter, than at the start."""

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gputime._measurement.history import list_phases
from lightning_gputime._measurement.stats import largest_part
from lightning_gputime._measurement.sums import Sums
from lightning_gputime._measurement.table import duration

Floats = npt.NDArray[np.float64]

_BLOCK_STEPS = 25
_MOST_BLOCKS = 256
_FEWEST_BLOCKS = 24
_FIND_EVERY = 32  # Blocks: to find a change takes milliseconds.
_MOST_PHASES = 64  # Of more, only whole phases are kept.
# What is left out of a run: GPUs and loaders settle in the first minutes, at most in a third of it.
_SETTLING_MS, _SETTLING_SHARE = 180e3, 1 / 3
# A level that fewer blocks have, or a smaller part of the run, is no lasting one.
_SHORTEST_LEVEL, _LEAST_PART = 7, 1 / 6
# A change is larger than as many of its standard errors, and than this fraction of the step. As
# many pairs of blocks, one from before and one from after it, differ in its direction.
_LEAST_ERRORS, _LEAST_CHANGE, _LEAST_ORDERED = 5.0, 0.02, 0.85
# Long steps take longer than as many medians. Of the distances between them, of which there are at
# least as many, this fraction are multiples of one.
_LONG, _FEWEST_LONG, _REGULAR = 1.2, 10, 0.9
# What a stretch leaves unexplained, as a fraction of what the best jump or trend leaves, is less.
_LEFT_BY_STRETCH = 0.5


@dataclass(frozen=True, slots=True)
class LastingChange:
    """A change of the step's length that lasted for long, or until the end of the run.

    Attributes:
        kind: "jump" where the length has two levels, "trend" where it grows or shrinks steadily,
            "stretch" where it was another in the middle of the run.
        since_step: The number of the first step after the jump, or of the trend or stretch.
        until_step: The number of the first step after the stretch; else None.
        since_epoch: The epoch of `since_step`, as the trainer counts; None where none is known.
        change: By how much steps are longer then, as a fraction of those before.
        error: Half the width of the 95 % interval of `change`.
        before_ms: The mean step before (in milliseconds).
        phase: The phase that changed most in the same direction.
        phase_change_ms: By how much that phase changed (in milliseconds a step).
    """

    kind: str
    since_step: int
    change: float
    error: float
    before_ms: float
    phase: str
    phase_change_ms: float
    until_step: int | None = None
    since_epoch: int | None = None

    def __str__(self) -> str:
        longer = "longer" if self.change > 0 else "shorter"
        size = f"{100 * abs(self.change):.1f} % ± {100 * self.error:.1f} %"
        where = f"most of it in `{self.phase}`"
        since = f"step {self.since_step:,}"
        if self.since_epoch is not None:
            since += f" (epoch {self.since_epoch:,})"
        if self.until_step is not None:
            return f"steps were {size} {longer} from {since} to {self.until_step:,}, {where}"
        if self.kind == "jump":
            return f"since {since} steps are {size} {longer} than before, {where}"
        return f"from {since} on steps get {longer}, {size} until the end, {where}"


@dataclass(frozen=True, slots=True)
class SlowPeriod:
    """Steps at regular distances that take longer than those between them.

    Attributes:
        every: Every how many steps.
        excess_ms: By how much they are longer, the mean (in milliseconds).
        phase: The phase that is longer in them by most.
        workers: How many workers the loader has; None where that is not known.
    """

    every: int
    excess_ms: float
    phase: str
    workers: int | None = None

    def __str__(self) -> str:
        longer = f"{duration(self.excess_ms)} longer, most of it in `{self.phase}`"
        workers = ": as many as the loader has workers" * (self.every == self.workers)
        return f"1 in {self.every} steps, at regular intervals, takes {longer}{workers}"


class LevelRecorder:
    """Keep the sums of a run after every block of steps, in bounded memory."""

    def __init__(self) -> None:
        self._every = _BLOCK_STEPS
        self._next = 0
        # The number of the newest step, how many there were, and the device time of each phase;
        # that of the step is named "".
        self._totals: list[tuple[int, int, dict[str, float]]] = []
        # The first step and the number of each epoch in which a block starts, or may start yet.
        self._epochs: list[tuple[float, int]] = []

    def start_epoch(self, first_step: int, epoch: int) -> None:
        self._epochs.append((first_step, epoch))

    def note(self, number: int, sums: Sums) -> bool:
        """Note the sums over all steps, the newest of this number; return whether to `find`."""
        n = sums.step.n
        if n < self._next:
            return False
        names: Collection[str] = sums.phases
        if len(names) > _MOST_PHASES:
            names = [name for name in names if "/" not in name]
        totals = {name: sums.phases[name].device_ms for name in names}
        totals[""] = sums.step.device_ms
        # Of the epochs that have begun inside the block, the next block starts in the last.
        before = self._totals[-1][0] if self._totals else -1
        inside = bisect_right(self._epochs, (before + 1, math.inf))
        del self._epochs[inside : bisect_right(self._epochs, (number + 1, math.inf)) - 1]
        self._totals.append((number, n, totals))
        self._next = n + self._every
        if len(self._totals) > 2 * _MOST_BLOCKS:
            del self._totals[1::2]
            self._every *= 2
        return len(self._totals) % _FIND_EVERY == 0

    def find(self) -> LastingChange | None:
        """Return the change of the step's length that lasts; None if there is none.

        Any thread may ask, while another one notes.
        """
        totals, epochs = [*self._totals], [*self._epochs]
        if len(totals) <= _FEWEST_BLOCKS:
            return None
        n = np.array([n for _, n, _ in totals], dtype=float)
        step_ms = _means(totals, n, "")
        ended_ms = np.cumsum(step_ms * np.diff(n))
        settling = int(np.searchsorted(ended_ms, _SETTLING_MS))
        first = min(settling, int(len(step_ms) * _SETTLING_SHARE))
        fitted = _fit(step_ms, first)
        if fitted is None:
            return None
        first, shape, before_ms, change_ms, error_ms = fitted
        start, end = _span(shape)
        parts = {
            name: _slope(_without_outliers(_means(totals, n, name)[first:]), shape)
            for name in totals[-1][2]
            if name
        }
        phase = largest_part(parts, sign=change_ms)
        since_step = totals[first + start][0] + 1
        epochs_until = epochs[: bisect_right(epochs, (since_step, math.inf))]
        return LastingChange(
            kind="trend" if _is_trend(shape) else "stretch" if end < len(shape) else "jump",
            since_step=since_step,
            change=change_ms / before_ms,
            error=1.96 * error_ms / before_ms,
            before_ms=before_ms,
            phase=phase,
            phase_change_ms=parts.get(phase, 0.0),
            until_step=totals[first + end][0] + 1 if end < len(shape) else None,
            since_epoch=epochs_until[-1][1] if epochs_until else None,
        )


def find_period(times: npt.NDArray[Any], workers: int | None = None) -> SlowPeriod | None:
    """Return the regular distance of the long steps in a history; None if there is none."""
    step_ms = times["step_ms"]
    is_long = step_ms > _LONG * np.median(step_ms) if len(step_ms) else np.zeros(0, bool)
    if is_long.sum() < _FEWEST_LONG:
        return None
    distances, counts = np.unique(np.diff(times["step"][is_long]), return_counts=True)
    every = int(distances[np.argmax(counts)])
    is_regular = counts[distances % every == 0].sum() >= _REGULAR * counts.sum()
    if every < 2 or not is_regular or 2 * counts.max() < counts.sum():
        return None
    excess_ms = {
        name: float(np.mean(ms[is_long]) - np.mean(ms[~is_long]))
        for name in list_phases(times)
        for ms in [np.nan_to_num(times[f"{name}_ms"])]
    }
    all_ms = float(np.mean(step_ms[is_long]) - np.mean(step_ms[~is_long]))
    return SlowPeriod(every, all_ms, largest_part(excess_ms), workers)


def _means(totals: Sequence[tuple[int, int, Mapping[str, float]]], n: Floats, name: str) -> Floats:
    """Return the means of a phase over the steps of each block."""
    return np.diff([sums.get(name, 0.0) for _, _, sums in totals]) / np.diff(n)


def _slope(values: Floats, shape: Floats) -> float:
    """Return by how much values change where the shape goes from 0 to 1, by least squares."""
    centered = shape - shape.mean()
    return float(centered @ values / (centered @ centered))


def _fit(blocks_ms: Floats, settled: int) -> tuple[int, Floats, float, float, float] | None:
    """Fit jumps, trends and stretches to the means of blocks; return the best if it is certain.

    Returns:
        The first block that it is fitted to, its shape from there on (1 where all of the change
        is), the level before, the change and its standard error (in milliseconds).
    """
    values, later = _without_outliers(blocks_ms), _without_outliers(blocks_ms[settled:])
    n, block = len(values), np.arange(len(values))
    fewest = _fewest(n)
    shape, _ = _best(later, _shapes(len(later)))
    # A stretch in the middle starts or ends where the best jump is, and may start early.
    jumps = block[fewest : n - fewest + 1]
    jump = _best(values, (block >= jumps[:, None]).astype(float))[0].argmax()
    pairs = np.array([*((one, jump) for one in block), *((jump, one) for one in jumps)])
    is_one = (pairs[:, 0] >= _SHORTEST_LEVEL) & (pairs[:, 1] - pairs[:, 0] >= fewest)
    if is_one.any():
        starts, ends = pairs[is_one].T[..., None]
        stretch, left_ms2 = _best(values, ((block >= starts) & (block < ends)).astype(float))
        _, left_by_shape_ms2 = _best(values, np.append(np.zeros(settled), shape)[None])
        certain = _if_certain(values, stretch)
        if left_ms2 < _LEFT_BY_STRETCH * left_by_shape_ms2 and certain is not None:
            return 0, stretch, *certain
    certain = _if_certain(later, shape)
    return None if certain is None else (settled, shape, *certain)


def _best(values: Floats, shapes: Floats) -> tuple[Floats, float]:
    """Return the shape that explains most of the squares of values, and what it leaves of them."""
    centered, all_ms2 = shapes - shapes.mean(axis=1, keepdims=True), ((values - values.mean()) ** 2)
    explained = (centered @ values) ** 2 / (centered * centered).sum(axis=1)
    best = int(np.argmax(explained))
    return shapes[best], float(all_ms2.sum() - explained[best])


def _if_certain(values: Floats, shape: Floats) -> tuple[float, float, float] | None:
    """Return the level before, the change and its error; None where the change is not certain."""
    n, change = len(values), _slope(values, shape)
    if change == 0.0:
        return None
    before = float(values.mean()) - change * float(shape.mean())
    left = values - before - change * shape
    of_left = float(left @ left)
    # Steps in a row are alike: of noise with this correlation the mean varies by more. The second
    # term is its bias in short runs.
    correlation = float(left[1:] @ left[:-1]) / of_left if of_left else 0.0
    correlation = min(max(correlation + (1.0 + 3.0 * correlation) / n, 0.0), 0.95)
    variance = of_left / (n - 3) * (1.0 + correlation) / (1.0 - correlation)
    # The start was chosen, too.
    error = math.sqrt(variance / n) / float(shape.std()) * (1.0 + 6.0 / n)
    earlier, later = values[shape == 0.0], values[shape == 1.0]
    if _is_trend(shape):
        earlier, later = values[: max(_span(shape)[0], n // 3)], values[-(n // 3) :]
    ordered = np.mean(np.sign(change) * (later[:, None] - earlier) > 0.0)
    least = max(_LEAST_ERRORS * error, _LEAST_CHANGE * before)
    is_certain = abs(change) >= least and ordered >= _LEAST_ORDERED
    return (before, change, error) if is_certain else None


def _fewest(n: int) -> int:
    return max(_SHORTEST_LEVEL, int(n * _LEAST_PART))


def _is_trend(shape: Floats) -> bool:
    return bool(((shape > 0.0) & (shape < 1.0)).any())


def _span(shape: Floats) -> tuple[int, int]:
    """Return the first block of a change, and the one after the last."""
    changed = np.flatnonzero(shape)
    # A trend starts where it is still zero.
    return int(changed[0]) - _is_trend(shape), int(changed[-1]) + 1


@lru_cache(maxsize=4)
def _shapes(n: int) -> Floats:
    """Return the shapes of all jumps and trends that `n` blocks may have."""
    fewest, block = _fewest(n), np.arange(n)
    jumps = np.arange(fewest, n - fewest + 1)
    trends = np.array([0, *range(fewest, n - 2 * fewest + 1)])
    risen = np.clip(block - trends[:, None], 0, None) / (n - 1 - trends[:, None])
    return np.vstack([(block >= jumps[:, None]).astype(float), risen])


def _without_outliers(values: Floats) -> Floats:
    """Return values that are at most four deviations away from the median of those around."""
    around = np.lib.stride_tricks.sliding_window_view(np.pad(values, 3, mode="reflect"), 7)
    medians = np.median(around, axis=1)
    away = values - medians
    # The quantile tells a deviation also where most blocks are alike.
    most = 4.0 * 0.75 * float(np.quantile(np.abs(away), 0.8))
    return medians + np.clip(away, -most, most)
