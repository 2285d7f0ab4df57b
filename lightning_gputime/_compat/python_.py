"""Private names of Python's standard library, and frames of the stack."""

import dis
import inspect
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any, NamedTuple

_PACKAGE = __name__.partition(".")[0] + "."
_NOT_USER_CODE = {
    *sys.stdlib_module_names - {"__main__"},
    *("lightning_gputime", "torch", "torchmetrics", "lightning", "pytorch_lightning"),
    *("lightning_fabric", "transformers", "accelerate", "deepspeed", "trl"),
}
"""Top-level modules whose frames are not user code."""


class Frame(NamedTuple):
    """A running function of the user, without a reference to its Python frame.

    Attributes:
        code: Its code object.
        line: Line that is running.
        at: Offset of the instruction that is running.
    """

    code: CodeType
    line: int
    at: int

    @property
    def file(self) -> str:
        """Path of the file."""
        return self.code.co_filename

    @property
    def function(self) -> str:
        """Qualified name of the function."""
        return self.code.co_qualname

    @property
    def last_line(self) -> int:
        """Last line of the function."""
        return _layout_of(self.code).last_line

    @property
    def loop_line(self) -> int:
        """Last line of the loop's body if the function is at the head of a `for` loop; else 0."""
        return _layout_of(self.code).loops.get(self.at, _NO_LOOP).body_line

    @property
    def lines_after(self) -> tuple[int, int] | None:
        """First and last line from that loop to the next iteration of an outer loop, or None."""
        return _layout_of(self.code).loops.get(self.at, _NO_LOOP).lines_after


def user_frames(most: int) -> tuple[Frame, ...]:
    """Return at most `most` frames of user code on the stack, innermost first.

    Frames of installed packages are returned only if there are no others, as for a training
    command that is installed as a package.
    """
    # No helper functions, for speed: this runs at each mark of some steps.
    frame: FrameType | None = sys._getframe(1)
    found: list[Frame] = []
    installed: list[Frame] = []
    while frame is not None and len(found) < most:
        name = frame.f_globals.get("__name__")
        if isinstance(name, str) and name.partition(".")[0] not in _NOT_USER_CODE:
            code = frame.f_code
            here = Frame(code, frame.f_lineno or code.co_firstlineno, frame.f_lasti)
            (installed if "-packages" in code.co_filename else found).append(here)
        frame = frame.f_back
    return tuple(found or installed[:most])


def definition_of(function: Any) -> tuple[str, int, str] | None:
    """Return the file, the line and the qualified name of a function; None if unknown."""
    try:
        code = inspect.unwrap(getattr(function, "func", function)).__code__
        return code.co_filename, code.co_firstlineno, code.co_qualname
    except Exception:  # A C function, or an object whose `__getattr__` returns anything.
        return None


class _Loop(NamedTuple):
    """Lines of a `for` loop."""

    body_line: int  # Last line of the body.
    lines_after: tuple[int, int] | None  # From the loop to the next iteration of the outer loop.


_NO_LOOP = _Loop(0, None)


class _Layout(NamedTuple):
    """Lines of a function."""

    last_line: int
    loops: dict[int, _Loop]  # Its `for` loops, by the offset of the instruction at their head.


@lru_cache(maxsize=256)
def _layout_of(code: CodeType) -> _Layout:
    found = [*dis.get_instructions(code)]
    last_line = max([*_lines(found), code.co_firstlineno])
    loops = {}
    for instruction, following in pairwise(found):
        if instruction.opname == "FOR_ITER":
            head, end = instruction.offset, int(instruction.argval)
            body = [other for other in found if head < other.offset < end]
            after = [*_until_next_round([other for other in found if other.offset >= end], head)]
            for_line = instruction.positions.lineno if instruction.positions else None
            lines = [line for line in _lines(after) if line != for_line]
            loop = _Loop(max([*_lines(body), 0]), (min(lines), max(lines)) if lines else None)
            # While a generator runs, the offset in Python 3.12 is that of the inline cache that
            # follows the instruction.
            loops.update(dict.fromkeys(range(head, following.offset, 2), loop))
    return _Layout(last_line, loops)


def _lines(instructions: list[dis.Instruction]) -> Iterator[int]:
    for instruction in instructions:
        if instruction.positions is not None and instruction.positions.lineno is not None:
            yield instruction.positions.lineno


def _until_next_round(instructions: list[dis.Instruction], head: int) -> Iterator[dis.Instruction]:
    for instruction in instructions:
        if instruction.opname.startswith("JUMP_BACKWARD") and int(instruction.argval) < head:
            return
        yield instruction


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
