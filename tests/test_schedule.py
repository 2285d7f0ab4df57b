import pytest

from lightning_gputime._run.schedule import TIMED, Schedule

LETTERS = {"timed": "t", "probed": "P", "untimed": ".", "unrepresentative": "x"}


@pytest.mark.parametrize(
    ("every_n_steps", "probe_every_n_steps", "warmup_steps", "plan"),
    [
        (1, 0, 0, "tttttttttttttttttttt"),
        (3, 0, 0, "..t..t..t..t..t..t.."),
        (1, 5, 0, "ttPxtPxttttttPxtPxtt"),
        (1, 5, 5, "tttttPxttttttPxtPxtt"),
        (1, 3, 0, "tPxPxttPxPxtPxttPxPx"),
        (4, 5, 0, "..Px.Pxt...t.PxtPx.t"),
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
    assert "".join(LETTERS[schedule.kind(index)] for index in range(len(plan))) == plan


@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_the_next_timed_step_is_found_without_looking_at_those_between(n: int) -> None:
    schedule = Schedule(n, window=n)
    for index in range(50):
        later = [other for other in range(index, index + n) if schedule.kind(other) is TIMED]
        assert [schedule.next_timed(index)] == later


def test_a_plan_in_which_all_steps_are_alike_times_all() -> None:
    plans = [Schedule(), Schedule(2), Schedule(probe_every_n_steps=5), Schedule(warmup_steps=5)]
    assert [plan.times_all for plan in plans] == [True, False, False, True]
