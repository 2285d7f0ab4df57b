import importlib
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_gpu import raw
from scipy import signal, stats

import lightning_gputime
from lightning_gputime import Cause, Run, RunComparison, SlowStep, compare
from lightning_gputime.__main__ import main
from lightning_gputime._measurement.history import history
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.wall_time import WallTimeBreakdown
from lightning_gputime._phases import StepRecord
from lightning_gputime._saved_runs import saved
from lightning_gputime._saved_runs.compare import (
    Difference,
    differences,
    mean_of_all,
    quantile_of_t,
    typical,
    variance,
)
from lightning_gputime._saved_runs.environment import Environment

PHASES = ("data", "forward", "backward")
ON = Environment(device="H200", device_type="cuda", world_size=1, batch_size=32, torch="2.13.0")


def noise(seed: int, n: int = 1000, *, lasting: float = 0.9) -> np.ndarray[Any, Any]:
    """Noise of deviation one, of which each step keeps a part of the one before."""
    new = np.random.default_rng(seed).standard_normal(n)
    new[1:] *= math.sqrt(1 - lasting**2)
    steps: np.ndarray[Any, Any] = signal.lfilter([1.0], [1.0, -lasting], new)
    return steps


def run(
    seed: int = 0, n: int = 1000, *, more: dict[str, float] | None = None, **changes: Any
) -> Run:
    """A run whose steps take 15 ms and some noise, most of it of some steps together."""
    times = {"data": 1.0, "forward": 5.0, "backward": 9.0}
    for name, ms in (more or {}).items():
        times[name] = times.get(name, 0.0) + ms
    each = np.array([*times.values()]) * (1 + 0.01 * noise(seed, n))[:, np.newaxis]
    records = [
        StepRecord(i, tuple(times), tuple(one), (0,) * (len(times) + 1), 0.0, 0, False)
        for i, one in enumerate(each.tolist())
    ]
    results = Results(n, 0)
    results.add(records)
    return Run(replace(ON, **changes), *results.history_and_warmup(), results.summary())


def constant(*steps: float, **changes: Any) -> Run:
    """A run of steps that take exactly so long, half of it forward."""
    records = [
        StepRecord(i, ("forward", "backward"), (ms / 2, ms / 2), (0, 0, 0), 0.0, 0, False)
        for i, ms in enumerate(steps)
    ]
    return replace(run(n=24), history=history(records), environment=replace(ON, **changes))


TWO_RUNS = "; with one run a side this may be chance: save three or more of each"


# The estimates


@pytest.mark.parametrize("sides", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_runs_whose_steps_take_no_time_are_refused(sides: tuple[float, float]) -> None:
    groups = [run(1, 200), run(2, 200)]
    for one, factor in zip(groups, sides, strict=True):
        for name in (one.history.dtype.names or ())[1:]:
            one.history[name] *= factor
    with pytest.raises(ValueError, match=r"most steps of .+ take 0 ms, and no change can be given"):
        compare(*groups)


def test_a_typical_step_is_the_mean_of_the_middle_half_and_its_phases_add_up() -> None:
    step = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 800.0])
    forward = step / 4
    times = np.stack([step, forward, step - forward], axis=1)
    values, influence = typical(times)
    assert values.tolist() == [4.5, 1.125, 3.375]
    # Beyond the borders a step moves the estimate as the border does, here by 2 (4.5 - 2.5).
    assert influence[:, 0].tolist() == [-4.0, -4.0, -3.0, -1.0, 1.0, 3.0, 4.0, 4.0]
    assert influence[:, 1:].sum(axis=1) == pytest.approx(influence[:, 0])


def test_the_mean_moves_with_each_step() -> None:
    values, influence = mean_of_all(np.array([[1.0], [2.0], [6.0]]))
    assert values.tolist() == [3.0]
    assert influence.ravel().tolist() == [-2.0, -1.0, 3.0]


@pytest.mark.parametrize("lasting", [0.0, 0.9])
def test_the_variance_is_that_of_the_means_of_many_series(lasting: float) -> None:
    series = [noise(seed, lasting=lasting)[:, np.newaxis] for seed in range(300)]
    means = [float(one.mean()) for one in series]
    found = np.mean([variance(one)[0] for one in series])
    # A little more is right: an interval may be too wide, but not too narrow.
    assert 1.0 <= found / np.var(means) < 1.4


def test_steps_that_are_alike_for_long_count_less() -> None:
    shuffled = noise(1).copy()
    np.random.default_rng(0).shuffle(shuffled)
    lasting, alone = (variance(x[:, np.newaxis])[0] for x in (noise(1), shuffled))
    assert lasting > 5 * alone


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 11, 50])
@pytest.mark.parametrize("confidence", [0.95, 0.995, 0.9995])
def test_the_quantiles_of_t_are_right(freedom: int, confidence: float) -> None:
    right = stats.t.ppf((1 + confidence) / 2, freedom)
    assert quantile_of_t(freedom, confidence) == pytest.approx(right, rel=1e-3)


# What is found


def test_a_slower_backward_is_found_and_named() -> None:
    found = compare(run(1), run(2, more={"backward": 0.6}))
    assert found.verdict == "slower"
    assert found.step.relative_change == pytest.approx(0.04, abs=0.005)
    assert found.step.change_ms == pytest.approx(sum(r.change_ms for r in found.rows.values()))
    # Of each phase 1 % is noise, which all share: 0.6 ms more are of backward alone.
    assert found.sentence.startswith("4.2 % ± 0.")
    assert re.search(
        r" % slower: backward 0\.6\d* ± 0\.[01]\d* ms slower; with one run ", found.sentence
    )
    significant = [name for name, row in found.rows.items() if row.is_significant]
    assert significant == ["backward"]


def test_a_faster_run_and_an_equal_one_are_told() -> None:
    assert compare(run(1), run(2, more={"forward": -1.0})).verdict == "faster"
    alike = compare(run(1), run(2))
    assert alike.verdict == "alike"
    assert alike.sentence.startswith("no significant change of the step: ")


def test_steps_without_noise_show_any_difference() -> None:
    found = compare(constant(*[10.0] * 24), constant(*[10.5] * 24))
    assert (found.step.before_ms, found.step.after_ms, found.step.error_ms) == (10.0, 10.5, 0.0)
    phases = "forward 0.25 ± 0 ms slower, backward 0.25 ± 0 ms slower"
    assert found.sentence == f"5.00 % ± 0.00 % slower: {phases}{TWO_RUNS}"


def test_a_part_that_is_the_phases_difference_is_named_with_it() -> None:
    before, after = run(1, more={"data/fetch": 0.0}), run(1, more={"data/fetch": 2.0})
    found = compare(before, after)
    # The whole step, and so data, is the fetch longer: 2 ms, and all of data's change.
    assert "slower: data (data/fetch) 1.99 ± 0.0" in found.sentence
    assert found.judged == [*PHASES]


def test_a_phase_that_one_side_has_not_takes_no_time_there() -> None:
    row = compare(run(1), run(2, more={"augment": 0.5})).rows["augment"]
    assert row.before_ms == 0.0
    assert row.after_ms == pytest.approx(0.5, rel=0.01)
    assert math.isnan(row.relative_change)
    assert row.is_significant


def test_one_step_that_takes_a_second_says_nothing() -> None:
    slow = run(2)
    slow.history["step_ms"][500] += 1000.0
    slow.history["backward_ms"][500] += 1000.0
    found = compare(run(1), slow)
    assert found.verdict == "alike"
    assert found.mean.change_ms == pytest.approx(1.0, abs=0.1)
    assert "mean of all" not in found.sentence


def test_a_mean_that_alone_is_longer_is_told_beside_a_noisy_step() -> None:
    step = Difference(before_ms=100.0, after_ms=70.0, error_ms=33.0, relative_error=0.33)
    mean = Difference(before_ms=100.0, after_ms=75.0, error_ms=10.0, relative_error=0.1)
    found = RunComparison(rows={}, step=step, mean=mean, runs=(2, 2), steps=(90, 90))
    assert found.sentence.startswith("the mean of all steps 25 ± 10 ms faster; a typical step: no")


def test_slow_steps_that_come_again_and_again_are_told_of_the_mean() -> None:
    slow = run(2)
    slow.history["step_ms"][::20] += 30.0
    found = compare(run(1), slow)
    assert found.verdict == "alike"
    assert found.sentence.startswith("the mean of all steps 1.5")
    assert " ms slower; a typical step: no significant change (" in found.sentence
    assert found.is_above(0.05)


def claims(found: RunComparison) -> bool:
    """Whether anything at all is called different: the step, the mean or a phase."""
    return not found.sentence.startswith(
        ("no significant change of the step: ", "too noisy to tell ")
    )


def test_equal_runs_are_rarely_called_different_and_one_percent_more_is_found() -> None:
    pairs = [
        (run(2 * i), run(2 * i + 1), run(2 * i + 1, more={"backward": 0.15})) for i in range(100)
    ]
    equal = sum(claims(compare(a, b)) for a, b, _ in pairs)
    found = sum(compare(a, c).verdict == "slower" for a, _, c in pairs)
    # Of 100 pairs, at 5 % each, more than 9 are called different once in forty times.
    assert equal <= 9
    assert found >= 90


def test_groups_are_rarely_called_different_and_what_is_planted_is_found() -> None:
    rng = np.random.default_rng(0)
    template = run(n=24, more={"small": 0.3})
    shares = {"data": 0.1, "forward": 0.4, "small": 0.02, "backward": 0.48}

    def group(*, step: float = 1.0, small: float = 1.0) -> list[Run]:
        """Three runs of 250 steps: 1 % noise in steps, and 0.3 % between runs."""
        runs = []
        for level in 10 * step * np.exp(0.003 * rng.standard_normal(3)):
            history = np.zeros(250, template.history.dtype)
            both = level * np.exp(0.01 * noise(int(rng.integers(2**31)), 250))
            for name, share in shares.items():
                own = share * both * np.exp(0.01 * rng.standard_normal(250))
                history[f"{name}_ms"] = own * (small if name == "small" else 1.0)
                history["step_ms"] += history[f"{name}_ms"]
            runs.append(replace(template, history=history, warmup_steps=0))
        return runs

    equal = [claims(compare(group(), group())) for _ in range(200)]
    slower = [compare(group(), group(step=1.02)).is_above(0.0, "step") for _ in range(50)]
    small = [compare(group(), group(small=1.1)).is_above(0.0, "small") for _ in range(50)]
    assert sum(equal) <= 10
    assert sum(slower) >= 45
    assert sum(small) >= 45


@pytest.mark.parametrize("part", [0.25, 0.75])
def test_equal_runs_of_two_speeds_are_rarely_called_different(part: float) -> None:
    rng = np.random.default_rng(0)

    def side() -> tuple[float, float]:
        steps = np.where(rng.random(2000) < part, 20, 10) + rng.normal(0, 0.1, 2000)
        values, influence = typical(steps[:, np.newaxis])
        return float(values[0]), float(variance(influence)[0])

    width = quantile_of_t(11, 0.95)
    pairs = [(side(), side()) for _ in range(100)]
    different = sum(abs(a - b) > width * math.sqrt(of_a + of_b) for (a, of_a), (b, of_b) in pairs)
    assert different <= 10


@pytest.mark.parametrize(
    ("every", "counts"), [(50, (1200, 1201)), (20, (480, 481)), (7, (840, 841))]
)
def test_slow_steps_at_a_fixed_distance_make_no_difference(
    every: int, counts: tuple[int, int]
) -> None:
    sides = [constant(*(1010.0 if i % every == 0 else 10.0 for i in range(n))) for n in counts]
    for before, after in (sides, sides[::-1]):
        found = compare(before, after)
        assert not found.is_above(0.02)
        assert not found.is_above(0.0)
        assert not claims(found)


def test_a_module_inside_another_is_compared_and_named_and_a_single_callback_is_not() -> None:
    names = ("forward/body", "forward/body/body.mlp", "callbacks/Bar.on_train_batch_end")
    results = Results(200, 0), Results(200, 0)
    for one, ms in zip(results, (2.0, 3.0), strict=True):
        more = dict(zip(names, (1.0, ms, 1.0), strict=True))
        one.add([raw(i, data=1.0, forward=4.0, **more) for i in range(100)])
    before, after = (
        Run(Environment(), *one.history_and_warmup(), one.summary()) for one in results
    )
    found = compare(before, after)
    assert [*found.rows] == ["data", "callbacks", "forward", *names[:2]]
    assert found.rows[names[1]].change_ms == pytest.approx(1.0)
    assert found.judged == ["data", "callbacks", "forward"]
    assert "% slower: forward (forward/body/body.mlp) 1 ± 0 ms slower; with one" in found.sentence


def test_the_rows_are_in_the_order_of_the_files() -> None:
    more = dict.fromkeys(("zeta", "alpha", "mu", "beta"), 1.0)
    assert [*compare(run(1, more=more), run(2, more={"more": 1.0})).rows] == [
        *PHASES,
        *more,
        "more",
    ]


def test_the_spread_between_runs_widens_the_interval() -> None:
    before = [constant(*[ms] * 24) for ms in (10.0, 11.0, 12.0)]
    after = [constant(*[ms] * 24) for ms in (11.0, 12.0, 13.0)]
    found = compare(before, after)
    # Two groups of three with a variance of 1 each: Student's test, with 2 % for the step, and
    # 2.5 % for its two phases, of half the length; 0.5 % for the mean.
    for row, chance, length in (
        (found.step, 0.02, 1.0),
        (found.rows["forward"], 0.0125, 0.5),
        (found.rows["backward"], 0.0125, 0.5),
        (found.mean, 0.005, 1.0),
    ):
        error = stats.t.ppf(1 - chance / 2, 4) * math.sqrt(1 / 3 + 1 / 3) * length
        assert row.error_ms == pytest.approx(error, rel=0.001)
        # That of the quotient: the time before counts 12/11 times.
        ratio = stats.t.ppf(1 - chance / 2, 4) * math.sqrt(1 / 3 + (12 / 11) ** 2 / 3) / 11
        assert row.relative_error == pytest.approx(ratio, rel=0.001)
    assert (found.runs, found.steps, found.verdict) == ((3, 3), (72, 72), "alike")
    assert "one run a side" not in str(found)
    assert TWO_RUNS in str(compare(before[0], after[0]))
    assert "too noisy to tell (+4.8 % ± 262.5 %): compare longer runs, or more of each" in str(
        compare(before[:2], after[0])
    )


@pytest.mark.parametrize("more_ms", [1.2, 2.0, 5.0, 20.0, 60.0])
def test_a_short_noisy_phase_that_grows_many_times_is_slower(more_ms: float) -> None:
    random = np.random.default_rng(0)

    def steps() -> Any:
        noisy = random.gamma(0.3, 2.0, (150, 1))
        return np.hstack([noisy + 10.0, noisy])

    before, after = steps(), steps() + more_ms
    chances = np.array([0.98, 0.996])
    _, phase = differences([before], [after], how=typical, confidence=chances)
    assert (phase.verdict, phase.is_above(0.05), phase.is_above(1.0)) == ("slower", True, True)


def test_a_bound_is_passed_where_the_whole_interval_is_above_it() -> None:
    found = compare(run(1), run(2, more={"backward": 0.6}))
    assert found.is_above(0.03, "step")
    assert not found.is_above(0.04, "step")
    assert not found.is_above(0.03, "forward")
    # Of backward 0.6 ms are 6.7 %: that is asked too, where nothing is named.
    assert (found.is_above(0.05), found.is_above(0.05, "backward")) == (True, True)
    assert (found.is_above(0.07), found.is_above(0.07, "backward")) == (False, False)
    assert not compare(run(2, more={"backward": 0.6}), run(1)).is_above(0.0)


def test_a_phase_is_found_where_the_step_is_too_unsteady() -> None:
    # Between runs backward differs by 3 ms and more: of that 2 ms more of loss hide in the step.
    def runs(loss_ms: float, *backward_ms: float) -> list[Run]:
        more = [{"loss": loss_ms, "backward": ms} for ms in backward_ms]
        return [run(i + round(loss_ms), more=one) for i, one in enumerate(more)]

    found = compare(runs(0.8, 0.0, 3.0, -2.0), runs(2.8, 1.0, -1.0, 4.0))
    assert found.verdict == "alike"
    assert found.sentence.startswith("loss 2 ± 0.")
    assert " ms slower; a typical step: no significant change (+" in found.sentence
    assert found.is_above(0.5, "loss")
    assert found.is_above(0.5)
    assert not found.is_above(0.0, "step")
    assert re.search(r"^loss .* \+\d+\.\d%  slower$", str(found), re.MULTILINE)


def test_a_phase_that_is_new_lies_above_any_bound_and_one_that_is_not_there_is_refused() -> None:
    found = compare(run(1), run(2, more={"augment": 0.2}))
    assert not found.is_above(0.1, "step")
    assert found.is_above(0.1)
    assert found.is_above(5.0, "augment")
    with pytest.raises(ValueError, match="no phase 'lost'; they have step, data, forward, backwar"):
        found.is_above(0.0, "lost")


def test_a_phase_below_a_hundredth_of_the_step_is_asked_only_by_name() -> None:
    found = compare(run(1, more={"tiny": 0.05}), run(2, more={"tiny": 0.1}))
    assert found.judged == [*PHASES]
    assert not found.is_above(0.5)
    assert found.is_above(0.5, "tiny")


BOTH = {
    0.0: (True, False),
    0.05: (True, False),
    0.067: (False, False),
    0.08: (False, True),
}


def test_an_interval_is_above_the_bound_or_below_or_around_it() -> None:
    # Backward is 6.7 % longer, give or take 1 %.
    found = compare(run(1), run(2, more={"backward": 0.6}))
    sides = {b: (found.is_above(b, "backward"), found.is_below(b, "backward")) for b in BOTH}
    assert sides == BOTH
    assert found.is_below(0.08)
    assert not found.is_below(0.06)


def in_turns(*pairs: tuple[float, float], order: str = "abba") -> tuple[list[Run], list[Run]]:
    """Two groups of runs, whose steps take so long: they started a second after each other."""
    sides: dict[str, list[Run]] = {"a": [], "b": []}
    for i, pair in enumerate(pairs):
        for side in order[2 * (i % 2) :][:2]:
            ms, n = pair["ab".index(side)], sum(map(len, sides.values()))
            sides[side].append(constant(*[ms] * 24, started=f"2026-01-01T00:00:{n:02}+00:00"))
    return sides["a"], sides["b"]


def test_runs_that_took_turns_are_compared_in_pairs() -> None:
    # Each run is 1 ms slower than the one before; the second of each pair 3 ms more or so.
    pairs = [(10.0, 13.0), (11.0, 14.5), (13.0, 15.5), (14.0, 17.0), (16.0, 19.0)]
    before, after = in_turns(*pairs)
    found = compare(before[::-1], after)
    assert found.in_turns
    more = np.array([after - before for before, after in pairs])
    error = stats.t.ppf(0.99, 4) * more.std(ddof=1) / math.sqrt(5)
    assert found.step.error_ms == pytest.approx(error, rel=0.001)
    assert str(found).startswith(
        "A typical step in ms: before 120 steps of 5 runs, after 120 steps of 5 runs, in turns\n"
    )
    # Four are too few, and those that were run one side after the other are no pairs.
    assert not compare(before[:4], after[:4]).in_turns
    assert not compare(before, [constant(*[9.0] * 24) for _ in range(5)]).in_turns


def test_groups_are_compared_with_the_first_and_share_the_chance() -> None:
    groups = [[constant(*[ms + i] * 24) for i in range(3)] for ms in (10.0, 10.0, 20.0)]
    found = compare(*groups)
    [other] = found.others
    # A variance of 1 in each group, and 2 % for the steps of both comparisons.
    error = stats.t.ppf(1 - 0.01 / 2, 4) * math.sqrt(1 / 3 + 1 / 3)
    assert found.step.error_ms == pytest.approx(error, rel=0.001)
    assert other.step.error_ms == pytest.approx(error, rel=0.001)
    assert (found.verdict, other.verdict, other.names) == (
        "alike",
        "slower",
        ("group 1", "group 3"),
    )
    head, *lines = str(found).splitlines()
    assert head.endswith(
        "group 1 72 steps of 3 runs, group 2 72 steps of 3 runs, group 3 72 steps of 3 runs"
    )
    [step] = [line.split() for line in lines if line.startswith("step ")]
    assert step[:4] == ["step", "11.000", "11.000", "+0.000"]
    assert step[-2:] == ["+90.9%", "slower"]
    assert lines[-1].startswith("group 3: 90.9 % ± ")
    assert found.to_dict()["others"][0]["verdict"] == "slower"


# What cannot be compared


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("device", "B200", "device is H200 (before) and B200 (after)"),
        ("world_size", 2, "world_size is 1 (before) and 2 (after)"),
        ("batch_size", 64, "batch_size is 32 (before) and 64 (after)"),
    ],
)
def test_runs_of_other_work_are_refused_unless_told(name: str, value: Any, told: str) -> None:
    other = run(2, **{name: value})
    with pytest.raises(
        ValueError, match=rf"cannot be compared: {re.escape(told)}\. Pass allow_mismatch=True"
    ):
        compare(run(1), other)
    assert told in str(compare(run(1), other, allow_mismatch=True))


def test_what_may_be_the_change_is_noted_and_what_is_not_known_is_not() -> None:
    found = compare(run(1, precision="32"), run(2, torch="2.14.0", batch_size=None))
    assert found.notes == ("torch is 2.13.0 (before) and 2.14.0 (after)",)


def test_runs_that_are_too_short_are_refused() -> None:
    with pytest.raises(ValueError, match="has 23 steps after its warm-up; at least 24 are needed"):
        compare(run(1), constant(*[1.0] * 23))
    with pytest.raises(ValueError, match="after must be a run or several, got none"):
        compare(run(1), [])
    with pytest.raises(TypeError, match=r"before must be a run as load\(\) returns it, .* got 3"):
        compare(3, run(1))  # type: ignore[arg-type]


# The command


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    paths = str(tmp_path / "before.json.gz"), str(tmp_path / "after.json.gz")
    for path, one in zip(paths, (run(1), run(2, more={"backward": 0.6})), strict=True):
        saved.save(one, path)
    return paths


def test_the_console_script_is_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    module, _, name = project["project"]["scripts"]["lightning-gputime"].partition(":")
    script = getattr(importlib.import_module(module), name)
    monkeypatch.setattr("sys.argv", ["lightning-gputime", "show", "missing.json"])
    assert script() == main(["show", "missing.json"]) == 2
    assert capsys.readouterr().err.count("missing.json") >= 2


ONE_RUN = (
    "warning: --fail-above has one run on a side: equal runs may differ as much, and fail. Save"
    " three or more per side, or use bench."
)
# The step is 4.2 % slower, and backward 6.7 %.
BOUNDS = {
    "3%": ["step", "backward"],
    "3": ["step", "backward"],
    "step:3 %": ["step"],
    "backward:3": ["backward"],
    "forward:3%": [],
    "forward:3%,backward:3%,step:3%": ["backward", "step"],
    "7.5%": [],
    "step:4.5%": [],
}


def test_the_command_prints_the_table_and_exits_above_the_bound(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *files]) == 0
    printed = capsys.readouterr().out
    assert "% slower: backward 0.6" in printed
    assert printed.splitlines()[0] == "A typical step in ms: before 1000 steps, after 1000 steps"
    for bounds, names in BOUNDS.items():
        arguments = [word for one in bounds.split(",") for word in ("--fail-above", one)]
        assert main(["compare", *files, *arguments]) == bool(names), bounds
        lines = [f"{name} is slower by more than 3 %." for name in names]
        assert capsys.readouterr().err.splitlines() == [ONE_RUN, *lines]
    assert main(["compare", *files[::-1], "--fail-above", "0%"]) == 0


def test_several_runs_a_side(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    before, after = files
    found = compare([before, before], [after, after])
    assert "before 2000 steps of 2 runs, after 2000 steps of 2 runs\n" in str(found)
    assert main(["compare", *files, "--fail-above=9%"]) == 0
    assert capsys.readouterr().err == f"{ONE_RUN}\n"


def test_folders_are_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, name in enumerate("abc"):
        for j in range(2):
            (tmp_path / name).mkdir(exist_ok=True)
            more = {"backward": 9.0} if name == "c" else {}
            saved.save(run(10 * i + j, more=more), tmp_path / name / f"{j}.json.gz")
    folders = [str(tmp_path / name) for name in "abc"]
    assert main(["compare", *folders, "--fail-above=step:20", "--fail-above=forward:1%"]) == 1
    out, err = capsys.readouterr()
    assert f"{folders[1]} 2000 steps of 2 runs, {folders[2]} 2000 steps of 2 runs\n" in out
    assert err == f"{folders[2]}: step is slower by more than 20 %.\n"
    assert main(["compare", *folders[:2], "--fail-above", "lost:2"]) == 2
    out, err = capsys.readouterr()
    assert "no phase 'lost'; they have step, data, " in err
    assert out == ""  # No table that looks like an answer.
    (tmp_path / "none").mkdir()
    assert main(["compare", folders[0], str(tmp_path / "none")]) == 2
    assert f"after must be a run or several, got none in {tmp_path}" in capsys.readouterr().err


def test_a_comparison_is_short_in_a_console() -> None:
    found = compare(run(n=24), run(1, n=24, more={"forward": 5.0}))
    assert repr(found) == f"<RunComparison: {found.sentence}>"


def test_json(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["compare", *files, "--json"])
    assert json.loads(capsys.readouterr().out)["verdict"] == "slower"


def test_json_has_null_for_what_is_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path, more in zip(paths, ({}, {"augment": 0.5}), strict=True):
        saved.save(run(1, more=more), path)
    assert main(["compare", *paths, "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["rows"]["augment"]["relative_error"] is None
    assert compare(*paths).to_dict()["rows"]["augment"]["relative_error"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "none.json.gz", "none.json.gz"], "No such file or directory"),
        (["show", __file__], "is not a saved run: write one with timer.save(path)"),
    ],
)
def test_bad_input_exits_with_two(
    arguments: list[str],
    message: str,
    files: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([files[0] if one == "FILE" else one for one in arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [OverflowError("large"), MemoryError(), ZeroDivisionError("0\n0")]
)
def test_an_error_that_nobody_expects_exits_with_two(
    error: Exception,
    files: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("lightning_gputime.compare", fail)
    assert main(["compare", *files, "--fail-above", "1%"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("lightning_gputime: the runs cannot be read or compared: ")


@pytest.mark.parametrize("bound", ["two", "-1%", "2%%", "nan", "loss:", ":2%", "loss=2%"])
def test_a_bound_that_is_no_percentage_is_refused(
    bound: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["compare", *files, f"--fail-above={bound}"])
    assert exit_.value.code == 2
    told = "must be a percentage such as 2%, or with a phase loss:5%, got "
    assert f"{told}{bound!r}" in capsys.readouterr().err


def test_show_prints_the_table_again(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", files[0]]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{saved.load(files[0]).summary()}\n")
    assert "H200 · torch 2.13.0 · batch 32" in printed
    assert "Slow steps" not in printed
    main(["show", files[0], "--json"])
    assert json.loads(capsys.readouterr().out)["steps"] == 1000


def test_show_prints_slow_steps_as_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    causes = (Cause("ranks", 9.0, 3.0, ""), Cause("off_cpu", 2.0, 1.5, "stopped or blocked"))
    steps = [SlowStep(7, 20.0, 15.0, "loss", causes, 0.5), SlowStep(9, 18.0, 15.0, "data", (), 3.0)]
    saved.save(replace(run(1), slow_steps=steps), tmp_path / "run.json.gz")
    assert main(["show", str(tmp_path / "run.json.gz")]) == 0
    assert capsys.readouterr().out.splitlines()[-10:] == [
        "Slow steps in ms",
        "",
        " step    time  baseline  excess  most in  excess is",
        "-" * 74,
        "    7  20.000    15.000   5.000  loss     3 ms other ranks, 1.5 ms off-CPU",
        "                                            (stopped or blocked), 0.5 ms",
        "                                            unexplained",
        "    9  18.000    15.000   3.000  data     3 ms unexplained",
        "-" * 74,
        "all 2                     8.000",
    ]


@pytest.mark.slow
def test_it_runs_as_a_module(files: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "lightning_gputime"]
    done = subprocess.run([*command, "compare", *files, "--fail-above", "2%"], capture_output=True)
    assert done.returncode == 1
    for arguments in (["--help"], []):
        helped = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
        assert "compare before.json.gz after.json.gz --fail-above 2%" in helped.stdout
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == f"lightning_gputime {lightning_gputime.__version__}\n"


@pytest.mark.parametrize(("ms", "title", "cells"), [(0.002, "us", "2.0"), (2000.0, "s", "2.0000")])
def test_the_table_has_the_unit_in_which_the_step_reads_best(
    ms: float, title: str, cells: str
) -> None:
    results = Results(100, 0)
    results.add([raw(i, forward=ms) for i in range(48)])
    one = Run(Environment(), *results.history_and_warmup(), results.summary())
    table = str(compare(one, one))
    assert table.startswith(f"A typical step in {title}: before 48 steps, after 48 steps\n")
    assert re.search(rf"^step +{cells} +{cells} +\+0\.0+  ± 0\.0+ ", table, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_nobody_reads_still_tells_by_its_exit_code(
    files: tuple[str, str], unbuffered: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lightning_gputime"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    pipes: Any = {"stdout": writer, "stderr": subprocess.PIPE, "env": environment}
    done = subprocess.run([*command, "compare", *files, "--fail-above", "2%"], **pipes)
    above = f"{ONE_RUN}\nstep is slower by more than 2 %.\nbackward is slower by more than 2 %.\n"
    assert (done.returncode, done.stderr.decode()) == (1, above)
    done = subprocess.run([*command, "show", files[0]], **pipes)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
def test_an_output_without_the_letters_gets_escapes(files: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "lightning_gputime", "compare", *files]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert r"% \xb1 " in done.stdout


# What the sentence says, and what lies beside it


def test_the_sentence_has_the_interval_that_decides() -> None:
    # Of a time that halves, the interval of `is_above` is another than that of the difference.
    step = Difference(before_ms=100.0, after_ms=95.0, error_ms=10.0, relative_error=0.3)
    same = RunComparison(rows={}, step=step, mean=step, runs=(2, 2), steps=(90, 90))
    assert same.sentence == "no significant change of the step: -5.0 % ± 10.0 %"
    noisy = replace(same, step=replace(step, error_ms=10.1))
    assert noisy.sentence.startswith("too noisy to tell (-5.0 % ± 10.1 %): compare longer runs")


def test_a_part_that_one_side_has_alone_has_no_percentage() -> None:
    step = Difference(before_ms=10.0, after_ms=8.0, error_ms=0.1, relative_error=0.01)
    part = Difference(before_ms=2.0, after_ms=0.0, error_ms=0.1, relative_error=0.05)
    rows = {
        "forward": part,
        "forward/net": part,
        "backward/comm": replace(part, before_ms=0.0, after_ms=2.0),
    }
    table = str(RunComparison(rows=rows, step=step, mean=step, runs=(2, 2), steps=(90, 90)))
    lines = {line.split()[0]: line.split() for line in table.splitlines() if line}
    assert lines["forward"][-2:] == ["-100.0%", "faster"]
    assert lines["net"][-3:] == ["0.100", "only", "before"]
    assert lines["comm"][-3:] == ["0.100", "only", "after"]


def test_the_mean_of_all_steps_is_named_where_it_alone_is_above(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rare = [900.0 if i % 10 == 5 else 10.0 for i in range(240)]
    for name, steps in (("a", [10.0] * 240), ("b", rare)):
        saved.save(constant(*steps), tmp_path / f"{name}.json.gz")
    paths = [str(tmp_path / f"{name}.json.gz") for name in "ab"]
    assert main(["compare", *paths, "--fail-above", "step:5%"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "the mean of all steps is slower by more than 5 %."


@pytest.mark.parametrize(
    ("evaluation_s", "note"),
    [
        (39.0, "outside of the steps 40 s of 60 s (before) and"),
        (1.5, ""),
    ],
)
def test_a_comparison_says_what_changed_outside_of_the_steps(
    evaluation_s: float, note: str
) -> None:
    def spent(seconds: float) -> Run:
        one = run()
        entries_s = {"set-up": 1.0, "steps": 20.0, "evaluation": seconds}
        wall_time = WallTimeBreakdown({name: s for name, s in entries_s.items() if s})
        return replace(one, _summary=replace(one.summary(), wall_time=wall_time))

    found = compare([spent(evaluation_s)] * 2, [spent(1.0)] * 2)
    assert found.outside == (f"{note} 2 s of 22 s (after), not judged" if note else "")
    # The step is as long as before: what differs comes first.
    alike = "no significant change of the step: +0.0 % ± 0.3 %"
    assert found.sentence == (f"{found.outside}; {alike}" if note else alike)
    assert compare(run(), spent(9.0)).outside == ""  # What is not known is no difference.
