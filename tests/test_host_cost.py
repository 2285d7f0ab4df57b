"""What a step costs the host, counted: no more than what is recorded."""

import json
import platform
import runpy
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RECORDED = json.loads((BENCHMARKS / "host_bounds.json").read_text())

# What is counted is the same each time, but for what is read now and then.
ROOM = 1.005


@pytest.fixture(scope="module")
def counted() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return runpy.run_path(str(BENCHMARKS / "host_counts.py"))["count_all"]()


@pytest.mark.filterwarnings("ignore")  # of the Trainer, of how it is asked to train
@pytest.mark.parametrize("way", RECORDED["step"])
def test_no_step_costs_more_than_is_recorded(counted: Any, way: str) -> None:
    bound, found = RECORDED["step"][way], counted[way]
    print(f"{way}: {found}, recorded {bound}")
    assert found["functions"] <= bound["functions"] * ROOM
    # Another Python has other instructions.
    if platform.python_version().startswith(RECORDED["python"] + "."):
        assert found["instructions"] <= bound["instructions"] * ROOM
    assert [*counted] == [*RECORDED["step"]]
