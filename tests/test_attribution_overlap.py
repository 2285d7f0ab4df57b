"""The test of overlap: shares of planted causes, and no cause by chance."""

from typing import Any

import numpy as np
import pytest

from lightning_gputime._attribution.overlap import Candidate, attribute
from lightning_gputime._attribution.surroundings import _excess

STEPS = 600


def noise(random: np.random.Generator, correlation: float) -> Any:
    """Return standard noise whose neighbors correlate."""
    values = random.normal(size=STEPS)
    for i in range(1, STEPS):
        values[i] += correlation * values[i - 1]
    return values / values.std()


def excess(random: np.random.Generator, correlation: float = 0.0) -> Any:
    """Return the excess of slow steps: 1 of 15 steps, more and less."""
    is_slow = noise(random, correlation) > 1.5
    return is_slow * random.lognormal(size=STEPS)


def unrelated(random: np.random.Generator) -> list[Candidate]:
    """Return bursts, periodic events, rare events and a slowly changing value."""
    numbers = np.arange(STEPS)
    return [
        Candidate("bursts", (noise(random, 0.95) > 1.0).astype(float)),
        Candidate("periodic", ((numbers + random.integers(37)) % 37 < 3).astype(float)),
        Candidate("rare", random.poisson(0.05, STEPS).astype(float)),
        Candidate("drift", np.exp(noise(random, 0.98))),
        Candidate("value", random.lognormal(size=STEPS)),
    ]


@pytest.mark.parametrize("correlation", [0.0, 0.8, 0.95])
def test_candidates_that_coincide_by_chance_are_not_named(correlation: float) -> None:
    random = np.random.default_rng(1)
    runs = 40
    false_alarms = sum(
        bool(attribute(excess(random, correlation), unrelated(random))) for _ in range(runs)
    )
    assert false_alarms <= 1


@pytest.mark.parametrize(
    "is_exposed",
    [np.arange(STEPS) % 50 < 3, np.arange(STEPS) // 100 == 3],
    ids=["every 50 steps", "once, for 100 steps"],
)
def test_share_of_a_cause_is_within_its_interval_and_ten_points(is_exposed: Any) -> None:
    random = np.random.default_rng(2)
    for _ in range(10):
        others_ms = excess(random)
        all_ms = others_ms + is_exposed * random.normal(10.0, 2.0, STEPS)
        truth = 1 - others_ms.sum() / all_ms.sum()
        cause = Candidate("save", is_exposed.astype(float), place="train.py:12")
        [found] = attribute(all_ms, [*unrelated(random), cause])
        assert found.candidate is cause
        assert found.low <= truth <= found.high
        assert found.share == pytest.approx(truth, abs=0.1)
        assert found.exposed == is_exposed.mean()


def test_two_causes_get_shares_that_do_not_overlap() -> None:
    random, numbers = np.random.default_rng(3), np.arange(STEPS)
    save, load = (numbers % 50 < 3).astype(float), (numbers % 40 == 17).astype(float)
    all_ms = 9.0 * save + 9.0 * load * (save == 0.0)
    found = attribute(all_ms, [Candidate("save", save), Candidate("load", load)])
    assert [each.candidate.name for each in found] == ["save", "load"]
    assert sum(each.share for each in found) == pytest.approx(1.0, abs=0.05)
    # Of two that are alike, the first is named.
    alike = [Candidate(name, save + 0.01 * noise(random, 0.0)) for name in ("first", "second")]
    assert [each.candidate.name for each in attribute(9.0 * save, alike)] == ["first"]


def test_threshold_of_a_value_separates_the_slow_steps() -> None:
    random = np.random.default_rng(4)
    tokens = random.integers(1000, 8000, STEPS).astype(float)
    slow_ms = np.where(tokens > 6500, tokens / 1000, 0.0)
    [found] = attribute(slow_ms, [Candidate("tokens", tokens)])
    assert 6000 < found.threshold < 7000
    assert found.share > 0.9


@pytest.mark.parametrize(
    ("n", "exposed", "others_ms", "is_named"),
    [
        (48, range(7, 48, 8), 0.0, False),
        (55, range(7, 55, 8), 0.0, True),  # 50 steps or more.
        (600, range(9, 600, 150), 0.0, False),
        (600, range(9, 600, 110), 0.0, True),  # 5 slow steps or more.
        (600, [*range(100, 104), *range(300, 304)], 0.0, False),
        (600, [*range(100, 104), *range(300, 304), *range(500, 504)], 0.0, True),  # 3 episodes.
        (600, range(300, 318), 0.0, False),
        (600, range(300, 322), 0.0, True),  # Or 20 slow steps in one.
        # Other steps are slow, too: the candidate has 8 % of the excess, then 12 %.
        (2000, range(49, 2000, 50), 2.0, False),
        (2000, range(49, 2000, 50), 1.4, True),
    ],
)
def test_cause_is_named_from_each_threshold_on(
    n: int, exposed: Any, others_ms: float, is_named: bool
) -> None:
    is_exposed = np.isin(np.arange(n), [*exposed])
    is_slow = np.random.default_rng(6).random(n) < 0.1
    excess_ms = np.where(is_exposed, 1.0, is_slow * others_ms)
    found = attribute(excess_ms, [Candidate("save", is_exposed.astype(float))])
    assert bool(found) == is_named


def test_few_slow_steps_or_one_coincidence_are_no_evidence() -> None:
    once = np.zeros(STEPS)
    once[300:306] = 50.0
    assert attribute(once, [Candidate("hiccup", (once > 0.0).astype(float))]) == []
    assert attribute(once[:40], [Candidate("hiccup", once[:40])]) == []
    constant, unknown = np.ones(STEPS), np.full(STEPS, np.nan)
    random = np.random.default_rng(5)
    assert attribute(excess(random), [Candidate("a", constant), Candidate("b", unknown)]) == []


@pytest.mark.parametrize(
    ("slow", "n_slow"),
    [
        (range(900, 1000), 100),  # It lasts for less than half of 250 steps.
        (range(1900, 2000), 0),  # Steps that stay long are a slowdown.
        (range(7, 2000, 12), 167),
        (range(0), 0),
    ],
)
def test_slow_steps_are_longer_than_before_and_after_them(slow: range, n_slow: int) -> None:
    all_ms = np.random.default_rng(0).normal(10.0, 0.1, 2000)
    all_ms[slow] += 5.0
    excess_ms = _excess(all_ms)
    assert np.count_nonzero(excess_ms) == n_slow
    assert np.count_nonzero(excess_ms[slow]) == n_slow
