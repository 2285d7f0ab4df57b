"""Ranks that agree on how many of their steps are timed."""

import time
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore

from lightning_gputime._session.ranks import Agreement


@pytest.fixture
def agreements(monkeypatch: pytest.MonkeyPatch) -> list[Agreement]:
    """Return the agreements of three ranks."""
    monkeypatch.setattr("lightning_gputime._session.ranks._AGREEMENT_TIMEOUT_S", 0.01)
    store = HashStore()
    return [Agreement(store, rank) for rank in range(3)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_ranks_follow_the_previous_request_of_rank_zero(
    agreements: list[Agreement], order: tuple[int, ...]
) -> None:
    def agree(*requests: int) -> list[int]:
        return [agreements[rank].agree([requests[rank]])[0] for rank in order]

    assert agree(4, 8, 3) == [1, 1, 1]
    assert agree(2, 9, 4) == [4, 4, 4]
    assert agree(9, 1, 1) == [2, 2, 2]


def test_agreement_does_not_wait_for_a_rank_without_a_timer(agreements: list[Agreement]) -> None:
    zero, first, _ = agreements
    assert [first.agree([7]), zero.agree([5, 90, 10])] == [[1], [1]]
    assert [[zero.agree([3]), first.agree([2])] for _ in range(2)] == [
        [[5, 90, 10], [5, 90, 10]],
        [[3], [3]],
    ]


def test_single_rank_follows_its_request_one_call_later(agreements: list[Agreement]) -> None:
    assert [agreements[0].agree([7]) for _ in range(3)] == [[1], [7], [7]]


def test_agreement_waits_at_most_a_third_of_the_timeout_of_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = list[float]()

    def wait(store: object, keys: list[str], deadline: float) -> list[str]:
        waits.append(deadline - time.monotonic())
        return []

    monkeypatch.setattr("lightning_gputime._session.ranks.wait_for", wait)
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.9))
    alone = Agreement(store, 1)
    assert [alone.agree([7]) for _ in range(3)] == [[1], [1], [1]]
    assert waits == [pytest.approx(0.3, abs=0.1)]


def test_rank_warns_once_if_others_do_not_answer(
    agreements: list[Agreement], caplog: pytest.LogCaptureFixture
) -> None:
    assert [agreements[1].agree([7]) for _ in range(5)] == [[1]] * 5
    assert len(caplog.messages) == 1
    assert "no longer agree" in caplog.text
    assert "This rank times every step from now on, so the ranks" in caplog.text
    assert "or pass sync_ranks=False" in caplog.text
