"""Distribution of the durations of all steps, in bounded memory."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_BINS_PER_FACTOR_E = 50  # Bins are 2 % wide.

Percentiles = tuple[float, float, float]


def percentiles(values: npt.NDArray[np.float64], weights: npt.NDArray[Any]) -> Percentiles:
    """Return the 5th, 50th and 95th percentile of weighted values; NaN without values."""
    if not len(values):
        return math.nan, math.nan, math.nan
    order = np.argsort(values)
    ends = np.cumsum(weights[order])
    places = np.searchsorted(ends, np.array([0.05, 0.5, 0.95]) * ends[-1])
    p5, p50, p95 = values[order][np.minimum(places, len(values) - 1)].tolist()
    return p5, p50, p95


class Durations:
    """Histogram of durations on a logarithmic scale."""

    def __init__(self) -> None:
        self._counts = Counter[int]()  # Number of durations by bin.
        self._max_ns = 0

    def add(self, took_ns: Sequence[int]) -> None:
        """Add durations. Negative values are unknown durations, and are left out."""
        bins = [int(math.log(ns or 1) * _BINS_PER_FACTOR_E) for ns in took_ns if ns >= 0]
        self._counts.update(bins)
        self._max_ns = max(self._max_ns, *took_ns, 0)

    def statistics_ms(self) -> dict[str, Any]:
        """Return fields of a `PhaseStats`; percentiles are accurate to 1 %."""
        centers_ms = [math.exp((bin_ + 0.5) / _BINS_PER_FACTOR_E) / 1e6 for bin_ in self._counts]
        p5, p50, p95 = percentiles(np.array(centers_ms), np.array([*self._counts.values()]))
        return {"p5_ms": p5, "p50_ms": p50, "p95_ms": p95, "max_ms": self._max_ns / 1e6}
