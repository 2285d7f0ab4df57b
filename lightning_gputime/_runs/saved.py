"""The file of a run: JSON with a version, a few bytes a step and phase."""

import gzip
import io
import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import IO, Any

from lightning_gputime._results import files
from lightning_gputime._results.summary import PhaseSummary
from lightning_gputime._runs import columns, fields
from lightning_gputime._runs.environment import Environment
from lightning_gputime._runs.run import Run

FORMAT = "lightning_gputime run"
VERSION = 1

_LARGEST = 2**30
"""A file that unpacks to more bytes is none of ours: a million steps take a tenth of it."""

_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, but ends of lines and tabs."""

_GZIP = b"\x1f\x8b"


def save(run: Run, path: str | os.PathLike[str]) -> None:
    """Writes a run as JSON, compressed where the path ends in ".gz"; replaces the file whole.

    Raises:
        OSError: If it cannot be written.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "environment": asdict(run.environment),
        "history": columns.to_json(run.history, run.warmup_steps),
        "summary": run.summary.to_dict(),
        "slow_steps": run.slow_steps,
        "evaluations": run.evaluations,
    }
    # The history needs no second look, and is nearly all.
    whole = {key: one if key == "history" else plain(one) for key, one in content.items()}
    data = json.dumps(whole, separators=(",", ":"), allow_nan=False).encode()
    if os.fspath(path).endswith(".gz"):
        # Level 1: a third of the time, for a tenth more bytes. No time, by which two files of one
        # run would differ.
        data = gzip.compress(data, compresslevel=1, mtime=0)
    files.write(path, data)


def load(path: str | os.PathLike[str]) -> Run:
    """Reads the file of a run, which a timer's `save` has written.

    It is JSON, of which every field is checked, and nothing is executed.

    Args:
        path: The file.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is damaged, of another program, or of a newer version of this one.
    """
    name = os.path.expanduser(path)
    with open(name, "rb") as file:
        content = _content(file, name)
    try:
        history, warmup_steps = columns.from_json(content.get("history"))
        return Run(
            fields.read(Environment, content.get("environment"), "environment"),
            history,
            warmup_steps,
            fields.read(PhaseSummary, content.get("summary"), "summary"),
            _objects(content, "slow_steps"),
            _objects(content, "evaluations"),
            os.path.basename(name),
        )
    except ValueError as error:
        raise ValueError(f"{name} is damaged: {error}") from error


def _content(file: IO[bytes], path: str) -> dict[str, Any]:
    start = file.read(len(_GZIP))
    file.seek(0)
    try:
        unpacked = gzip.GzipFile(fileobj=file) if start == _GZIP else file
        data = unpacked.read(_LARGEST + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: it cannot be unpacked ({error})") from error
    if len(data) > _LARGEST:
        raise ValueError(f"{path} is no file of a run: it unpacks to more than {_LARGEST} bytes")
    try:
        # Not over text: what is no UTF-8 is told as an error of the file, too.
        content = json.load(
            io.BytesIO(data),
            parse_constant=_refuse,
            parse_float=_finite,
            object_pairs_hook=lambda pairs: {
                _printable(key): _printable(one) for key, one in pairs
            },
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged, or no file of a run: it is no JSON ({error})"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f"{path} is no file of a run: write one by timer.save(path), or"
            " GPUPhaseTimer(save=path)"
        )
    version = content.get("version")
    if type(version) is not int or version < 1:
        raise ValueError(f"{path} is damaged: its version is {version!r:.60}")
    if version > VERSION:
        raise ValueError(
            f"{path} was written by a newer lightning_gputime: the file has version {version}, this"
            f" one reads up to {VERSION}; update lightning_gputime"
        )
    return content


def _printable(value: Any) -> Any:
    """Returns a text, or a list of texts, without what a terminal takes for a command."""
    if isinstance(value, str):
        return _COMMANDS.sub("\ufffd", value)
    if isinstance(value, list) and value and isinstance(value[0], str):
        return [*map(_printable, value)]
    return value


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(text: str) -> float:
    return fields.number(float(text), f"the number {text:.60}")


def _objects(content: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = content.get(name, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{name} must be a list of objects, not {found!r:.60}")
    return found


def plain(value: Any) -> Any:
    """Returns what JSON has words for: None for a number that is none."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
