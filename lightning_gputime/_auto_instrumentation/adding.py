"""What the timers have in common that are added to a script that has none."""

import atexit
import os
from typing import Any

from lightning_gputime._messages import WarnOnce, messages
from lightning_gputime._results.table import show
from lightning_gputime._timer import Timer

_HAS_ONE = (
    "The script has a timer of its own: no other is added, and options of `run` are not used."
)

tell_once = WarnOnce()


def options_of_all(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the options that all timers have."""
    return {name: value for name, value in wanted.items() if name != "save"}


def take_place(callbacks: list[Any], adder: object, timer: Timer) -> bool:
    """Put a timer in the place of what adds it. Return False where there is another timer."""
    if any(isinstance(one, Timer) for one in callbacks):
        tell_once(_HAS_ONE)
        return False
    # In the list that is being gone through: no other callback may be left out.
    callbacks[callbacks.index(adder)] = timer
    return True


def show_at_exit(timer: Any, wanted: dict[str, Any], *, prints: bool = True) -> None:
    """When Python exits, end a measurement, print its table on rank zero, and save it."""
    # The process group may be gone by then.
    is_zero = os.environ.get("RANK", "0") == "0"
    atexit.register(_end, timer, wanted.get("save") if is_zero else None, is_zero and prints)


def _end(timer: Any, path: str | None, prints: bool) -> None:
    try:
        if hasattr(timer, "remove"):
            timer.remove()
        if prints and timer.last is not None:
            show(timer.summary())
        if path is not None and timer.last is not None:
            timer.save(path)
    except Exception as error:
        messages.warning("The table could not be shown, or the run not be saved: %r", error)
