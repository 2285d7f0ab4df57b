"""Messages to the user, through the package's logger."""

import difflib
import itertools
import logging
from collections import deque
from collections.abc import Iterable
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
