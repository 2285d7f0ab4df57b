"""Times with a suitable unit, fractions in percent, and values for JSON."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Unit:
    """Unit of `ms` milliseconds; tables show `digits` decimal places."""

    name: str
    ms: float
    digits: int

    def cell(self, ms: float) -> str:
        """Return a time for a table whose title contains the unit."""
        return f"{ms / self.ms:.{self.digits}f}"

    def fitted(self, longest_ms: float) -> "Unit":
        """Return this unit with three significant digits for the longest time of a column."""
        number = longest_ms / self.ms
        return replace(self, digits=max(2 - math.floor(math.log10(number)), 0) if number else 0)

    def number(self, ms: float) -> str:
        """Return a time with three significant digits, without the unit."""
        number = ms / self.ms  # With `.3g`, larger numbers would be 1.23e+03.
        return f"{number:.3g}" if abs(number) < 999.5 else f"{number:.0f}"

    def of(self, ms: float) -> str:
        """Return a time with three significant digits and the unit."""
        return f"{self.number(ms)} {self.name}"


def unit_of(ms: float) -> Unit:
    """Return the unit to show a time in."""
    if 0 < ms < 0.1:
        return Unit("us", ms=1e-3, digits=1)
    return Unit("s", ms=1e3, digits=4) if ms >= 1e3 else Unit("ms", ms=1, digits=3)


def duration(ms: float) -> str:
    """Return a time with three significant digits, in a suitable unit."""
    return unit_of(abs(ms)).of(ms)


def percent(share: float) -> str:
    """Format a fraction as a percentage, with two significant digits below 10 %."""
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def plain(value: Any) -> Any:
    """Convert `value` to JSON types, with None for NaN and infinity."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
