"""Private names of Python's standard library, and frames of the stack."""

import inspect
import subprocess
import sys
from collections.abc import Iterator, Mapping
from traceback import walk_stack
from types import CodeType
from typing import Any

_PACKAGE = __name__.partition(".")[0] + "."


def code_of(function: Any) -> CodeType | None:
    """Return the code of a function; None if it is not written in Python."""
    try:
        code = inspect.unwrap(getattr(function, "func", function)).__code__
        return code if isinstance(code, CodeType) else None
    except Exception:  # An object whose `__getattr__` returns anything.
        return None


def definition_of(function: Any) -> tuple[str, int, str] | None:
    """Return the file, the line and the qualified name of a function; None if unknown."""
    code = code_of(function)
    return None if code is None else (code.co_filename, code.co_firstlineno, code.co_qualname)


def interpreter_flags() -> list[str]:
    """Return the flags that this Python was started with; empty if unknown."""
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
    """Yield the local variables of each running call of a code object, innermost first."""
    for frame, _ in walk_stack(sys._getframe()):
        if frame.f_code is code:
            yield frame.f_locals


def calling_module(*between: str) -> str:
    """Return the name of the module that calls this package.

    Modules whose names start with one of `between` only pass the call on, and are skipped.
    """
    frames = (frame for frame, _ in walk_stack(sys._getframe()))
    names = (frame.f_globals.get("__name__", "") for frame in frames)
    return next((name for name in names if not name.startswith((_PACKAGE, *between))), "")


def running_module(functions: Mapping[str, str]) -> str:
    """Return the innermost running module of `functions` (module to function name), or ""."""
    for frame, _ in walk_stack(sys._getframe()):
        module = frame.f_globals.get("__name__", "")
        if functions.get(module) == frame.f_code.co_name:
            return str(module)
    return ""
