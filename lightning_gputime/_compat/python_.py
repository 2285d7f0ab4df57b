"""Private names of Python's standard library, frames of the stack, and the user's code in them.

The user's code is what is neither an installed library, the standard library nor generated code.
"""

import inspect
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any

_PACKAGE = __name__.partition(".")[0] + "."


def code_of(function: Any) -> CodeType | None:
    """Return the code of a function; None if it is not written in Python."""
    try:
        called = getattr(function, "func", function)  # Of a `partial`.
        code = inspect.unwrap(called).__code__
        return code if isinstance(code, CodeType) else None
    except Exception:  # An object whose `__getattr__` returns anything.
        return None


def short_name(qualified: str) -> str:
    """Return the qualified name of a function, without the functions around its definition."""
    return qualified.rpartition("<locals>.")[2]


def interpreter_flags() -> list[str]:
    flags: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
    return flags


def variables_of_callers() -> Iterator[dict[str, Any]]:
    """Yield the local variables of all callers, innermost first."""
    # Skip this generator (0), because reading its own variables creates a reference cycle, and the
    # function that iterates over it (1).
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
    skipped = (_PACKAGE, *between)
    for frame, _ in walk_stack(sys._getframe()):
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(skipped):
            return str(name)
    return ""


def running_module(functions: Mapping[str, str]) -> str:
    """Return the module of the innermost of these functions that is running; empty if none is.

    Args:
        functions: Names of functions, by module.
    """
    for frame, _ in walk_stack(sys._getframe()):
        module = frame.f_globals.get("__name__", "")
        if functions.get(module) == frame.f_code.co_name:
            return str(module)
    return ""


_LIBRARIES: tuple[str, ...] = (
    *("lightning_gputime", "torch", "torchmetrics", "lightning", "pytorch_lightning"),
    *("lightning_fabric", "transformers", "accelerate", "deepspeed", "trl"),
)
"""Top-level packages that are libraries wherever they are installed, such as from a clone."""

_INTERACTIVE = ("<stdin>", "<input>", "<ipython-input", "<console>")
"""Names of files of code that was typed in."""

_INLINED = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""Names of functions that Python makes from expressions: their time belongs to the expression."""

_commands: set[str] = set()
"""Folders of installed packages whose command runs the training: their code is the user's."""


def is_user_code(code: CodeType, module: object) -> bool:
    """Return True if a function is the user's code.

    Args:
        code: Code of the function.
        module: Name of its module, from its globals.
    """
    file = code.co_filename
    if code.co_name in _INLINED:
        return False
    if file.startswith("<"):
        # Libraries generate code, too, such as the methods of dataclasses. Only code that runs in
        # the main module was written by the user.
        return file.startswith(_INTERACTIVE) or (
            module == "__main__" and code.co_name != "__init__"
        )
    return _is_user_file(file, (*sys.path,), frozenset(_commands))


@lru_cache(maxsize=4096)
def _is_user_file(file: str, path: tuple[str, ...], commands: frozenset[str]) -> bool:
    file = os.path.abspath(file)  # The name is relative if the script was started by such a name.
    if any(file.startswith(folder) for folder in commands):
        return True
    if "-packages" in file or "torchinductor" in file or file.startswith(_library_files(path)):
        return False
    # Console scripts that an installer has generated have no extension.
    return not (os.path.dirname(file) == _SCRIPTS and "." not in os.path.basename(file))


_SCRIPTS = sysconfig.get_paths()["scripts"]


@lru_cache(maxsize=16)
def _library_files(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the folders of libraries, each with a separator at its end, and single files."""
    files = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    for folder in filter(None, path):
        try:
            # A folder into which packages were installed, as with `pip install --target`.
            is_root = any(name.endswith(".dist-info") for name in os.listdir(folder))
        except OSError:
            # The zipped standard library.
            is_root = folder.endswith(".zip") and "python3" in folder
        if is_root:
            files.add(folder)
    for name in _LIBRARIES:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            # A library may be a single file.
            is_package = os.path.basename(file) == "__init__.py"
            files.add(os.path.dirname(file) if is_package else file)
    if cache := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        files.add(os.path.abspath(cache))
    return tuple(file if file.endswith(".py") else os.path.join(file, "") for file in files)


def user_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the running functions of the user, innermost first, from a frame outwards.

    If no function on the stack is the user's, a command that is installed as a package runs the
    training. From then on, the code of that package is the user's.
    """
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    found = [frame for frame in frames if is_user_code(frame.f_code, _module_of(frame))]
    if not found:
        _admit_command(frames)
        found = [frame for frame in frames if is_user_code(frame.f_code, _module_of(frame))]
    return found


def _admit_command(frames: list[FrameType]) -> None:
    """Treat the outermost package on the stack that is no library as the user's code."""
    for frame in reversed(frames):
        package = _module_of(frame).partition(".")[0]
        file = getattr(sys.modules.get(package), "__file__", None)
        is_library = package in _LIBRARIES or package in sys.stdlib_module_names
        if file and not is_library and Path(file).name == "__init__.py":
            _commands.add(os.path.join(os.path.dirname(file), ""))
            return


def _module_of(frame: FrameType) -> str:
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else ""


def running_line() -> tuple[str, int, str] | None:
    """Return file, line and function of the innermost line of the user that runs, or None."""
    frames = user_frames(sys._getframe(1))
    if not frames:
        return None
    code = frames[0].f_code
    return code.co_filename, frames[0].f_lineno or code.co_firstlineno, code.co_qualname


def running_functions() -> frozenset[tuple[str, str]]:
    """Return file and name of the user's functions that are running."""
    frames = user_frames(sys._getframe(1))
    codes = (frame.f_code for frame in frames)
    return frozenset((code.co_filename, short_name(code.co_qualname)) for code in codes)


def place_in_thread(ident: int) -> tuple[str, int, str] | None:
    """Return file, line and function that another thread runs; None if it has ended.

    It is the innermost line of the user. Without any, it is the outermost function that is not part
    of Python's own thread pools.
    """
    frame = sys._current_frames().get(ident)
    found = None
    while frame is not None:
        code = frame.f_code
        if is_user_code(code, module := _module_of(frame)):
            return code.co_filename, frame.f_lineno or code.co_firstlineno, code.co_qualname
        if module.partition(".")[0] not in ("threading", "concurrent", "queue", "multiprocessing"):
            found = code.co_filename, code.co_firstlineno, code.co_qualname
        frame = frame.f_back
    return found
