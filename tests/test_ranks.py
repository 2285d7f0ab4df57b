"""Comparison of ranks, and the exchange of their times."""

import json
import math
import pickle
import random
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import STEP_MS, FakeGPU, raw, steps
from fake_loop import Logger, Loop, hooks, run_of, timed_indices, with_facts
from fake_ranks import Ranks, reduce, train_ranks
from processes import finish, run, start
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from lightning_gputime import GPUPhaseHooks, load
from lightning_gputime._ledger.rows import LineRow, PhasePart
from lightning_gputime._measurement.sums import Sums
from lightning_gputime._output import page as report
from lightning_gputime._ranks import (
    BatchContent,
    BatchMeans,
    LineTime,
    PhaseTotals,
    RankTotals,
    StepWindows,
    decode,
    encode,
    line_times,
    since,
    totals_of,
)
from lightning_gputime._ranks.comparison import RankSummary, compare
from lightning_gputime._ranks.exchange import Agreement, Exchange
from lightning_gputime._ranks.over_time import heat_maps
from lightning_gputime._runs.saved import save

SCRIPT = Path(__file__).parent / "rank_run.py"

BALANCED = {"data": 1.0, "forward": 4.0, "backward": 8.0, "optimizer": 2.0}
SLOWER = "slower than the median of the others, in"


def totals(
    steps: int = 10,
    comm: float = 0.0,
    late: str = "",
    late_ms: float = 3.0,
    phases_ms: Mapping[str, float] = BALANCED,
    **more: Any,
) -> RankTotals:
    """Return the totals of a rank that waits `comm` ms, and is slower in the phase `late`."""
    ms = {**BALANCED, **phases_ms}
    ms |= {"backward": ms["backward"] + comm, "backward/comm": comm}
    if late:
        ms[late] += late_ms
    ms["step"] = sum(ms for name, ms in ms.items() if "/" not in name)
    return RankTotals({name: (ms * steps, steps) for name, ms in ms.items()}, **more)


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
def test_straggler_and_its_phase_are_named(
    phase: str, named: str, max_ms: float, slowest: int, world_size: int
) -> None:
    on_time, late = totals(comm=3.5), totals(comm=0.5, late=phase)
    ranks = compared([on_time, late, *[on_time] * (world_size - 2)])
    assert ranks.straggler == 1
    assert ranks.excess_ms == pytest.approx(3.0)
    assert ranks.sentence == f"rank 1 is 3 ms per step {SLOWER} {named}"
    assert ranks.rows["step"].min_ms == pytest.approx(18.5)
    assert ranks.rows["step"].max_ms == pytest.approx(18.5)
    assert ranks.rows["backward/comm"].min_ms == pytest.approx(0.5)
    assert ranks.rows["local"].max_ms == pytest.approx(18.0)
    assert ranks.rows["local"].max_rank == 1
    assert {*ranks.rows} == {*BALANCED, "backward/comm", "step", "local"}
    assert (ranks.rows[phase].max_ms, ranks.rows[phase].max_rank) == (max_ms, slowest)


DATA = {"data": 1.25, "data/comm": 0.5, "data/fetch": 0.5, "data/copy": 0.25}


@pytest.mark.parametrize(
    ("usual_ms", "late_ms", "named"),
    [
        (DATA, {**DATA, "data": 6.1, "data/fetch": 5.0}, "data/fetch"),
        (DATA, {**DATA, "data": 6.1, "data/fetch": 2.8, "data/copy": 2.7}, "data/copy"),
        # Neither part has most of the difference.
        (DATA, {**DATA, "data": 6.1, "data/fetch": 2.7, "data/copy": 2.6}, "data"),
        ({}, {"callbacks": 5.0}, "callbacks"),
        ({"forward/comm": 0.0}, {"forward": 7.0, "forward/comm": 0.0}, "forward compute"),
    ],
)
def test_slowest_part_excludes_waits(
    usual_ms: dict[str, float], late_ms: dict[str, float], named: str
) -> None:
    ranks = compared([totals(phases_ms=usual_ms), totals(phases_ms=late_ms)])
    assert (ranks.straggler, ranks.phase) == (1, named.removesuffix(" compute"))
    assert ranks.sentence.endswith(f"{SLOWER} {named}")


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
    assert ranks.straggler == slowest
    assert bool(ranks.sentence) == (slowest is not None)
    assert ranks.metrics()["straggler"] == (-1 if slowest is None else slowest)


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
    assert ranks.stragglers == tuple(rank for rank, ms in enumerate(late_ms) if ms > 2)
    assert ranks.straggler == late_ms.index(3.0)


def test_rank_means_of_a_phase_are_over_the_steps_in_which_it_ran() -> None:
    often = with_phases(totals(), {"save": (20.0, 10)})
    seldom = with_phases(totals(), {"save": (6.0, 1)})
    row = compared([often, seldom, totals()]).rows["save"]
    assert (row.min_ms, row.max_ms, row.max_rank) == (2.0, 6.0, 1)
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
    assert local.windows.wait_ms == [40.0, 0.0, 9.0]


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_noise_of_correlated_steps_is_not_underestimated(correlation: float) -> None:
    chance, local, ms = random.Random(0), BatchMeans(), 0.0
    for _ in range(5000):
        ms = correlation * ms + chance.gauss(0.0, math.sqrt(1 - correlation**2))
        local.take(ms)
    expected = math.sqrt((1 + correlation) / (1 - correlation))
    assert expected <= local.deviation_ms <= 3 * expected


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
    assert ranks.excess_ms == pytest.approx(1.0)
    assert (ranks.straggler, ranks.suspect) == (None, 0)
    assert ranks.error_ms is not None
    assert ranks.excess_ms < 4 * ranks.error_ms


def test_blocks_of_a_rank_are_its_windows() -> None:
    local = BatchMeans()
    for number in range(1000):
        local.take(float(number), 1.0, 10 + number)
    windows = local.windows
    assert (windows.steps, windows.n, len(windows.first)) == (16, 1000, 62)
    assert windows.first[:2] == [10, 26]
    assert windows.local_ms[:2] == [7.5, 23.5]
    assert windows.wait_ms == [1.0] * 62
    assert windows.newest_ms == [*map(float, range(968, 1000))]


# The line of the straggler


def augment(loop: Loop) -> None:
    loop.gpu.host_work(12.0)


def attend(loop: Loop) -> None:
    loop.gpu.work(12.0)


def tokenize(loop: Loop) -> None:
    loop.gpu.host_work(16.0)


def resize(loop: Loop) -> None:
    loop.gpu.host_work(6.0)


def usual(loop: Loop, x: Tensor) -> None:
    loop.train(x)


def augments(loop: Loop, x: Tensor) -> None:
    augment(loop)
    loop.train(x)
    wait(loop.gpu)


def waits(loop: Loop, x: Tensor) -> None:
    loop.train(x)
    wait(loop.gpu)


def attends(loop: Loop, x: Tensor) -> None:
    attend(loop)
    loop.train(x)


def wait(gpu: FakeGPU) -> None:
    gpu.now = max(gpu.now, gpu.free_at)


def line_of(function: Any) -> str:
    return f"`{function.__name__}` (test_ranks.py:{function.__code__.co_firstlineno + 1})"


def ranks_of(monkeypatch: pytest.MonkeyPatch, *bodies: Any, **options: Any) -> RankSummary:
    """Train a rank with each body, and return their comparison."""
    ranks = train_ranks(monkeypatch, bodies, **options).summary().ranks
    assert ranks is not None
    return ranks


@pytest.mark.parametrize(
    ("usual", "late", "line", "pace", "ms"),
    [
        # The copy of the batch takes 1 ms, in which the host does not set the pace.
        (waits, augments, augment, "host-paced", 11),
        (usual, attends, attend, "GPU-paced", 12),
    ],
)
@pytest.mark.parametrize("world_size", [2, 5])
def test_line_of_the_straggler_is_named_with_its_pace(
    usual: Any,
    late: Any,
    line: Any,
    pace: str,
    ms: int,
    world_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bodies = [usual, late, usual, usual, usual][:world_size]
    summary = train_ranks(monkeypatch, bodies).summary()
    ranks = summary.ranks
    assert ranks is not None
    slower = f"rank 1 is {ms} ms per step slower than the median of the others"
    assert ranks.sentence == f"{slower}, in {line_of(line)}, {pace}"
    assert (ranks.straggler, ranks.line, ranks.phase) == (1, line_of(line), "other")
    assert ranks.line_ms == pytest.approx(ms, abs=0.1)
    assert ranks.pattern == "same"
    note = f"the same rank is last in 40 of 40 steps, which costs {ms} ms per step"
    assert ranks.notes == (note,)
    assert {ranks.sentence, *ranks.notes} <= {*summary.notes}


def test_phase_is_that_of_the_line_where_hosts_hide_work_in_another(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    collectives = Ranks(FakeGPU(), monkeypatch)

    def usual(loop: Loop, x: Tensor) -> None:
        collectives.gpu = loop.gpu
        out = loop.model(x)
        for _ in range(2):
            reduce()  # Each takes 3 ms, so they hide 6 of the 16 ms of `tokenize`.
        train_rest(loop, out)

    def late(loop: Loop, x: Tensor) -> None:
        resize(loop)  # 1 of the 6 ms is hidden by the copy of the batch.
        train_rest(loop, loop.model(x))

    def train_rest(loop: Loop, out: Tensor) -> None:
        tokenize(loop)
        loop.tail(out).backward()
        loop.update()
        wait(loop.gpu)

    ranks = ranks_of(monkeypatch, usual, late)
    # Without waits, the loss takes 12.5 instead of 5.5 ms, but the other host works as long in it.
    loss = ranks.rows["loss"]
    assert (loss.max_ms, loss.min_ms, ranks.rows["loss/comm"].max_ms) == (12.5, 11.5, 6.0)
    assert ranks.rows["other"].max_ms == 5.0
    assert (ranks.straggler, ranks.phase) == (1, "other")
    assert ranks.excess_ms == pytest.approx(6.0, abs=0.01)
    assert (ranks.line, ranks.line_ms) == (line_of(resize), 5.0)
    assert ranks.sentence.endswith(f"median of the others, mostly in {line_of(resize)}, host-paced")


@pytest.mark.parametrize("without_lines", [[0, 1], [1], [0]])
def test_ranks_without_lines_compare_phases(
    without_lines: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {rank: {"lines": False} for rank in without_lines}
    ranks = ranks_of(monkeypatch, usual, attends, of_ranks=options)
    assert (ranks.line, ranks.sentence) == ("", f"rank 1 is 12 ms per step {SLOWER} other")


def test_larger_batches_of_the_straggler_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ranks_of(monkeypatch, usual, attends, usual, samples={1: 4})
    assert ranks.batch == "4.0 times the elements of the others (8 and 2 per step)"
    assert ranks.notes[0] == f"rank 1 has {ranks.batch}"


def host_bound(loop: Loop, x: Tensor, factor: float = 1.0) -> None:
    """Keep the host busy in each phase, for longer than the device."""
    loop.gpu.host_work(4.0 * factor)
    out = loop.model(x)
    loop.gpu.host_work(12.0 * factor)
    loss = loop.tail(out)
    loop.gpu.host_work(8.0 * factor)
    loss.backward()
    loop.gpu.host_work(16.0 * factor)
    loop.update()


def test_host_that_is_slower_in_all_lines_is_named_in_long_runs_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bodies = host_bound, partial(host_bound, factor=2.0)
    short = ranks_of(monkeypatch, *bodies, lines=False)
    # In 3 s, one of two equal hosts may be that much slower by chance.
    assert (short.straggler, short.sentence, short.suspect) == (None, "", 1)
    assert short.error_ms is not None
    assert short.excess_ms < 4 * short.error_ms
    long = ranks_of(monkeypatch, *bodies, n=400)
    assert long.straggler == 1
    assert long.factor == pytest.approx(2.0, rel=0.1)
    assert "because its host needs 2.0 times as long for every line: its CPU is" in long.sentence


@pytest.mark.parametrize(
    ("late", "tokens", "steps", "straggler"),
    [
        # Measured on two H200, without a delay: 40 steps of FSDP2 that were bound by the host.
        ({"forward": 8.0, "backward": 14.0}, 100.0, 40, None),
        # The same in 1,000 steps is no chance.
        ({"forward": 8.0, "backward": 14.0}, 100.0, 1000, 0),
        # More tokens explain it.
        ({"forward": 8.0, "backward": 14.0}, 270.0, 40, 0),
        # A delay in one phase.
        ({"forward": 20.0}, 100.0, 40, 0),
        ({"forward": 20.0, "backward": 6.0}, 100.0, 40, 0),
        # A short phase shows the speed of a host from 10 % of the step on.
        ({"forward": 20.0, "data": 5.0}, 100.0, 40, 0),
        ({"forward": 8.0, "optimizer": 6.0}, 100.0, 40, None),
    ],
)
def test_host_that_varies_is_no_straggler_in_a_short_run(
    late: dict[str, float], tokens: float, steps: int, straggler: int | None
) -> None:
    def rank(tokens: float, **phases_ms: float) -> RankTotals:
        ms = {"data": 0.5, "forward": 3.0, "backward": 5.0, "optimizer": 2.0} | phases_ms
        ms["step"] = sum(ms.values())
        phases = {name: (steps * each_ms, steps) for name, each_ms in ms.items()}
        batch = BatchContent("tokens", tokens)
        return RankTotals(phases, 1.0, dict.fromkeys(ms, 1.0), batch=batch)

    ranks = compared([rank(tokens, **late), rank(100.0)])
    assert ranks.straggler == straggler
    assert ranks.suspect == (0 if straggler is None else None)


def test_line_is_named_on_a_host_that_is_slower_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(loop: Loop, x: Tensor) -> None:
        for _ in range(4):
            augment(loop)
        host_bound(loop, x, 1.2)

    ranks = ranks_of(monkeypatch, host_bound, late)
    assert (ranks.straggler, ranks.line) == (1, line_of(augment))


def line(
    name: str,
    gpu_ms: float = 0.0,
    *,
    host_ms: float = 0.0,
    busy_ms: float = 0.0,
    error_ms: float = 0.1,
    caller: str = "",
    phases_ms: Mapping[str, float] | None = None,
) -> LineTime:
    """Return the times of a function, in forward by default."""
    phases_ms = phases_ms or {"forward": host_ms + gpu_ms}
    text = f"`{name}` (net.py:1)"
    return LineTime(text, name, caller, host_ms, gpu_ms, busy_ms, error_ms, phases_ms)


@pytest.mark.parametrize(
    ("late", "straggler", "excess_ms"),
    [
        # The other rank's host needs as long, while its GPU waits.
        ({"host_ms": 9.0, "busy_ms": 10.0}, None, 0.0),
        ({"host_ms": 9.0, "busy_ms": 10.4}, None, 0.4),
        # All of the rest may be drift of the host.
        ({"host_ms": 9.0, "busy_ms": 12.5}, None, 2.5),
        # It does not need this time, or this line.
        ({"host_ms": 9.0, "busy_ms": 17.5}, 0, 7.5),
        ({"host_ms": 1.0, "gpu_ms": 8.0, "busy_ms": 10.0}, 0, 8.0),
    ],
)
def test_work_that_other_hosts_hide_behind_waits_makes_no_straggler(
    late: dict[str, float], straggler: int | None, excess_ms: float
) -> None:
    def rank(host_ms: float, busy_ms: float, gpu_ms: float = 0.0) -> RankTotals:
        n, wait_ms = 40, 10.0 - host_ms - gpu_ms
        ms = {"forward": 10.0, "forward/comm": wait_ms, "optimizer": 1.0, "step": 11.0}
        return RankTotals(
            {name: (n * each_ms, n) for name, each_ms in ms.items()},
            1.0,
            {"forward": host_ms / 10.0, "optimizer": 1.0},
            [
                line("f", gpu_ms, error_ms=0.01),
                line("g", host_ms=host_ms, busy_ms=busy_ms, error_ms=0.01),
            ],
            busy_ms=busy_ms,
        )

    ranks = compared([rank(**late), rank(host_ms=1.0, busy_ms=10.0)])
    assert ranks.straggler == straggler
    assert ranks.excess_ms == pytest.approx(excess_ms)


MODEL = line("model", 10.0)
TWELVE = [line(f"f{i}", host_ms=2.0, busy_ms=2.0) for i in range(12)]


@pytest.mark.parametrize(
    ("usual", "late", "late_ms", "deviation_ms", "straggler", "named"),
    [
        # A line of this rank only is evidence, even if the local times vary.
        ([MODEL], [line("augment", 3.0), MODEL], 3.0, 4.0, 2, "augment"),
        # A line that all ranks have, that is short, or that is uncertain, may be longer by chance.
        ([MODEL], [line("model", 13.0), line("rest", 1.0)], 3.0, 4.0, None, "model"),
        ([MODEL], [line("augment", 1.4), line("rest", 1.0)], 1.4, 4.0, None, "augment"),
        ([MODEL], [line("augment", 3.0, error_ms=1.6), MODEL], 3.0, 4.0, None, "augment"),
        # A line within its error, or with less than half of the excess, is not even named.
        ([line("model", 4.0)], [line("model", 7.0, error_ms=3.5)], 3.0, 0.0, 2, ""),
        ([MODEL], [line("model", 13.0)], 7.0, 0.0, 2, ""),
        # The caller is longer by 3 ms. The other ranks count `inner` for it.
        (
            [line("outer", 10.0), line("other", 5.0)],
            [line("inner", 9.0, caller="outer"), line("outer", 4.0), line("other", 5.0)],
            *(3.0, 0.0, 2, "inner"),
        ),
        # The other ranks may not have sent it, because their 12 longest lines take 2 ms.
        (
            TWELVE,
            [line("augment", host_ms=5.0, busy_ms=5.0), *TWELVE[:11]],
            *(3.0, 0.0, 2, "augment"),
        ),
    ],
)
def test_line_is_compared_with_that_of_the_others(
    usual: list[LineTime],
    late: list[LineTime],
    late_ms: float,
    deviation_ms: float,
    straggler: int | None,
    named: str,
) -> None:
    def rank(lines: list[LineTime], late_ms: float = 0.0) -> RankTotals:
        return totals(late="forward", late_ms=late_ms, deviation_ms=deviation_ms, lines=lines)

    ranks = compared([rank(usual), rank(usual), rank(late, late_ms)])
    assert (ranks.straggler, ranks.suspect) == (straggler, 2 if straggler is None else None)
    assert ranks.line == (f"`{named}` (net.py:1)" if named else "")
    assert ranks.line_ms == pytest.approx(late_ms if named else 0.0)


@pytest.mark.parametrize(
    ("phases_ms", "phase"),
    [
        ({"forward": 10.0, "backward": 5.0}, "forward"),
        # The longest phase of the line is not the one that is longer.
        ({"forward": 7.0, "backward": 8.0}, "backward"),
        ({"data/fetch": 8.0, "forward": 7.0}, "data/fetch"),
        ({"forward": 10.0, "backward": 5.0, "backward/comm": 20.0}, "forward"),
    ],
)
def test_phase_of_the_line_is_the_one_with_the_most_of_its_excess(
    phases_ms: dict[str, float], phase: str
) -> None:
    usual = totals(lines=[line("f", 12.0, phases_ms={"forward": 7.0, "backward": 5.0})])
    # The phase with the largest difference is another one.
    late = totals(late="optimizer", lines=[line("f", 15.0, phases_ms=phases_ms)])
    ranks = compared([usual, late])
    assert (ranks.line, ranks.phase) == ("`f` (net.py:1)", phase)


CLOCKS = "its clocks are lower, or its batches larger"
CPU = "its CPU is shared or slower"


@pytest.mark.parametrize(
    ("factor", "side", "core_waits", "why"),
    [
        (1.25, "GPU", (None, None), CLOCKS),
        (1.6, "host", (0.4, 0.02), "it waits for a CPU core for 40 % of the time (others 2 %)"),
        (1.6, "host", (0.4, 0.3), CPU),
        (1.6, "host", (0.05, 0.0), CPU),
        (1.6, "host", (None, None), CPU),
    ],
)
def test_factor_is_named_instead_of_the_longest_of_lines_that_are_all_longer(
    factor: float, side: str, core_waits: tuple[float | None, float | None], why: str
) -> None:
    def rank(factor: float, core_wait: float | None, late_ms: float = 0.0) -> RankTotals:
        times = ("forward", 9.0), ("loss", 2.0), ("step", 1.0)
        lines = [line(name, factor * ms) for name, ms in times]
        if side == "host":
            lines = [line(name, host_ms=ms, busy_ms=factor * ms) for name, ms in times]
        shares = dict.fromkeys(BALANCED, float(side == "host"))
        phases = totals(late="forward", late_ms=late_ms)
        return replace(phases, lines=lines, core_wait=core_wait, host_shares=shares)

    usual = rank(1.0, core_waits[1])
    late_ms = 3.0 if side == "GPU" else 9.0
    ranks = compared([usual, usual, rank(factor, core_waits[0], late_ms)])
    assert (ranks.straggler, ranks.line) == (2, "")
    assert ranks.factor == pytest.approx(factor)
    assert ranks.sentence == (
        f"rank 2 is {late_ms:.0f} ms per step slower than the median of the others, because its"
        f" {side} needs {factor:.1f} times as long for every line: {why}"
    )


USUAL_BATCH = BatchContent("tokens", 1024.0)


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        (BatchContent("tokens", 1638.4), "1.6 times the tokens of the others (1,638 and 1,024"),
        (BatchContent("tokens", 1229.0), "1.2 times the tokens of the others (1,229 and 1,024"),
        # The rank needs 1.25 times as long.
        (BatchContent("tokens", 1126.0), ""),
        (BatchContent("elements", 1638.4), ""),
        (BatchContent(), ""),
    ],
)
def test_rank_with_more_in_its_batches_is_named(batch: BatchContent, named: str) -> None:
    usual, late = totals(batch=USUAL_BATCH), totals(late="forward", late_ms=4.0, batch=batch)
    ranks = compared([usual, late, usual])
    assert ranks.straggler == 1
    assert ranks.batch == (f"{named} per step)" if named else "")
    assert ranks.notes == ((f"rank 1 has {ranks.batch}",) if named else ())
    # A rank that is not late is not named.
    assert not compared([usual, totals(batch=batch), usual]).batch


@pytest.mark.parametrize(
    ("late", "phase", "waits_ms", "note"),
    [
        (
            "forward",
            "optimizer",
            (3.25, 0.0, 3.0),
            "the other ranks wait 3.12 ms per step in `reduce` (net.py:1), in optimizer",
        ),
        ("", "optimizer", (0.5, 0.5, 0.5), None),
        # Most ranks do not wait there.
        ("", "optimizer", (9.0, None, None), None),
        (
            "",
            "backward",
            (3.0, 3.0, 3.0),
            "ranks wait for each other 3 ms per step in the backward of `reduce` (net.py:1)",
        ),
    ],
)
def test_line_in_which_the_other_ranks_wait_is_named(
    late: str, phase: str, waits_ms: tuple[float | None, ...], note: str | None
) -> None:
    phases_ms = [{f"{phase}/comm": ms} if ms is not None else None for ms in waits_ms]
    lines = [line("reduce", phases_ms=each_ms) for each_ms in phases_ms]
    by_rank = [totals(late=late if rank == 1 else "", lines=[lines[rank]]) for rank in range(3)]
    assert compared(by_rank).notes == (() if note is None else (note,))


@pytest.mark.parametrize("is_slow", [False, True])
def test_all_ranks_examine_the_same_steps(
    is_slow: bool, two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_rank(loop: Loop, x: Tensor) -> None:
        # A slowdown, recurring long steps, and steps unlike the first, on one of the ranks only.
        if is_slow and (loop.number > 150 or loop.number % 7 == 3):
            attend(loop)
        loop.train(x)

    timer = train_ranks(monkeypatch, [train_rank], n=400, every_n_steps=4, sync_ranks=False)
    examined = [step.index for step in timer._results.ledger.evaluate()]
    assert examined == [12, 15, 18, 29, 47, 76, 122, 196, 314]


# The straggler over the run


def with_windows(
    *by_rank: Sequence[float], steps: int = 4, apart: int = 0, newest: Any = None, **more: Any
) -> list[RankTotals]:
    """Return totals of ranks with these local times in windows, which start `apart` steps apart."""
    windows = [
        StepWindows(
            steps,
            range(0, (apart or steps) * len(local_ms), apart or steps) if rank == 0 else (),
            local_ms,
            [1.0] * len(local_ms),
            newest[rank] if newest else [],
            steps * len(local_ms),
        )
        for rank, local_ms in enumerate(by_rank)
    ]
    return [totals(windows=each, **more) for each in windows]


USUAL = [15.0, 15.01, 15.02, 15.0, 15.03] * 4


def late_in(windows: Iterable[int], ms: float = 8.0, else_ms: float = 0.0) -> list[float]:
    """Return the local times of a rank that is late by `ms` in some of 20 windows."""
    return [usual_ms + (ms if i in windows else else_ms) for i, usual_ms in enumerate(USUAL)]


IN_TURN = [late_in(range(rank, 20, 4)) for rank in range(4)]
OF_TWO = [late_in(range(rank, 20, 2)) for rank in range(2)]
IN_EACH_STEP = [[15.0 + 6.0 * (i % 4 == rank) for i in range(32)] for rank in range(4)]


@pytest.mark.parametrize(
    ("by_rank", "more", "pattern", "end"),
    [
        ([USUAL] * 4, {}, "", None),
        ([late_in(range(8, 10))], {}, "transient", "steps 32 to 39, which costs 0.8 ms"),
        ([late_in([2, 11, 17])], {}, "transient", "3 of 20 windows of 4 steps, which costs 1.2 ms"),
        ([late_in([19])], {"steps": 1}, "transient", "step 19, which costs 0.4 ms"),
        # 4 of 40 steps are timed.
        ([late_in([19])], {"apart": 40}, "transient", "steps 760 to 799, which costs 0.4 ms"),
        # Of 7 windows, one may be late by chance.
        ([late_in([3])[:7]], {}, "", None),
        ([late_in([3])[:10]], {}, "transient", "steps 12 to 15, which costs 0.8 ms"),
        # Rank 1 is last in all windows, but most of them are too noisy to tell.
        ([late_in([4, 5], 8.0, 0.7)], {}, "transient", "steps 16 to 23, which costs 0.8 ms"),
        ([late_in([4, 5], 3.2, 0.7)], {}, "", None),
        # Half of the windows, always by the same rank: none of the three.
        ([late_in(range(0, 20, 2))], {}, "", None),
        # It costs 0.1 ms of 15 per step.
        ([late_in([8], 2.0)], {}, "", None),
        (IN_TURN, {}, "rotating", "20 of 20 windows of 4 steps, which costs 8 ms"),
        (OF_TWO, {}, "rotating", "20 of 20 windows of 4 steps, which costs 8 ms"),
        # If hosts are busy for 80 % of the step, they may hide their work.
        (IN_TURN, {"busy_ms": 11}, "rotating", "20 of 20 windows of 4 steps, which costs 8 ms"),
        (IN_TURN, {"busy_ms": 13}, "", None),
        # It changes in each step, so only the newest steps show it.
        (
            [USUAL] * 4,
            {"newest": IN_EACH_STEP},
            "rotating",
            "32 of the newest 32 steps, which costs 6 ms",
        ),
    ],
)
def test_pattern_of_the_straggler_over_the_run(
    by_rank: list[list[float]], more: dict[str, Any], pattern: str, end: str | None
) -> None:
    if len(by_rank) == 1:  # These are the times of rank 1.
        by_rank = [USUAL, *by_rank, USUAL]
    ranks = compared(with_windows(*by_rank, **more))
    assert (ranks.straggler, ranks.pattern) == (None, pattern)
    notes = {
        "transient": f"rank 1 is last only in {end} per step over the run",
        "rotating": f"the straggler changes: {len(by_rank)} ranks are last in turn in {end}"
        " per step",
    }
    assert ranks.notes == ((notes[pattern],) if pattern else ())


@pytest.mark.parametrize("world_size", [2, 8, 64, 1024])
def test_noise_shows_no_pattern(world_size: int) -> None:
    chance = random.Random(world_size)
    noisy = [[chance.gauss(15.0, 0.4) for _ in range(40)] for _ in range(world_size)]
    newest = [[chance.gauss(15.0, 1.0) for _ in range(32)] for _ in range(world_size)]
    ranks = compared(with_windows(*noisy, newest=newest))
    assert (ranks.pattern, ranks.notes) == ("", ())


def test_windows_that_have_not_arrived_are_unknown() -> None:
    zero, late = with_windows([10.0, 20.0, 30.0], [1.0, 3.0], steps=8)
    _, finer = with_windows([0.0], [1.0, 3.0, 5.0], steps=4)
    history = compared([zero, late, finer, totals()]).history
    assert history is not None
    assert (history.steps, history.first) == (8, (0, 8, 16))
    assert history.local_ms[0] == (10.0, 20.0, 30.0)
    assert history.local_ms[1] == pytest.approx((1.0, 3.0, math.nan), nan_ok=True)
    for absent_ms in history.local_ms[2:]:
        assert absent_ms == pytest.approx([math.nan] * 3, nan_ok=True)


# The picture


def picture_of(n_ranks: int, width: int, *, in_colour: bool) -> str:
    by_rank = [late_in(range(20) if rank == 1 else [rank % 20]) for rank in range(n_ranks)]
    ranks = compared(with_windows(*by_rank, steps=4))
    assert ranks.history is not None
    return heat_maps(ranks.ranks, ranks.history, width, in_colour)


def test_terminal_shows_a_heat_map_of_the_ranks() -> None:
    assert picture_of(3, 60, in_colour=False).splitlines() == [
        "Ranks over the run (each block is 4 timed steps)",
        "",
        "rank  local time            waits",
        "   0  ....................  .-------------------",
        "   1  .*.*****************  ....................",
        "   2  ....................  --.-----------------",
        "",
        "local time above the median, from: - 5 %  + 20 %  * 50 %  # 100 %",
        "waits, as a fraction of the step, from: - 5 %  + 20 %  * 40 %  # 60 %",
    ]


@pytest.mark.parametrize("n_ranks", [2, 8, 17, 1024])
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("in_colour", [False, True])
def test_heat_map_fits_the_terminal(n_ranks: int, width: int, in_colour: bool) -> None:
    text = picture_of(n_ranks, width, in_colour=in_colour)
    grid = re.sub("\x1b.*?m", "", text).splitlines()[2:-3]
    assert len(grid) <= 17
    assert max(map(len, grid)) <= width


def test_page_and_file_of_many_ranks_are_small(tmp_path: Path) -> None:
    pytest.importorskip("bokeh")
    run = run_of(raw(i, forward=4.0 + i % 7 / 7, backward=8.0 + i % 3 / 3) for i in range(10_000))
    chance = random.Random(0)
    by_rank = [[chance.gauss(15.0, 1.0) for _ in range(39)] for _ in range(1024)]
    ranks = compared(with_windows(*by_rank, steps=256))
    shown = replace(run, _summary=with_facts(run.summary(), ranks=ranks))
    page = report.page([shown])
    assert "Ranks over steps" in page
    assert "Ranks over steps" not in report.page([run])
    assert len(page) < 5e6
    save(shown, tmp_path / "run.json")
    assert (tmp_path / "run.json").stat().st_size < 5e6
    assert load(tmp_path / "run.json").summary().ranks == ranks


def test_summary_shows_the_heat_map_in_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = train_ranks(monkeypatch, [usual, attends]).summary()
    assert "Ranks over the run" in summary._table().text(100)
    assert "Ranks over the run" not in str(summary)
    balanced = train_ranks(monkeypatch, [usual, usual]).summary()
    assert "Ranks over the run" not in balanced._table().text(100)


# The exchange of totals, from all ranks to rank zero


def test_times_of_a_line_are_sent_by_phase_without_most_sub_phases() -> None:
    parts = {
        "forward": PhasePart(1.0, 2.0),
        "forward/body": PhasePart(3.0),
        "data/fetch": PhasePart(0.0, 4.0),
        "backward/comm": PhasePart(5.0),
    }
    row = LineRow("f", "net.py", 7, phases=parts, busy_ms=7.0, path=("main (train.py:1)",))
    # Time that no examined step shows, and time outside of steps, are not sent.
    [sent] = line_times([row, LineRow("", phases=parts), replace(row, entry="validation")])
    assert sent.phases_ms == {"forward": 6.0, "data/fetch": 4.0, "backward/comm": 5.0}
    assert sent[:6] == ("`f` (net.py:7)", "f", "main", 6.0, 4.0, 7.0)
    assert (sent.local_ms, sent.longest_ms) == (10.0, 15.0)


def test_exchange_of_1024_ranks_is_small() -> None:
    chance, local = random.Random(0), BatchMeans()
    for number in range(10_000):
        local.take(chance.gauss(15.0, 0.3), chance.gauss(12.0, 0.3), number)

    def ms(longest_ms: float) -> float:
        return round(chance.uniform(0.0, longest_ms), 3)

    phases = "forward", "backward", "backward/comm"
    lines = [
        LineTime(
            f"`Block{i}.forward` (model.py:{20 * i})",
            f"Block{i}.forward",
            "GPT.forward",
            *(ms(0.2), ms(2.0), ms(0.2), ms(0.1)),
            {name: ms(2.0) for name in phases},
        )
        for i in range(12)
    ]
    shares = {name: round(chance.random(), 3) for name in BALANCED}
    sent = totals(host_shares=shares, lines=lines, windows=local.windows)
    value = encode(sent)
    assert len(value) < 1024  # A megabyte for all ranks.
    received = decode(value)
    # Rank zero knows the numbers of the steps.
    assert sent.windows is not None
    assert replace(received, phases=sent.phases, windows=sent.windows) == sent
    assert {name: tuple(both) for name, both in received.phases.items()} == sent.phases
    assert received.windows == sent.windows._replace(first=[])
    # At logs, ranks send totals only.
    assert len(encode(totals())) < 256


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
    monkeypatch.setattr("lightning_gputime._ranks.exchange.time", host_time)
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


@pytest.mark.parametrize(
    ("arrives_s", "timeout_s", "compared", "waited_s"),
    [
        (0.2, 300.0, {0: 10, 1: 10}, 0.2),
        # Less than the 5 s after which Lightning's launcher ends the other processes.
        (math.inf, 300.0, {0: 10}, 3.0),
        # Less than the timeout of a collective.
        (math.inf, 0.3, {0: 10}, 0.1),
    ],
)
def test_rank_zero_waits_for_late_ranks_at_the_end(
    arrives_s: float,
    timeout_s: float,
    compared: dict[int, int],
    waited_s: float,
    host_time: HostTime,
) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))
    zero, first = (Exchange(store, rank, 2) for rank in range(2))
    send(10, zero)
    host_time.call_at(arrives_s, lambda: send(10, first))
    assert gather(zero, wait=True) == [compared]
    assert host_time.now_s == pytest.approx(waited_s, abs=0.002)


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
    monkeypatch.setattr("lightning_gputime._ranks.exchange.open_exchange", lambda: fake)
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


def straggler(timer: GPUPhaseHooks) -> int | None:
    ranks = timer.summary().ranks
    assert ranks is not None
    return ranks.straggler


def test_ranks_are_compared_when_an_epoch_ends(loop: Loop, exchange: FakeExchange) -> None:
    logger = RankLogger()
    timer = train(loop, 5, 5, logger=logger, log="all", log_every_n_steps=2)
    assert steps_of(exchange.sent) == [5, 10, 10]
    (first, metrics), (second, _) = logger.rank_logs()
    assert (first, second) == (4, 9)
    assert metrics["phase_time/ranks/forward_min_ms"] == pytest.approx(4.0)
    assert metrics["phase_time/ranks/forward_max_ms"] == pytest.approx(7.0)
    assert metrics["phase_time/ranks/straggler"] == 1
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
            assert straggler(timer) == 1
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
        assert straggler(timer) == 1
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


def at_line(code: str) -> str:
    """Return the place of a line of `rank_run.py`, as a result names it."""
    lines = [line.strip() for line in SCRIPT.read_text().splitlines()]
    return f"called by train (rank_run.py:{lines.index(code) + 1})"


LAYER = f"`Layer.forward` ({at_line('net(x).sum().backward()')})"
STRAGGLER_LINES = {
    "data": "`batches` (fake_gpu.py:25)",
    "forward": LAYER,
    "backward": LAYER,
    "optimizer": f"`Adder.step` ({at_line('optimizer.step()')})",
}
NO_STRAGGLER: dict[str, Any] = {"sentence": "", "excess_ms": 0.0, "comm_ms": 0.0}
EXPECTED: dict[str, dict[str, Any]] = {
    "balanced": {**NO_STRAGGLER, "logged": -1},
    # If one of two ranks has raised, they are not compared, and nothing is logged.
    "one raises": {**NO_STRAGGLER, "logged": None},
    **{
        phase: {
            "sentence": f"rank 1 is 30 ms per step {SLOWER} {line}, GPU-paced",
            "excess_ms": 30.0,
            # Rank 0 waits for rank 1 in backward/comm.
            "comm_ms": 30.0,
            "logged": 1,
        }
        for phase, line in STRAGGLER_LINES.items()
    },
}


@pytest.fixture(scope="module")
def real_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the results of rank 0, or of rank 1 for "uneven", by the case of `rank_run.py`."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = (*EXPECTED, "uneven", "dies")
    first, second = (start(SCRIPT, folder, 2, rank, *cases) for rank in range(2))
    finish(first)
    second.communicate(timeout=10.0)
    assert second.returncode == 3
    found: dict[str, dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return {**found, "uneven": json.loads((folder / "uneven.json").read_text())}


@pytest.mark.slow
@pytest.mark.parametrize("case", EXPECTED)
def test_stragglers_are_named_in_real_processes(
    case: str, real_ranks: dict[str, dict[str, Any]]
) -> None:
    found = real_ranks[case]
    # Rank 0 does not wait long for a rank that raised in its last step.
    assert case != "one raises" or found["seconds"] < 10
    assert found == {**EXPECTED[case], "seconds": found["seconds"]}


@pytest.mark.slow
def test_rank_with_more_batches_waits_for_no_comparison(
    real_ranks: dict[str, dict[str, Any]],
) -> None:
    assert real_ranks["uneven"]["steps"] == 40
    # Otherwise rank 0 would wait 3 s for the comparison at the end of its loop, and rank 1 would
    # meanwhile wait in backward for rank 0.
    assert real_ranks["uneven"]["longest_backward_ms"] < 1500.0


@pytest.mark.slow
def test_dead_rank_raises_the_error_of_the_training_first(
    real_ranks: dict[str, dict[str, Any]],
) -> None:
    assert "Connection" in real_ranks["dies"]["error"]
    # Every 5 s Lightning's launcher checks if a process has died, and then kills the others.
    assert real_ranks["dies"]["seconds"] < 5.0


@pytest.mark.slow
def test_distributed_example_names_the_straggler(tmp_path: Path) -> None:
    example = Path(__file__).parent.parent / "examples" / "distributed.py"
    # `--standalone` chooses a free port.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    printed = run(*torchrun, example, cwd=tmp_path)
    [sentence] = [line for line in printed.splitlines() if line.startswith("rank 1 is ")]
    assert re.search(rf"ms per step {SLOWER} `SlowNet.forward` \(distributed.py:\d+\)$", sentence)
    assert len([*tmp_path.glob("phase_times_rank[01].npy")]) == 2


# Agreement on the number of timed steps


@pytest.fixture
def agreements(monkeypatch: pytest.MonkeyPatch) -> list[Agreement]:
    """Return the agreements of three ranks."""
    monkeypatch.setattr("lightning_gputime._ranks.exchange._AGREEMENT_TIMEOUT_S", 0.01)
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


def test_agreement_waits_at_most_a_third_of_the_timeout_of_collectives(host_time: HostTime) -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.9))
    alone = Agreement(store, 1)
    assert [alone.agree([7]) for _ in range(3)] == [[1], [1], [1]]
    assert host_time.now_s == pytest.approx(0.3, abs=0.002)  # Once.


def test_rank_warns_once_if_others_do_not_answer(
    agreements: list[Agreement], caplog: pytest.LogCaptureFixture
) -> None:
    assert [agreements[1].agree([7]) for _ in range(5)] == [[1]] * 5
    assert len(caplog.messages) == 1
    assert "no longer agree" in caplog.text
    assert "This rank times every step from now on, so the ranks" in caplog.text
    assert "or pass sync_ranks=False" in caplog.text
