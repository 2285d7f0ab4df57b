from typing import Any

import pytest

from lightning_gputime._phases import StepRecord
from lightning_gputime._session.schedule import AutoSchedule, Schedule


@pytest.mark.parametrize(
    ("every_n_steps", "probe_every_n_steps", "warmup_steps", "plan"),
    [
        (1, 0, 0, "tttttttttttttttttttt"),
        (3, 0, 0, "..t..t..t..t..t..t.."),
        (1, 5, 0, "ttPttPtttttttPttPttt"),
        (1, 5, 5, "tttttPtttttttPttPttt"),
        (1, 3, 0, "tPtPtttPtPttPtttPtPt"),
        (4, 5, 0, "..Pt.P.t...t.P.tP..t"),
    ],
)
def test_the_plan_of_the_first_steps(
    every_n_steps: int, probe_every_n_steps: int, warmup_steps: int, plan: str
) -> None:
    schedule = Schedule(
        every_n_steps,
        window=every_n_steps,
        probe_every_n_steps=probe_every_n_steps,
        warmup_steps=warmup_steps,
    )
    letters = [
        "P" if schedule.is_probed(index) else "t" if schedule.is_timed(index) else "."
        for index in range(len(plan))
    ]
    assert "".join(letters) == plan


def test_blocks_are_counted_back_from_the_end_of_each_window() -> None:
    schedule = Schedule(10, block=2, window=25)
    timed = [index for index in range(60) if schedule.is_timed(index)]
    assert timed == [13, 14, 23, 24, 38, 39, 48, 49]


@pytest.mark.parametrize(
    "schedule", [*(Schedule(n, window=n) for n in (1, 2, 3, 10)), Schedule(10, 2, 25)]
)
def test_the_next_timed_step_is_found_without_looking_at_those_between(schedule: Schedule) -> None:
    timed = [index for index in range(100) if schedule.is_timed(index)]
    for index in range(50):
        assert schedule.next_timed(index) == min(other for other in timed if other >= index)


def test_a_plan_in_which_all_steps_are_alike_times_all() -> None:
    plans = [Schedule(), Schedule(2), Schedule(probe_every_n_steps=5), Schedule(warmup_steps=5)]
    assert [plan.times_all for plan in plans] == [True, False, False, True]


def auto(
    *,
    timed_ms: float = 2.1,
    untimed_ms: float | None = 2.0,
    wait_ms: float = 0.0,
    reading_us: int = 0,
    switch_us: int = 0,
) -> AutoSchedule:
    """What decides, after timed steps of 7 marks, and in turns with them untimed stretches."""
    schedule = AutoSchedule(window=50)
    # The first one has no untimed steps before it, and the last one has none behind it.
    for turn, ms in enumerate([50.0, timed_ms, timed_ms, timed_ms, 50.0]):
        start_ns = turn * 10**9
        host_ns = (start_ns, *range(start_ns + 1, start_ns + 7), start_ns + round(ms * 1e6))
        step = StepRecord(turn, ("data",) * 7, (1.0,) * 7, host_ns, wait_ms, 0, False)
        schedule.add_timed([step], reading_us * 1000)
        if untimed_ms is not None and turn < 4:
            # The mood of the loop changes; on average a step takes as long as it is said.
            ms = untimed_ms * (1.25 if turn % 2 else 0.75)
            start_ns += 5 * 10**8
            schedule.add_untimed(start_ns, start_ns + round(ms * 1e7), 10)
        if switch_us:
            schedule.add_switch(switch_us * 1000)
    return schedule


@pytest.mark.parametrize(
    ("how", "n", "share"),
    [
        # Each step, where that takes less than 0.8 %.
        # No mark takes more than 40 us: they are hidden in a wait of that long, and in long steps.
        ({"untimed_ms": None}, 2, None),
        ({"untimed_ms": None, "wait_ms": 0.28}, 1, None),
        ({"untimed_ms": None, "wait_ms": 0.27}, 2, None),
        ({"untimed_ms": None, "timed_ms": 35.1}, 1, None),
        ({"untimed_ms": None, "timed_ms": 35.0}, 2, None),
        ({"untimed_ms": 35.1, "timed_ms": 35.2}, 1, None),
        # Blocks may take half of that, 0.5 % of 2 ms: 10 us.
        ({}, 10, 0.05),
        ({"reading_us": 20}, 12, 0.06),
        ({"switch_us": 100}, 20, 0.05),
        ({"timed_ms": 9.0}, 28, 0.14),
        ({"untimed_ms": 0.1, "timed_ms": 0.2}, 50, 1.0),
        # No mark takes less than 3 us.
        ({"timed_ms": 1.9}, 3, 0.0105),
        ({"untimed_ms": 2.625}, 2, 0.008),
        ({"untimed_ms": 2.8}, 1, 0.0075),
    ],
)
def test_as_few_steps_are_timed_as_cost_less_than_1_percent(
    how: dict[str, Any], n: int, share: float | None
) -> None:
    schedule = auto(**how)
    assert schedule.decide(200) == n
    assert schedule.share == (None if share is None else pytest.approx(share))


def test_it_is_decided_again_at_ever_longer_intervals() -> None:
    schedule = AutoSchedule(window=50)
    assert (schedule.due, schedule.decide(100), schedule.due) == (100, 1, 200)
    schedule = auto()
    for index, due in [(100, 200), (400, 600), (10_000, 14_096)]:
        schedule.decide(index)
        assert schedule.due == due


@pytest.mark.parametrize(
    ("window", "n", "plan"),
    [
        (50, 1, Schedule()),
        (50, 7, Schedule(35, 5, 50)),
        (50, 18, Schedule(36, 2, 50)),
        (50, 50, Schedule(50, 1, 50)),
        (1, 2, Schedule(2, 1, 2)),
        (2000, 500, Schedule(500, 1, 2000)),
    ],
)
def test_the_steps_that_are_timed_stand_in_blocks_of_at_most_5(
    window: int, n: int, plan: Schedule
) -> None:
    assert AutoSchedule(window).schedule(n) == plan
