"""Python calls per step stay within the recorded bounds."""

import json
from typing import Any

import host_counts
import pytest

RECORDED = json.loads(host_counts.BOUNDS.read_text())


@pytest.fixture(scope="module")
def counted() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        # Ignore code that other tests compiled, which would keep hooks attached.
        patch.setattr("lightning_gputime._session.session.has_compiled", lambda: False)
        return host_counts.count_all()


@pytest.mark.filterwarnings("ignore")  # The Trainer warns about its options.
@pytest.mark.parametrize("loop", RECORDED)
def test_steps_make_no_more_calls_than_recorded(counted: Any, loop: str) -> None:
    print(f"{loop}: {counted[loop]}, recorded {RECORDED[loop]}")
    assert [*counted] == [*RECORDED]
    assert counted[loop].keys() == RECORDED[loop].keys()
    assert all(counted[loop][kind] <= bound for kind, bound in RECORDED[loop].items())
