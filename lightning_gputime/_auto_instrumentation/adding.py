"""What the timers have in common that are added to a script that has none."""

import os
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakSet

from torch import distributed

from lightning_gputime._auto_instrumentation import tell_once
from lightning_gputime._messages import messages
from lightning_gputime._results.table import show
from lightning_gputime._timer import Timer

HAS_ONE = "The script has a timer of its own: no other is added, and options of `run` are not used."

added = WeakSet[Timer]()  # To trainers.


def take_place(callbacks: list[Any], adder: object, timer: Timer) -> bool:
    """Put a timer in the place of what adds it. Return False where there is another timer."""
    if any(isinstance(one, Timer) for one in callbacks):
        tell_once(HAS_ONE)
        return False
    # In the list that is being gone through: no other callback may be left out.
    callbacks[callbacks.index(adder)] = timer
    added.add(timer)
    return True


def show_at_exit(timer: Any, wanted: dict[str, Any], *, prints: bool = True) -> None:
    """When Python exits, end a measurement, print its table on rank zero, and save it."""
    # The process group may be gone by then.
    has_group = distributed.is_available() and distributed.is_initialized()
    is_zero = str(distributed.get_rank() if has_group else os.environ.get("RANK", 0)) == "0"
    path = wanted.get("save") if is_zero else None
    # Unlike `atexit`: in no process that is forked off later, and in those of `multiprocessing`.
    Finalize(None, _end, (timer, path, is_zero and prints), exitpriority=0)


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
