"""Saving and loading runs: versioned JSON files of a few bytes per step and phase."""

import errno
import glob
import gzip
import io
import json
import os
import stat
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt

from lightning_gputime._measurement.slow import SlowStep
from lightning_gputime._measurement.units import unit_of
from lightning_gputime._messages import messages
from lightning_gputime._output.summary import PhaseSummary
from lightning_gputime._output.table import Table, Tabular
from lightning_gputime._runs import schema
from lightning_gputime._runs.environment import Environment

_MAX_BYTES = 2**30  # Larger files are refused: a million steps take a tenth of this.
_MIN_LEFTOVER_AGE_S = 60.0  # A younger file may still be written by another process.
_IGNORED = (
    "%s was saved by lightning_gputime %s. This version ignores unknown fields: %s. Update"
    " lightning_gputime to read them."
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Run(Tabular):
    """Measurement of a run, as `save` writes it and `load` reads it.

    Attributes:
        environment: Environment of the run.
        history: Newest steps, as in `history` of the timers, with times rounded to 0.0001 ms.
        warmup_steps: Number of warm-up steps at the start of the history.
        slow_steps: Slowest steps with their causes.
        evaluations: Means of each evaluation, as JSON objects.
        name: Name of the run, such as its file.
        warnings: Newest warnings of the package during the run.
    """

    environment: Environment
    history: npt.NDArray[Any]
    warmup_steps: int
    _summary: PhaseSummary
    slow_steps: Sequence[SlowStep] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()
    name: str = ""
    warnings: Sequence[str] = ()

    def summary(self) -> PhaseSummary:
        """Return the summary of the steps after the warm-up; without such steps, of the warm-up."""
        return self._summary

    def _table(self) -> Table:
        return self._summary._table()

    @property
    def about(self) -> str:
        """Name and environment of the run in one line."""
        on = self.environment
        device = f"{on.world_size} x {on.device}" if on.world_size > 1 else on.device
        known = {"torch": on.torch, "batch": on.batch_size, "commit": on.commit[:10]}
        named = [f"{name} {value}" for name, value in known.items() if value]
        compiled = "compiled" if on.compiled else ""
        parts = (self.name, device, *named, on.precision, compiled, on.started)
        return " · ".join(filter(None, parts))

    @property
    def slow_table(self) -> Table:
        """Table of the slow steps, the largest excess first."""
        unit, steps = unit_of(self._summary.step.mean_ms), self.slow_steps
        lines = [("step", "time", "baseline", "excess", "most in", "causes")]
        for step in steps:
            took, baseline, excess = map(
                unit.cell, (step.step_ms, step.baseline_ms, step.excess_ms)
            )
            lines.append((str(step.step), took, baseline, excess, step.phase, step.why))
        excess_ms = sum(step.excess_ms for step in steps)
        lines.append((f"all {len(steps)}", "", "", unit.cell(excess_ms), "", ""))
        return Table(f"Slow steps in {unit.name}", lines, (), left=(4, 5))

    @property
    def measured(self) -> npt.NDArray[Any]:
        """History without the warm-up."""
        return self.history[self.warmup_steps :]


def save(run: Run, path: str | os.PathLike[str]) -> None:
    """Write a run as JSON, compressed if the path ends in ".gz". Replace the file atomically."""
    data = json.dumps(schema.to_json(run), separators=(",", ":"), allow_nan=False).encode()
    if os.fspath(path).endswith(".gz"):
        # Level 1 takes a third of the time for 10 % more bytes. Without a timestamp, two files of
        # the same run are identical.
        data = gzip.compress(data, compresslevel=1, mtime=0)
    write(path, data)


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replace a file atomically, and keep its mode. Raise an OSError that names the file."""
    target = Path(os.path.expanduser(path)).resolve()
    # Write to the same folder, so that the move is atomic.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        if target.is_dir():
            raise OSError(errno.EISDIR, "it is a folder: pass the path of a file in it")
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file: pass the path of a file")
        is_new = not target.exists()
        mode = 0o666 if is_new else stat.S_IMODE(target.stat().st_mode)
        try:
            # Never let more users read it than the target. The umask applies only to new files.
            with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
                if not is_new:
                    os.chmod(temporary, mode)
                file.write(content.encode() if isinstance(content, str) else content)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        message = f"Cannot write {target} ({error.strerror})"
        raise type(error)(error.errno, message) from error


def remove_leftovers(path: str) -> None:
    """Remove temporary files of processes that were killed in `write`. Never raise an OSError."""
    target = Path(path)
    with suppress(OSError):
        for leftover in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
            if time.time() - leftover.stat().st_mtime > _MIN_LEFTOVER_AGE_S:
                leftover.unlink()


def load(path: str | os.PathLike[str]) -> Run:
    """Load a run that a timer's `save` has written. The file is JSON: loading it runs no code.

    Args:
        path: File to read.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is damaged, not a saved run, or has another version of the format.
    """
    name = os.path.expanduser(path)
    with open(name, "rb") as file:
        try:
            run, unknown = schema.from_json(Run, _decompress(file), os.path.basename(name))
        except Exception as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            message = f"{name} is not a saved run: write one with timer.save(path) ({reason})"
            raise ValueError(message) from error
    if unknown:
        package = run.environment.package or "another version"
        messages.warning(_IGNORED, name, package, ", ".join(unknown))
    return run


def _decompress(file: io.BufferedReader) -> bytes:
    is_compressed = file.peek(2)[:2] == b"\x1f\x8b"
    data = (gzip.GzipFile(fileobj=file) if is_compressed else file).read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it unpacks to more than {_MAX_BYTES} bytes")
    return data
