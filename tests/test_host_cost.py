"""Python calls per step, against the recorded bounds."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RECORDED = json.loads((BENCHMARKS / "host_bounds.json").read_text())


@pytest.fixture(scope="module")
def counted() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        # Compiled code of this process keeps hooks on.
        patch.setattr("lightning_gputime._session.hooks_off.has_compiled", lambda: False)
        patch.syspath_prepend(str(BENCHMARKS))
        return runpy.run_path(str(BENCHMARKS / "host_counts.py"))["count_all"]()


@pytest.mark.filterwarnings("ignore")  # of the Trainer, of how it is asked to train
@pytest.mark.parametrize("way", RECORDED)
def test_no_step_makes_more_calls_than_are_recorded(counted: Any, way: str) -> None:
    print(f"{way}: {counted[way]}, recorded {RECORDED[way]}")
    assert [*counted] == [*RECORDED]
    assert counted[way].keys() == RECORDED[way].keys()
    assert all(counted[way][kind] <= bound for kind, bound in RECORDED[way].items())
