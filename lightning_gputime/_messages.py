"""Texts for the user: messages through the package's logger, and numbers with their units."""

import difflib
import itertools
import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

_MAX_SHOWN = 60  # Maximum length of values in messages, in characters.
HOMES = (
    "GPUPhaseTimer is for the Trainer of Lightning,"
    " lightning_gputime.huggingface.TransformersPhaseTimer for that of transformers,"
    " and GPUPhaseHooks for your own loop, also with Fabric."
)
"""Text that names the right timer for each kind of loop."""

messages = logging.getLogger("lightning_gputime")


_numbers = itertools.count(1)
# Numbers and texts of the newest warnings of this process. Number 0 precedes the first.
_newest_warnings: deque[tuple[int, str]] = deque([(0, "")], maxlen=20)


def _keep_and_name(record: logging.LogRecord) -> bool:
    if record.levelno >= logging.WARNING:
        _newest_warnings.append((next(_numbers), record.getMessage()))
    # Without configured logging, Python prints only the message, without the logger's name.
    if not messages.hasHandlers():
        record.msg = f"{messages.name}: {record.msg}"
    return True


messages.addFilter(_keep_and_name)


def format_value(value: object) -> str:
    """Return `repr(value)`, or "a <type>" if that is too long for a message."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"a {type(value).__name__}"


def suggest(name: object, known: Iterable[str]) -> str:
    """Return "did you mean ...?" with the closest known name, or "there is ..." with all names."""
    known = [*known]
    alike = difflib.get_close_matches(str(name), known, 1)
    return f"did you mean {alike[0]}?" if alike else f"there is {', '.join(known) or 'none'}"


class Named(dict[str, Any]):
    """A dict whose KeyError suggests the most similar key."""

    def __missing__(self, name: object) -> NoReturn:
        raise KeyError(f"{name!r}: {suggest(name, self)}")


class WarnOnce:
    """Log each warning once: a training loop must not fill the log."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        newest_number, _ = _newest_warnings[-1]
        self._first_number = newest_number + 1

    def __call__(self, message: str, *args: object) -> None:
        if message not in self._logged:
            self._logged.add(message)
            messages.warning(message, *args)

    def warnings_since(self) -> tuple[str, ...]:
        """Return the newest warnings of this process since this object was created."""
        return tuple(text for number, text in [*_newest_warnings] if number >= self._first_number)


# Numbers


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
