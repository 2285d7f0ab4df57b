"""Helpers for timers that are added to a script from outside."""

import os
import sys
import time
from itertools import count
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from weakref import WeakSet

from torch import distributed

from lightning_gputime._auto_instrumentation import BEGAN, warn_once
from lightning_gputime._messages import messages
from lightning_gputime._timer import Timer

_HAS_TIMER = (
    "The script has a timer, so `run` adds none and uses the timer of the script. Of the options of"
    " `run`, only save_path has an effect."
)
_SAVED = "The run up to the error is saved in %s"

_timers_of_script = WeakSet[Timer]()


def use_timer_of_script(timer: Timer, wanted: dict[str, Any]) -> None:
    """Save the run of the script's timer when Python exits, on rank zero."""
    warn_once(_HAS_TIMER)
    if timer not in _timers_of_script and _rank() in (None, "0"):
        _timers_of_script.add(timer)
        path = path_to_save(wanted)
        if timer._live_file.path is None:  # Otherwise `save_path` was passed to the timer.
            timer._live_file.start(path)
        Finalize(None, _print_and_save, (timer, path), {"prints": False}, exitpriority=0)


def replace_with_timer(
    adder: object, callbacks: list[Any], timer: Timer, wanted: dict[str, Any]
) -> bool:
    """Replace the callback `adder` with a timer.

    If the list already contains a timer, use that timer instead, and return False.
    """
    if others := [callback for callback in callbacks if isinstance(callback, Timer)]:
        use_timer_of_script(others[0], wanted)
        return False
    # Replace in place, because the Trainer is iterating over this list.
    callbacks[callbacks.index(adder)] = timer
    timer._print_on_stderr()
    return True


def finish_at_exit(timer: Timer, wanted: dict[str, Any], *, prints: bool = True) -> Finalize | None:
    """Print the table and save the run when Python exits, on rank zero.

    Return a function that prints and saves now instead; None on other ranks.
    """
    timer._print_on_stderr()
    if _rank() not in (None, "0"):
        return None
    path = path_to_save(wanted)
    timer._live_file.start(path)
    # Unlike `atexit`, this runs in child processes of `multiprocessing`, but not after `os.fork`.
    return Finalize(None, _print_and_save, (timer, path), {"prints": prints}, exitpriority=0)


def _rank() -> str | None:
    """Return the rank of this process; None if it is unknown.

    Call it when a timer is added: the process group may be gone when Python exits.
    """
    if distributed.is_available() and distributed.is_initialized():
        return str(distributed.get_rank())
    return os.environ.get("RANK")


_file_numbers = count(1)
_began_s = float(os.environ.get(BEGAN, time.time()))  # Unix time at which `run` began.


def path_to_save(wanted: dict[str, Any]) -> str | None:
    """Return a path to which no other timer of the script or its subprocesses saves.

    The path is `save_path`, with a process id or a number if needed. Return None without
    `save_path`.
    """
    if (path := wanted.get("save_path")) is None:
        return None
    number = next(_file_numbers)
    parts: list[int] = []
    if _rank() is None and parent_process() is not None:
        parts.append(os.getpid())
    if number > 1:
        parts.append(number)
    return _unused(_extended(path, *parts))


def _unused(path: str) -> str:
    """Return the path; if a file was saved there since `run` began, add the process id."""
    if not os.path.exists(path) or os.path.getmtime(path) < _began_s:
        return path
    unused = _extended(path, os.getpid())
    warn_once(
        "Another process of this run has already saved %s. This process saves to %s.", path, unused
    )
    return unused


def _extended(path: str, *parts: object) -> str:
    """Return a path with parts added to its name, such as "run-2.json.gz" for "run.json.gz"."""
    name, dot, endings = Path(path).name.partition(".")
    return str(Path(path).with_name("-".join([name, *map(str, parts)]) + dot + endings))


def _print_and_save(timer: Any, path: str | None, *, prints: bool) -> None:
    """End the timer, and save its run. Print its table if `prints`, or if the training failed."""
    try:
        has_failed = hasattr(sys, "last_value")  # An error has ended the script.
        is_unfinished = timer._session.is_attached or timer._is_aborted
        if hasattr(timer, "remove"):
            timer.remove()
        has_steps = timer.last_step is not None
        if has_steps and (prints or (has_failed and is_unfinished)):
            timer._print_on_stderr()
            timer._show(is_wanted=True)
        if has_steps and path is not None:
            if not timer._live_file.wrote(path):
                path = _unused(path)
            timer.save(path)
            if has_failed:
                messages.warning(_SAVED, path)
    except Exception as error:
        messages.warning("The table could not be shown, or the run could not be saved: %r", error)
