"""Saved runs of earlier versions, and the keys of the JSON result.

`python tests/test_schema.py` writes the files of this version.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from lightning_gputime import load
from lightning_gputime._measurement.history import structured
from lightning_gputime._runs import result, saved
from lightning_gputime._runs.result import result_of
from lightning_gputime._runs.saved import Run

GOLDEN = Path(__file__).parent / "golden"
NEWEST = GOLDEN / f"run-{saved.VERSION}.{saved.MINOR}.json"

RESULT = GOLDEN / f"result-{result.VERSION}.{result.MINOR}.json"

DERIVED = {"verdict", "advice", "diagnosis", "sentence", "minor"}
"""Keys that are derived from others, and that readers ignore."""


def filled(kind: Any) -> Any:
    """Return a value of a type in which no field has its default."""
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        fields = {name: filled(hint) for name, hint in get_type_hints(kind).items()}
        return kind(**fields)  # type: ignore[operator]
    if origin is UnionType:
        return filled(inner[0])
    if origin is Literal:
        return inner[0]
    if origin is Mapping:
        return {"forward": 1.5 if inner[1] is Any else filled(inner[1])}
    if origin in (tuple, Sequence):
        return [filled(inner[0])]
    return {bool: True, int: 30, float: 1.5, str: "text"}[kind]


def filled_run() -> Run:
    times = np.array([1.5, np.nan, 2.5])
    columns = {"step": np.array([0, 1, 2]), "step_ms": np.array([1.5, 0.0, 2.5])}
    history = structured({**columns, "host_wait_ms": np.full(3, 0.5), "forward_ms": times})
    hints = {name: hint for name, hint in get_type_hints(Run).items() if name != "history"}
    return Run(**{name: filled(hint) for name, hint in hints.items()}, history=history)


def without_derived(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_derived(item) for key, item in value.items() if key not in DERIVED}
    return [*map(without_derived, value)] if isinstance(value, list) else value


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Return the paths of values of an old file that were not read."""
    if isinstance(old, dict) and isinstance(new, dict):
        parts = [differences(old[key], new.get(key), f"{path}.{key}") for key in old]
        return [found for part in parts for found in part]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        parts = [differences(*pair, path) for pair in zip(old, new, strict=True)]
        return [found for part in parts for found in part]
    return [] if old == new else [path]


OF_RANKS = ("slow", "slowest_rank", "behind_median_ms", "rows.forward.slowest_rank")
RENAMED = {".version", *(f".summary.ranks.{name}" for name in OF_RANKS)}
"""Values of older files that have other names in this version."""

REMOVED = {
    "5.0": {
        *(f".summary.memory.{name}" for name in ("at_step", "peak_mib", "start_mib", "steps")),
        ".summary.rows.forward.peak_mib",
        ".summary.step.peak_mib",
    },
    "5": {
        *RENAMED,
        *(f".setup.{name}" for name in ("classes", "costly_settings", "has_parts")),
        *(f".summary.{name}" for name in ("culprits", "probe_failure", "probed_steps")),
        *(f".summary.{row}.gpu_busy_mean_ms" for row in ("rows.forward", "step")),
    },
    "6": RENAMED,
}
"""Values of older files that this version no longer has, by version."""


@pytest.mark.parametrize("name", [path.name for path in sorted(GOLDEN.glob("run-*.json"))])
def test_saved_file_of_each_version_is_read(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    version, minor = Path(name).stem.removeprefix("run-").split(".")
    old = json.loads((GOLDEN / name).read_text())
    (tmp_path / name).write_text(json.dumps(old | {"minor": int(minor)}))
    with caplog.at_level(logging.WARNING):
        run = load(tmp_path / name)
    assert not caplog.messages
    assert isinstance(run.summary().measurement.sections[0].sentences, tuple)
    new = json.loads(json.dumps(without_derived(saved.to_json(run))))
    removed = REMOVED.get(version, set()) | REMOVED.get(f"{version}.{minor}", set())
    assert {*differences(without_derived(old), new)} == removed
    ranks = run.summary().ranks
    assert ranks is not None
    assert (ranks.straggler, ranks.stragglers, ranks.excess_ms) == (30, (30,), 1.5)
    assert ranks.rows["forward"].max_rank == 30


def test_newest_saved_file_has_every_field() -> None:
    """If this fails, raise `MINOR` (or `VERSION`) and write a new file. Keep the older files."""
    golden = without_derived(json.loads(NEWEST.read_text()))
    current = json.loads(json.dumps(without_derived(saved.to_json(filled_run()))))
    assert current == golden


def keys_of(value: Any, path: str = "") -> list[str]:
    """Return the paths of all keys of a JSON object."""
    if isinstance(value, dict):
        found = [keys_of(item, f"{path}.{key}") for key, item in value.items()]
        return [key for keys in found for key in keys]
    if isinstance(value, list) and value:
        return keys_of(value[0], f"{path}[]")
    return [path]


def result_keys() -> dict[str, list[str]]:
    return {
        name: sorted(keys_of(result_of(filled_run(), brief=name == "brief")))
        for name in ("full", "brief")
    }


def test_keys_of_the_result_are_those_of_its_version() -> None:
    """If this fails, raise `MINOR` (or `VERSION`) of `result.py` and write a new file."""
    assert result_keys() == json.loads(RESULT.read_text())


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result_keys(), indent=1) + "\n")
    NEWEST.write_text(json.dumps(without_derived(saved.to_json(filled_run())), indent=1) + "\n")
