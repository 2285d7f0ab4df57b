"""A saved run: a versioned JSON file of a few bytes per step and phase."""

import errno
import gzip
import io
import json
import math
import os
import re
import stat
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from lightning_gputime._measurement.history import History, list_phases, structured
from lightning_gputime._measurement.plain import plain
from lightning_gputime._measurement.slow import SlowStep
from lightning_gputime._measurement.units import unit_of
from lightning_gputime._messages import Named, messages
from lightning_gputime._output.summary import PhaseSummary
from lightning_gputime._output.table import Table, Tabular
from lightning_gputime._runs.environment import Environment

FORMAT = "lightning_gputime run"
VERSION = 5  # Files of another version cannot be read.
MINOR = 0  # Raised when fields are added: older readers ignore them, and say so.
_UNIT_MS = 1e-4  # Times are saved as multiples of it: five times finer than a CUDA event.
_MAX_TIME_MS = 1e9  # No step takes that long: a longer time is saved as absent.
_ABSENT = -1  # In place of a time that is not known, as where a phase did not run.
_MAX_BYTES = 2**30  # What unpacks to more is not ours: a million steps take a tenth of it.
# Control characters other than line feeds and tabs: a terminal may take them for commands.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

# Events of two streams may be out of order by a little.
_MIN_TIME = -1.0
_SIGNED = re.compile("change|excess|unexplained|behind")  # Fields that may be below zero.
_MAX_COUNT = 2**63
# Keys of a file that are read by other names, or derived from the others.
_NOT_FIELDS = {"format", "version", "minor", "summary", "setup", "sentence"}
_NOT_FIELDS |= {"verdict", "advice", "diagnosis"}
# How messages name fields that the file has elsewhere.
_PATHS = {"_summary": ".summary", "measurement": ""}
_IGNORED = (
    "%s was saved by lightning_gputime %s. This version does not know, and ignores: %s. Update"
    " lightning_gputime to see them."
)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Run(Tabular):
    """What a timer has measured of a run, as `save` writes it and `load` reads it.

    Attributes:
        environment: What it ran on.
        history: The newest steps, see the timers' `history`; to 0.0001 ms.
        warmup_steps: How many of the first steps of the history are warm-up.
        slow_steps: The slowest steps with their causes.
        evaluations: The means of each evaluation, each a JSON object.
        name: What it is called, such as its file.
    """

    environment: Environment
    history: npt.NDArray[Any]
    warmup_steps: int
    _summary: PhaseSummary
    slow_steps: Sequence[SlowStep] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()
    name: str = ""

    def summary(self) -> PhaseSummary:
        """Return the statistics of all steps but the warm-up; of that where there are no others."""
        return self._summary

    def _table(self) -> Table:
        return self._summary._table()

    @property
    def about(self) -> str:
        """What it is, and what it ran on, in a line."""
        on = self.environment
        device = f"{on.world_size} x {on.device}" if on.world_size > 1 else on.device
        known = {"torch": on.torch, "batch": on.batch_size, "commit": on.commit[:10]}
        named = [f"{name} {value}" for name, value in known.items() if value]
        compiled = "compiled" if on.compiled else ""
        parts = (self.name, device, *named, on.precision, compiled, on.started)
        return " · ".join(filter(None, parts))

    @property
    def slow_table(self) -> Table:
        """The slow steps, the largest excess first."""
        unit, steps = unit_of(self._summary.step.mean_ms), self.slow_steps
        lines = [("step", "time", "baseline", "excess", "most in", "excess is")]
        for one in steps:
            took, baseline, excess = map(unit.cell, (one.step_ms, one.baseline_ms, one.excess_ms))
            lines.append((str(one.step), took, baseline, excess, one.phase, one.why))
        excess_ms = sum(one.excess_ms for one in steps)
        lines.append((f"all {len(steps)}", "", "", unit.cell(excess_ms), "", ""))
        return Table(f"Slow steps in {unit.name}", lines, (), left=(4, 5))

    @property
    def measured(self) -> npt.NDArray[Any]:
        """The history without the warm-up."""
        return self.history[self.warmup_steps :]


def save(run: Run, path: str | os.PathLike[str]) -> None:
    """Write a run as JSON, compressed if the path ends in ".gz". Replace the file whole."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "minor": MINOR,
        "environment": asdict(run.environment),
        "warmup_steps": run.warmup_steps,
        "summary": run.summary().to_dict(),
        "setup": asdict(run.summary().setup),
        "slow_steps": [asdict(one) for one in run.slow_steps],
        "evaluations": run.evaluations,
    }
    # The history is nearly all of the file, and its numbers are plain already.
    whole = {**plain(content), "history": _pack(run.history)}
    data = json.dumps(whole, separators=(",", ":"), allow_nan=False).encode()
    if os.fspath(path).endswith(".gz"):
        # Level 1 takes a third of the time, for a tenth more bytes. Without a time of day, two
        # files of one run are the same.
        data = gzip.compress(data, compresslevel=1, mtime=0)
    write(path, data)


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replace a file whole, in one move; its mode stays. Raise an OSError that names it."""
    target = Path(os.path.expanduser(path)).resolve()
    # Beside its target, so that the move is one, and nobody sees half a file.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        if target.is_dir():
            raise OSError(errno.EISDIR, "it is a folder: pass the path of a file in it")
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "it is no regular file: pass the path of one")
        is_new = not target.exists()
        mode = 0o666 if is_new else stat.S_IMODE(target.stat().st_mode)
        try:
            # Never readable by more users than the target. The umask applies to new files alone.
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


def load(path: str | os.PathLike[str]) -> Run:
    """Read a file that a timer's `save` has written. It is JSON: nothing in it is executed.

    Args:
        path: The file.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is damaged, of another program, or of another version of this one.
    """
    name = os.path.expanduser(path)
    with open(name, "rb") as file:
        try:
            content = _parse(_decompress(file))
            content |= {"history": _unpack(content["history"]), "name": os.path.basename(name)}
            content["_summary"] = {"measurement": content["summary"], "setup": content["setup"]}
            unknown: list[str] = []
            run: Run = _read(Run, content, "run", unknown)
        except Exception as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            message = f"{name} is not a saved run: write one with timer.save(path) ({reason})"
            raise ValueError(message) from error
    if content.get("minor", 0) != MINOR and unknown:
        package = run.environment.package or "another version"
        messages.warning(_IGNORED, name, package, ", ".join(sorted(unknown)))
    return run


def _pack(history: npt.NDArray[Any]) -> dict[str, Any]:
    return {
        "unit_ms": _UNIT_MS,
        # The first number, then differences: nearly all are 1, which takes no room compressed.
        "steps": np.diff(history["step"], prepend=0).tolist(),
        "host_wait": _to_units(history["host_wait_ms"]),
        # Without that of the step, which is the sum of the phases.
        "phases": {name: _to_units(history[f"{name}_ms"]) for name in list_phases(history)},
    }


def _to_units(times_ms: Floats) -> Any:
    is_known = np.abs(times_ms) < _MAX_TIME_MS
    units = np.rint(np.where(is_known, times_ms, 0) / _UNIT_MS)
    # The events of two streams may be less than nothing apart.
    return np.where(is_known, np.maximum(units, 0), _ABSENT).astype(np.int64).tolist()


def _unpack(packed: Any) -> npt.NDArray[Any]:
    numbers = np.array(packed["steps"], np.int64)
    steps = np.cumsum(numbers)
    if np.any(steps < 0) or np.abs(numbers).sum(dtype=float) >= _MAX_COUNT:
        raise ValueError("the numbers of its steps must be 0 or more, and less than 2 ** 63")
    unit_ms = packed["unit_ms"]
    if not 0 < unit_ms <= 1:
        raise ValueError(f"the unit of its times must be above 0 and at most 1 ms, not {unit_ms}")
    named = {"host_wait": packed["host_wait"], **packed["phases"]}
    units = {name: np.array(column, np.int64) for name, column in named.items()}
    for name, n in units.items():
        if np.any((n < _ABSENT) | (n * unit_ms > _MAX_TIME_MS)):
            raise ValueError(f"times of {name:.60} in its history are below 0 or above 1e9 ms")
    times = {name: np.where(n < 0, np.nan, n * unit_ms) for name, n in units.items()}
    if any(ms.shape != steps.shape for ms in times.values()):
        raise ValueError("the columns of its history differ in length")
    top_level = [times[name] for name in packed["phases"] if "/" not in name]
    columns = {
        "step": steps,
        "step_ms": np.nansum([np.zeros(len(steps)), *top_level], axis=0),
        **{f"{name}_ms": ms for name, ms in times.items()},
    }
    return structured(columns)


def _decompress(file: io.BufferedReader) -> bytes:
    is_compressed = file.peek(2)[:2] == b"\x1f\x8b"
    data = (gzip.GzipFile(fileobj=file) if is_compressed else file).read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it unpacks to more than {_MAX_BYTES} bytes")
    return data


def _parse(data: bytes) -> dict[str, Any]:
    content = json.loads(
        data, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_printable
    )
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    if content.get("version") != VERSION:
        raise ValueError(
            f"its version is {content.get('version')!r:.60}, and this lightning_gputime reads"
            f" version {VERSION}: update lightning_gputime, or save the run again"
        )
    return content


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.60} is not a finite number")
    return number


def _printable(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object without control characters in its strings and lists of strings."""
    return {_clean(key): _clean(value) for key, value in pairs}


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _CONTROL.sub("\ufffd", value)
    if isinstance(value, list) and value and isinstance(value[0], str):
        return [*map(_clean, value)]
    return value


def _read(kind: Any, value: Any, where: str, unknown: list[str]) -> Any:
    """Return a value of JSON as the type that a field of a dataclass has, or raise.

    Missing fields take their default, and unknown ones are ignored and added to `unknown`: a record
    may get a field without a new version of the file. A float that is null is NaN.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is float and type(value) is int:
        value = float(value)
    if kind in (int, float) and type(value) is kind:
        _check_number(value, where)
    if kind is Any or type(value) in (kind, History) or (origin is Literal and value in inner):
        return value
    if kind is float and value is None:
        return math.nan
    if origin is UnionType:
        return None if value is None else _read(inner[0], value, where, unknown)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        unknown += [f"{where}.{name:.60}" for name in value.keys() - hints.keys() - _NOT_FIELDS]
        known = {name: hint for name, hint in hints.items() if name in value}
        return kind(
            **{
                name: _read(hint, value[name], where + _PATHS.get(name, f".{name}"), unknown)
                for name, hint in known.items()
            }
        )
    if origin is Mapping and isinstance(value, dict):
        read = {
            key: _read(inner[1], one, f"{where}[{key!r:.60}]", unknown)
            for key, one in value.items()
        }
        return Named(read)
    if origin in (tuple, Sequence) and isinstance(value, list):
        several = [_read(inner[0], one, f"{where}[{i}]", unknown) for i, one in enumerate(value)]
        return tuple(several) if origin is tuple else several
    raise ValueError(f"{where} must be {getattr(kind, '__name__', kind)}, not {value!r:.60}")


def _check_number(value: float, where: str) -> None:
    """Raise where a number cannot be: below zero and no difference, or a count that overflows."""
    is_signed = _SIGNED.search(where.rpartition(".")[2]) is not None
    least = -math.inf if is_signed else 0 if isinstance(value, int) else _MIN_TIME
    if value < least or value >= (_MAX_COUNT if isinstance(value, int) else math.inf):
        raise ValueError(f"{where} must be {least:g} or more, and below 2 ** 63, not {value!r:.60}")
