"""Runs, and the versioned JSON files that store them with a few bytes per step and phase.

A file is a JSON object with these keys:

- `format`, `version`, `minor`: files of `version` 5 to 7 can be read. A larger `minor` has more
  keys, which older readers ignore with a warning.
- `environment`, `setup`, `slow_steps`, `summary` (a `Measurement`): objects whose keys are the
  fields of these classes. A missing key means the default.
- `evaluations`: the means of each evaluation. `warmup_steps`: a number of steps. `warnings`: texts.
- `history`: the time of each step and phase as a multiple of `unit_ms`; -1 if absent.

Increment `MINOR` to add a key, and `VERSION` to rename or remove a key. `tests/test_schema.py`
reads a file of each version.
"""

import errno
import glob
import gzip
import json
import math
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from lightning_gputime._measurement.history import History, list_phases, structured
from lightning_gputime._measurement.measurement import Environment
from lightning_gputime._measurement.slow import SlowStep
from lightning_gputime._messages import Named, WarnOnce, messages, plain, unit_of
from lightning_gputime._output.summary import PhaseSummary
from lightning_gputime._output.table import Table, Tabular

FORMAT = "lightning_gputime run"
VERSION, MINOR = 7, 2
_MAX_BYTES = 2**30  # Larger files are refused: a million steps take a tenth of this.
_MIN_LEFTOVER_AGE_S = 60.0  # Another process may still write a younger temporary file.
_MIN_INTERVAL_S = 10.0  # Minimum time between two files of a live run.
_MIN_INTERVAL_RATIO = 100  # Minimum time until the next file, as a multiple of the saving time.
_UNIT_MS = 1e-4  # Unit of saved times: a fifth of the resolution of a CUDA event.
_MAX_TIME_MS = 1e9  # Longer times are saved as absent.
_ABSENT = -1
# Control characters other than line feeds and tabs, which a terminal may take for commands.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Keys that are read under other names, or derived from other keys.
_NOT_FIELDS = {"format", "version", "minor", "summary", "setup", "sentence"}
_NOT_FIELDS |= {"verdict", "advice", "diagnosis"}
# Error messages name a field by its path in the file, here for fields with other names in the file.
_PATHS = {"_summary": ".summary", "measurement": ""}
_IGNORED = (
    "%s was saved by lightning_gputime %s. This version ignores unknown fields: %s. Update"
    " lightning_gputime to read them."
)
_NOT_SAVED = (
    "The run is not saved: %s. Its file has the last saved state, or does not exist. Training, its"
    " logs and the table are not affected."
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
        """Return the summary of the steps after the warm-up; if none, of the warm-up steps."""
        return self._summary

    def _table(self) -> Table:
        return self._summary._table()

    @property
    def about(self) -> str:
        """Name and environment of the run in one line."""
        env = self.environment
        device = f"{env.world_size} x {env.device}" if env.world_size > 1 else env.device
        values = {"torch": env.torch, "batch": env.batch_size, "commit": env.commit[:10]}
        named = [f"{name} {value}" for name, value in values.items() if value]
        compiled = "compiled" if env.compiled else ""
        is_cut = self._summary.measurement.is_running
        cut = "not finished when this was saved" if is_cut else ""
        parts = (self.name, device, *named, env.precision, compiled, env.started, cut)
        return " · ".join(filter(None, parts))

    @property
    def slow_table(self) -> Table:
        """Table of the slow steps, the largest excess first."""
        unit = unit_of(self._summary.step.mean_ms)
        lines = [("step", "time", "baseline", "excess", "most in", "causes")]
        for step in self.slow_steps:
            took, baseline = unit.cell(step.step_ms), unit.cell(step.baseline_ms)
            excess = unit.cell(step.excess_ms)
            lines.append((str(step.step), took, baseline, excess, step.phase, step.why))
        excess = unit.cell(sum(step.excess_ms for step in self.slow_steps))
        lines.append((f"all {len(self.slow_steps)}", "", "", excess, "", ""))
        return Table(f"Slow steps in {unit.name}", lines, (), left=(4, 5))

    @property
    def measured(self) -> npt.NDArray[Any]:
        """History without the warm-up."""
        return self.history[self.warmup_steps :]


def save(run: Run, path: str | os.PathLike[str]) -> None:
    """Write a run as JSON, compressed if the path ends in ".gz". Replace the file atomically."""
    data = json.dumps(to_json(run), separators=(",", ":"), allow_nan=False).encode()
    if os.fspath(path).endswith(".gz"):
        # Level 1 takes a third of the time for 10 % more bytes. Without a timestamp, two files of
        # the same run are identical.
        data = gzip.compress(data, compresslevel=1, mtime=0)
    write(path, data)


def to_json(run: Run) -> dict[str, Any]:
    summary, history = run.summary(), run.history
    content = {
        "format": FORMAT,
        "version": VERSION,
        "minor": MINOR,
        "environment": asdict(run.environment),
        "warmup_steps": run.warmup_steps,
        "summary": summary.to_dict(),
        "setup": asdict(summary.setup),
        "slow_steps": [asdict(step) for step in run.slow_steps],
        "evaluations": run.evaluations,
        "warnings": run.warnings,
    }
    packed = {
        "unit_ms": _UNIT_MS,
        # Store the first number, then differences: nearly all are 1, which compresses well.
        "steps": np.diff(history["step"], prepend=0).tolist(),
        "host_wait": _to_units(history["host_wait_ms"]),
        # Omit the step, which is the sum of the phases.
        "phases": {name: _to_units(history[f"{name}_ms"]) for name in list_phases(history)},
    }
    # Exclude the history from `plain`: it is most of the file, and already has JSON types.
    return {**plain(content), "history": packed}


def _to_units(times_ms: npt.NDArray[np.float64]) -> Any:
    is_known = np.abs(times_ms) < _MAX_TIME_MS
    units = np.rint(np.where(is_known, times_ms, 0) / _UNIT_MS)
    # Times may be slightly negative if events of two streams are out of order.
    return np.where(is_known, np.maximum(units, 0), _ABSENT).astype(np.int64).tolist()


def runs_in(folder: Path) -> list[Path]:
    """Return the files of the runs in a folder, in order of their names.

    A process that was killed may have left a temporary file of `write`, whose name starts with a
    dot.
    """
    return sorted(file for file in folder.glob("*.json*") if not file.name.startswith("."))


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replace a file atomically, and keep its mode. An OSError names the file."""
    target = Path(os.path.expanduser(path)).resolve()
    # Write to the same folder, so that `os.replace` is atomic.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        if target.is_dir():
            raise OSError(errno.EISDIR, "it is a folder: pass the path of a file in it")
        is_new = not target.exists()
        if not is_new and not target.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file: pass the path of a file")
        mode = 0o666 if is_new else stat.S_IMODE(target.stat().st_mode)
        try:
            # Create the temporary file with the target's mode, so that no other users can ever read
            # it. Then undo the umask, which must only change the mode of a new target.
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


class LiveFile:
    """File of a run, rewritten every 10 s and at the end of each epoch.

    It is rewritten less often if saving would take more than 1 % of the time.
    """

    def __init__(self) -> None:
        self.path: str | None = None  # None if no file is written.
        # Earliest times of the next file (`time.perf_counter`): inside and at the end of an epoch.
        self._due_s = 0.0
        self._epoch_due_s = 0.0
        self._written: tuple[int, int] | None = None  # Identity of the newest file.
        self._warn_once = WarnOnce()

    def start(self, path: str | None) -> None:
        """Rewrite this file from now on; None for no file."""
        self.path = path
        if path is not None:
            remove_leftovers(path)
            self._due_s = time.perf_counter() + _MIN_INTERVAL_S

    def is_due(self, *, is_epoch_end: bool = False) -> bool:
        due_s = self._epoch_due_s if is_epoch_end else self._due_s
        return self.path is not None and time.perf_counter() >= due_s

    def rewrite(self, save: Callable[[str], None]) -> None:
        """Rewrite the file, if any, and set the time at which the next rewrite is due."""
        start_s = time.perf_counter()
        if self.path is not None:
            self.try_to_save(self.path, save)
        end_s = time.perf_counter()
        self._epoch_due_s = end_s + _MIN_INTERVAL_RATIO * (end_s - start_s)
        self._due_s = max(self._epoch_due_s, end_s + _MIN_INTERVAL_S)

    def try_to_save(self, path: str, save: Callable[[str], None]) -> bool:
        """Save the run, and return True. If that fails, warn once and return False."""
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            save(path)
            self._written = _identity(path)
        except Exception as error:
            self._warn_once(_NOT_SAVED, error)
            return False
        return True

    def wrote(self, path: str) -> bool:
        """Return True if the file at this path is the newest file that this object has written."""
        return self._written is not None and self._written == _identity(path)


def remove_leftovers(path: str) -> None:
    """Remove temporary files of processes that were killed in `write`. Never raise an OSError."""
    target = Path(path)
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        with suppress(OSError):  # Another process may have removed it.
            if time.time() - leftover.stat().st_mtime > _MIN_LEFTOVER_AGE_S:
                leftover.unlink()


def _identity(path: str) -> tuple[int, int] | None:
    """Return the modification time and the inode of a file; None if it does not exist."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino


def load(path: str | os.PathLike[str]) -> Run:
    """Load a run that a timer's `save` has written. The file is JSON: loading it runs no code.

    Args:
        path: File to read.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged, not a saved run, or has another version of the format.
    """
    name = os.path.expanduser(path)
    unknown: list[str] = []
    with open(name, "rb") as file:
        try:
            is_compressed = file.peek(2)[:2] == b"\x1f\x8b"
            data = (gzip.GzipFile(fileobj=file) if is_compressed else file).read(_MAX_BYTES + 1)
            if len(data) > _MAX_BYTES:
                raise ValueError(f"it unpacks to more than {_MAX_BYTES} bytes")
            content = json.loads(
                data,
                # Without control characters in strings and lists of strings.
                object_pairs_hook=lambda items: {_clean(key): _clean(item) for key, item in items},
            )
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT!r}")
            if content.get("version") not in (5, 6, VERSION):
                raise ValueError(
                    f"its version is {content.get('version')!r:.60}, and this lightning_gputime"
                    f" reads versions 5 to {VERSION}: update lightning_gputime, or save the run"
                    " again"
                )
            content |= {"history": _unpack(content["history"]), "name": os.path.basename(name)}
            if content["version"] == 5:  # Its facts about code and settings have other meanings.
                content["summary"].pop("culprits", None)
                content["setup"].pop("costly_settings", None)
            if content["version"] < 7 and content["summary"].get("ranks"):
                content["summary"]["ranks"] = _rename_ranks(content["summary"]["ranks"])
            content["_summary"] = {"measurement": content["summary"], "setup": content["setup"]}
            run: Run = _as_field(Run, content, "run", unknown)
        except Exception as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            message = f"{name} is not a saved run: write one with timer.save(path) ({reason})"
            raise ValueError(message) from error
    if unknown and (content["version"], content.get("minor", 0)) > (VERSION, MINOR):
        package = run.environment.package or "another version"
        messages.warning(_IGNORED, name, package, ", ".join(sorted(unknown)))
    return run


def _rename_ranks(ranks: dict[str, Any]) -> dict[str, Any]:
    """Return a comparison of ranks of versions 5 and 6 with the names of version 7."""
    rows = {
        name: {key: value for key, value in row.items() if key != "slowest_rank"}
        | {"max_rank": row["slowest_rank"]}
        for name, row in ranks["rows"].items()
    }
    names = {"slowest_rank": "straggler", "behind_median_ms": "excess_ms", "slow": "stragglers"}
    return {**{names.get(key, key): value for key, value in ranks.items()}, "rows": rows}


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _CONTROL.sub("\ufffd", value)
    if isinstance(value, list) and value and isinstance(value[0], str):
        return [*map(_clean, value)]
    return value


def _unpack(packed: Any) -> npt.NDArray[Any]:
    steps = np.cumsum(np.array(packed["steps"], np.int64))
    times = {}
    for name, column in {"host_wait": packed["host_wait"], **packed["phases"]}.items():
        n = np.array(column, np.int64)
        if n.shape != steps.shape:
            raise ValueError("the columns of its history differ in length")
        times[name] = np.where(n < 0, np.nan, n * packed["unit_ms"])
    top_level = [times[name] for name in packed["phases"] if "/" not in name]
    step_ms = np.nansum([np.zeros(len(steps)), *top_level], axis=0)
    columns = {f"{name}_ms": ms for name, ms in times.items()}
    return structured({"step": steps, "step_ms": step_ms, **columns})


def _as_field(kind: Any, value: Any, where: str, unknown: list[str]) -> Any:
    """Return a JSON value as the type of a field.

    A missing field gets its default. A null float is read as NaN. The history is already unpacked
    by `_unpack`, so any `History` is right. Raises ValueError with the path `where` of a wrong
    field, and TypeError if a field without default is missing. The paths of ignored fields are
    added to `unknown`.

    Example: `{"step": 7, "causes": [{...}], ...}` as `SlowStep` becomes a `SlowStep` whose `causes`
    are `Cause` objects, because its type hints say so.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is float and type(value) is int:
        value = float(value)
    if kind is Any or type(value) in (kind, History) or (origin is Literal and value in inner):
        return value
    if kind is float and value is None:
        return math.nan
    if origin is UnionType:  # `X | None`.
        return None if value is None else _as_field(inner[0], value, where, unknown)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        unknown += [f"{where}.{name:.60}" for name in value.keys() - hints.keys() - _NOT_FIELDS]
        found = {
            name: _as_field(hint, value[name], where + _PATHS.get(name, f".{name}"), unknown)
            for name, hint in hints.items()
            if name in value
        }
        return kind(**found)
    if origin is Mapping and isinstance(value, dict):
        items_by_key = {
            key: _as_field(inner[1], item, f"{where}[{key!r:.60}]", unknown)
            for key, item in value.items()
        }
        return Named(items_by_key)
    if origin in (tuple, Sequence) and isinstance(value, list):
        items = [
            _as_field(inner[0], item, f"{where}[{i}]", unknown) for i, item in enumerate(value)
        ]
        return tuple(items) if origin is tuple else items
    raise ValueError(f"{where} must be {getattr(kind, '__name__', kind)}, not {value!r:.60}")
