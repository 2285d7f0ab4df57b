"""Test which candidates coincide with the excess of slow steps more often than by chance.

A candidate has one value per step: the fraction of the step in which something else ran, or a
property of the step such as its number of tokens. A step is *exposed* to the candidate if its value
is above a threshold. The *share* of a candidate is its attributable fraction (Levin 1953): the part
of the excess that would be missing if exposed steps had as much excess as the other steps. With the
fraction `inside` of the excess in exposed steps, and the fraction `exposed` of all steps, it is
`(inside - exposed) / (1 - exposed)`: 0 by chance, 1 if all of the excess is in exposed steps. For
example, if 10 % of the steps have 70 % of the excess, it is (0.7 - 0.1) / 0.9 = 0.67. Steps of
which the value is unknown do not count, as long as they have less than half of the excess.

A candidate is significant if blocks of excess that are placed at random have less excess in exposed
steps. The excess keeps its autocorrelation inside of a block. Only what the candidate itself does
not explain determines the length of the blocks, because a cause that lasts makes consecutive steps
slow. Holm's method corrects the significance for the number of candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Numbers of steps, and of steps with excess, to test anything. Chosen: fewer give wide intervals.
MIN_STEPS, MIN_SLOW = 50, 5
# A thread or process is named before the pressure that it causes, down to this fraction of the
# share of the pressure: a thread that ends between two readings is seen for a part of its time.
# Chosen: a smaller one names what only adds to the pressure, 1 the pressure without its cause.
_MIN_SPECIFIC = 0.6
MIN_SHARE = 0.1  # Candidates with a smaller share of the excess, which gains little, are left out.
# Probability that any candidate of a run is reported by chance: in 0 of 50 control runs
# (`benchmarks/results/outside_control.json`).
FALSE_ALARMS = 0.01
_DRAWS = 9999  # Random placements of the excess: p >= 1 / 10,000, enough for 100 candidates.
_MAX_PLACED = 200  # Only this many steps with the largest excess are placed, to bound the time.
_RESAMPLES = 200  # Bootstrap resamples for the interval of a share: 5 of them are beyond each end.
_QUANTILES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)  # Possible thresholds of exposure.
# Minimum number of separate episodes of exposure with excess. Fewer may coincide by accident,
# unless they contain at least this many slow steps and half of the excess. Chosen, like `MIN_SLOW`.
_MIN_EPISODES, _MIN_SLOW_INSIDE = 3, 20


class Candidate(NamedTuple):
    """Possible cause of slow steps. Of several equal causes, the first in the list is reported."""

    name: str
    values: Floats  # One value per step; NaN if unknown.
    place: str = ""  # Function with file and line, or process id.
    kind: str = ""  # See `OutsideCause.kind`.


@dataclass(frozen=True, slots=True)
class Attribution:
    """Share of the excess of slow steps that a candidate explains."""

    candidate: Candidate
    share: float  # Fraction of the excess, from 0 to 1.
    low: float  # Ends of the 95 % interval of `share`.
    high: float
    exposed: float  # Fraction of all steps that are exposed.
    threshold: float  # Steps with a larger value are exposed.


def attribute(
    excess_ms: Floats, candidates: Sequence[Candidate], max_false_alarms: float = FALSE_ALARMS
) -> list[Attribution]:
    """Return the candidates that explain the excess of slow steps, in the order of their discovery.

    The shares do not overlap: each candidate is tested on what the candidates before it have left.

    Args:
        excess_ms: Excess of each step; 0.0 for steps that are not slow.
        candidates: The candidates, the most specific first. Each has a value per step.
        max_false_alarms: Probability that any candidate is returned by chance.
    """
    found: list[Attribution] = []
    total_ms, n = float(excess_ms.sum()), len(excess_ms)
    if n < MIN_STEPS or np.count_nonzero(excess_ms) < MIN_SLOW:
        return found
    left_ms = excess_ms.copy()
    remaining = [candidate for candidate in candidates if _varies(candidate.values)]
    random = np.random.default_rng(0)
    while remaining:
        splits = [_best_split(left_ms, candidate.values) for candidate in remaining]
        # Only a sufficient share is worth a test, but all candidates count in the correction.
        tested = [
            (_p_value(left_ms, candidate.values, split, random), index)
            for index, (candidate, split) in enumerate(zip(remaining, splits, strict=True))
            if split.share * left_ms.sum() >= MIN_SHARE * total_ms and _repeats(left_ms, split)
        ]
        significant = []
        for rank, (p, index) in enumerate(sorted(tested)):
            if p * (len(remaining) - rank) > max_false_alarms:
                break  # Holm's method rejects in order of significance, up to the first failure.
            significant.append(index)
        if not significant:
            break
        # If several have similar shares, the first in the list is the most specific.
        most = max(splits[index].share for index in significant)
        index = min(i for i in significant if splits[i].share >= _MIN_SPECIFIC * most)
        split, candidate = splits[index], remaining.pop(index)
        low, high = _interval(left_ms, split, random)
        scale = float(left_ms.sum()) / total_ms
        if low > 0.0:
            exposed = float(split.is_exposed[split.is_known].mean())
            shares = (split.share * scale, low * scale, high * scale)
            found.append(Attribution(candidate, *shares, exposed, split.threshold))
            inside_ms, outside_ms = _means(left_ms, split)
            # Assume the same share where it is unknown.
            left_ms = np.where(split.is_known, left_ms, left_ms * (1.0 - split.share))
            left_ms = np.where(split.is_exposed, left_ms * outside_ms / inside_ms, left_ms)
    return found


class _Split(NamedTuple):
    """Steps that are exposed to a candidate, by the threshold with the largest share."""

    is_exposed: npt.NDArray[np.bool_]
    is_known: npt.NDArray[np.bool_]
    threshold: float
    share: float


def _varies(values: Floats) -> bool:
    known = values[np.isfinite(values)]
    # Smaller differences are rounding errors.
    return len(known) >= MIN_STEPS and float(np.ptp(known)) > 1e-6 * float(np.abs(known).max())


def _thresholds(values: Floats) -> list[float]:
    known = values[np.isfinite(values)]
    quantiles = np.unique(np.quantile(known, _QUANTILES, method="lower"))
    return [float(value) for value in quantiles if value < known.max()] or [float(known.min())]


def _best_split(excess_ms: Floats, values: Floats) -> _Split:
    splits, is_known = [], np.isfinite(values)
    if excess_ms[is_known].sum() < 0.5 * excess_ms.sum():
        is_known = np.ones_like(is_known)  # Too little is known: count the others as not exposed.
    for threshold in _thresholds(values):
        is_exposed = np.nan_to_num(values, nan=-np.inf) > threshold
        share = _share(excess_ms[is_known], is_exposed[is_known])
        splits.append(_Split(is_exposed, is_known, threshold, share))
    # Of thresholds that are about as good, the highest separates the slow steps from the others.
    best = max(split.share for split in splits)
    return [split for split in splits if split.share >= best - 0.01][-1]


def _share(excess_ms: Floats, is_exposed: npt.NDArray[np.bool_]) -> float:
    """Return the attributable fraction."""
    total_ms, exposed = float(excess_ms.sum()), float(is_exposed.mean()) if len(excess_ms) else 0.0
    if not total_ms or exposed in (0.0, 1.0):
        return 0.0
    inside = float(excess_ms[is_exposed].sum()) / total_ms
    return (inside - exposed) / (1.0 - exposed)


def _means(excess_ms: Floats, split: _Split) -> tuple[float, float]:
    """Return the mean excess of exposed steps, and of the others."""
    others = ~split.is_exposed & split.is_known
    return float(excess_ms[split.is_exposed].mean()), float(excess_ms[others].mean())


def _repeats(excess_ms: Floats, split: _Split) -> bool:
    """Return True if exposure and excess coincide often enough to be no accident."""
    starts = np.diff(split.is_exposed.astype(int), prepend=0) == 1
    episode = np.cumsum(starts) * split.is_exposed
    slow_inside = (excess_ms > 0.0) & split.is_exposed
    if len(np.unique(episode[slow_inside])) >= _MIN_EPISODES:
        return True
    return int(slow_inside.sum()) >= _MIN_SLOW_INSIDE and split.share >= 0.5


def _block_length(excess_ms: Floats, split: _Split) -> int:
    """Return three times the autocorrelation time of what the candidate does not explain.

    For example, with correlations of 0.5 and 0.2 between steps at a distance of 1 and 2, this time
    is 2 * (1 + 0.5 + 0.2) - 1 = 2.4 steps, and a block has 8 steps.
    """
    n, (inside_ms, outside_ms) = len(excess_ms), _means(excess_ms, split)
    rest = excess_ms - np.where(split.is_exposed, inside_ms, outside_ms)
    spectrum = np.abs(np.fft.rfft(rest, 2 * n)) ** 2
    correlation = np.fft.irfft(spectrum)[: max(n // 10, 2)]
    if correlation[0] <= 0.0:
        return 1
    # Up to the first lag that is not correlated: 2 standard errors of white noise.
    correlation = correlation / correlation[0]
    is_noise = correlation < 2.0 / np.sqrt(n)
    lags = int(np.argmax(is_noise)) if is_noise.any() else len(correlation)
    time = 2.0 * float(correlation[:lags].sum()) - 1.0
    return int(np.ceil(3.0 * time)) if lags > 1 else 1


def _p_value(
    excess_ms: Floats, values: Floats, split: _Split, random: np.random.Generator
) -> float:
    """Return the probability of this much excess in exposed steps by chance.

    For example, if 3 of 9,999 random placements have as much as was observed: 4 / 10,000.
    """
    n, length = len(excess_ms), _block_length(excess_ms, split)
    # The mean over all thresholds, because the best threshold was chosen by its share.
    levels = [np.nan_to_num(values, nan=-np.inf) > threshold for threshold in _thresholds(values)]
    scores = np.mean(levels, axis=0)
    n_placed = min(int(np.count_nonzero(excess_ms)), _MAX_PLACED)
    at = np.argsort(excess_ms)[-n_placed:]
    blocks, block = np.unique(at // length, return_inverse=True)
    observed = float(scores[at] @ excess_ms[at])
    starts = random.integers(0, n, (_DRAWS, len(blocks)))
    placed = scores[(starts[:, block] + at % length) % n] @ excess_ms[at]
    return float(1 + np.count_nonzero(placed >= observed * (1 - 1e-9))) / (1 + _DRAWS)


def _interval(excess_ms: Floats, split: _Split, random: np.random.Generator) -> tuple[float, float]:
    """Return the 95 % interval of the share, from resampled blocks of steps."""
    n = len(excess_ms)
    length = min(max(_block_length(excess_ms, split), 5), n // 10)
    starts = random.integers(0, n, (_RESAMPLES, n // length))
    steps = (starts[:, :, None] + np.arange(length)).reshape(_RESAMPLES, -1) % n
    known = [each[split.is_known[each]] for each in steps]
    shares = [_share(excess_ms[each], split.is_exposed[each]) for each in known]
    low, high = np.quantile(shares, [0.025, 0.975])
    return float(low), min(float(high), 1.0)
