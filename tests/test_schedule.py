import math
from typing import Any

import numpy as np
import pytest

from lightning_gputime._phases import StepRecord
from lightning_gputime._session.schedule import AutoSchedule, Plan, Schedule


def timed_steps(schedule: Schedule, n: int) -> list[int]:
    return [index for index in range(n) if schedule.is_timed(index)]


@pytest.mark.parametrize("plan", [Plan(), Plan(5, 50, 10)])
def test_plan_whose_windows_fill_the_interval_times_every_step(plan: Plan) -> None:
    assert plan.times_all
    assert timed_steps(Schedule(plan), 20) == [*range(20)]


@pytest.mark.parametrize(
    "plan", [Plan(1, 3), Plan(1, 10), Plan(5, 50), Plan(2, 50, 3), Plan(1, 7, 2)]
)
def test_each_part_of_an_interval_has_one_window(plan: Plan) -> None:
    timed = timed_steps(Schedule(plan), 100 * plan.interval)
    starts = timed[:: plan.window]
    assert timed == [index + i for index in starts for i in range(plan.window)][: len(timed)]
    for k in range(99 * plan.windows):
        first, last = plan.part(k)
        # A window that overlaps the previous window starts at its end.
        assert len([start for start in starts if first <= start < last + plan.window]) >= 1


@pytest.mark.parametrize("plan", [Plan(1, 10), Plan(5, 50), Plan(1, 50, 4)])
@pytest.mark.parametrize("period", [2, 7, 10, 25, 49, 50, 51, 100])
def test_timed_steps_are_spread_evenly_over_any_period(plan: Plan, period: int) -> None:
    timed = timed_steps(Schedule(plan), 2000 * plan.interval)
    counts = np.bincount(np.array(timed) % period, minlength=period)
    fair = len(timed) / period
    # As even as if each place were drawn at random.
    assert np.std(counts) <= 1.6 * math.sqrt(plan.window * fair)


def test_next_timed_step_needs_no_earlier_steps() -> None:
    timed = timed_steps(Schedule(Plan(2, 25)), 200)
    schedule = Schedule(Plan(2, 25))
    for index in range(0, 150, 3):
        assert schedule.next_timed(index) == min(other for other in timed if other >= index)


@pytest.mark.parametrize(("last", "distance", "n"), [(90, 50, 5), (0, 100, 5), (7, 7, 7)])
def test_windows_cover_long_steps_that_recur(last: int, distance: int, n: int) -> None:
    schedule = Schedule(Plan(5, 50), next_long=lambda: (last, distance))
    timed = timed_steps(schedule, 600)
    assert len([index for index in timed if (index - last) % distance == 0]) >= n


def test_ranks_follow_the_recurrence_that_they_agreed_on() -> None:
    plan = Plan(5, 50, recurrence=(90, 50))
    other = Schedule(plan, next_long=lambda: (33, 10))
    assert timed_steps(Schedule(plan), 400) == timed_steps(other, 400)


def test_first_window_covers_the_steps_in_which_loggers_run() -> None:
    schedule = Schedule(Plan())
    schedule.follow(Plan(5, 50, ends_in_log=True), 100)
    timed = timed_steps(schedule, 251)
    # The last step of an interval, in which a log is due, and the next.
    assert {*range(146, 151)} <= {*timed}


def test_another_plan_starts_with_its_next_complete_part() -> None:
    schedule = Schedule(Plan())
    assert timed_steps(schedule, 10) == [*range(10)]
    schedule.follow(Plan(1, 50), 120)
    assert schedule.next_timed(120) >= 150


def auto(
    timed_ms: float = 2.1,
    untimed_ms: float | None = 2.0,
    wait_ms: float = 0.0,
    reading_us: int = 0,
    switch_us: int = 0,
) -> AutoSchedule:
    """Return a schedule after timed steps of 7 marks, alternating with untimed steps."""
    schedule = AutoSchedule(interval=50)
    # No untimed steps precede the first window or follow the last.
    for turn, ms in enumerate([50.0, timed_ms, timed_ms, timed_ms, 50.0]):
        start_ns = turn * 10**9
        host_ns = (start_ns, *range(start_ns + 1, start_ns + 7), start_ns + round(ms * 1e6))
        step = StepRecord(turn, ("data",) * 7, (1.0,) * 7, host_ns, wait_ms, 0, False)
        schedule.add_timed([step], reading_us * 1000)
        if untimed_ms is not None and turn < 4:
            # Untimed steps vary; their mean is as given.
            ms = untimed_ms * (1.25 if turn % 2 else 0.75)
            start_ns += 5 * 10**8
            schedule.add_untimed(start_ns, start_ns + round(ms * 1e7), 10)
        if switch_us:
            schedule.add_switch(switch_us * 1000)
    return schedule


@pytest.mark.parametrize(
    ("times", "n", "share"),
    [
        # Every step is timed if that costs less than 0.8 %.
        # No mark takes more than 40 us: they are hidden in a wait of that long, and in long steps.
        ({"untimed_ms": None}, 2, None),
        ({"untimed_ms": None, "wait_ms": 0.28}, 1, None),
        ({"untimed_ms": None, "wait_ms": 0.27}, 2, None),
        ({"untimed_ms": None, "timed_ms": 35.1}, 1, None),
        ({"untimed_ms": None, "timed_ms": 35.0}, 2, None),
        ({"untimed_ms": 35.1, "timed_ms": 35.2}, 1, None),
        # Timing windows may take 0.5 % of 2 ms: 10 us.
        ({}, 10, 0.05),
        ({"reading_us": 20}, 12, 0.06),
        ({"switch_us": 100}, 17, 0.05),
        ({"timed_ms": 9.0}, 50, 0.14),
        ({"untimed_ms": 0.1, "timed_ms": 0.2}, 50, 1.0),
        # No mark takes less than 3 us.
        ({"timed_ms": 1.9}, 3, 0.0105),
        ({"untimed_ms": 2.625}, 2, 0.008),
        ({"untimed_ms": 2.8}, 1, 0.0075),
    ],
)
def test_timed_steps_cost_less_than_1_percent(
    times: dict[str, Any], n: int, share: float | None
) -> None:
    schedule = auto(**times)
    assert schedule.decide() == n
    assert schedule.share == (None if share is None else pytest.approx(share))


def test_cost_of_timing_all_steps_excludes_what_reads_of_few_steps_add() -> None:
    schedule = auto(reading_us=300)
    step = StepRecord(9, ("data",) * 7, (1.0,) * 7, (0, *range(1, 7), 2_100_000), 0.0, 0, False)
    schedule.add_timed([step] * 25, reading_ns=25 * 20_000)
    schedule.decide()
    # Timing adds 100 us to a step of 2 ms, and reading 20 us if 25 steps are read together.
    assert schedule.share == pytest.approx(0.06)
    # On average, reading has taken (5 * 300 + 25 * 20) / 30 = 67 us per timed step.
    assert schedule.added_share(50) == pytest.approx((100 + 200 / 3) / 2000 / 50)


def test_decisions_come_at_ever_longer_intervals() -> None:
    schedule = AutoSchedule(interval=50)
    assert (schedule.due, schedule.decide()) == (100, 1)
    # A trial with n = 2 is shorter.
    for n, index, due in [
        (1, 100, 200),
        (1, 400, 600),
        (9, 10_000, 14_096),
        (2, 100, 200),
        (2, 10_000, 10_625),
    ]:
        assert schedule.follow(n, index) == schedule.plan(n)
        assert schedule.due == due


@pytest.mark.parametrize(
    ("interval", "n", "plan"),
    [
        (50, 1, Plan()),
        (50, 7, Plan(5, 50, 1, ends_in_log=True)),
        (50, 2, Plan(5, 50, 5, ends_in_log=True)),
        (50, 18, Plan(2, 50, 1, ends_in_log=True)),
        (50, 50, Plan(1, 50, 1, ends_in_log=True)),
        (1, 2, Plan(1, 2)),
        (2000, 500, Plan(1, 2000, 4, ends_in_log=True)),
    ],
)
def test_timing_windows_have_at_most_5_steps(interval: int, n: int, plan: Plan) -> None:
    assert AutoSchedule(interval).plan(n) == plan
