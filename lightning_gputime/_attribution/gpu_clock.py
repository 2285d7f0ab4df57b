"""The clock of the GPU, measured without NVML.

A kernel that spins for a number of clock cycles takes time in proportion to the length of a cycle.
One such kernel runs at the end of a timed step, behind its work, and is excluded from its phases.
So it measures the clock of a busy GPU. Power and heat limits lower that clock.
"""

from collections.abc import Callable
from contextlib import suppress
from statistics import median
from typing import Any

import numpy as np

from lightning_gputime._record.clock import Clock, TimingEvent

CYCLES = 200_000  # 0.14 ms. Shorter spins read low, because two events have a distance of 2 us.
# The GPU spins for this long while the host launches the rest, 15 us later at most.
_CYCLES_BEFORE = 40_000
_EVERY_NS = 2_000_000_000  # Minimum distance of measurements, which take the host about 30 us.
_MAX_MEASURED = 2000  # Of more measurements, every second is dropped.
# Minimum change with two or more measurements after it, and with one. A spin is off by up to 5 %.
_MIN_CHANGE, _MIN_CHANGE_OF_ONE = 0.05, 0.1


class GPUClock:
    """Measurements of the GPU's clock. All are empty on a device without a spinning kernel."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spin: Callable[[int], None] | None = getattr(clock, "spin_cycles", None)
        # Number of the step, start and end of the measurement that was launched.
        self._pending: tuple[int, TimingEvent, TimingEvent] | None = None
        self._launched_ns = -_EVERY_NS
        self.is_due = False
        """True if `measure` should be called at the end of the next timed step."""
        self.mhz: list[tuple[int, float]] = []
        """Number of each measured step, and clock (in MHz)."""

    def __getstate__(self) -> dict[str, Any]:
        # Neither the device's clock nor its events can be pickled.
        cleared = {"_clock": None, "_spin": None, "_pending": None, "is_due": False}
        return {**self.__dict__, **cleared, "mhz": self.mhz.copy()}

    def steps_read(self) -> None:
        """Read the newest measurement if the device has finished it. Does not wait or raise."""
        if self._spin is None or self._clock.is_capturing():
            return
        with suppress(RuntimeError):  # The next measurement may succeed.
            if self._pending is not None:
                number, start, end = self._pending
                if not end.query():
                    return
                if (ms := start.elapsed_time(end)) > 0.0:
                    self.mhz.append((number, CYCLES / ms / 1e3))
                if len(self.mhz) > _MAX_MEASURED:
                    del self.mhz[1:-1:2]
        self._pending = None
        self.is_due = self._clock.host_ns() - self._launched_ns >= _EVERY_NS

    def measure(self, number: int) -> None:
        """Launch a measurement at the end of the step of this number. Does not raise."""
        self.is_due = False
        if self._spin is None or self._clock.is_capturing():
            return
        self._launched_ns = self._clock.host_ns()
        try:
            start, end = self._clock.event(), self._clock.event()
            self._spin(_CYCLES_BEFORE)
            start.record()
            self._spin(CYCLES)
            end.record()
        except RuntimeError:
            self.stop()
        else:
            self._pending = number, start, end

    def stop(self) -> Any:
        """Measure no more. Return the events of a measurement that was not read."""
        pending, self._pending, self._spin, self.is_due = self._pending, None, None, False
        return pending

    @property
    def median_mhz(self) -> float | None:
        """Median of all measurements; None without any."""
        return median(mhz for _, mhz in self.mhz) if self.mhz else None

    def change_at(self, step: int) -> str:
        """Return how the clock has fallen since a step, as part of a sentence; empty if not."""
        before = [mhz for number, mhz in self.mhz if number < step]
        after = [mhz for number, mhz in self.mhz if number >= step]
        # The quartiles, because the first measurements, and those of an idle GPU, may be low.
        if len(before) < 2 or not after or np.quantile(after, 0.75) >= np.quantile(before, 0.25):
            return ""
        was, now = median(before), median(after)
        if now > (1 - (_MIN_CHANGE if len(after) > 1 else _MIN_CHANGE_OF_ONE)) * was:
            return ""
        return f"the GPU's clock fell from {was:,.0f} to {now:,.0f} MHz"
