"""Ranks that agree on how many of their steps are timed."""

import time

import pytest
from torch._C._distributed_c10d import HashStore

from lightning_gputime._session.rank_comparer import Exchange


@pytest.fixture
def agreements(monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    """Those of three ranks."""
    path = "lightning_gputime._session.rank_comparer._AGREEMENT_TIMEOUT_S"
    monkeypatch.setattr(path, 0.01)
    store = HashStore()
    return [Exchange(store, rank, 3) for rank in range(3)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_ranks_do_what_rank_zero_wishes(
    agreements: list[Exchange], order: tuple[int, ...]
) -> None:
    def turn(*wishes: int) -> list[int]:
        return [agreements[rank].agree([wishes[rank]])[0] for rank in order]

    assert turn(4, 8, 3) == [1, 1, 1]
    assert turn(2, 9, 4) == [4, 4, 4]
    assert turn(9, 1, 1) == [2, 2, 2]


def test_a_rank_without_a_timer_is_waited_for_by_nobody(agreements: list[Exchange]) -> None:
    zero, one, _ = agreements
    assert [one.agree([7]), zero.agree([5, 90, 10])] == [[1], [1]]
    assert [[zero.agree([3]), one.agree([2])] for _ in range(2)] == [
        [[5, 90, 10], [5, 90, 10]],
        [[3], [3]],
    ]


def test_rank_zero_alone_does_what_it_wishes(agreements: list[Exchange]) -> None:
    assert [agreements[0].agree([7]) for _ in range(3)] == [[1], [7], [7]]


def test_nobody_waits_longer_than_a_collective_may_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = list[float]()

    def wait(store: object, keys: list[str], deadline: float) -> list[str]:
        waits.append(deadline - time.monotonic())
        return []

    monkeypatch.setattr("lightning_gputime._session.rank_comparer.wait_for", wait)
    alone = Exchange(HashStore(), 1, 2, timeout_s=0.3)
    assert [alone.agree([7]) for _ in range(3)] == [[1], [1], [1]]
    assert waits == [pytest.approx(0.3, abs=0.1)]


def test_a_rank_that_is_left_alone_says_so_once(
    agreements: list[Exchange], caplog: pytest.LogCaptureFixture
) -> None:
    assert [agreements[1].agree([7]) for _ in range(5)] == [[1]] * 5
    assert len(caplog.messages) == 1
    assert "no longer agree" in caplog.text
    assert "On this one all are: give" in caplog.text
    assert "or this one sync_ranks=False" in caplog.text
