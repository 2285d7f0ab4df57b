"""Two real processes, rank 1 is late: the times show how long rank 0 waits."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from processes import finish, start
from wait_fits import LATE_IN_FIT
from wait_ways import LATE_MS, PLACES, STEPS, WARMUP, WAYS

from lightning_gputime._measurement.ranks import PhaseTotals

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "wait_run.py"
RANKS = range(2)
LATE_IN = {
    "third layer": "forward",
    "callback": "callbacks",
    "loader": "data",
}
"""The phase of each place, where it is not called so."""


SAID = {"callback": "callbacks", "loader": "data/fetch"}
"""The part of it that is reported."""


def without_compute(slowest: int | None, where: str) -> tuple[int | None, str]:
    """Report a phase in which ranks wait as its `compute`."""
    return slowest, where.removesuffix(" compute")


class Runs:
    """Results of both processes, in one or several attempts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.attempt = cache(self._attempt)

    def _attempt(self, *case: str | int) -> list[dict[str, Any]]:
        directory = self.directory / "_".join(map(str, case))
        directory.mkdir()
        finish(*(start(SCRIPT, directory, rank, *case[:1]) for rank in RANKS))
        return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in RANKS]

    def found(self, case: str, attempt: int) -> list[dict[str, Any]]:
        """Return the results of each rank. All cases run together first, then separately."""
        ranks = self.attempt(case, attempt) if attempt else self.attempt("all")
        return [found[case] for found in ranks]

    def totals(self, case: str, attempt: int) -> dict[int, PhaseTotals]:
        """The totals of each rank, as they are gathered to be compared."""
        return dict(enumerate(found["totals"] for found in self.found(case, attempt)))

    def said(self, case: str, attempt: int) -> tuple[int | None, str]:
        """The rank that is slow, and the end of what rank zero says of it."""
        told = self.found(case, attempt)[0]
        return told["slowest_rank"], told["sentence"].partition("of the others, in ")[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("ranks"))


def waited(totals: PhaseTotals) -> float:
    """Return the wait of a rank for others, in ms per step."""
    steps = totals["step"][1]
    return sum(ms / steps for name, (ms, _) in totals.items() if name.endswith("/comm"))


def local(totals: PhaseTotals) -> dict[str, float]:
    """The time of each phase a step, and of the step, without the waits."""
    steps = totals["step"][1]
    own = {name: ms / steps for name, (ms, _) in totals.items() if "/" not in name}
    for name, (ms, _) in totals.items():
        if name.endswith("/comm"):
            own[name.partition("/")[0]] -= ms / steps
    own["step"] -= waited(totals)
    return own


def longest_in(early: dict[str, float], late: dict[str, float]) -> str:
    """The phase in which one rank is longer than another by most."""
    names = {*early, *late} - {"step"}
    return max(names, key=lambda name: late.get(name, 0.0) - early.get(name, 0.0))


CASES = [(way, place) for way in WAYS for place in PLACES if place != "nobody"]
FITS = [("Lightning", place) for place in LATE_IN_FIT if place != "nobody"]


@pytest.mark.parametrize(("way", "place"), [*CASES, *FITS])
def test_early_rank_waits_and_late_rank_is_longer_where_it_is_late(
    runs: Runs, way: str, place: str
) -> None:
    phase = LATE_IN.get(place, place)
    expected = (True, True, phase, 1, SAID.get(place, phase))
    # These are real times: what else the machine does can spoil them, but not every time.
    for attempt in range(4):
        of_ranks = runs.totals(f"{way} {place}", attempt)
        early, late = (local(of_ranks[rank]) for rank in RANKS)
        found = (
            waited(of_ranks[0]) >= 20.0,
            late["step"] - early["step"] == pytest.approx(LATE_MS, rel=0.5),
            longest_in(early, late),
            *without_compute(*runs.said(f"{way} {place}", attempt)),
        )
        if found == expected:
            break
    assert found == expected, of_ranks


@pytest.mark.parametrize("way", [*WAYS, "Lightning"])
def test_balanced_ranks_take_equally_long(runs: Runs, way: str) -> None:
    for attempt in range(4):
        of_ranks = runs.totals(f"{way} nobody", attempt)
        assert all(totals["step"][1] == STEPS - WARMUP for totals in of_ranks.values())
        early, late = (local(of_ranks[rank])["step"] for rank in RANKS)
        named = runs.said(f"{way} nobody", attempt)
        if abs(late - early) < LATE_MS / 3 and named == (None, ""):
            break
    assert abs(late - early) < LATE_MS / 3, of_ranks
    assert named == (None, "")


@pytest.mark.parametrize("way", ["FSDP2", "TP"])
def test_gradients_and_weights_are_bitwise_the_same_on_every_rank(runs: Runs, way: str) -> None:
    assert [found[f"{way} is bitwise"] for found in runs.attempt("all")] == [True, True]


def test_nothing_is_left_on_the_classes_of_torch(runs: Runs) -> None:
    assert [found["nothing is left"] for found in runs.attempt("all")] == [True, True]
