"""How the benchmarks take their arguments, and record their results."""

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

LINE_LENGTH = 200


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser that knows `--out`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help="write what is found to this file")
    return parser


def command() -> str:
    """Returns the command that runs now, without where its results go."""
    words = [*sys.argv]
    if "--out" in words:
        place = words.index("--out")
        del words[place : place + 2]
    return shlex.join(["python", *words])


def host() -> str:
    """Returns the name of the processor: it decides where steps are bound by launches."""
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
    """Returns on what the results were found, and by which command: each result begins with it."""
    return {key: ENVIRONMENT[key]() for key in keys or ("gpu", "torch", "command")}


def save(out: Path | None, found: Mapping[str, Any]) -> None:
    """Write a result to `out`, unless it is None."""
    if out is not None:
        out.write_text(as_lines(found) + "\n")


def as_lines(found: Any, indent: str = "") -> str:
    """Return JSON with each object and array on one line, if it fits."""
    line = json.dumps(found)
    if len(indent + line) <= LINE_LENGTH or not found or not isinstance(found, dict | list):
        return line
    inner = indent + "  "
    if isinstance(found, dict):
        rows = [f"{json.dumps(key)}: {as_lines(value, inner)}" for key, value in found.items()]
    else:
        rows = [as_lines(value, inner) for value in found]
    opens, closes = "{}" if isinstance(found, dict) else "[]"
    return f"{opens}\n{inner}" + f",\n{inner}".join(rows) + f"\n{indent}{closes}"
