"""Options that `run` passes in environment variables to the processes of a script."""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

from lightning_gputime._messages import WarnOnce

# Environment variable: unset, empty or "0" for no timer, "1" for the defaults, or options as JSON.
VARIABLE = "LIGHTNING_GPUTIME"
BEGAN = f"{VARIABLE}_BEGAN"  # Start time of `run`, as `time.time()`.
TUNE = f"{VARIABLE}_TUNE"  # Instructions of `tune` for the processes of a run, as JSON.

warn_once = WarnOnce()


def options() -> dict[str, Any] | None:
    """Return the options of the timer to add, or None to add no timer."""
    text = os.environ.get(VARIABLE, "")
    if text in ("", "0"):
        return None
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        if found == 1 or isinstance(found, dict):
            return {} if found == 1 else found
    warn_once("%s must be 1, or options as JSON; no timer is added for %r", VARIABLE, text)
    return None


def timer_options(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the options that every timer takes: all except `save_path`."""
    return {name: value for name, value in wanted.items() if name != "save_path"}


@contextlib.contextmanager
def suppress_errors() -> Iterator[None]:
    """Suppress an exception and warn once, so that the script runs without a timer."""
    try:
        yield
    except Exception as error:
        warn_once("The timer could not be added: %r. The script runs without it.", error)
