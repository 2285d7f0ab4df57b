"""Arguments, environment and result files of the benchmarks."""

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

LINE_LENGTH = 600  # An answer of `answers.py` fits.


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option `--out`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the results to this file")
    return parser


def command() -> str:
    """Return the current command without `--out`."""
    words = [*sys.argv]
    if "--out" in words:
        place = words.index("--out")
        del words[place : place + 2]
    return shlex.join(["python", *words])


def host() -> str:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")


ENVIRONMENT: dict[str, Callable[[], str]] = {
    "gpu": torch.cuda.get_device_name,
    "host": host,
    "machine": lambda: platform.processor() or platform.machine(),
    "python": platform.python_version,
    "torch": lambda: torch.__version__,
    "lightning": lambda: version("lightning"),
    "command": command,
}


def environment(*keys: str) -> dict[str, Any]:
    """Return the header of a result file: machine, versions and command."""
    return {key: ENVIRONMENT[key]() for key in keys or ("gpu", "torch", "command")}


def save(out: Path | None, results: Mapping[str, Any]) -> None:
    """Write results to `out`, unless it is None."""
    if out is not None:
        out.write_text(as_lines(results) + "\n")


def as_lines(value: Any, indent: str = "") -> str:
    """Return JSON with each object and array inside `value` on a single line if it fits.

    An object with a text of any length, and no other objects or arrays, is also on a single line.
    """
    line = json.dumps(value)
    items = [*value.values()] if isinstance(value, dict) else []
    has_text = str in map(type, items) and not any(isinstance(item, dict | list) for item in items)
    fits = (len(indent + line) <= LINE_LENGTH or has_text) and indent
    if fits or not value or not isinstance(value, dict | list):
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        rows = [f"{json.dumps(key)}: {as_lines(item, inner)}" for key, item in value.items()]
    else:
        rows = [as_lines(item, inner) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(rows) + f"\n{indent}{closing}"
