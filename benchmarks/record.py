"""How the benchmarks record their results."""

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def command() -> str:
    """Returns the command that runs now, without where its results go."""
    words = [*sys.argv]
    if "--out" in words:
        place = words.index("--out")
        del words[place : place + 2]
    return shlex.join(["python", *words])


def save(out: Path | None, found: Mapping[str, Any]) -> None:
    """Writes what was found to a file, if one was asked for."""
    if out is not None:
        out.write_text(json.dumps(found, indent=2) + "\n")
