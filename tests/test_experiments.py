"""The experiments in examples/experiments, on the CPU or on a GPU."""

import math
import runpy
from pathlib import Path
from typing import Any

import pytest

EXPERIMENTS = Path(__file__).parent.parent / "examples" / "experiments"
Rows = dict[str, dict[str, float]]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs an experiment, checks its output, and returns its numbers."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))

    def run(name: str, **options: Any) -> Rows:
        rows: Rows = runpy.run_path(str(EXPERIMENTS / f"{name}.py"))["main"](**options)
        printed = capsys.readouterr().out
        for row, cells in rows.items():
            assert row in printed
            for column, ms in cells.items():
                assert column in printed
                assert math.isfinite(ms)
                assert f"{ms:.4f}" in printed
        return rows

    return run


@pytest.mark.parametrize(
    ("name", "options", "rows"),
    [
        ("launch_time", {"dim": 32, "repeat": 4}, {"without a warm-up", "with a warm-up"}),
        (
            "inference",
            {"width": 8, "size": 32, "batch": 4, "n": 20},
            {"1. time stamps", "2. synchronize", "3. events"},
        ),
        (
            "pipeline",
            {"width": 16, "size": 64, "batch": 4, "cpu_size": 64, "n": 20, "rounds": 2},
            {"synchronize", "events"},
        ),
        (
            "four_synchronizes",
            {"width": 64, "batch": 16, "layers": 2, "n": 20, "rounds": 2},
            {"no timer", "four synchronizes", "one wait"},
        ),
        (
            "callables",
            {"width": 64, "batch": 16, "n": 40},
            {"host's clock", "steps", "fresh inputs", "cold L2 cache"},
        ),
        pytest.param(
            "beside_the_profiler",
            {"large": 256, "n_small": 100, "n_large": 60, "vectors": 300},
            set(),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_experiment_prints_its_numbers(
    name: str, options: dict[str, int], rows: set[str], run: Any
) -> None:
    found = run(name, **options)
    assert rows <= {*found}
    assert max(ms for row in found.values() for ms in row.values()) > 0


@pytest.mark.gpu
def test_waiting_makes_the_pipeline_longer_and_events_do_not(run: Any) -> None:
    # The CPU has little work, so that even on a slow host it takes less time than the device.
    rows = run("pipeline", cpu_size=256)
    whole = {name: row["whole, per iteration"] for name, row in rows.items()}
    assert whole["synchronize"] > 1.1 * whole["no timer"]
    # The work of the CPU varies by more than events cost.
    assert whole["events"] - whole["no timer"] < 0.5 * (whole["synchronize"] - whole["no timer"])
