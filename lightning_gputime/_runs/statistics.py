"""How long a step typically takes, and how sure that is: steps are not independent."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEAST_STEPS = 24
"""Of fewer steps no error can be told."""

_TRIMMED = 0.25
"""The part of the steps that is left out at each end: what is left is the interquartile mean."""

BLOCKS = 12
"""How many blocks of neighbouring steps a run is cut into."""


_PARTS = ((1, 1), (4, 5), (2, 3), (3, 5), (1, 2), (3, 7))
"""Parts of a block whose lengths have few periods in common."""


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """What one run says of each column: its estimate, and by how much each step moves that.

    Attributes:
        values: The estimate of each column.
        influence: For each step and column, how far the estimate would move by it, times the
            number of steps. Its mean is zero, and the error of that mean is the estimate's.
    """

    values: Floats
    influence: Floats


def mean(times: Floats) -> Estimate:
    """Returns the mean of each column.

    Args:
        times: Of shape (steps, columns).
    """
    values = times.mean(axis=0)
    return Estimate(values, times - values)


def typical(times: Floats) -> Estimate:
    """Returns the mean of each column over the middle half of the steps.

    Which steps these are says the first column, that of the whole step: so the others add up to it
    as they do in each step. One step of a second moves it no more than one a little slow.

    Args:
        times: Of shape (steps, columns).
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
    return Estimate(times[kept].mean(axis=0), influence * n / len(kept))


def variance(influence: Floats) -> tuple[Floats, int]:
    """Returns the variance of the mean of each column, by the moving-block bootstrap.

    That draws blocks of neighbouring steps, so that what is alike stays together. The variance of
    the mean of drawn blocks is that of all blocks, divided by their number: nothing must be drawn.
    The blocks are as long as they can be, because what slows steps down may last for hundreds of
    them; the interval is wider for their small number, see `quantile_of_t`.

    Args:
        influence: Of shape (steps, columns), in the order of the steps.

    Returns:
        The variances, and their degrees of freedom.
    """
    block = len(influence) // BLOCKS
    whole, half = _variance_of(influence, block), _variance_of(influence, block // 2)
    # What longer blocks show more than shorter ones, still longer ones would show again.
    return whole + np.maximum(whole - half, 0), BLOCKS - 1


def variance_of_mean(influence: Floats) -> tuple[Floats, int]:
    """As `variance`, for the mean of all steps, in which single steps may weigh much.

    Blocks as long as some periods of slow steps have all the same number of them, and so no
    variance: of blocks of several lengths the largest variance counts. And it is never less than
    one more, or one fewer, of the longest steps makes.
    """
    block = len(influence) // BLOCKS
    found, freedom = variance(influence)
    for times, of in _PARTS:
        found = np.maximum(found, _variance_of(influence, max(block * times // of, 1)))
    one = np.abs(influence).max(axis=0) / len(influence)
    return np.maximum(found, one**2), freedom


def _variance_of(influence: Floats, block: int) -> Floats:
    sums = np.vstack((np.zeros(influence.shape[1]), np.cumsum(influence, axis=0)))
    means = (sums[block:] - sums[:-block]) / block
    # As with a sample, one is lost: the mean of the blocks is known only as well as they are.
    variances: Floats = means.var(axis=0) / (len(influence) / block - 1)
    return variances


def quantile_of_t(freedom: float, confidence: float = 0.95) -> float:
    """Returns how many standard errors wide half an interval of Student's t is.

    Args:
        freedom: The degrees of freedom.
        confidence: The part of the distribution inside.
    """
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
