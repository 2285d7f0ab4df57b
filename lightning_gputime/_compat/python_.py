"""Private names of Python's standard library, and frames of the stack."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from traceback import walk_stack
from types import CodeType
from typing import Any

_PACKAGE = __name__.partition(".")[0] + "."


def interpreter_flags() -> list[str]:
    """Return the flags this Python was started with; none if they are unknown."""
    flags: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
    return flags


def variables_of_callers() -> Iterator[dict[str, Any]]:
    """Yield the local variables of all callers, innermost first."""
    # Skip our own frame: reading its variables creates a reference cycle.
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]  # None at the end


def calls_on_stack(code: CodeType | None) -> Iterator[dict[str, Any]]:
    """Yield the local variables of each running call of a function, innermost first."""
    for frame, _ in walk_stack(sys._getframe()):
        if frame.f_code is code:
            yield frame.f_locals


def calling_module(*between: str) -> str:
    """Return the name of the module that calls this package.

    `between` are first parts of the names of modules that only pass calls on.
    """
    frames = (frame for frame, _ in walk_stack(sys._getframe()))
    names = (frame.f_globals.get("__name__", "") for frame in frames)
    return next((name for name in names if not name.startswith((_PACKAGE, *between))), "")


def running_module(functions: Mapping[str, str]) -> str:
    """Return the innermost of some modules whose function, of a given name, is running, or ""."""
    for frame, _ in walk_stack(sys._getframe()):
        module = frame.f_globals.get("__name__", "")
        if functions.get(module) == frame.f_code.co_name:
            return str(module)
    return ""
