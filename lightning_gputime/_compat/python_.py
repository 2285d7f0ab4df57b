"""Private names of Python's standard library."""

import subprocess


def interpreter_flags() -> list[str]:
    """Return the flags by which this Python was started; none where that is unknown."""
    flags: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
    return flags
