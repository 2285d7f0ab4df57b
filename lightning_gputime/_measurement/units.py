"""Times with a suitable unit, and fractions in percent."""

import math
from dataclasses import dataclass, replace


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
        """Return this unit with the decimal places that show a column's longest time in three."""
        number = longest_ms / self.ms
        return replace(self, digits=max(2 - math.floor(math.log10(number)), 0) if number else 0)

    def number(self, ms: float) -> str:
        """Return a time in three digits, without the unit."""
        number = ms / self.ms  # With `.3g`, larger numbers would be 1.23e+03.
        return f"{number:.3g}" if abs(number) < 999.5 else f"{number:.0f}"

    def of(self, ms: float) -> str:
        """Return a time in three digits, with the unit."""
        return f"{self.number(ms)} {self.name}"


_MICROSECONDS, MILLISECONDS, _SECONDS = Unit("us", 1e-3, 1), Unit("ms", 1, 3), Unit("s", 1e3, 4)


def unit_of(ms: float) -> Unit:
    """Return the unit to show a time in."""
    if 0 < ms < 0.1:
        return _MICROSECONDS
    return _SECONDS if ms >= 1e3 else MILLISECONDS


def duration(ms: float) -> str:
    """Return a time in three digits, in a suitable unit."""
    return unit_of(abs(ms)).of(ms)


def percent(share: float) -> str:
    """Return a fraction in a sentence, in two digits where it is small."""
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"
