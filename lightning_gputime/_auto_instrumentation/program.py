"""Kinds of command lines: a Python script, or a program that may start Python."""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

_PYTHON = re.compile(r"(python|pypy)[0-9.]*(\.exe)?")
_SUFFIXES = (".py", ".pyw", ".pyc", ".pyz")
# Flags of Python that take their value from the next argument.
_WITH_VALUE = "WX"

KEEPS_OUT = "Python's flags -E, -I and -S prevent the timer from starting: remove them{}"
_NOT_FOUND = "no such script or command: {!r}"
_NOT_PYTHON = (
    "{0} is neither a Python script nor executable. Name the program that runs it, as in"
    " `run bash {0}`, or add a first line such as #!/bin/bash and run chmod +x {0}"
)
_NO_PACKAGE = (
    "{0} has no lightning_gputime, so nothing would be timed: install it there by {0} -m pip"
    " install lightning-gputime (Python 3.11 or newer), or write run train.py, without a Python"
)
# Unlike a script, `python -c` has the current folder ("") on sys.path: remove it.
_FIND = """\
import importlib.util, sys
sys.path[:] = filter(None, sys.path)
sys.exit(sys.version_info < (3, 11) or not importlib.util.find_spec("lightning_gputime"))
"""


def find_program(command: Sequence[str]) -> str | None:
    """Return the path of the program that a command starts; None for a Python script.

    Raises:
        ValueError: If there is no such file or command, if it cannot be executed, or if the timer
            would not reach the Python that it starts.
    """
    first = command[0]
    if first == "-" or _is_python_script(first):  # For "-", Python reads the script from stdin.
        return None
    if not os.path.isfile(first):
        path = shutil.which(first)
        if path is None:
            raise ValueError(_NOT_FOUND.format(first))
    elif os.access(first, os.X_OK) and (_first_line(first) or _is_binary(first)):
        path = os.path.abspath(first)
    else:
        raise ValueError(_NOT_PYTHON.format(first))
    _check_python(command)
    # Check the first line of a script, too. Even `python` may be a script, as with pyenv.
    _check_python([*_first_line(path), path, *command[1:]])
    return path


def _is_python_script(path: str) -> bool:
    """Return whether Python can run a file or a folder."""
    if os.path.isdir(path):
        return os.path.isfile(os.path.join(path, "__main__.py"))
    if not os.path.isfile(path):
        return os.path.exists(path)  # A pipe, such as a shell's `<(...)`.
    if path.endswith(_SUFFIXES):
        return True
    if command := _first_line(path):
        # The kernel runs an executable script with the Python of its first line.
        return _is_python(_without_env(command)) and not os.access(path, os.X_OK)
    if Path(path).suffix:
        return False
    return zipfile.is_zipfile(path) or not _is_binary(path)


def _is_binary(path: str) -> bool:
    with open(path, "rb") as file:
        return b"\0" in file.read(1024)


def _first_line(path: str) -> list[str]:
    """Return the program and the arguments that the first line of a script names, if any."""
    if not os.path.isfile(path):
        return []
    with open(path, "rb") as file:
        line = file.readline(1024)
    return os.fsdecode(line[2:]).split() if line.startswith(b"#!") else []


def _without_env(command: Sequence[str]) -> Sequence[str]:
    """Return a command without a leading `env`, its flags and its variables."""
    if os.path.basename(command[0]) != "env":
        return command
    return [*itertools.dropwhile(lambda part: part.startswith("-") or "=" in part, command[1:])]


def _is_python(command: Sequence[str]) -> bool:
    return bool(command) and _PYTHON.fullmatch(os.path.basename(command[0])) is not None


def _check_python(command: Sequence[str]) -> None:
    """Raise ValueError if a command starts a Python in which the timer would not run."""
    command = _without_env(command)
    if not _is_python(command):
        return
    flags = _flags(command[1:])
    if any(flag in "EIS" for flag in flags):
        raise ValueError(KEEPS_OUT.format(f" from {shlex.join(command)!r}"))
    python = shutil.which(command[0])
    if python is None or _folder(python) == _folder(sys.executable) or "V" in flags:
        return
    found = subprocess.run([python, "-c", _FIND], check=False, stderr=subprocess.DEVNULL)
    if found.returncode:
        raise ValueError(_NO_PACKAGE.format(command[0]))


def _folder(path: str) -> str:
    # Do not resolve links: Python finds its virtual environment by this folder.
    return os.path.dirname(os.path.abspath(path))


def _flags(arguments: Sequence[str]) -> str:
    """Return the letters of Python's flags that precede the script."""
    letters = ""
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-") or argument in ("-", "--"):
            break
        if argument.startswith("--"):
            continue
        for i, letter in enumerate(argument[1:], 2):
            if letter in "cm":
                return letters
            if letter in _WITH_VALUE:
                # The value is the rest of this argument, or else the next argument.
                if i == len(argument):
                    next(rest, None)
                break
            letters += letter
    return letters
