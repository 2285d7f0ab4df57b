"""Python calls per step stay within the recorded bounds."""

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
        # Ignore code that other tests compiled, which would keep hooks attached.
        patch.setattr("lightning_gputime._session.session.has_compiled", lambda: False)
        patch.syspath_prepend(str(BENCHMARKS))
        return runpy.run_path(str(BENCHMARKS / "host_counts.py"))["count_all"]()


@pytest.mark.filterwarnings("ignore")  # The Trainer warns about its options.
@pytest.mark.parametrize("loop", RECORDED)
def test_steps_make_no_more_calls_than_recorded(counted: Any, loop: str) -> None:
    print(f"{loop}: {counted[loop]}, recorded {RECORDED[loop]}")
    assert [*counted] == [*RECORDED]
    assert counted[loop].keys() == RECORDED[loop].keys()
    assert all(counted[loop][kind] <= bound for kind, bound in RECORDED[loop].items())
