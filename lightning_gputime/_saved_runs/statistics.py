"""How long a step typically takes, and how sure that is: steps are not independent."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MIN_STEPS = 24  # With fewer steps the error of an estimate is not known.
# The fraction of the steps left out at each end: what is left is the interquartile mean.
_TRIMMED = 0.25
_MOST_FACTOR = 2.0
_BLOCKS = 12  # The number of blocks of neighbouring steps that a run is cut into.

# The estimate of each column of one run; and for each step and column its influence: how far the
# estimate would move by it, times the number of steps. The mean of that is zero, and the error of
# that mean is the estimate's.
Estimate = tuple[Floats, Floats]


def mean(times: Floats) -> Estimate:
    """Return the mean of each column of times, of shape (steps, columns)."""
    values = times.mean(axis=0)
    return values, times - values


def typical(times: Floats) -> Estimate:
    """Return the mean of each column over the middle half of the steps.

    The first column, the whole step, decides which steps these are: so the others add up to it as
    they do in each step. A step of a second moves it no more than one that is a little slow.
    """
    n = len(times)
    cut = int(n * _TRIMMED)
    order = np.argsort(times[:, 0], kind="stable")
    kept = order[cut : n - cut]
    influence = np.empty_like(times)
    influence[kept] = times[kept]
    # Where a step that is cut lies does not matter, but on which side does: it moves the border,
    # as far as the columns are long there. On both sides of it: where steps have two speeds, the
    # gap may lie on either side of the border by chance.
    near = max(cut // 5, 1)
    influence[order[:cut]] = times[order[cut - near : cut + near]].mean(axis=0)
    influence[order[n - cut :]] = times[order[n - cut - near : n - cut + near]].mean(axis=0)
    influence -= influence.mean(axis=0)
    return times[kept].mean(axis=0), influence * n / len(kept)


def variance(influence: Floats) -> Floats:
    """Return the variance of the mean of each column, by the moving-block bootstrap.

    It draws blocks of neighbouring steps, so that what is alike stays together. The variance of
    the mean of drawn blocks is that of all blocks, divided by their number: nothing must be drawn.
    The blocks are as long as they can be, because what slows steps down may last for hundreds of
    them; the interval is wider for their small number, see `quantile_of_t`.
    """
    block = len(influence) // _BLOCKS
    whole, half = _variance_of(influence, block), _variance_of(influence, block // 2)
    # Where slow steps recur at a fixed distance, blocks have all the same number of them: it is
    # never less than one more, or one fewer, of the longest steps makes.
    one = (np.abs(influence).max(axis=0) / len(influence)) ** 2
    # What longer blocks show more than shorter ones, still longer ones would show again.
    return np.asarray(np.maximum(whole + np.maximum(whole - half, 0), one))


def _variance_of(influence: Floats, block: int) -> Floats:
    sums = np.vstack((np.zeros(influence.shape[1]), np.cumsum(influence, axis=0)))
    means = (sums[block:] - sums[:-block]) / block
    # As with a sample, one is lost: the mean of the blocks is known only as well as they are.
    return np.asarray(means.var(axis=0) / (len(influence) / block - 1))


def difference(
    before: Sequence[Floats],
    after: Sequence[Floats],
    *,
    how: Callable[[Floats], Estimate],
    confidence: float | Floats,
    in_turns: bool = False,
) -> Floats:
    """Return by how much the steps of two sides differ.

    The times of each run have shape (steps, columns). Of each column it returns the estimates
    before and after, half the width of the interval of their difference, and that of the difference
    as a fraction of the time before (NaN if that is 0). The interval is the wider one of two: by
    the noise within the runs, and by the spread between them, if a side has several.

    Args:
        before: The times of each run of one side.
        after: Those of the other.
        how: `typical` or `mean`.
        confidence: That of the intervals, or of the interval of each column.
        in_turns: Whether the runs of the two sides are pairs, one after the other.
    """
    values, noise = [], []
    for runs in (before, after):
        found, influences = zip(*map(how, runs), strict=True)
        values.append(np.array(found))
        noise.append(np.sum([variance(one) for one in influences], axis=0) / len(runs) ** 2)
    before_ms, after_ms = (one.mean(axis=0) for one in values)
    is_there = before_ms > 0
    ratio = np.divide(after_ms, before_ms, out=np.zeros_like(before_ms), where=is_there)
    n, m = len(before), len(after)

    def error_of(factor: Floats | float) -> Floats:
        """Return half the interval of the time after minus a multiple of that before."""
        within = quantile_of_t((_BLOCKS - 1) * min(n, m), confidence) * np.sqrt(
            noise[1] + factor**2 * noise[0]
        )
        if n + m == 2:
            return np.asarray(within)
        if in_turns:
            freedom, square = n - 1, (values[1] - factor * values[0]).var(axis=0, ddof=1) / n
        else:
            freedom = n + m - 2
            pooled = (n * values[0].var(axis=0) + m * values[1].var(axis=0)) / freedom
            square = pooled * (factor**2 / n + 1 / m)
        return np.asarray(np.maximum(within, quantile_of_t(freedom, confidence) * np.sqrt(square)))

    # The noise of the time before counts as often as the bound that it is held against, which is no
    # more than twice that time; and not as often as a short phase has grown.
    factor = np.minimum(ratio, _MOST_FACTOR)
    relative_error = np.divide(
        error_of(factor), before_ms, out=np.full_like(before_ms, np.nan), where=is_there
    )
    return np.stack((before_ms, after_ms, error_of(1.0), relative_error), axis=1)


def quantile_of_t(freedom: int, confidence: float | Floats) -> Floats:
    """Return how many standard errors half an interval of Student's t is wide."""
    # Of t = sqrt(freedom) tan(angle) the angle has this density, without its constant.
    angles = np.linspace(0, np.pi / 2, 4_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.cumsum(density[1:] + density[:-1])
    angle = np.interp(confidence, np.append(0, below) / below[-1], angles)
    return np.asarray(math.sqrt(freedom) * np.tan(angle))
