"""The schedule of timed steps, and the cost of timing that decides on it."""

import math
from typing import Any

import numpy as np
import pytest
from fake_gpu import raw

from lightning_gputime._measurement.untimed import Recurrence
from lightning_gputime._session.schedule import Schedule, TimingCost, Windows


def timed_steps(schedule: Schedule, n: int) -> list[int]:
    return [index for index in range(n) if schedule.next_timed(index) == index]


@pytest.mark.parametrize("windows", [Windows(), Windows(5, 50, 10)])
def test_windows_that_fill_the_interval_time_every_step(windows: Windows) -> None:
    assert windows.cover_all
    assert timed_steps(Schedule(windows), 20) == [*range(20)]


@pytest.mark.parametrize(
    "windows", [Windows(1, 3), Windows(1, 10), Windows(5, 50), Windows(2, 50, 3), Windows(1, 7, 2)]
)
def test_each_part_of_an_interval_has_a_timing_window(windows: Windows) -> None:
    timed = timed_steps(Schedule(windows), 100 * windows.interval)
    # The next timed step does not depend on calls for earlier steps.
    sparse = Schedule(windows)
    for index in range(0, 150, 3):
        assert sparse.next_timed(index) == min(other for other in timed if other >= index)
    starts = timed[:: windows.size]
    assert timed == [index + i for index in starts for i in range(windows.size)][: len(timed)]
    for k in range(99 * windows.count):
        first, last = windows.part(k)
        # A window starts after the previous window, which may extend into this part.
        assert len([start for start in starts if first <= start < last + windows.size]) >= 1


@pytest.mark.parametrize("windows", [Windows(1, 10), Windows(5, 50), Windows(1, 50, 4)])
@pytest.mark.parametrize("period", [2, 7, 10, 25, 49, 50, 51, 100])
def test_timed_steps_are_spread_evenly_over_any_period(windows: Windows, period: int) -> None:
    timed = timed_steps(Schedule(windows), 2000 * windows.interval)
    counts = np.bincount(np.array(timed) % period, minlength=period)
    fair = len(timed) / period
    # At least as even as random draws.
    assert np.std(counts) <= 1.6 * math.sqrt(windows.size * fair)


@pytest.mark.parametrize(("last", "distance", "n"), [(90, 50, 5), (0, 100, 5), (7, 7, 7)])
def test_windows_cover_long_steps_that_recur(last: int, distance: int, n: int) -> None:
    schedule = Schedule(Windows(5, 50), next_long=Recurrence(last, distance).next_from)
    timed = timed_steps(schedule, 600)
    assert len([index for index in timed if (index - last) % distance == 0]) >= n


def test_ranks_with_an_agreed_recurrence_time_the_same_steps() -> None:
    windows = Windows(5, 50, recurrence=Recurrence(90, 50))
    other = Schedule(windows, next_long=Recurrence(33, 10).next_from)
    assert timed_steps(Schedule(windows), 400) == timed_steps(other, 400)


@pytest.mark.parametrize("count", [1, 2, 4, 5, 10])
def test_one_window_of_eight_covers_the_steps_in_which_loggers_run(count: int) -> None:
    schedule = Schedule(Windows())
    schedule.follow(Windows(2, 50, count, end_in_log=True), 100)
    timed = {*timed_steps(schedule, 100 + 50 * 800)}
    # A log is due in step 149, the last of an interval.
    assert {149, 150} <= timed
    covered = [end for end in range(150, 100 + 50 * 800, 50) if {end - 1, end} <= timed]
    share = len(covered) / (800 * count)
    assert 0.09 < share < 0.2


def test_new_windows_start_with_their_next_complete_part() -> None:
    schedule = Schedule(Windows())
    assert timed_steps(schedule, 10) == [*range(10)]
    schedule.follow(Windows(1, 50), 120)
    assert schedule.next_timed(120) >= 150


def cost_of(
    timed_ms: float = 2.1,
    untimed_ms: float | None = 2.0,
    wait_ms: float = 0.0,
    reading_us: int = 0,
    switch_us: int = 0,
    reading_25_us: int = 0,
) -> TimingCost:
    """Return the cost of timing after timed steps (of 7 marks) that alternate with untimed steps.

    Reading takes `reading_us` for a step and `reading_25_us` for 25 steps at once; attaching and
    removing the hooks takes `switch_us`.
    """
    now_ns = 0

    def switch() -> None:
        nonlocal now_ns
        now_ns += switch_us * 1000

    cost = TimingCost(lambda: now_ns, 50)
    # No untimed steps precede the first window or follow the last.
    for window, ms in enumerate([50.0, timed_ms, timed_ms, timed_ms, 50.0]):
        start_ns = window * 10**9
        host_ns = (*range(start_ns, start_ns + 7), start_ns + round(ms * 1e6))
        step = raw(0, wait_ms)._replace(labels=("data",) * 7, device_ms=(1.0,) * 7, host_ns=host_ns)
        cost.add_timed([step], now_ns - reading_us * 1000)
        if untimed_ms is not None and window < 4:
            # Untimed steps vary around their mean.
            ms = untimed_ms * (1.25 if window % 2 else 0.75)
            now_ns = start_ns + 5 * 10**8
            cost.start_span(0)
            now_ns += round(ms * 1e7)
            cost.end_span(10)
        if switch_us:
            cost.time_switch(switch, 0)
    if reading_25_us:
        cost.add_timed([step] * 25, now_ns - reading_25_us * 1000)
    return cost


@pytest.mark.parametrize(
    ("times", "n", "share"),
    [
        # All steps are timed if 7 marks of up to 40 us take less than the host wait, or less than
        # 0.8 % of a step. Otherwise, without untimed steps, a trial times 1 of 2 steps.
        ({"untimed_ms": None}, 2, None),
        ({"untimed_ms": None, "wait_ms": 0.28}, 1, None),
        ({"untimed_ms": None, "wait_ms": 0.27}, 2, None),
        ({"untimed_ms": None, "timed_ms": 35.1}, 1, None),
        ({"untimed_ms": None, "timed_ms": 35.0}, 2, None),
        ({"untimed_ms": 35.1, "timed_ms": 35.2}, 1, None),
        # Sampling may cost 0.4 % of 2 ms, which is 8 us per step, of 2 * 100 us per timed step.
        ({}, 25, 0.05),
        ({"reading_us": 20}, 50, 0.06),
        ({"switch_us": 100}, 100, 0.05),
        ({"timed_ms": 9.0}, 100, 0.14),
        # Ten log intervals of 50 steps pay for a timed step.
        ({"untimed_ms": 0.1, "timed_ms": 0.2}, 500, 1.0),
        # A mark is assumed to take at least 3 us.
        ({"timed_ms": 1.9}, 10, 0.0105),
        ({"untimed_ms": 2.625}, 5, 0.008),
        ({"untimed_ms": 2.8}, 1, 0.0075),
    ],
)
def test_cost_of_timing_decides_on_the_interval_of_timed_steps(
    times: dict[str, Any], n: int, share: float | None
) -> None:
    cost = cost_of(**times)
    assert cost.decide() == n
    assert cost.share == (None if share is None else pytest.approx(share))


def test_cost_of_timing_all_steps_assumes_reads_in_full_batches() -> None:
    cost = cost_of(timed_ms=20.1, untimed_ms=20.0, reading_us=1200, reading_25_us=25 * 200)
    cost.decide()
    # Timing adds 100 us to a step, and reading 200 us if 25 steps are read together.
    assert cost.share == pytest.approx(0.3 / 20.0)
    # So far, reading has taken (5 * 1200 + 25 * 200) / 30 us per timed step. In windows, timing
    # costs twice as much. Counting takes 8 us per step.
    assert cost.added_share(50) == pytest.approx((2 * (0.1 + 11 / 30) / 50 + 0.008) / 20.0)


def test_cost_of_timing_hidden_by_waits_is_unknown() -> None:
    cost = cost_of()
    assert cost.decide() == 25
    assert cost.added_share(25) == pytest.approx(0.004 + 0.008 / 2)
    host_ns = (*range(7), 2_100_000)
    step = raw(0, 9.0)._replace(labels=("data",) * 7, device_ms=(1.0,) * 7, host_ns=host_ns)
    cost.add_timed([step] * 25, 0)
    assert (cost.decide(), cost.added_share(1)) == (1, None)


def test_decisions_are_made_at_increasing_intervals() -> None:
    cost = TimingCost(int, 50)
    assert (cost.due, cost.decide()) == (100, 1)
    # A trial with n = 2 is shorter.
    for n, index, due in [
        (1, 100, 200),
        (1, 400, 600),
        (9, 10_000, 14_096),
        (2, 100, 200),
        (2, 10_000, 10_625),
    ]:
        cost.schedule_next(n, index)
        assert cost.due == due


@pytest.mark.parametrize(
    ("interval", "n", "windows"),
    [
        (50, 1, Windows()),
        (50, 7, Windows(5, 50, 1, end_in_log=True)),
        (50, 2, Windows(5, 50, 5, end_in_log=True)),
        (50, 18, Windows(2, 50, 1, end_in_log=True)),
        (50, 50, Windows(1, 50, 1, end_in_log=True)),
        (1, 2, Windows(1, 2, 1, end_in_log=True)),
        (16, 40, Windows(1, 48, 1, end_in_log=True)),
        (None, 40, Windows(5, 200, 1, end_in_log=True)),
        (2000, 500, Windows(1, 2000, 4, end_in_log=True)),
    ],
)
def test_timing_windows_have_at_most_5_steps(
    interval: int | None, n: int, windows: Windows
) -> None:
    assert TimingCost(int, interval).windows(n) == windows
