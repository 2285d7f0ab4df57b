"""How long a step typically takes, and how sure that is: steps are not independent."""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MIN_STEPS = 24  # With fewer steps the error of an estimate is not known.
# The fraction of the steps left out at each end: what is left is the interquartile mean.
_TRIMMED = 0.25
_BLOCKS = 12  # The number of blocks of neighbouring steps that a run is cut into.
# Fractions of a block whose lengths have few periods in common.
_FRACTIONS = ((1, 1), (4, 5), (2, 3), (3, 5), (1, 2), (3, 7))


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
    # What longer blocks show more than shorter ones, still longer ones would show again.
    return whole + np.maximum(whole - half, 0)


def _variance_of_mean(influence: Floats) -> Floats:
    """As `variance`, for the mean of all steps, in which single steps may weigh much.

    Blocks as long as some periods of slow steps have all the same number of them, and so no
    variance: the largest variance of blocks of several lengths counts. And it is never less than
    one more, or one fewer, of the longest steps makes.
    """
    block = len(influence) // _BLOCKS
    lengths = [max(block * times // of, 1) for times, of in _FRACTIONS]
    one = np.abs(influence).max(axis=0) / len(influence)
    found = [variance(influence), one**2, *(_variance_of(influence, n) for n in lengths)]
    return np.asarray(np.max(found, axis=0))


def _variance_of(influence: Floats, block: int) -> Floats:
    sums = np.vstack((np.zeros(influence.shape[1]), np.cumsum(influence, axis=0)))
    means = (sums[block:] - sums[:-block]) / block
    # As with a sample, one is lost: the mean of the blocks is known only as well as they are.
    return np.asarray(means.var(axis=0) / (len(influence) / block - 1))


# How to estimate, the variance of that, and the confidence of its interval.
TYPICAL = (typical, variance, 0.95)
MEAN = (mean, _variance_of_mean, 0.995)


def difference(
    before: Sequence[Floats],
    after: Sequence[Floats],
    *,
    how: tuple[Callable[[Floats], Estimate], Callable[[Floats], Floats], float],
) -> Floats:
    """Return by how much the steps of two sides differ.

    The times of each run have shape (steps, columns). Of each column it returns the estimates
    before and after, half the width of the interval of their difference, and that of the difference
    as a fraction of the time before (NaN if that is 0).
    """
    estimate, variance_of, confidence = how
    means_ms, noise, squares = [], [], []
    for runs in (before, after):
        values, influences = zip(*map(estimate, runs), strict=True)
        means_ms.append(np.mean(values, axis=0))
        noise.append(np.sum([variance_of(one) for one in influences], axis=0) / len(runs) ** 2)
        squares.append(((values - means_ms[-1]) ** 2).sum(axis=0))
    before_ms, after_ms = means_ms
    none = np.full_like(before_ms, math.nan)
    is_there = before_ms > 0
    ratio = np.divide(after_ms, before_ms, out=np.zeros_like(none), where=is_there)

    def errors(of_before: Floats, of_after: Floats, freedom: int) -> Floats:
        width = quantile_of_t(freedom, confidence)
        # The second: the error of the quotient, times the time before.
        return width * np.sqrt([of_before + of_after, of_before * ratio**2 + of_after])

    freedom = (_BLOCKS - 1) * min(len(before), len(after))
    error, of_ratio = errors(noise[0], noise[1], freedom)
    if freedom := len(before) + len(after) - 2:
        # Never narrower than the spread between runs says.
        pooled = sum(squares) / freedom
        spread = errors(pooled / len(before), pooled / len(after), freedom)
        error, of_ratio = np.maximum((error, of_ratio), spread)
    error_ratio = np.divide(of_ratio, before_ms, out=none, where=is_there)
    return np.stack((before_ms, after_ms, error, error_ratio), axis=1)


def quantile_of_t(freedom: float, confidence: float = 0.95) -> float:
    """Return how many standard errors half an interval of Student's t is wide."""
    p = (1 + confidence) / 2
    if freedom < 1.5:
        return math.tan(math.pi * (p - 0.5))
    if freedom < 2.5:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    z = NormalDist().inv_cdf(p)
    # The expansion of Cornish and Fisher: right to half a percent from three degrees on.
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**i for i, term in enumerate(terms))
