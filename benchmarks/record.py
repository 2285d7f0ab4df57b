"""What the benchmarks write beside their results."""

import shlex
import sys


def command() -> str:
    """Returns the command that runs now, without where its results go."""
    words = [*sys.argv]
    if "--out" in words:
        place = words.index("--out")
        del words[place : place + 2]
    return shlex.join(["python", *words])
