"""Comparison of ranks, and the exchange of their times."""

import json
import math
import pickle
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import STEP_MS, FakeGPU, raw, steps
from fake_loop import Logger, Loop, hooks, timed_indices
from processes import finish, run, start
from torch._C._distributed_c10d import HashStore

from lightning_gputime import GPUPhaseHooks
from lightning_gputime._measurement.ranks import (
    BatchMeans,
    PhaseTotals,
    RankSummary,
    RankTotals,
    compare,
    since,
    totals_of,
)
from lightning_gputime._measurement.sums import Sums
from lightning_gputime._session.ranks import Agreement, Exchange

SCRIPT = Path(__file__).parent / "rank_run.py"

BALANCED = {"data": 1.0, "forward": 4.0, "backward": 8.0, "optimizer": 2.0}
SLOWER = "slower than the median of the others, in"


def totals(
    steps: int = 10, comm: float = 0.0, late: str = "", late_ms: float = 3.0, **more: Any
) -> RankTotals:
    """Return the totals of a rank that waits `comm` ms, and is slower in the phase `late`."""
    ms = {name: base + (late_ms if name == late else 0.0) for name, base in BALANCED.items()}
    ms["backward"] += comm
    all_ms = {**ms, "step": sum(ms.values()), "backward/comm": comm}
    return RankTotals({name: (ms * steps, steps) for name, ms in all_ms.items()}, **more)


def with_phases(totals: RankTotals, phases: PhaseTotals) -> RankTotals:
    return replace(totals, phases={**totals.phases, **phases})


def compared(totals: Iterable[RankTotals]) -> RankSummary:
    """Compare ranks that are numbered from 0."""
    ranks = compare(dict(enumerate(totals)))
    assert ranks is not None
    return ranks


def steps_of(totals: Iterable[RankTotals]) -> list[int]:
    return [rank_totals.steps for rank_totals in totals]


# The comparison


@pytest.mark.parametrize(
    ("phase", "named", "max_ms", "slowest"),
    [
        ("data", "data", 4.0, 1),
        ("forward", "forward", 7.0, 1),
        # All ranks took as long in backward: rank 1 computed while the others waited.
        ("backward", "backward compute", 11.5, 0),
        ("optimizer", "optimizer", 5.0, 1),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_slowest_rank_and_its_phase_are_named(
    phase: str, named: str, max_ms: float, slowest: int, world_size: int
) -> None:
    on_time, late = totals(comm=3.5), totals(comm=0.5, late=phase)
    ranks = compared([on_time, late, *[on_time] * (world_size - 2)])
    assert ranks.slowest_rank == 1
    assert ranks.behind_median_ms == pytest.approx(3.0)
    assert ranks.sentence == f"rank 1 is 3 ms per step {SLOWER} {named}"
    assert ranks.rows["step"].min_ms == pytest.approx(18.5)
    assert ranks.rows["step"].max_ms == pytest.approx(18.5)
    assert ranks.rows["backward/comm"].min_ms == pytest.approx(0.5)
    assert ranks.rows["local"].max_ms == pytest.approx(18.0)
    assert ranks.rows["local"].slowest_rank == 1
    assert {*ranks.rows} == {*BALANCED, "backward/comm", "step", "local"}
    assert (ranks.rows[phase].max_ms, ranks.rows[phase].slowest_rank) == (max_ms, slowest)


NOISE: Any = {"steps": 40, "deviation_ms": 0.2422 * math.sqrt(40)}
"""Noise for which 1.370 ms are four standard errors of the difference between two ranks."""


@pytest.mark.parametrize(
    ("options", "world_size", "late_ms", "slowest"),
    [
        # 5 % of the 15 ms that the step of the other ranks takes.
        ({}, 4, 0.74, None),
        ({}, 4, 0.76, 1),
        # Four standard errors.
        (NOISE, 2, 1.36, None),
        (NOISE, 2, 1.38, 1),
        # The noise of a single step is unknown.
        ({"steps": 1}, 2, 3.0, None),
    ],
)
def test_rank_is_named_from_five_percent_and_four_standard_errors(
    options: dict[str, Any], world_size: int, late_ms: float, slowest: int | None
) -> None:
    on_time, late = totals(**options), totals(**options, late="forward", late_ms=late_ms)
    ranks = compared([on_time, late, *[on_time] * (world_size - 2)])
    assert ranks.slowest_rank == slowest
    assert bool(ranks.sentence) == (slowest is not None)
    assert ranks.metrics()["slowest_rank"] == (-1 if slowest is None else slowest)


@pytest.mark.parametrize(
    ("late_ms", "named"),
    [
        ([3.0] + 15 * [0.0], "rank 0 is"),
        ([0.0] * 6 + [2.8, 3.0], "ranks 6, 7 are up to"),
        ([0.0] * 16 + [3.0] * 16, "ranks 16, 17, 18, 19, 20, 21, 22, 23 and 8 more are up to"),
        ([0.0] * 12 + [1.4, 1.4, 3.0, 1.4], "rank 14 is"),
        ([0.0, 3.0], "rank 1 is"),
    ],
    ids=["one worker", "last of 4 stages", "last of 2 stages", "others half as slow", "two ranks"],
)
def test_equally_slow_ranks_are_named_together(late_ms: list[float], named: str) -> None:
    ranks = compared(totals(late="forward", late_ms=ms) for ms in late_ms)
    assert ranks.sentence == f"{named} 3 ms per step {SLOWER} forward"
    assert ranks.slow == tuple(rank for rank, ms in enumerate(late_ms) if ms > 2)
    assert ranks.slowest_rank == late_ms.index(3.0)


# Noise: the standard error of the mean of n steps is their deviation divided by sqrt(n).


def test_noise_is_measured_on_the_local_time() -> None:
    local = BatchMeans()
    assert local.deviation_ms == 0.0
    labels, host_ns = ("data", "forward", "<waits>", "<continues>"), (0, 1, 2, 3, 4)
    for ms in [(1.0, 2.0, 40.0, 1.0), (1.0, 2.0, 0.0, 4.0), (2.0, 2.0, 9.0, 2.0)]:
        local.add([raw(0)._replace(labels=labels, device_ms=ms, host_ns=host_ns)])
    # The local times are 4, 7 and 6 ms. The estimate assumes that 10 successive steps are
    # correlated, and doubles a deviation of only three values.
    assert local.deviation_ms == pytest.approx(statistics.stdev([4, 7, 6]) * math.sqrt(10) * 2)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_noise_of_correlated_steps_is_not_underestimated(correlation: float) -> None:
    chance, local, ms = random.Random(0), BatchMeans(), 0.0
    for _ in range(5000):
        ms = correlation * ms + chance.gauss(0.0, math.sqrt(1 - correlation**2))
        local.take(ms)
    expected = math.sqrt((1 + correlation) / (1 - correlation))
    assert expected <= local.deviation_ms <= 3 * expected
    assert len(local._means_ms) < 64


@pytest.mark.parametrize(
    ("slow_steps", "more_ms"),
    [
        # Both ranks are slow for 100 steps at a time: one in half of the steps, one in a quarter.
        (({*range(100), *range(200, 300)}, {*range(100, 200)}), 4.0),
        # A single stall on one rank.
        (({307}, set()), 400.0),
    ],
)
def test_rank_that_is_slow_in_some_of_the_steps_is_not_named(
    slow_steps: tuple[set[int], set[int]], more_ms: float
) -> None:
    def rank(slow: set[int]) -> RankTotals:
        local = BatchMeans()
        steps = [raw(i, forward=10.0 + more_ms * (i in slow)) for i in range(400)]
        local.add(steps)
        return totals_of(Sums(steps), local.deviation_ms)

    ranks = compared(map(rank, slow_steps))
    assert ranks.behind_median_ms == pytest.approx(1.0)
    assert ranks.slowest_rank is None
    assert ranks.suspect == 0
    assert ranks.error_ms is not None
    assert ranks.behind_median_ms < 4 * ranks.error_ms


def totals_with(**phases_ms: float) -> RankTotals:
    """Return totals with given times of some phases. `data__fetch` means `data/fetch`."""
    names = {name.replace("__", "/"): (10 * ms, 10) for name, ms in phases_ms.items()}
    phases = {**totals().phases, **names}
    step_ms = sum(ms for name, (ms, _) in phases.items() if "/" not in name and name != "step")
    return RankTotals({**phases, "step": (step_ms, 10)})


DATA_PARTS = totals_with(data=1.25, data__fetch=0.5, data__copy=0.25, data__comm=0.5)


@pytest.mark.parametrize(
    ("usual", "late", "named"),
    [
        (
            DATA_PARTS,
            totals_with(data=6.0, data__fetch=5.0, data__copy=0.5, data__comm=0.5),
            "data/fetch",
        ),
        (
            DATA_PARTS,
            totals_with(data=6.4, data__fetch=3.0, data__copy=2.9, data__comm=0.5),
            "data/copy",
        ),
        (totals_with(), totals_with(callbacks=5.0), "callbacks"),
        (
            totals_with(forward__comm=0.0),
            totals_with(forward=7.0, forward__comm=0.0),
            "forward compute",
        ),
    ],
)
def test_slowest_part_excludes_waits(usual: RankTotals, late: RankTotals, named: str) -> None:
    ranks = compared([usual, late])
    assert ranks.slowest_rank == 1
    assert named.startswith(ranks.phase)
    assert ranks.sentence.endswith(f"{SLOWER} {named}")


def test_rank_means_of_a_phase_are_over_the_steps_in_which_it_ran() -> None:
    often = with_phases(totals(), {"save": (20.0, 10)})
    seldom = with_phases(totals(), {"save": (6.0, 1)})
    row = compared([often, seldom, totals()]).rows["save"]
    assert (row.min_ms, row.max_ms, row.slowest_rank) == (2.0, 6.0, 1)
    assert row.mean_ms == pytest.approx(26 / 11)


def test_wait_in_a_nested_module_is_not_local_time() -> None:
    names = ("step", "forward", "forward/body", "forward/body/comm")
    ranks = compared(RankTotals(dict.fromkeys(names, (ms, 1))) for ms in (8.0, 9.0))
    assert ranks.rows["local"].max_ms == 0.0


def test_rank_without_steps_is_left_out() -> None:
    empty = RankTotals({"step": (0.0, 0)})
    assert compared([totals(), empty, totals(), RankTotals({})]).ranks == (0, 2)
    assert compare({0: empty}) is None


def test_window_is_the_difference_of_two_totals() -> None:
    before, now = totals(steps=4), with_phases(totals(steps=10), {"save": (3.0, 1)})
    window = since(now, before)
    assert window.phases["forward"] == (24.0, 6)
    assert window.phases["save"] == (3.0, 1)
    assert since(now, now).phases == {}
    assert since(now, None) is now


# The exchange of totals, from all ranks to rank zero


def exchanges(world_size: int, timeout_s: float = 30.0) -> list[Exchange]:
    store = HashStore()
    return [Exchange(store, rank, world_size, timeout_s=timeout_s) for rank in range(world_size)]


class HostTime:
    """Replaces the module `time`: `sleep` advances the time, and makes the calls that are due."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        while self._due and self._due[0][0] <= self.now_s:
            self._due.pop(0)[1]()

    def call_at(self, seconds: float, call: Callable[[], object]) -> None:
        self._due.append((seconds, call))


@pytest.fixture
def host_time(monkeypatch: pytest.MonkeyPatch) -> HostTime:
    """The clock of waits in rank zero."""
    host_time = HostTime()
    monkeypatch.setattr("lightning_gputime._session.ranks.time", host_time)
    return host_time


def send(n: int, *ranks: Exchange) -> None:
    """Send the totals of the first n steps."""
    for exchange in ranks:
        exchange.send(totals(steps=n), n)


def gather(zero: Exchange, *, wait: bool = False) -> list[dict[int, int]]:
    """Return the number of steps by rank, for each complete comparison."""
    return [
        {rank: rank_totals.steps for rank, rank_totals in by_rank.items()}
        for _, by_rank in zero.arrived(wait=wait)
    ]


def test_no_rank_waits_for_another_during_training(host_time: HostTime) -> None:
    zero, first, second = exchanges(3)
    send(1, first)
    send(3, zero)
    assert gather(zero) == []
    send(2, second)
    # Two more windows of a rank that is ahead do not enter the current comparison.
    send(4, first)
    send(5, first)
    send(7, zero)
    assert gather(zero) == [{0: 3, 1: 1, 2: 2}]
    assert gather(zero) == []
    send(6, second)
    assert [number for number, _ in zero.arrived(wait=False)] == [7]
    assert not zero.is_waiting
    assert host_time.now_s == 0.0


def test_rank_zero_waits_for_late_ranks_at_the_end(host_time: HostTime) -> None:
    zero, first, second = exchanges(3)
    send(1, first, zero)
    host_time.call_at(0.2, lambda: send(2, second))
    assert gather(zero, wait=True) == [{0: 1, 1: 1, 2: 2}]
    assert host_time.now_s == pytest.approx(0.2)


def test_rank_zero_waits_once_for_absent_ranks_and_names_them_once(
    host_time: HostTime, caplog: pytest.LogCaptureFixture
) -> None:
    zero, first, *_ = exchanges(4, timeout_s=0.1)
    send(10, first, zero, first, zero)
    assert gather(zero, wait=True) == [{0: 10, 1: 10}] * 2
    assert host_time.now_s == pytest.approx(0.1)
    assert caplog.messages == [
        "The times of these ranks did not arrive, and are left out until they do: 2, 3. Attach the"
        " same timers on all ranks, in the same order, and run the same number of steps."
    ]


def test_late_rank_takes_part_again_when_it_has_caught_up(
    host_time: HostTime, caplog: pytest.LogCaptureFixture
) -> None:
    zero, first, second = exchanges(3)
    for n in range(1, 7):
        send(n, first, zero)
    # Rank zero leaves out the missing rank once it is five comparisons ahead. It then expects the
    # rank in a comparison only if the rank has sent the times of the previous comparison.
    assert gather(zero) == [{0: n, 1: n} for n in range(1, 7)]
    for n in range(1, 8):
        send(n, second)
    send(7, first, zero)
    assert gather(zero) == [{0: 7, 1: 7, 2: 7}]
    assert caplog.text.count("did not arrive") == 1
    assert host_time.now_s == 0.0


def test_rank_that_runs_far_ahead_loses_no_window() -> None:
    zero, first = exchanges(2)
    for n in range(1, 11):
        send(n, first)
    for n in range(1, 11):
        send(10, zero)
        assert gather(zero) == [{0: 10, 1: n}]


def test_rank_zero_waits_less_than_the_timeout_of_a_collective(host_time: HostTime) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    zero = Exchange(store, 0, 2)
    send(10, zero)
    assert gather(zero, wait=True) == [{0: 10}]
    assert 0.1 <= host_time.now_s < 0.3


def test_exchange_deletes_old_windows() -> None:
    _, first = exchanges(2)
    for _ in range(15):
        send(10, first)
    is_kept = [first._store.check([f"{window}/1"]) for window in range(15)]
    assert is_kept == [False] * 5 + [True] * 10


# The comparison in a timer


class FakeExchange:
    """The exchange of rank zero. It computes the totals of each other rank from those of rank 0."""

    def __init__(self, *others: Callable[[RankTotals], RankTotals]) -> None:
        self.others: tuple[Callable[[RankTotals], RankTotals], ...] = others
        self.sent: list[RankTotals] = []
        self.on_send: Callable[[], None] = lambda: None
        self.is_late = False  # True while the other ranks have not sent their times.
        self.open: list[tuple[int, RankTotals]] = []
        self.waits: list[bool] = []

    @property
    def is_waiting(self) -> bool:
        return bool(self.open)

    def send(self, own: RankTotals, number: int) -> None:
        self.on_send()
        self.sent.append(own)
        self.open.append((number, own))

    def arrived(self, *, wait: bool) -> Iterator[tuple[int, dict[int, RankTotals]]]:
        self.waits.append(wait)
        while self.open and (wait or not self.is_late):
            number, own = self.open.pop(0)
            others = {rank: other(own) for rank, other in enumerate(self.others, start=1)}
            yield number, {0: own, **others}


def slower_forward(own: RankTotals) -> RankTotals:
    names = [name for name in ("forward", "step") if name in own.phases]
    more_ms = 3.0 * own.steps
    slower = {name: (own.phases[name][0] + more_ms, own.phases[name][1]) for name in names}
    return with_phases(own, slower)


@pytest.fixture
def exchange(monkeypatch: pytest.MonkeyPatch) -> FakeExchange:
    fake = FakeExchange(slower_forward)
    monkeypatch.setattr("lightning_gputime._session.ranks.open_exchange", lambda: fake)
    return fake


class RankLogger(Logger):
    def rank_logs(self) -> list[tuple[int, dict[str, float]]]:
        return [call for call in self.calls if any("/ranks/" in key for key in call[1])]


def train(
    loop: Loop,
    *epochs: int,
    after_step: Callable[[int, GPUPhaseHooks], object] = lambda number, timer: None,
    **options: Any,
) -> GPUPhaseHooks:
    """Train epochs of some steps each, and return the timer."""
    with hooks(loop, **options) as timer:
        for epoch in epochs:
            for number, x in enumerate(timer.steps(loop.batches(epoch))):
                loop.train(x)
                after_step(number, timer)
    return timer


def slowest_rank(timer: GPUPhaseHooks) -> int | None:
    ranks = timer.summary().ranks
    assert ranks is not None
    return ranks.slowest_rank


def test_ranks_are_compared_when_an_epoch_ends(loop: Loop, exchange: FakeExchange) -> None:
    logger = RankLogger()
    timer = train(loop, 5, 5, logger=logger, log="all", log_every_n_steps=2)
    assert steps_of(exchange.sent) == [5, 10, 10]
    (first, metrics), (second, _) = logger.rank_logs()
    assert (first, second) == (4, 9)
    assert metrics["phase_time/ranks/forward_min_ms"] == pytest.approx(4.0)
    assert metrics["phase_time/ranks/forward_max_ms"] == pytest.approx(7.0)
    assert metrics["phase_time/ranks/slowest_rank"] == 1
    summary = timer.summary()
    sentence = f"rank 1 is 3 ms per step {SLOWER} forward"
    assert str(summary).endswith(sentence)
    assert sentence in summary._repr_html_()
    assert "4.000 - 7.000 (1)" in str(summary)
    assert json.loads(json.dumps(summary.to_dict()))["ranks"]["rows"]["forward"]["max_ms"] == 7.0


def test_ranks_are_compared_when_late_totals_arrive(loop: Loop, exchange: FakeExchange) -> None:
    def after_step(number: int, timer: GPUPhaseHooks) -> None:
        exchange.is_late = number < 10
        if number == 10:
            assert logger.rank_logs() == []
            assert slowest_rank(timer) == 1
            # The first comparison is of step 3, but loggers refuse decreasing step numbers.
            assert [step for step, _ in logger.rank_logs()] == [7, 7]

    logger, exchange.is_late = RankLogger(), True
    options: dict[str, Any] = {"sync_ranks": "log", "logger": logger, "log_every_n_steps": 4}
    train(loop, 13, after_step=after_step, **options)
    assert exchange.waits.count(True) == 1
    assert exchange.waits[-1]


@pytest.mark.parametrize(("log", "is_logged"), [("all", True), ("phases", False)])
def test_end_of_training_waits_for_other_ranks_only_if_they_are_logged(
    loop: Loop, exchange: FakeExchange, log: str, is_logged: bool
) -> None:
    logger, exchange.is_late = RankLogger(), True
    timer = train(loop, 5, logger=logger, log=log)
    assert any(exchange.waits) == is_logged
    assert bool(logger.rank_logs()) == is_logged
    pickle.dumps(timer._results)
    for _ in range(2):
        assert slowest_rank(timer) == 1
        assert exchange.waits.count(True) == 1


def test_exchange_is_in_no_step_and_once_per_epoch_end(loop: Loop, exchange: FakeExchange) -> None:
    exchange.on_send = lambda: loop.gpu.host_work(50.0)
    timer = train(loop, 6, 6, sync_ranks="log", log_every_n_steps=3)
    assert steps_of(exchange.sent) == [3, 6, 9, 12, 12]
    assert steps(timer) == [STEP_MS] * 12


def steps_compared(exchange: FakeExchange, is_flushed: bool, **options: Any) -> list[int]:
    """Train 60 steps, flush each if `is_flushed`, and return the steps of each comparison."""

    def after_step(_: int, timer: GPUPhaseHooks) -> None:
        if is_flushed:
            loop.gpu.host_work(100.0)
            timer.flush()

    exchange.sent, exchange.others = [], ()
    loop = Loop(FakeGPU())
    train(loop, 60, after_step=after_step, sync_ranks="log", **options)
    return steps_of(exchange.sent)


@pytest.mark.parametrize(("every", "lag"), [(1, 0), (1, 1), (1, 5), (2, 1)])
@pytest.mark.parametrize("log_every", [4, 10])
def test_each_log_compares_exactly_the_preceding_steps(
    exchange: FakeExchange, every: int, lag: int, log_every: int
) -> None:
    options = {"every_n_steps": every, "_lag": lag, "log_every_n_steps": log_every}
    timed = timed_indices(every, 60)
    logs = range(log_every - 1, 60 - lag, log_every)
    of_logs = [sum(index <= number for index in timed) for number in logs]
    compared = steps_compared(exchange, is_flushed=False, **options)
    assert compared == [*of_logs, len(timed), len(timed)]
    assert steps_compared(exchange, is_flushed=True, **options) == compared


@pytest.mark.parametrize("observers", [[], [lambda _: None]])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_steps_with_an_evaluation_are_left_out_on_all_ranks(
    loop: Loop, exchange: FakeExchange, lag: int, observers: Any
) -> None:
    x = torch.ones(1, 2)
    options = {"sync_ranks": "log", "log_every_n_steps": 10, "_lag": lag, "observers": observers}
    with hooks(loop, **options) as timer:
        for number in range(40):
            if number in (10, 20, 30):
                loop.model.eval()
                with torch.inference_mode():
                    loop.model(x)
                loop.model.train()
            else:
                loop.train(x)
            timer.step()
    assert steps_of(exchange.sent[:3]) == [10, 19, 28]


@pytest.mark.parametrize("captured_at", [8, 10])
@pytest.mark.parametrize("every", [3, 10])
def test_comparison_does_not_break_a_graph_capture(
    loop: Loop, exchange: FakeExchange, every: int, captured_at: int
) -> None:
    x, exchange.others = torch.ones(1, 2), ()
    options = {"sync_ranks": "log", "log_every_n_steps": 10, "every_n_steps": every}
    with hooks(loop, **options) as timer:
        for number in range(40):
            if number == captured_at:
                with loop.gpu.capture() as replay:
                    loop.train(x)
            elif number > captured_at:
                replay()
            else:
                loop.train(x)
            timer.step()
    assert not loop.gpu.capture_broken
    assert len(exchange.sent) >= 3


@pytest.mark.parametrize("options", [{"every_n_steps": 10}, {"every_n_steps": 2, "_lag": 3}, {}])
def test_logged_step_numbers_never_decrease(
    loop: Loop, exchange: FakeExchange, options: dict[str, Any]
) -> None:
    logger, exchange.others = RankLogger(), (lambda own: own,)
    with hooks(loop, logger=logger, log="all", log_every_n_steps=13, **options) as timer:
        for epoch in (21, 16, 8):
            for x in timer.steps(loop.batches(epoch)):
                loop.train(x)
            timer.flush()
    assert logger.rank_logs()
    numbers = [step for step, _ in logger.calls]
    assert numbers == sorted(numbers)


def test_failed_or_unsynced_training_sends_nothing(loop: Loop, exchange: FakeExchange) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("in the loop")

    with pytest.raises(RuntimeError, match="in the loop"):
        train(loop, 3, after_step=fail)
    assert train(Loop(loop.gpu), 3, sync_ranks=False).summary().ranks is None
    assert exchange.sent == []


@pytest.mark.parametrize("name", ["send", "arrived"])
def test_failing_store_ends_only_the_comparison(
    name: str,
    loop: Loop,
    exchange: FakeExchange,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ConnectionError("broken pipe")

    monkeypatch.setattr(exchange, name, fail)
    assert train(loop, 3, 3).summary().steps == 6
    assert caplog.text.count("broken pipe") == 1


# Real processes


def train_together(directory: Path, *cases: str) -> dict[str, Any]:
    """Run the cases in two processes, and return the results of `rank_run.py`."""
    finish(*(start(SCRIPT, directory, 2, rank, *cases) for rank in range(2)))
    results: dict[str, Any] = json.loads((directory / "results.json").read_text())
    return results


@pytest.mark.slow
def test_stragglers_are_named_in_real_processes(tmp_path: Path) -> None:
    no_straggler: dict[str, Any] = {"sentence": "", "behind_median_ms": 0.0, "comm_ms": 0.0}
    # If one of two ranks has raised, they are not compared, and nothing is logged.
    expected = {
        "balanced": {**no_straggler, "logged": -1},
        "one raises": {**no_straggler, "logged": None},
    }
    for phase in BALANCED:
        where = "backward compute" if phase == "backward" else phase
        expected[phase] = {
            "sentence": f"rank 1 is 30 ms per step {SLOWER} {where}",
            "behind_median_ms": 30.0,
            # Rank 0 waits for rank 1 in backward/comm.
            "comm_ms": 30.0,
            "logged": 1,
        }
    results = train_together(tmp_path, *expected)
    seconds = {case: found.pop("seconds") for case, found in results.items()}
    assert results == expected
    # Rank 0 does not wait long for a rank that raised in its last step.
    assert seconds["one raises"] < 10


@pytest.mark.slow
def test_rank_with_more_batches_waits_for_no_comparison(tmp_path: Path) -> None:
    found = train_together(tmp_path, "uneven")
    assert found["steps"] == 40
    # Otherwise rank 0 would wait 3 s for the comparison at the end of its loop, and rank 1 would
    # meanwhile wait in backward for rank 0.
    assert found["longest_backward_ms"] < 1500.0


@pytest.mark.slow
def test_dead_rank_raises_the_error_of_the_training_first(tmp_path: Path) -> None:
    dead = start(SCRIPT, tmp_path, 2, 1, "dies")
    finish(start(SCRIPT, tmp_path, 2, 0, "dies"))
    dead.communicate(timeout=10.0)
    assert dead.returncode == 3
    found = json.loads((tmp_path / "results.json").read_text())
    assert "Connection" in found["error"]
    # Every 5 s Lightning's launcher checks if a process has died, and then kills the others.
    assert found["seconds"] < 5.0


@pytest.mark.slow
def test_distributed_example_names_the_slowest_rank(tmp_path: Path) -> None:
    example = Path(__file__).parent.parent / "examples" / "distributed.py"
    # `--standalone` chooses a free port.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    printed = run(*torchrun, example, cwd=tmp_path)
    last_line = printed.splitlines()[-1]
    assert last_line.startswith("rank 1 is ")
    assert last_line.endswith(f"ms per step {SLOWER} forward")
    assert len([*tmp_path.glob("phase_times_rank[01].npy")]) == 2


# Agreement on the number of timed steps


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
