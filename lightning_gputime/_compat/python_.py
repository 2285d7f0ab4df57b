"""Private names of Python's standard library, and frames of the stack."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any

_PACKAGE = __name__.partition(".")[0] + "."
_NOT_USER_CODE = {
    *sys.stdlib_module_names - {"__main__"},
    *("lightning_gputime", "torch", "torchmetrics", "lightning", "pytorch_lightning"),
    *("lightning_fabric", "transformers", "accelerate", "deepspeed", "trl"),
}
"""Top-level modules whose frames are not the user's."""


def user_frames(most: int) -> list[FrameType]:
    """Return the innermost frames on the stack that run code of the user, at most `most`.

    Code of installed packages counts only if there is no other, as in a command that is installed.
    """
    frame: FrameType | None = sys._getframe(1)
    found: list[FrameType] = []
    installed: list[FrameType] = []
    while frame is not None and len(found) < most:
        name = frame.f_globals.get("__name__")
        if isinstance(name, str) and name.partition(".")[0] not in _NOT_USER_CODE:
            is_installed = "-packages" in frame.f_code.co_filename
            (installed if is_installed else found).append(frame)
        frame = frame.f_back
    return found or installed[:most]


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
