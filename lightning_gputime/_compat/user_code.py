"""Distinguish the user's code from installed libraries, the standard library and generated code."""

import os
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

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
    if "-packages" in file or "torchinductor" in file or file.startswith(_roots(path)):
        return False
    # Console scripts that an installer has generated have no extension.
    return not (os.path.dirname(file) == _SCRIPTS and "." not in os.path.basename(file))


_SCRIPTS = sysconfig.get_paths()["scripts"]


@lru_cache(maxsize=16)
def _roots(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the files of libraries, and their folders, each with a separator at its end."""
    roots = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    # A folder of `path` into which packages were installed, as with `pip install --target`.
    roots |= {folder for folder in path if folder and _has_installed_packages(folder)}
    for name in _LIBRARIES:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            # A library may be a single file.
            is_package = os.path.basename(file) == "__init__.py"
            roots.add(os.path.dirname(file) if is_package else file)
    if cache := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        roots.add(os.path.abspath(cache))
    return tuple(root if root.endswith(".py") else os.path.join(root, "") for root in roots)


def _has_installed_packages(folder: str) -> bool:
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:
        return folder.endswith(".zip") and "python3" in folder  # The zipped standard library.


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
        for frame in reversed(frames):
            package = _module_of(frame).partition(".")[0]
            file = getattr(sys.modules.get(package), "__file__", None)
            is_library = package in _LIBRARIES or package in sys.stdlib_module_names
            if file and not is_library and Path(file).name == "__init__.py":
                _commands.add(os.path.join(os.path.dirname(file), ""))
                break
        found = [frame for frame in frames if is_user_code(frame.f_code, _module_of(frame))]
    return found


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
    names = ((frame.f_code.co_filename, frame.f_code.co_qualname) for frame in frames)
    return frozenset((file, name.rpartition("<locals>.")[2]) for file, name in names)
