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
from lightning_gputime import Run, compare
from lightning_gputime._cli import main
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.history import history
from lightning_gputime._results.results import Results
from lightning_gputime._saved_runs import saved, statistics
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


# The estimates


def test_a_typical_step_is_the_mean_of_the_middle_half_and_its_phases_add_up() -> None:
    step = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 800.0])
    forward = step / 4
    times = np.stack([step, forward, step - forward], axis=1)
    values, influence = statistics.typical(times)
    assert values.tolist() == [4.5, 1.125, 3.375]
    # Beyond the borders a step moves the estimate as the border does, here by 2 (4.5 - 2.5).
    assert influence[:, 0].tolist() == [-4.0, -4.0, -3.0, -1.0, 1.0, 3.0, 4.0, 4.0]
    assert influence[:, 1:].sum(axis=1) == pytest.approx(influence[:, 0])


def test_the_mean_moves_with_each_step() -> None:
    values, influence = statistics.mean(np.array([[1.0], [2.0], [6.0]]))
    assert values.tolist() == [3.0]
    assert influence.ravel().tolist() == [-2.0, -1.0, 3.0]


@pytest.mark.parametrize("lasting", [0.0, 0.9])
def test_the_variance_is_that_of_the_means_of_many_series(lasting: float) -> None:
    series = [noise(seed, lasting=lasting)[:, np.newaxis] for seed in range(300)]
    means = [float(one.mean()) for one in series]
    found = np.mean([statistics.variance(one)[0] for one in series])
    # A little more is right: an interval may be too wide, but not too narrow.
    assert 1.0 <= found / np.var(means) < 1.4


def test_steps_that_are_alike_for_long_count_less() -> None:
    shuffled = noise(1).copy()
    np.random.default_rng(0).shuffle(shuffled)
    lasting, alone = (statistics.variance(x[:, np.newaxis])[0] for x in (noise(1), shuffled))
    assert lasting > 5 * alone


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 11, 50])
@pytest.mark.parametrize("confidence", [0.95, 0.995])
def test_the_quantiles_of_t_are_right(freedom: int, confidence: float) -> None:
    right = stats.t.ppf((1 + confidence) / 2, freedom)
    assert statistics.quantile_of_t(freedom, confidence) == pytest.approx(right, rel=0.02)


# What is found


def test_a_slower_backward_is_found_and_named() -> None:
    found = compare(run(1), run(2, more={"backward": 0.6}))
    assert found.verdict == "slower"
    assert found.step.ratio == pytest.approx(0.04, abs=0.005)
    assert found.step.change_ms == pytest.approx(sum(r.change_ms for r in found.rows.values()))
    assert sum(found.explains.values()) == pytest.approx(1.0)
    assert found.explains["backward"] > 0.9
    assert found.sentence.startswith("4.2 % ± 0.")
    assert " % slower: backward explains 9" in found.sentence


def test_a_faster_run_and_an_equal_one_are_told() -> None:
    assert compare(run(1), run(2, more={"forward": -1.0})).verdict == "faster"
    alike = compare(run(1), run(2))
    assert (alike.verdict, alike.explains) == ("alike", {})
    assert alike.sentence.startswith("no difference is certain: ")


def test_steps_without_noise_show_any_difference() -> None:
    found = compare(constant(*[10.0] * 24), constant(*[10.5] * 24))
    assert (found.step.before_ms, found.step.after_ms, found.step.error_ms) == (10.0, 10.5, 0.0)
    assert found.sentence == "5.00 % ± 0.00 % slower: forward explains 50 %"


def test_a_part_that_is_the_phases_difference_is_named_in_its_place() -> None:
    before, after = run(1, more={"data/fetch": 0.0}), run(1, more={"data/fetch": 2.0})
    found = compare(before, after)
    assert "slower: data/fetch explains 100 %" in found.sentence
    assert "data/fetch" not in found.explains


def test_a_phase_that_one_side_has_not_takes_no_time_there() -> None:
    row = compare(run(1), run(2, more={"augment": 0.5})).rows["augment"]
    assert row.before_ms == 0.0
    assert row.after_ms == pytest.approx(0.5, rel=0.01)
    assert math.isnan(row.ratio)
    assert row.is_certain


def test_one_step_that_takes_a_second_says_nothing() -> None:
    slow = run(2)
    slow.history["step_ms"][500] += 1000.0
    slow.history["backward_ms"][500] += 1000.0
    found = compare(run(1), slow)
    assert found.verdict == "alike"
    assert found.mean.change_ms == pytest.approx(1.0, abs=0.1)
    assert found.mean_sentence == ""


def test_slow_steps_that_come_again_and_again_are_told_of_the_mean() -> None:
    slow = run(2)
    slow.history["step_ms"][::20] += 30.0
    found = compare(run(1), slow)
    assert found.verdict == "alike"
    assert found.mean_sentence.startswith("with the slowest and fastest steps the mean is 10.")
    assert found.is_above(0.05)


def test_equal_runs_are_rarely_called_different_and_one_percent_more_is_found() -> None:
    pairs = [
        (run(2 * i), run(2 * i + 1), run(2 * i + 1, more={"backward": 0.15})) for i in range(100)
    ]
    equal = sum(compare(a, b).verdict != "alike" for a, b, _ in pairs)
    found = sum(compare(a, c).verdict == "slower" for a, _, c in pairs)
    # Of 100 pairs, at 5 % each, more than 9 are called different once in forty times.
    assert equal <= 9
    assert found >= 90


@pytest.mark.parametrize("part", [0.25, 0.75])
def test_equal_runs_of_two_speeds_are_rarely_called_different(part: float) -> None:
    rng = np.random.default_rng(0)

    def side() -> tuple[float, float]:
        steps = np.where(rng.random(2000) < part, 20, 10) + rng.normal(0, 0.1, 2000)
        values, influence = statistics.typical(steps[:, np.newaxis])
        return float(values[0]), float(statistics.variance(influence)[0])

    width = statistics.quantile_of_t(11)
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
        assert found.mean_sentence == ""


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
    assert found.sentence.endswith("slower: forward/body/body.mlp explains 100 %")


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
    # Two groups of three with a variance of 1 each: Student's test.
    error = stats.t.ppf(0.975, 4) * math.sqrt(1 / 3 + 1 / 3)
    assert found.step.error_ms == pytest.approx(error, rel=0.001)
    assert (found.runs, found.steps, found.verdict) == ((3, 3), (72, 72), "alike")
    assert "One run a side" not in str(found)
    assert "One run a side" in str(compare(before[0], after[0]))


def test_a_bound_is_passed_where_the_whole_interval_is_above_it() -> None:
    found = compare(run(1), run(2, more={"backward": 0.6}))
    assert found.is_above(0.03)
    assert not found.is_above(0.04)
    assert not compare(run(2, more={"backward": 0.6}), run(1)).is_above(0.0)


# What cannot be compared


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("device", "B200", "device is H200 before and B200 after"),
        ("world_size", 2, "world_size is 1 before and 2 after"),
        ("batch_size", 64, "batch_size is 32 before and 64 after"),
    ],
)
def test_runs_of_other_work_are_refused_unless_told(name: str, value: Any, told: str) -> None:
    other = run(2, **{name: value})
    with pytest.raises(ValueError, match=rf"cannot be compared: {told}\. Pass anyway=True"):
        compare(run(1), other)
    assert told in str(compare(run(1), other, anyway=True))


def test_what_may_be_the_change_is_noted_and_what_is_not_known_is_not() -> None:
    found = compare(run(1, precision="32"), run(2, torch="2.14.0", batch_size=None))
    assert found.notes == ("torch is 2.13.0 before and 2.14.0 after",)


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


def test_the_command_prints_the_table_and_exits_above_the_bound(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *files]) == 0
    printed = capsys.readouterr().out
    assert "backward explains" in printed
    assert printed.splitlines()[0] == "A typical step in ms: 1000 steps before, 1000 steps after"
    assert main(["compare", *files, "--fail-above", "3%"]) == 1
    assert capsys.readouterr().err == "The step is slower by more than 3 %.\n"
    assert main(["compare", *files, "--fail-above", "3"]) == 1
    assert main(["compare", *files, "--fail-above", "4.5 %"]) == 0
    assert main(["compare", *files[::-1], "--fail-above", "0%"]) == 0


def test_several_runs_a_side(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    before, after = files
    assert main(["compare", "--before", before, before, "--after", after, after]) == 0
    assert "2000 steps of 2 runs before" in capsys.readouterr().out


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
    assert found["rows"]["augment"]["error_ratio"] is None
    assert compare(*paths).to_dict()["rows"]["augment"]["error_ratio"] is None


def test_short_runs_are_noted() -> None:
    note = "With fewer than 200 steps a side"
    assert note in str(compare(run(1, n=199), run(2)))
    assert note not in str(compare(run(1, n=200), run(2)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "none.json.gz", "none.json.gz"], "No such file or directory"),
        (["compare", "FILE"], "give two runs, or several each behind --before and --after"),
        (["compare", "FILE", "FILE", "--before", "FILE"], "give two runs"),
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


@pytest.mark.parametrize("bound", ["two", "-1%", "2%%", "nan"])
def test_a_bound_that_is_no_percentage_is_refused(
    bound: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["compare", *files, f"--fail-above={bound}"])
    assert exit_.value.code == 2
    assert "must be a percentage such as 2%" in capsys.readouterr().err


def test_show_prints_the_table_again(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", files[0]]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{saved.load(files[0]).summary}\n")
    assert "H200 · torch 2.13.0 · batch 32" in printed
    main(["show", files[0], "--json"])
    assert json.loads(capsys.readouterr().out)["steps"] == 1000


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
    assert table.startswith(f"A typical step in {title}: 48 steps before, 48 steps after\n")
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
    assert (done.returncode, done.stderr) == (1, b"The step is slower by more than 2 %.\n")
    done = subprocess.run([*command, "show", files[0]], **pipes)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
def test_an_output_without_the_letters_gets_escapes(files: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "lightning_gputime", "compare", *files]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert r"% \xb1 " in done.stdout
