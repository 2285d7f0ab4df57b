"""`compare`: estimates, differences, outcomes, and the command."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import Command
from fake_gpu import raw
from fake_loop import run_of, with_facts
from processes import ENVIRONMENT
from scipy import signal, stats

from lightning_gputime import Cause, Difference, PhaseStats, Run, RunComparison, SlowStep, compare
from lightning_gputime._measurement.history import history, structured
from lightning_gputime._measurement.measurement import Environment
from lightning_gputime._measurement.wall_clock import WallClockBreakdown
from lightning_gputime._phases import StepRecord
from lightning_gputime._runs import saved
from lightning_gputime._runs.estimates import quantile_of_t

PHASES = ("data", "forward", "backward")
H200 = Environment(device="H200", device_type="cuda", world_size=1, batch_size=32, torch="2.13.0")
ONE_RUN = "One run per side: the difference may be noise between runs."
REGRESSION = "Regression: {} is slower by more than {} %."
FORWARD_PASSED = "Passed: forward is not slower by more than 3 %."
UNCERTAIN = "Cannot tell whether backward is slower by more than"
DECIDE, NEEDED = "per side would decide", "per side would be needed"


def noise(seed: int, n: int = 1000, *, correlation: float = 0.9) -> np.ndarray[Any, Any]:
    """Return correlated noise with a standard deviation of 1."""
    shocks = np.random.default_rng(seed).standard_normal(n)
    shocks[1:] *= math.sqrt(1 - correlation**2)
    steps: np.ndarray[Any, Any] = signal.lfilter([1.0], [1.0, -correlation], shocks)
    return steps


def run(
    seed: int = 0, n: int = 1000, *, more: dict[str, float] | None = None, **changes: Any
) -> Run:
    """Return a run of 15 ms per step, and `more` ms by phase, with 1 % of correlated noise.

    Args:
        changes: Fields of its environment that differ from `H200`.
    """
    mean_ms = {"data": 1.0, "forward": 5.0, "backward": 9.0}
    for name, ms in (more or {}).items():
        mean_ms[name] = mean_ms.get(name, 0.0) + ms
    times_ms = np.array([*mean_ms.values()]) * (1 + 0.01 * noise(seed, n))[:, np.newaxis]
    timed = run_of(
        StepRecord(i, tuple(mean_ms), tuple(step), (0,) * (len(mean_ms) + 1), 0.0, 0, False)
        for i, step in enumerate(times_ms.tolist())
    )
    return replace(timed, environment=replace(H200, **changes))


def constant(*steps: float, **changes: Any) -> Run:
    """Return a run whose steps take these milliseconds, half of them in forward."""
    records = [raw(i, forward=ms / 2, backward=ms / 2) for i, ms in enumerate(steps)]
    return replace(run(n=24), history=history(records), environment=replace(H200, **changes))


def steady(ms: float, n: int = 24, **changes: Any) -> Run:
    """Return a run of steps of equal length."""
    return constant(*[ms] * n, **changes)


def comparison(
    step: Difference, rows: dict[str, Difference] | None = None, **changes: Any
) -> RunComparison:
    """Return a comparison of two runs per side whose typical and mean step are the same."""
    defaults = RunComparison(rows=rows or {}, step=step, mean=step, runs=(2, 2), steps=(90, 90))
    return replace(defaults, **changes)


def has_difference(found: RunComparison) -> bool:
    """Return whether the step, the mean or a phase is reported as different."""
    reported = [found.step, found.mean, *(found.rows[name] for name in found.judged)]
    return any(row.is_significant for row in reported)


def saved_to(folder: Path, *runs: Run) -> list[str]:
    """Save runs to files of a folder, and return the paths."""
    paths = [str(folder / f"{number}.json.gz") for number in range(len(runs))]
    for path, timed in zip(paths, runs, strict=True):
        saved.save(timed, path)
    return paths


# Estimates


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 11, 50])
@pytest.mark.parametrize("confidence", [0.95, 0.995, 0.9995])
def test_quantiles_of_t_agree_with_scipy(freedom: int, confidence: float) -> None:
    expected = stats.t.ppf((1 + confidence) / 2, freedom)
    assert quantile_of_t(freedom, confidence) == pytest.approx(expected, rel=1e-3)


# Runs in which every step was timed


NO_FETCH, FETCH = {"data/fetch": 0.0}, {"data/fetch": 2.0}


@pytest.mark.parametrize(
    ("before", "after", "direction", "sentence"),
    [
        ({}, {"backward": 0.6}, "slower", r"4\.2 % ± 0\.\d % slower: backward 0\.6\d* ± 0\.\d* ms"),
        ({}, {"forward": -1.0}, "faster", r"6\.5 % ± 0\.\d % faster: forward 0\.99 ± 0\.\d* ms"),
        ({}, {}, "alike", r"no significant change of the step: \+0\.\d % ± 0\.\d %$"),
        (NO_FETCH, FETCH, "slower", r".+ slower: data \(data/fetch\) 2 ± 0\.\d+ ms slower$"),
    ],
)
def test_comparison_names_the_changed_phase_and_the_size_of_the_change(
    before: dict[str, float], after: dict[str, float], direction: str, sentence: str
) -> None:
    found = compare(run(1, more=before), run(2, more=after))
    assert found.direction == direction
    assert found.step.change_ms == pytest.approx(
        sum(row.change_ms for name, row in found.rows.items() if "/" not in name)
    )
    assert re.match(f"{ONE_RUN} {sentence}", found.sentence)
    assert repr(found) == f"<RunComparison: {found.sentence}>"
    assert found.judged == [*PHASES]


@pytest.mark.parametrize(
    ("after_ms", "is_significant"), [(1.0, False), (1.005, False), (1.007, True)]
)
def test_change_below_resolution_is_not_significant(after_ms: float, is_significant: bool) -> None:
    # Two phases have three boundaries of 2 us.
    found = compare(steady(1.0), steady(after_ms))
    assert found.step.resolution_ms == pytest.approx(0.006)
    assert found.rows["forward"].resolution_ms == pytest.approx(0.004)
    assert found.step.is_significant is is_significant
    assert found.outcome(0.0, "step") == ("regression" if is_significant else "passed")


@pytest.mark.parametrize(
    ("steps", "more_ms", "sentence", "outcomes"),
    [
        # A single stall makes the mean 6.7 % longer, and then steps of 30 ms more recur.
        (slice(500, 501), 1000.0, "no significant change of the step: ", ["cannot tell", "passed"]),
        (slice(None, None, 20), 30.0, "the mean of all steps 1.5", ["regression", "cannot tell"]),
    ],
)
def test_slow_steps_are_a_change_of_the_mean_only_if_they_recur(
    steps: slice, more_ms: float, sentence: str, outcomes: list[str]
) -> None:
    slow = run(2)
    for column in ("step_ms", "backward_ms"):
        slow.history[column][steps] += more_ms
    found = compare(run(1), slow)
    assert found.direction == "alike"
    assert found.mean.change_ms == pytest.approx(more_ms * len(range(1000)[steps]) / 1000, abs=0.1)
    assert found.sentence.startswith(f"{ONE_RUN} {sentence}")
    assert [found.outcome(bound) for bound in (0.05, 0.1)] == outcomes


def test_equal_runs_rarely_differ_and_a_slowdown_of_one_percent_is_found() -> None:
    pairs = [
        (run(2 * i), run(2 * i + 1), run(2 * i + 1, more={"backward": 0.15})) for i in range(50)
    ]
    equal = sum(has_difference(compare(a, b)) for a, b, _ in pairs)
    found = sum(compare(a, c).direction == "slower" for a, _, c in pairs)
    # 2.5 of 50 are expected to differ by chance.
    assert equal <= 4
    assert found >= 45


@pytest.mark.parametrize(("every", "n"), [(50, 1200), (20, 480), (7, 840)])
def test_additional_periodic_slow_step_is_not_significant(every: int, n: int) -> None:
    times_ms = [1010.0 if i % every == 0 else 10.0 for i in range(n + 1)]
    sides = [constant(*times_ms[:-1]), constant(*times_ms)]
    for before, after in (sides, sides[::-1]):
        found = compare(before, after)
        assert found.outcome(0.0) != "regression"
        assert not has_difference(found)


def test_comparison_covers_modules_and_not_single_callbacks() -> None:
    names = ("forward/body", "forward/body/body.mlp", "callbacks/Bar.on_train_batch_end")

    def timed(ms: float) -> Run:
        parts = dict(zip(names, (1.0, ms, 1.0), strict=True))
        return run_of(raw(i, data=1.0, forward=4.0, **parts) for i in range(100))

    found = compare(timed(2.0), timed(3.0))
    assert [*found.rows] == ["data", "callbacks", "forward", *names[:2]]
    assert found.rows[names[1]].change_ms == pytest.approx(1.0)
    assert found.judged == ["data", "callbacks", "forward"]
    assert found.sentence.endswith("% slower: forward (forward/body/body.mlp) 1 ± 0 ms slower")


def test_spread_between_runs_widens_the_interval() -> None:
    found = compare(
        [steady(ms) for ms in (10.0, 11.0, 12.0)], [steady(ms) for ms in (11.0, 12.0, 13.0)]
    )
    # Student's test of two groups of three with a variance of 1. A false alarm has a chance of 2 %
    # for the step, 2.5 % for its two phases, which are half as long, and 0.5 % for the mean.
    for row, chance, length in (
        (found.step, 0.02, 1.0),
        (found.rows["forward"], 0.0125, 0.5),
        (found.rows["backward"], 0.0125, 0.5),
        (found.mean, 0.005, 1.0),
    ):
        quantile = stats.t.ppf(1 - chance / 2, 4)
        error = quantile * math.sqrt(1 / 3 + 1 / 3) * length
        assert row.error_ms == pytest.approx(error, rel=0.001)
        # The relative change is a quotient, in which the error of `before` counts 12/11 times.
        ratio = quantile * math.sqrt(1 / 3 + (12 / 11) ** 2 / 3) / 11
        assert row.relative_error == pytest.approx(ratio, rel=0.001)
    assert (found.runs, found.steps, found.direction) == ((3, 3), (72, 72), "alike")


# Outcomes


def difference(before_ms: float, after_ms: float, error_ms: float) -> Difference:
    return Difference(before_ms, after_ms, error_ms, error_ms / (before_ms or math.nan))


@pytest.mark.parametrize(
    ("row", "outcome"),
    [
        (difference(100.0, 104.0, 1.0), "regression"),
        (difference(100.0, 102.5, 1.0), "cannot tell"),
        (difference(100.0, 101.5, 1.0), "cannot tell"),
        (difference(100.0, 101.0, 1.0), "passed"),
        (difference(100.0, 60.0, 1.0), "passed"),
        (difference(0.0, 1.0, 0.5), "regression"),
        (difference(0.0, 1.0, 1.5), "cannot tell"),
        (difference(0.0, 0.0, 0.0), "passed"),
        (Difference(0.1, 0.108, 0.001, 0.01, resolution_ms=0.01), "passed"),
        (Difference(0.1, 0.108, 0.004, 0.04, resolution_ms=0.01), "cannot tell"),
        (Difference(0.1, 0.112, 0.001, 0.01, resolution_ms=0.01), "regression"),
    ],
)
def test_outcome_follows_from_the_difference_and_a_bound_of_two_percent(
    row: Difference, outcome: str
) -> None:
    assert row.outcome(0.02) == outcome


def test_phase_passes_by_default_if_it_adds_less_than_the_bound_to_the_step() -> None:
    rows = {"data": difference(2.0, 2.0, 1.0), "forward": difference(98.0, 98.0, 0.5)}
    found = comparison(difference(100.0, 100.0, 0.5), rows)
    assert found.outcome(0.02) == "passed"
    assert found.outcome(0.02, "data") == "cannot tell"
    expected = {"step": "passed", "data": "cannot tell", "forward": "passed"}
    assert found.outcomes(0.0051) == expected


@pytest.mark.parametrize(
    ("runs", "change_ms", "error_ms", "needed"),
    [
        # The difference is 2 ms from the bound of 5 %: the error must be smaller.
        ((3, 3), 3.0, 2.1, "about 4"),
        ((3, 3), 3.0, 4.0, "about 12"),
        ((5, 5), 3.0, 4.0, "about 20"),
        ((3, 3), 7.0, 4.0, "about 12"),
        ((3, 3), 5.0, 4.0, "more than 100"),
        # One run per side does not show the spread between runs.
        ((1, 1), 3.0, 6.0, "at least 9"),
        ((1, 1), 3.0, math.inf, "at least 3"),
    ],
)
def test_uncertain_comparison_says_how_many_runs_would_decide(
    runs: tuple[int, int], change_ms: float, error_ms: float, needed: str
) -> None:
    found = comparison(difference(100.0, 100.0 + change_ms, error_ms), runs=runs)
    [sentence] = found.explain(0.05, "step")
    assert f" 5 %: {needed} runs per side would " in sentence


def test_phase_change_is_found_in_a_noisy_step() -> None:
    # Backward varies by 3 ms between runs. In the step this hides that the loss takes 2 ms more.
    def runs(loss_ms: float, *backward_ms: float) -> list[Run]:
        more = [{"loss": loss_ms, "backward": ms} for ms in backward_ms]
        return [run(i + round(loss_ms), more=ms) for i, ms in enumerate(more)]

    found = compare(runs(0.8, 0.0, 3.0, -2.0), runs(2.8, 1.0, -1.0, 4.0))
    assert found.direction == "alike"
    assert found.sentence.startswith("loss 2 ± 0.")
    assert " ms slower; typical step: no significant change (+" in found.sentence
    assert found.outcome(0.5, "loss") == found.outcome(0.5) == "regression"
    assert found.outcome(0.0, "step") == "cannot tell"
    assert re.search(r"^loss .* \+\d+\.\d%  slower$", str(found), re.MULTILINE)


def test_new_phase_exceeds_any_bound_and_unknown_phase_is_refused() -> None:
    found = compare(run(1), run(2, more={"augment": 0.2}))
    assert found.outcome(0.1, "step") == "passed"
    assert found.outcome(0.1) == found.outcome(5.0, "augment") == "regression"
    assert found.to_dict()["rows"]["augment"]["relative_error"] is None
    with pytest.raises(ValueError, match="no phase 'lost'; they have step, data, forward, backwar"):
        found.outcome(0.0, "lost")


def test_phase_below_one_percent_of_the_step_is_judged_only_by_name() -> None:
    found = compare(run(1, more={"tiny": 0.05}), run(2, more={"tiny": 0.1}))
    assert found.judged == [*PHASES]
    assert found.outcome(0.5) == "passed"
    assert found.outcome(0.5, "tiny") == "regression"


# Runs in which steps were sampled


def sampled(seed: int, *, n: int = 2000, more: float = 0.0) -> Run:
    """Return a run in which 1 of 50 steps takes 60 ms more.

    Only every 10th step and all long steps were timed. The summary estimates all steps.
    """
    rng = np.random.default_rng(seed)
    index = np.arange(n)
    is_long = index % 50 == 0
    variation = 1 + 0.07 * rng.standard_normal(n)
    callbacks = 0.02 + np.where(is_long, 60.0, 0.0)
    phases = {"data": 0.3 * variation, "callbacks": callbacks, "forward": (1.2 + more) * variation}
    step = np.sum([*phases.values()], axis=0)
    rows = {
        name: PhaseStats(n // 10, share=ms.sum() / step.sum(), share_error=0.005)
        for name, ms in phases.items()
    }
    summary = with_facts(
        run(n=24).summary(),
        rows=rows,
        step=PhaseStats(n, mean_ms=float(step.mean()), max_ms=float(step.max()), share=1.0),
        steps=n // 10,
        untimed_steps=n - n // 10,
        timed_every_n_steps=10,
    )
    columns = {"step": index, "step_ms": step, **{f"{name}_ms": ms for name, ms in phases.items()}}
    is_timed = is_long | (index % 10 == 1)
    times = structured({name: column[is_timed] for name, column in columns.items()})
    return Run(H200, times, 0, summary)


def test_sampled_runs_are_compared_by_the_mean_of_all_steps() -> None:
    before, after = sampled(1), sampled(2, more=0.4)
    found = compare(before, after)
    assert found.is_sampled
    assert found.step == found.mean
    assert found.step.before_ms == before.summary().step.mean_ms
    assert found.step.change_ms == pytest.approx(sum(row.change_ms for row in found.rows.values()))
    # The mean of the timed steps alone is far too long.
    timed_ms = float(before.measured["step_ms"].mean())
    assert timed_ms > 1.5 * found.step.before_ms
    assert found.steps == (2000, 2000)
    assert str(found).startswith("Mean of all steps in ms: before 2000 steps, after 2000 steps\n")
    assert found.outcomes(0.05, "step") == {"step": "regression"}
    assert re.search("% slower: forward 0.[34]", found.sentence)


def test_sampled_run_is_compared_with_a_fully_timed_run_by_their_means() -> None:
    full = constant(*[2.0, 2.0, 5.0] * 20)
    found = compare(full, sampled(1), allow_mismatch=True)
    assert found.is_sampled
    assert (found.step.before_ms, found.rows["forward"].before_ms) == (3.0, 1.5)
    assert found.steps == (60, 2000)


def test_unsampled_time_widens_the_interval_of_every_phase() -> None:
    before, after = sampled(1), sampled(2)
    summary = after.summary()
    rows = {**summary.rows, "callbacks": replace(summary.rows["callbacks"], share=0.01)}
    found = compare(before, replace(after, _summary=with_facts(summary, rows=rows)))
    assert found.rows["callbacks"].change_ms < -1.0
    assert found.rows["callbacks"].direction == "alike"
    assert found.rows["forward"].error_ms > 1.0
    assert found.step.error_ms < 0.5
    assert found.notes == ("44 % of the time was not sampled (after): pass every_n_steps=1",)


def in_turns(*pairs: tuple[float, float]) -> tuple[list[Run], list[Run]]:
    """Return two groups of runs that started in the order abbaab..., given the ms of each pair."""
    groups: tuple[list[Run], list[Run]] = ([], [])
    for i, pair_ms in enumerate(pairs):
        for second, group in enumerate(((0, 1), (1, 0))[i % 2], start=2 * i):
            started = f"2026-01-01T00:00:{second:02}+00:00"
            groups[group].append(steady(pair_ms[group], started=started))
    return groups


def test_alternating_runs_are_compared_in_pairs() -> None:
    # The machine slows down by about 1 ms per pair, and `after` is 3 ms slower than `before`.
    pairs = [(10.0, 13.0), (11.0, 14.5), (13.0, 15.5), (14.0, 17.0), (16.0, 19.0)]
    before, after = in_turns(*pairs)
    found = compare(before[::-1], after)
    assert found.in_turns
    more = np.array([after - before for before, after in pairs])
    error = stats.t.ppf(0.99, 4) * more.std(ddof=1) / math.sqrt(5)
    assert found.step.error_ms == pytest.approx(error, rel=0.001)
    assert str(found).startswith(
        "A typical step in ms: before 120 steps of 5 runs, after 120 steps of 5 runs, alternating\n"
    )
    # Four pairs are too few. Runs that did not start in turns are not pairs.
    assert not compare(before[:4], after[:4]).in_turns
    assert not compare(before, [steady(9.0)] * 5).in_turns


# Runs that cannot be compared


NEW_TORCH = {"torch": "2.14.0", "batch_size": None}


@pytest.mark.parametrize(
    ("changes", "note", "is_refused"),
    [
        ({"device": "B200"}, "device is H200 (before) and B200 (after)", True),
        ({"world_size": 2}, "world_size is 1 (before) and 2 (after)", True),
        ({"batch_size": 64}, "batch_size is 32 (before) and 64 (after)", True),
        # An unknown batch size is not refused.
        (NEW_TORCH, "torch is 2.13.0 (before) and 2.14.0 (after)", False),
    ],
)
def test_runs_of_different_work_are_refused_without_allow_mismatch(
    changes: dict[str, Any], note: str, is_refused: bool
) -> None:
    runs = run(1, precision="32"), run(2, **changes)
    if is_refused:
        message = rf"cannot be compared: {re.escape(note)}\. Pass allow_mismatch=True"
        with pytest.raises(ValueError, match=message):
            compare(*runs)
    found = compare(*runs, allow_mismatch=is_refused)
    assert found.notes == (note,)
    assert note in str(found)


STEPS_OF_ZERO = r"most steps of .+ take 0 ms, so a change in percent is"


@pytest.mark.parametrize(
    ("before", "after", "error", "message"),
    [
        (steady(0.0), run(), ValueError, STEPS_OF_ZERO),
        (run(), steady(0.0), ValueError, STEPS_OF_ZERO),
        (steady(0.0), steady(0.0), ValueError, STEPS_OF_ZERO),
        (run(), steady(1.0, 23), ValueError, "has 23 timed steps after its warm-up; at"),
        (run(), [], ValueError, "after must be one or more runs, got none"),
        (3, run(), TypeError, r"before must be a run as load\(\) returns it, .* got 3"),
    ],
)
def test_compare_refuses_arguments_that_are_not_runs_of_enough_steps(
    before: Any, after: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        compare(before, after)


# The command


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return saved_to(tmp_path, run(1), run(2, more={"backward": 0.6}))


@pytest.mark.parametrize(
    ("bounds", "code", "lines"),
    [
        ([], 0, []),
        (["3%"], 1, [REGRESSION.format("step", 3), REGRESSION.format("backward", 3)]),
        (["3"], 1, [REGRESSION.format("step", 3), REGRESSION.format("backward", 3)]),
        (["step:3 %"], 1, [REGRESSION.format("step", 3)]),
        (["backward:3"], 1, [REGRESSION.format("backward", 3)]),
        (["forward:3%"], 0, [FORWARD_PASSED]),
        (["forward:3%", "backward:3%"], 1, [FORWARD_PASSED, REGRESSION.format("backward", 3)]),
        (["9%"], 0, ["Passed: the step is not slower by more than 9 %."]),
        (["backward:6.5%"], 3, [f"{UNCERTAIN} 6.5 %: at least 4 runs {DECIDE}."]),
        (["backward:6.85%"], 3, [f"{UNCERTAIN} 6.85 %: more than 100 runs {NEEDED}."]),
    ],
)
def test_compare_exit_code_and_message_follow_from_the_bound(
    bounds: list[str], code: int, lines: list[str], files: list[str], command: Command
) -> None:
    # The step is 4.2 % slower, and backward 6.7 %, with an error of 1 %.
    arguments = ["compare", *files, *(f"--fail-above={bound}" for bound in bounds)]
    out, err = command(*arguments, code=code)
    assert err.splitlines() == lines
    assert out.startswith("A typical step in ms: before 1000 steps, after 1000 steps\n")
    assert out.count(ONE_RUN) == 1
    out, _ = command(*arguments, "--json", code=code)
    outcomes = {0: "passed", 1: "regression", 3: "cannot tell"}
    found = json.loads(out, parse_constant=pytest.fail)
    assert found.get("outcome") == (outcomes[code] if bounds else None)


def test_compare_takes_folders(tmp_path: Path, command: Command) -> None:
    before, after, empty = (tmp_path / name for name in ("a", "b", "none"))
    for folder, more, runs in ((before, {}, 2), (after, {"backward": 9.0}, 2), (empty, {}, 0)):
        folder.mkdir()
        saved_to(folder, *(run(10 * len(more) + i, more=more) for i in range(runs)))
        (folder / ".run.json.gz.0123.tmp").write_text("{")  # Left by a process that was killed.
    bounds = ("--fail-above=step:20", "--fail-above=forward:9%")
    out, err = command("compare", before, after, *bounds, code=1)
    assert "before 2000 steps of 2 runs, after 2000 steps of 2 runs\n" in out
    regression, passed = REGRESSION.format("step", 20), "Passed: forward is not slower by more than"
    assert err == f"{regression}\n{passed} 9 %.\n"
    out, err = command("compare", before, after, "--fail-above", "lost:2", code=2)
    assert "no phase 'lost'; they have step, data, " in err
    assert out == ""
    _, err = command("compare", before, empty, code=2)
    assert f"after must be one or more runs, got none in {tmp_path}" in err


NOT_A_BOUND = "must be a percentage such as 2%, or with a phase loss:5%, got '{}'"
BOUNDS = ("two", "-1%", "2%%", "nan", "loss:", ":2%", "loss=2%")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "none.json.gz", "none.json.gz"], "No such file or directory"),
        (["show", __file__], "is not a saved run: write one with timer.save(path)"),
        *((["compare", "a", "b", f"--fail-above={b}"], NOT_A_BOUND.format(b)) for b in BOUNDS),
    ],
)
def test_unreadable_file_or_bound_exits_with_2(
    arguments: list[str], message: str, command: Command
) -> None:
    assert message in command(*arguments, code=2).err


@pytest.mark.parametrize(
    "error", [OverflowError("large"), MemoryError(), ZeroDivisionError("0\n0")]
)
def test_compare_exits_with_2_for_an_unexpected_error(
    error: Exception, files: list[str], monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr("lightning_gputime.compare", Mock(side_effect=error))
    [line] = command("compare", *files, "--fail-above", "1%", code=2).err.splitlines()
    assert line.startswith("lightning_gputime: unexpected error: ")


def test_show_prints_the_slow_steps(files: list[str], tmp_path: Path, command: Command) -> None:
    printed = command("show", files[0]).out
    assert printed.startswith(f"{saved.load(files[0]).summary()}\n")
    assert "H200 · torch 2.13.0 · batch 32" in printed
    assert "Slow steps" not in printed
    assert json.loads(command("show", files[0], "--json").out)["steps"] == 1000
    # Files of earlier versions have the cause `off_cpu`.
    causes = (Cause("ranks", 9.0, 3.0, ""), Cause("off_cpu", 2.0, 1.5, "stopped or blocked"))
    steps = [SlowStep(7, 20.0, 15.0, "loss", causes, 0.5), SlowStep(9, 18.0, 15.0, "data", (), 3.0)]
    [path] = saved_to(tmp_path, replace(run(1), slow_steps=steps))
    assert command("show", path).out.splitlines()[-10:] == [
        "Slow steps in ms",
        "",
        " step    time  baseline  excess  most in  causes",
        "-" * 74,
        "    7  20.000    15.000   5.000  loss     3 ms other ranks, 1.5 ms off-CPU",
        "                                            (stopped or blocked), 0.5 ms",
        "                                            unexplained",
        "    9  18.000    15.000   3.000  data     3 ms unexplained",
        "-" * 74,
        "all 2                     8.000",
    ]


@pytest.mark.parametrize(("ms", "title", "cells"), [(0.002, "us", "2.0"), (2000.0, "s", "2.0000")])
def test_comparison_table_unit_suits_the_step(ms: float, title: str, cells: str) -> None:
    timed = run_of(raw(i, forward=ms) for i in range(48))
    table = str(compare(timed, timed))
    assert table.startswith(f"A typical step in {title}: before 48 steps, after 48 steps\n")
    assert re.search(rf"^step +{cells} +{cells} +\+0\.0+  ± 0\.0+ ", table, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    # Without a buffer the first write fails, otherwise the flush at exit.
    ("arguments", "unbuffered", "code", "names"),
    [
        (["compare", "0.json.gz", "1.json.gz", "--fail-above", "2%"], "", 1, ["step", "backward"]),
        (["show", "0.json.gz"], "1", 0, []),
    ],
)
def test_command_keeps_its_exit_code_when_stdout_is_closed(
    arguments: list[str], unbuffered: str, code: int, names: list[str], files: list[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "lightning_gputime", *arguments],
        cwd=Path(files[0]).parent,
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered},
        text=True,
        check=False,
    )
    os.close(writer)
    lines = [REGRESSION.format(name, 2) for name in names]
    assert (done.returncode, done.stderr.splitlines()) == (code, lines)


# The sentence and the table


@pytest.mark.parametrize(
    ("step", "mean", "sentence"),
    [
        ((95.0, 10.0), (95.0, 10.0), "no significant change of the step: -5.0 % ± 10.0 %"),
        ((95.0, 10.1), (95.0, 10.1), "too noisy to tell (-5.0 % ± 10.1 %): record longer runs"),
        ((70.0, 33.0), (75.0, 10.0), "the mean of all steps 25 ± 10 ms faster; typical step: no"),
    ],
)
def test_sentence_of_a_step_without_a_significant_change(
    step: tuple[float, float], mean: tuple[float, float], sentence: str
) -> None:
    found = comparison(difference(100.0, *step), mean=difference(100.0, *mean))
    assert found.sentence.startswith(sentence)


def test_phase_that_only_one_side_has_gets_no_percentage() -> None:
    step = Difference(before_ms=10.0, after_ms=8.0, error_ms=0.1, relative_error=0.01)
    before = Difference(before_ms=2.0, after_ms=0.0, error_ms=0.1, relative_error=0.05)
    after = replace(before, before_ms=0.0, after_ms=2.0)
    table = str(
        comparison(step, {"forward": before, "forward/net": before, "backward/comm": after})
    )
    lines = {line.split()[0]: line.split() for line in table.splitlines() if line}
    assert lines["forward"][-2:] == ["-100.0%", "faster"]
    assert lines["net"][-3:] == ["0.100", "only", "before"]
    assert lines["comm"][-3:] == ["0.100", "only", "after"]


def test_regression_of_the_mean_alone_is_named(tmp_path: Path, command: Command) -> None:
    rare = [900.0 if i % 10 == 5 else 10.0 for i in range(240)]
    paths = saved_to(tmp_path, steady(10.0, 240), constant(*rare))
    err = command("compare", *paths, "--fail-above", "step:5%", code=1).err
    assert err == f"{REGRESSION.format('the mean of all steps', 5)}\n"


# The speed of the host


def at_speed(seed: int, slowness: float, trial_ms: float, **more: float) -> Run:
    """Return a run on a host that was slow, and whose fixed calculation took `trial_ms`."""
    timed = run(seed, more=more)
    for name in ("step", *PHASES):
        timed.history[f"{name}_ms"] *= slowness
    wall_clock = WallClockBreakdown({"steps": 15.0}, trial_ms=trial_ms)
    return replace(timed, _summary=with_facts(timed.summary(), wall_clock=wall_clock))


@pytest.mark.parametrize(
    ("follows", "outcome"), [(True, "regression"), (False, "cannot tell"), (None, "cannot tell")]
)
def test_times_are_adjusted_for_the_speed_of_the_host(follows: bool | None, outcome: str) -> None:
    """The fixed calculation follows the speed, does not follow it, or is unknown."""
    slowness = [1.0, 1.3, 1.1, 1.25, 0.9, 1.2, 1.15, 0.95]
    trials_ms = [0.2 * (1 if follows is False else slow) for slow in slowness]
    if follows is None:
        trials_ms = [0.0] * len(slowness)
    sides = [
        [
            at_speed(seed, slowness[seed], trials_ms[seed], forward=forward)
            for seed in range(first, len(slowness), 2)
        ]
        for first, forward in ((0, 0.0), (1, 1.5))
    ]
    found = compare(*sides)
    assert found.step.outcome(0.05) == outcome
    adjusted = "times are adjusted for the host, which varied by 44 % (`trial_ms`)"
    assert (adjusted in found.notes) is bool(follows)
    if follows:
        assert found.step.relative_change == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(
    ("more", "outcome", "change"),
    [
        ({}, "passed", 0.0),
        ({"forward": 3.0}, "regression", 0.2),
        # If a long phase becomes faster, the others are longer in proportion, but not the step.
        ({"forward": -1.0}, "cannot tell", 0.167),
    ],
)
def test_phases_in_proportion_decide_on_a_busy_host(
    more: dict[str, float], outcome: str, change: float
) -> None:
    """The host makes the phases of a run up to 1.3 times as long. The trial does not show it."""
    slowness = [1.0, 1.3, 1.3, 1.0, 1.1, 1.2, 1.2, 1.1]
    sides = [
        [at_speed(seed, slowness[seed], 0.2, **changes) for seed in range(first, 8, 2)]
        for first, changes in ((0, {}), (1, more))
    ]
    found = compare(*sides)
    assert found.step.outcome(0.15) == "cannot tell"
    assert found.outcome(0.15, "step") == outcome
    assert found.proportional is not None
    assert found.proportional.step.relative_change == pytest.approx(change, abs=0.01)
    (sentence,) = found.explain(0.15, "step")
    is_told = f"(in proportion to {found.proportional.phase}: " in sentence
    assert is_told is (outcome != "cannot tell")
    assert json.loads(json.dumps(found.to_dict()))["proportional"]["phase"]


# The wall clock outside the steps


def with_wall_clock(evaluation_s: float) -> Run:
    wall_clock = WallClockBreakdown({"set-up": 1.0, "steps": 20.0, "evaluation": evaluation_s})
    return replace(run(), _summary=with_facts(run().summary(), wall_clock=wall_clock))


@pytest.mark.parametrize(
    ("evaluation_s", "outside"),
    [
        (
            39.0,
            "time outside of the steps (not tested for significance): 40 s of 60 s (before) and"
            " 2 s of 22 s (after)",
        ),
        (1.5, ""),
    ],
)
def test_sentence_shows_changed_time_outside_the_steps(evaluation_s: float, outside: str) -> None:
    found = compare([with_wall_clock(evaluation_s)] * 2, [with_wall_clock(1.0)] * 2)
    assert found.outside == outside
    alike = "no significant change of the step: +0.0 % ± 0.3 %"
    assert found.sentence == (f"{outside}; {alike}" if outside else alike)
    assert compare(run(), with_wall_clock(9.0)).outside == ""


@pytest.mark.parametrize(
    ("after_s", "outcome"),
    [
        ([8.0, 8.1, 8.2], "regression"),
        ([5.0, 5.1, 5.2], "passed"),
        ([5.0, 5.5, 6.0], "cannot tell"),
        ([9.0], "cannot tell"),  # One run per side shows no noise.
    ],
)
def test_entry_of_the_wall_clock_is_judged_only_by_name(after_s: list[float], outcome: str) -> None:
    before = [with_wall_clock(s) for s in (4.9, 5.0, 5.1)[: len(after_s)]]
    found = compare(before, [with_wall_clock(s) for s in after_s])
    assert [*found.wall_clock] == ["set-up", "steps", "evaluation"]
    assert found.outcome(0.2, "evaluation") == outcome
    assert found.outcome(0.2) == "passed"
    with pytest.raises(ValueError, match="no phase 'evaluation'"):
        compare(before, [run()] * 3).outcome(0.2, "evaluation")
