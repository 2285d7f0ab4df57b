"""The history in the file of a run: whole numbers, a few bytes a step and phase."""

from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gputime._results.history import structured

_UNIT_MS = 1e-4
"""Times are whole numbers of this: five times finer than what an event of CUDA can tell."""

_LARGEST = 2**53
"""Whole numbers up to this are exact as floats."""


_OTHERS = ("step", "host_wait")
"""Columns that are no phases."""


def to_json(history: npt.NDArray[Any], warmup_steps: int) -> dict[str, Any]:
    """Returns a history as an object of JSON."""
    names = [name.removesuffix("_ms") for name in history.dtype.names or ()]
    numbers = history["step"]
    return {
        "unit_ms": _UNIT_MS,
        "warmup_steps": warmup_steps,
        "first_step": int(numbers[0]) if len(numbers) else 0,
        # Ones, nearly all, which take no room when compressed.
        "step_differences": np.diff(numbers).tolist(),
        "host_wait": _to_units(history["host_wait_ms"]),
        "phases": {name: _to_units(history[f"{name}_ms"]) for name in names if name not in _OTHERS},
    }


def _to_units(times_ms: npt.NDArray[np.float64]) -> list[int | None]:
    is_absent = ~(np.abs(times_ms) <= _LARGEST * _UNIT_MS)
    # Events of two streams may tell less than nothing: as 0, since a file with such is refused.
    known = np.maximum(np.where(is_absent, 0, times_ms), 0)
    units: list[int | None] = np.rint(known / _UNIT_MS).astype(np.int64).tolist()
    for i in np.flatnonzero(is_absent).tolist():
        units[i] = None
    return units


def from_json(found: Any) -> tuple[npt.NDArray[Any], int]:
    """Returns the history in an object of JSON, and how many of its first steps are warm-up.

    Raises:
        ValueError: If it is none.
    """
    if not isinstance(found, dict) or not isinstance(found.get("phases"), dict):
        raise ValueError(f"history must be an object with phases, not {found!r:.60}")
    unit_ms, warmup_steps, first = (
        found.get(name) for name in ("unit_ms", "warmup_steps", "first_step")
    )
    if type(unit_ms) is not float or not 0 < unit_ms < 1e3:
        raise ValueError(f"history.unit_ms must be a number above 0, not {unit_ms!r:.60}")
    if type(warmup_steps) is not int or type(first) is not int or warmup_steps < 0:
        raise ValueError("history.warmup_steps and .first_step must be whole numbers")
    if abs(first) > _LARGEST:
        raise ValueError("history.first_step is too large")
    wait = _times(found.get("host_wait"), "host_wait")
    differences = _column(found.get("step_differences"), "step_differences")
    if len(differences) != max(len(wait) - 1, 0) or np.isnan(differences).any():
        raise ValueError("history.step_differences must be one less than there are steps")
    numbers = first + np.concatenate(([0], np.cumsum(differences)))[: len(wait)]
    if len(numbers) and np.abs(numbers).max() > _LARGEST:
        raise ValueError("history.step_differences add up to too large a number")
    phases = {}
    for name, column in found["phases"].items():
        if name in _OTHERS:
            raise ValueError(f"history has a phase called {name}, which none can be")
        phases[name] = _times(column, name) * unit_ms
        if len(phases[name]) != len(wait):
            raise ValueError(f"history.{name:.60} has {len(phases[name])} of {len(wait)} steps")
    top_level = [np.nan_to_num(ms) for name, ms in phases.items() if "/" not in name]
    columns = {
        "step": numbers.astype(np.int64),
        # Not in the file, because it is the sum of the phases.
        "step_ms": np.sum(top_level, axis=0) if top_level else np.zeros(len(wait)),
        "host_wait_ms": wait * unit_ms,
        **{f"{name}_ms": ms for name, ms in phases.items()},
    }
    return structured(columns), min(warmup_steps, len(wait))


def _times(found: Any, name: str) -> npt.NDArray[np.float64]:
    times = _column(found, name)
    if (times < 0).any():
        raise ValueError(f"history.{name:.60} has a negative time")
    return times


def _column(found: Any, name: str) -> npt.NDArray[np.float64]:
    if not isinstance(found, list) or not {*map(type, found)} <= {int, type(None)}:
        raise ValueError(f"history.{name:.60} must be a list of whole numbers")
    try:
        column = np.array(found, np.float64)
    except OverflowError as error:
        raise ValueError(f"history.{name:.60} has a number that is too large") from error
    if (np.abs(column) > _LARGEST).any():
        raise ValueError(f"history.{name:.60} has a number that is too large")
    return column
