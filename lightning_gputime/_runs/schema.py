"""File format of saved runs: keys, versions, and checks of all values.

A file is a JSON object with these keys:

- `format`, `version`, `minor`: files of `version` 5 and 6 can be read. A larger `minor` has more
  keys, which older readers ignore with a warning.
- `environment`, `setup`, `slow_steps`, `summary` (a `Measurement`): objects whose keys are the
  fields of these classes. A missing key means the default.
- `evaluations`: the means of each evaluation. `warmup_steps`: a number of steps. `warnings`: texts.
- `history`: the time of each step and phase as a multiple of `unit_ms`; -1 if absent.

Increment `MINOR` to add a key, and `VERSION` to rename or remove a key. `tests/test_schema.py`
reads a file of each version.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from lightning_gputime._measurement.history import History, list_phases, structured
from lightning_gputime._measurement.plain import plain
from lightning_gputime._messages import Named
from lightning_gputime._runs.run import Run

FORMAT = "lightning_gputime run"
VERSION, MINOR = 6, 0
_READABLE = (5, VERSION)
_UNIT_MS = 1e-4  # Unit of saved times: a fifth of the resolution of a CUDA event.
_MAX_TIME_MS = 1e9  # Longer times are saved as absent.
_ABSENT = -1
# Control characters other than line feeds and tabs, which a terminal may take for commands.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

# Minimum of floats that are not differences, mostly times in milliseconds. Times may be slightly
# negative if events of two streams are out of order.
_MIN_FLOAT = -1.0
_DIFFERENCES = re.compile("change|excess|unexplained|behind_median")  # Fields without a minimum.
_MAX_COUNT = 2**63  # Counts must be smaller, to fit into 64-bit integers.
# Keys that are read under other names, or derived from other keys.
_NOT_FIELDS = {"format", "version", "minor", "summary", "setup", "sentence"}
_NOT_FIELDS |= {"verdict", "advice", "diagnosis"}
# Keys of version 5 that have no counterpart: probes, calls by name, and places at phase boundaries.
_NOT_FIELDS |= {"probed_steps", "probe_failure", "gpu_busy_mean_ms", "observed_s", "caller"}
# Error messages name a field by its path in the file, here for fields with other names in the file.
_PATHS = {"_summary": ".summary", "measurement": ""}

Floats = npt.NDArray[np.float64]


def to_json(run: Run) -> dict[str, Any]:
    """Return the content of a file."""
    summary = run.summary()
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
    # Exclude the history from `plain`: it is most of the file, and already has JSON types.
    return {**plain(content), "history": _pack(run.history)}


def from_json(data: bytes, name: str) -> tuple[Run, list[str]]:
    """Return a run, and the ignored keys of a file with a newer minor version.

    Args:
        data: Content of the file.
        name: Name of the run.

    Raises:
        KeyError: If the file has no history.
        ValueError: If the file is damaged, or has another format or version.
    """
    content = _parse(data)
    content |= {"history": _unpack(content["history"]), "name": name}
    if content["version"] == 5:
        _convert_from_5(content)
    content["_summary"] = {"measurement": content["summary"], "setup": content["setup"]}
    unknown: list[str] = []
    run: Run = _read(Run, content, "run", unknown)
    is_newer = (content["version"], content.get("minor", 0)) > (VERSION, MINOR)
    return run, sorted(unknown) if is_newer else []


def _convert_from_5(content: dict[str, Any]) -> None:
    """Drop what a file of version 5 says about code and settings, in place."""
    content["summary"].pop("culprits", None)
    content["setup"].pop("costly_settings", None)


def _pack(history: npt.NDArray[Any]) -> dict[str, Any]:
    return {
        "unit_ms": _UNIT_MS,
        # Store the first number, then differences: nearly all are 1, which compresses well.
        "steps": np.diff(history["step"], prepend=0).tolist(),
        "host_wait": _to_units(history["host_wait_ms"]),
        # Omit the step, which is the sum of the phases.
        "phases": {name: _to_units(history[f"{name}_ms"]) for name in list_phases(history)},
    }


def _to_units(times_ms: Floats) -> Any:
    is_known = np.abs(times_ms) < _MAX_TIME_MS
    units = np.rint(np.where(is_known, times_ms, 0) / _UNIT_MS)
    # Times may be slightly negative if events of two streams are out of order.
    return np.where(is_known, np.maximum(units, 0), _ABSENT).astype(np.int64).tolist()


def _unpack(packed: Any) -> npt.NDArray[Any]:
    increments = np.array(packed["steps"], np.int64)
    steps = np.cumsum(increments)
    if np.any(steps < 0) or np.abs(increments).sum(dtype=float) >= _MAX_COUNT:
        raise ValueError("the numbers of its steps must be 0 or more, and less than 2 ** 63")
    unit_ms = packed["unit_ms"]
    if not 0 < unit_ms <= 1:
        raise ValueError(f"the unit of its times must be above 0 and at most 1 ms, not {unit_ms}")
    packed_columns = {"host_wait": packed["host_wait"], **packed["phases"]}
    units = {name: np.array(column, np.int64) for name, column in packed_columns.items()}
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


def _parse(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a file, after a check of its format and version."""
    content = json.loads(
        data, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_printable
    )
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    if content.get("version") not in _READABLE:
        raise ValueError(
            f"its version is {content.get('version')!r:.60}, and this lightning_gputime reads"
            f" versions 5 and {VERSION}: update lightning_gputime, or save the run again"
        )
    return content


def _finite(text: str) -> float:
    """Return a JSON number, or raise ValueError for `NaN`, `Infinity` or an overflow."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.60} is not a finite number")
    return number


def _printable(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object without control characters in strings and lists of strings."""
    return {_clean(key): _clean(value) for key, value in pairs}


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _CONTROL.sub("\ufffd", value)
    if isinstance(value, list) and value and isinstance(value[0], str):
        return [*map(_clean, value)]
    return value


def _read(kind: Any, value: Any, where: str, unknown: list[str]) -> Any:
    """Return a JSON value as the type of a field, or raise ValueError.

    A missing field gets its default. A null float is read as NaN.

    Args:
        kind: Type of the field, as annotated.
        value: JSON value.
        where: Path of the field, for error messages.
        unknown: List to which the paths of ignored fields are added.
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
    if origin is UnionType:  # `X | None`.
        return None if value is None else _read(inner[0], value, where, unknown)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        unknown += [f"{where}.{name:.60}" for name in value.keys() - hints.keys() - _NOT_FIELDS]
        found = {
            name: _read(hint, value[name], where + _PATHS.get(name, f".{name}"), unknown)
            for name, hint in hints.items()
            if name in value
        }
        return kind(**found)
    if origin is Mapping and isinstance(value, dict):
        items_by_key = {
            key: _read(inner[1], item, f"{where}[{key!r:.60}]", unknown)
            for key, item in value.items()
        }
        return Named(items_by_key)
    if origin in (tuple, Sequence) and isinstance(value, list):
        items = [_read(inner[0], item, f"{where}[{i}]", unknown) for i, item in enumerate(value)]
        return tuple(items) if origin is tuple else items
    raise ValueError(f"{where} must be {getattr(kind, '__name__', kind)}, not {value!r:.60}")


def _check_number(value: float, where: str) -> None:
    """Raise ValueError if an integer is too large, or a number is too low and no difference."""
    if isinstance(value, int) and value >= _MAX_COUNT:
        raise ValueError(f"{where} must be below 2 ** 63, not {value!r:.60}")
    min_value = 0 if isinstance(value, int) else _MIN_FLOAT
    is_difference = _DIFFERENCES.search(where.rpartition(".")[2]) is not None
    if value < min_value and not is_difference:
        raise ValueError(f"{where} must be {min_value:g} or more, not {value!r:.60}")
