"""The clock of the GPU, measured without NVML.

A kernel that spins for a number of clock cycles takes time in proportion to the length of a cycle.
One such kernel in an examined step, which no statistic includes, runs behind the work of the step
before, so it measures the clock of a busy GPU. Power and heat limits lower that clock.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

from lightning_gputime._record.clock import Clock, TimingEvent

CYCLES = 200_000  # 0.14 ms. Shorter spins read low, because two events have a distance of 2 us.
_MIN_STEP_NS = 5e6  # In shorter steps, the spin would be a large part of the step.
# Minimum change with two or more measurements after it, and with one. A spin is off by up to 5 %.
_MIN_CHANGE, _MIN_CHANGE_OF_ONE = 0.05, 0.1


class GPUClock:
    """Measurements of the GPU's clock. All are empty on a device without a spinning kernel."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spin: Callable[[int], None] | None = getattr(clock, "spin_cycles", None)
        self._pending: list[tuple[TimingEvent, TimingEvent]] = []
        self.mhz: list[tuple[int, float]] = []
        """Number of each measured step, and clock (in MHz)."""

    def __getstate__(self) -> dict[str, Any]:
        # Neither the device's clock nor its events can be pickled.
        return {"_clock": None, "_spin": None, "_pending": [], "mhz": self.mhz}

    def measure(self, step_ns: float) -> None:
        """Spin in the step that has started, and is expected to take `step_ns`.

        Call `read` once the device has finished the step.
        """
        self._pending = []
        if self._spin is None or step_ns < _MIN_STEP_NS or self._clock.is_capturing():
            return
        start, end = self._clock.event(), self._clock.event()
        start.record()
        self._spin(CYCLES)
        end.record()
        self._pending = [(start, end)]

    def read(self, number: int) -> None:
        """Read the measurement in the step of this number. Does not wait."""
        for start, end in self._pending:
            if end.query() and (ms := start.elapsed_time(end)) > 0.0:
                self.mhz.append((number, CYCLES / ms / 1e3))
        self._pending = []

    @property
    def median_mhz(self) -> float | None:
        """Median of all measurements; None without any."""
        return median(mhz for _, mhz in self.mhz) if self.mhz else None

    def change_at(self, step: int) -> str:
        """Return how the clock has fallen since a step, as part of a sentence; empty if not."""
        before = [mhz for number, mhz in self.mhz if number < step]
        after = [mhz for number, mhz in self.mhz if number >= step]
        if len(before) < 2 or not after or max(after) >= min(before):
            return ""
        was, now = median(before), median(after)
        if now > (1 - (_MIN_CHANGE if len(after) > 1 else _MIN_CHANGE_OF_ONE)) * was:
            return ""
        return f"the GPU's clock fell from {was:,.0f} to {now:,.0f} MHz"
