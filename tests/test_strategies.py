"""Lightning's strategies and DistributedDataParallel, in real processes over gloo."""

import json
from pathlib import Path

import pytest
from fake_gpu import STEP_MS
from processes import run

SCRIPT = Path(__file__).parent / "ddp_run.py"

SENTENCE = "rank 1 is 3 ms per step slower than the median of the others, in data/fetch"
LOGGED = {
    "phase_time/ranks/data_min_ms": 1.0,
    "phase_time/ranks/data_max_ms": 4.0,
    "phase_time/ranks/straggler": 1,
}
"""Values that rank zero logs for two ranks."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        # Strategies that start processes come first, because the others keep a process group.
        ["2 ddp_notebook", "2 ddp_spawn", "1 auto", "1 ddp"],
        ["2 ddp", "2 ddp_find_unused_parameters_true"],
    ],
)
def test_strategy_times_every_phase_on_each_rank(cases: list[str], tmp_path: Path) -> None:
    printed = run(SCRIPT, tmp_path, *cases)
    # Only rank zero prints the table.
    assert printed.count("over 3 steps") == len(cases)
    for case in cases:
        assert_measured(case, tmp_path / case)


def assert_measured(case: str, directory: Path) -> None:
    """Check the file of each rank."""
    number, strategy = case.split()
    devices = int(number)
    for rank in range(devices):
        measured = json.loads((directory / f"rank{rank}.json").read_text())
        # The fake GPUs are independent, so waits take no time.
        comm = {"backward/comm": 0.0} if devices > 1 else {}
        fetch_ms = 1.0 + 3.0 * rank
        assert measured["steps"] == [{**STEP_MS, **comm, "data": fetch_ms}] * 3
        parts = {"data": fetch_ms, "data/fetch": fetch_ms, "data/copy": 0.0, "callbacks": 0.0}
        # Lightning broadcasts a flag on every batch.
        broadcast = {"data/comm": 0.0} if devices > 1 else {}
        assert measured["parts of data"] == [{**parts, **broadcast}] * 3
        assert measured["hooks"] == 0
        assert measured["wrapped"] == (strategy != "auto")
        # Only rank zero compares, and only if there are other ranks.
        sentence, logged = (SENTENCE, LOGGED) if devices > 1 and rank == 0 else (None, {})
        assert measured["sentence"] == sentence
        assert {key: measured["logged"].get(key) for key in logged} == logged
        assert bool(measured["logged"]) == bool(logged)
