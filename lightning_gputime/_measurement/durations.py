"""Distribution of the durations of all steps, in bounded memory."""

import math
from collections import Counter

import numpy as np
import numpy.typing as npt

_BINS_PER_FACTOR_E = 50  # Bins are 2 % wide.


class Durations:
    """Histogram of durations on a logarithmic scale."""

    def __init__(self) -> None:
        self._counts = Counter[int]()
        self._max_ns = 0

    def add(self, took_ns: npt.NDArray[np.float64]) -> None:
        if len(took_ns):
            bins = np.floor(np.log(np.maximum(took_ns, 1.0)) * _BINS_PER_FACTOR_E).astype(int)
            self._counts.update(bins.tolist())
            self._max_ns = max(self._max_ns, int(took_ns.max()))

    def percentiles_ms(self, *quantiles: float) -> list[float]:
        """Return percentiles, accurate to 1 % (in milliseconds)."""
        bins = sorted(self._counts)
        ends = np.cumsum([self._counts[place] for place in bins])
        if not len(ends):
            return [math.nan] * len(quantiles)
        places = np.searchsorted(ends, np.array(quantiles) / 100 * ends[-1])
        places = np.minimum(places, len(bins) - 1)
        return [math.exp((bins[i] + 0.5) / _BINS_PER_FACTOR_E) / 1e6 for i in places.tolist()]

    @property
    def max_ms(self) -> float:
        return self._max_ns / 1e6
