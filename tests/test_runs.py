import errno
import gzip
import json
import math
import os
import pickle
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_gpu import FakeGPU, raw
from fake_loop import Loop, train, with_facts

import lightning_gputime
from lightning_gputime import Cause, GPUPhaseHooks, GPUPhaseTimer, Run, SlowStep, load
from lightning_gputime.__main__ import main
from lightning_gputime._measurement.observers import Section
from lightning_gputime._measurement.ranks import RankStats, RankSummary
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.wall_clock import WallClock, WallClockBreakdown
from lightning_gputime._output.summary import summary_of
from lightning_gputime._runs import environment, saved, schema
from lightning_gputime._runs.environment import Environment


def run_of(results: Results, **more: Any) -> Run:
    return Run(Environment(), *results.history_and_warmup(), summary_of(results), **more)


def timed(steps: int = 4, **options: Any) -> GPUPhaseHooks:
    """A timer that has timed some steps of known times."""
    loop = Loop(FakeGPU())
    return train(loop, steps, **options)


def test_saved_run_loads_unchanged(tmp_path: Path) -> None:
    timer = timed(warmup_steps=1)
    timer.save(tmp_path / "run.json.gz")
    run = load(tmp_path / "run.json.gz")
    assert run.name == "run.json.gz"
    assert run.summary() == timer.summary()
    assert str(run.summary()) == str(timer.summary())
    assert run.history.dtype == timer.history().dtype
    for name in run.history.dtype.names or ():
        assert run.history[name] == pytest.approx(timer.history()[name], abs=6e-5, nan_ok=True)
    assert (run.warmup_steps, len(run.measured)) == (1, 3)
    assert run.measured["step"].tolist() == [1, 2, 3]
    assert (run.slow_steps, run.evaluations) == ([], [])


def test_timer_and_its_run_show_the_same(tmp_path: Path) -> None:
    timer = timed(warmup_steps=1)
    timer.save(tmp_path / "run.json")
    run = load(tmp_path / "run.json")
    for saved_run in (timer, run):
        assert str(saved_run) == str(timer.summary())
        assert saved_run._repr_html_() == timer.summary()._repr_html_()
        assert repr(saved_run) == f"<{type(saved_run).__name__}: {timer.summary().verdict}>"
        with pytest.raises(KeyError, match=r"'forward_ms': did you mean forward\?"):
            saved_run.summary().rows["forward_ms"]
    for history in (timer.history(), run.history[1:]):
        with pytest.raises(ValueError, match="named 'forward': did you mean forward_ms"):
            history["forward"]
        assert type(history["forward_ms"]) is np.ndarray


def test_phase_that_did_not_run_is_still_absent(tmp_path: Path) -> None:
    results = Results(10, 1)
    results.add([raw(3, forward=2.0), raw(5, data=1.0, forward=3.0), raw(6, forward=4.0)])
    saved.save(run_of(results), tmp_path / "run.json.gz")
    run = load(tmp_path / "run.json.gz")
    assert run.history["step"].tolist() == [3, 5, 6]
    assert run.history["step_ms"].tolist() == [2.0, 4.0, 4.0]
    assert np.isnan(run.history["data_ms"]).tolist() == [True, False, True]


@pytest.mark.parametrize("bad_ms", [math.nan, math.inf, 1e300])
def test_time_that_is_no_number_is_saved_as_absent(bad_ms: float, tmp_path: Path) -> None:
    results = Results(10, 0)
    results.add([raw(0, data=1.0, forward=2.0)._replace(device_ms=(1.0, bad_ms))])
    saved.save(run_of(results), tmp_path / "run.json.gz")
    run = load(tmp_path / "run.json.gz")
    assert np.isnan(run.history["forward_ms"]).tolist() == [True]
    assert run.history["step_ms"].tolist() == [1.0]


def test_time_below_zero_is_saved_as_zero(tmp_path: Path) -> None:
    results = Results(10, 0)
    results.add([raw(0, data=-0.001, forward=2.0)])
    saved.save(run_of(results), tmp_path / "run.json.gz")
    assert load(tmp_path / "run.json.gz").history["data_ms"].tolist() == [0.0]


def test_warm_up_outside_the_history_is_not_excluded_twice() -> None:
    results = Results(4, 3)
    results.add([raw(i, forward=1.0) for i in range(6)])
    history, warmup_steps = results.history_and_warmup()
    assert (history["step"].tolist(), warmup_steps) == ([2, 3, 4, 5], 1)


def test_all_that_a_run_can_have_is_kept(tmp_path: Path) -> None:
    results = Results(10, 0)
    results.add([raw(0, forward=2.0)])
    stats = RankStats(1.0, 2.0, 3.0, 1)
    ranks = RankSummary({"step": stats}, (0, 1), 1, 2.0, "forward", "rank 1 is slow")
    results.ranks.add(ranks)
    results.wall_clock = WallClock(iter([0, 4_000_000_000, 5_000_000_000]).__next__)
    cause = Cause("ranks", 2.0, 1.5, "rank 1")
    lost_ms, phase_ms, host_ms = {"loss": {"unexplained": 3.0}}, {"loss": 9.5}, {"loss": 0.5}
    slow = SlowStep(7, 9.5, 5.0, "loss", (cause,), 3.0, 4.0, lost_ms, phase_ms, host_ms)
    run = run_of(
        results,
        slow_steps=[slow],
        evaluations=[{"stage": "val", "step": 3, "forward_ms": 2.5}],
    )
    saved.save(run, tmp_path / "run.json.gz")
    found = load(tmp_path / "run.json.gz")
    assert found.summary().ranks == ranks
    assert found.summary().wall_clock == WallClockBreakdown({"set-up": 4.0})
    assert found.slow_steps == [slow]
    assert found.evaluations == run.evaluations


def test_sections_of_observers_are_saved(tmp_path: Path) -> None:
    run = run_of(Results(10, 0))
    energy = Section("energy", ("a step takes 3 J",), {"joules": 3.0, "of_ranks": [1, 2]})
    run = replace(run, _summary=with_facts(run.summary(), sections=(energy,)))
    saved.save(run, tmp_path / "run.json.gz")
    assert load(tmp_path / "run.json.gz").summary().sections == (energy,)


def test_run_without_steps_is_saved_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timed(0).save(tmp_path / "run.json.gz")
    assert caplog.messages[1:] == ["The saved run has no steps. Save it after the training."]
    run = load(tmp_path / "run.json.gz")
    assert len(run.history) == 0
    assert str(run.summary()).startswith("No step was timed")


def test_environment_describes_the_run() -> None:
    loop = Loop(FakeGPU())
    timer = train(loop, 2, modules=[], _lag=0, accumulate_grad_batches=2)
    found = timer._run().environment
    assert (found.device_type, found.world_size, found.rank) == ("cpu", 1, 0)
    assert (found.precision, found.parameters) == ("float32", 6)
    assert (found.accumulate_grad_batches, found.batch_size, found.compiled) == (2, None, False)
    assert found.package == lightning_gputime.__version__
    assert found.started.endswith("+00:00")
    assert "history_size" not in found.options  # A default.
    assert not {"_clock", "_lag"} & {*found.options}


def test_environment_says_if_the_model_is_compiled() -> None:
    import torch

    net = torch.nn.Linear(2, 1)
    net._compiled_call_impl = net.forward  # as `net.compile()` does, without importing dynamo
    with GPUPhaseHooks(net, torch.optim.SGD(net.parameters())) as timer:
        pass
    assert timer._run().environment.compiled


def test_commit_is_found_in_any_state_of_a_repository(tmp_path: Path) -> None:
    def git(*arguments: object, cwd: Path) -> str:
        user = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
        command = ["git", *user, *map(str, arguments)]
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    main, tree = tmp_path / "main", tmp_path / "tree"
    inside = main / "src" / "package"
    inside.mkdir(parents=True)
    assert environment.head_of(inside) == ""
    git("init", "--quiet", cwd=main)
    with pytest.raises(OSError, match="packed-refs"):  # Without a commit.
        environment.head_of(inside)
    for message, change in (
        ("on a branch", ["checkout", "--quiet", "-b", "feature/one"]),
        ("packed", ["pack-refs", "--all"]),
        ("of the worktree", ["worktree", "add", "--quiet", tree, "-b", "other"]),
        ("detached", ["checkout", "--quiet", "--detach"]),
    ):
        git("commit", "--quiet", "--allow-empty", "--message", message, cwd=main)
        git(*change, cwd=main)
        assert environment.head_of(inside) == git("rev-parse", "HEAD", cwd=inside)
    git("commit", "--quiet", "--allow-empty", "--message", "in the worktree", cwd=tree)
    assert environment.head_of(tree) == git("rev-parse", "HEAD", cwd=tree)
    assert environment.head_of(tree) != environment.head_of(main)
    git("pack-refs", "--all", cwd=main)
    assert environment.head_of(tree) == git("rev-parse", "HEAD", cwd=tree)


def test_no_process_is_started_for_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    environment._commit.cache_clear()
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda *_, **__: pytest.fail("a process"))
    assert timed()._run().environment.package == lightning_gputime.__version__


def test_environment_that_cannot_be_found_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(environment, "version", lambda _: 1 / 0)
    timer = timed(2)
    assert timer.summary().steps == 2
    assert "Cannot describe the environment of the run: ZeroDivisionError" in caplog.text


# Files that are not runs


def changed(path: Path, change: Any) -> Path:
    """A saved run in which something is changed."""
    timed().save(path)
    content = json.loads(gzip.decompress(path.read_bytes()))
    change(content)
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format="other"), "its format is not 'lightning_gputime run'"),
        (lambda c: c.update(version=3), "its version is 3, .* reads version 5: update"),
        (lambda c: c.update(version="2"), "its version is '2'"),
        (lambda c: c.pop("history"), "it has no 'history'"),
        (lambda c: c["history"].pop("phases"), "it has no 'phases'"),
        (lambda c: c.pop("summary"), "it has no 'summary'"),
        (lambda c: c.pop("setup"), "it has no 'setup'"),
        (lambda c: c["summary"].update(steps=1.5), "summary.steps must be int, not 1.5"),
        (
            lambda c: c["summary"]["rows"]["forward"].update(mean_ms="1"),
            r"summary.rows\['forward'\].mean_ms must be float, not '1'",
        ),
        (lambda c: c["history"]["host_wait"].pop(), "columns of its history differ in length"),
        (lambda c: c["history"]["phases"]["data"].pop(), "columns of its history differ in length"),
        (lambda c: c["history"]["phases"].update(data=["one"] * 4), "invalid literal for int"),
        (lambda c: c["history"]["phases"].update(data=[{}] * 4), "must be .* number, not 'dict'"),
        (lambda c: c["history"]["phases"]["data"].__setitem__(0, 10**400), "too large"),
        (lambda c: c["history"]["phases"]["data"].__setitem__(0, 10**300), "too large"),
        (lambda c: c["history"]["steps"].__setitem__(0, 10**400), "too large"),
        (
            lambda c: c["summary"]["rows"]["forward"].update(mean_ms=10**400),
            "int too large to convert to float",
        ),
        (lambda c: c["summary"]["rows"]["forward"].update(mean_ms=-2.5), "mean_ms must be -1 or"),
        (lambda c: c["summary"].update(steps=-1), "summary.steps must be 0 or more"),
        (lambda c: c["summary"]["rows"]["data"].update(n=2**63), "n must be 0 or more"),
        (lambda c: c.update(warmup_steps=-3), "run.warmup_steps must be 0 or more"),
        (lambda c: c["environment"].update(world_size=-1), "world_size must be 0 or more"),
        (lambda c: c["history"]["steps"].__setitem__(0, -1), "numbers of its steps must be 0"),
        (lambda c: c["history"].update(steps=[2**62] * 4), "numbers of its steps must be 0"),
        (lambda c: c["history"].update(unit_ms=-1e-4), "unit of its times must be above 0"),
        (lambda c: c["history"].update(unit_ms=1e300), "unit of its times must be above 0"),
        (lambda c: c["history"]["phases"]["data"].__setitem__(0, -2), "times of data .* below 0"),
        (lambda c: c["history"]["host_wait"].__setitem__(0, 2**62), "of host_wait .* above 1e9"),
        (lambda c: c.update(slow_steps={}), "slow_steps must be Sequence, not {}"),
        (lambda c: c.update(slow_steps=[1]), r"slow_steps\[0\] must be SlowStep, not 1"),
        (
            lambda c: c["summary"].update(wall_clock={"entries_s": []}),
            "summary.wall_clock.entries_s must be Mapping",
        ),
    ],
)
def test_file_with_something_wrong_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    path = changed(tmp_path / "run.json.gz", change)
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    expected = f"{path} is not a saved run: write one with timer.save(path) ("
    assert str(error.value).startswith(expected)


def test_control_characters_of_a_file_are_replaced(tmp_path: Path) -> None:
    timed().save(tmp_path / "run.json")
    content = json.loads((tmp_path / "run.json").read_text())
    content["environment"]["device"] = "H200\x1b[2J\nµ"
    content["summary"]["not_measured"] = ["a", "b\x9b"]
    cause = {"kind": "ranks", "host_ms": 1, "exposed_ms": 1, "detail": "\x1b]0;x"}
    slow = {"step": 1, "step_ms": 9, "baseline_ms": 5, "phase": "l\x07", "unexplained_ms": 0}
    content["slow_steps"] = [{**slow, "causes": [cause]}]
    (tmp_path / "run.json").write_text(json.dumps(content))
    run = load(tmp_path / "run.json")
    assert run.environment.device == "H200\ufffd[2J\nµ"
    assert run.summary().not_measured == ("a", "b\ufffd")
    [slow_step] = run.slow_steps
    assert (slow_step.phase, slow_step.causes[0].detail) == ("l\ufffd", "\ufffd]0;x")


def test_unexplained_time_may_be_negative(tmp_path: Path) -> None:
    slow = {"step": 3, "step_ms": 9.0, "baseline_ms": 5.0, "phase": "loss", "causes": []}
    slow["unexplained_ms"] = -0.5
    path = changed(tmp_path / "run.json.gz", lambda c: c.update(slow_steps=[slow]))
    assert load(path).slow_steps[0].unexplained_ms == -0.5


@pytest.mark.parametrize("minor", [None, 0, schema.MINOR, 99])
def test_files_of_all_minor_versions_are_read_and_ignored_fields_named(
    minor: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(content: dict[str, Any]) -> None:
        del content["minor"]
        if minor is not None:
            content["minor"] = minor
        content["environment"]["package"] = "9.1.0"
        content["later"] = {}
        content["summary"]["later"] = [1]
        content["summary"]["rows"]["data"]["later_ms"] = 1.0

    path = changed(tmp_path / "run.json.gz", change)
    assert load(path).summary().steps == 4
    is_newer = minor == 99
    later = "run.later, run.summary.later, run.summary.rows['data'].later_ms"
    ignored = f"ignores unknown fields: {later}. Update"
    assert (
        f"saved by lightning_gputime 9.1.0. This version {ignored}" in (caplog.text)
    ) == is_newer
    assert bool(caplog.text) == is_newer


@pytest.mark.parametrize("path", ["", "."])
def test_save_path_that_is_not_a_file_is_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it was started"))
    for name in [path, *([] if path == "" else ["new/", str(tmp_path)])]:
        with pytest.raises((TypeError, ValueError), match="save_path must be a") as error:
            GPUPhaseTimer(save_path=name)
        assert main(["run", "--save-path", name, "train.py"]) == 2
        assert capsys.readouterr().err == f"lightning_gputime: {error.value}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b"\x80\x04\x95", "can't decode byte"),
        (pickle.dumps({"a": 1}), "can't decode byte"),
        (b"[" * 100_000, "recursion"),
        (b'{"format": NaN}', "NaN is not a finite number"),
        (b'{"format": 1e999}', "1e999 is not a finite number"),
        (b"[1]", "its format is not"),
        (gzip.compress(b"{}" * 100, mtime=0)[:-12], "ended before the end-of-stream marker"),
        (b"\x1f\x8b" + b"x" * 50, "Unknown compression method"),
    ],
)
def test_file_of_another_format_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.json.gz").write_bytes(content)
    with pytest.raises(ValueError, match=rf"is not a saved run: .*{message}"):
        load(tmp_path / "run.json.gz")


def test_file_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed().save(tmp_path / "run.json.gz")
    monkeypatch.setattr(saved, "_MAX_BYTES", 100)
    with pytest.raises(ValueError, match="unpacks to more than 100 bytes"):
        load(tmp_path / "run.json.gz")


def test_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = timed()
    timer.save(tmp_path / "run.json.gz")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match=r"No space left on device.*"):
        timer.save(tmp_path / "run.json.gz")
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["run.json.gz"]
    assert load(tmp_path / "run.json.gz").summary().steps == 4


def test_replaced_file_is_never_public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    path.touch(0o600)
    monkeypatch.setattr(os, "chmod", lambda *_, **__: None)
    saved.write(path, "new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o600)


def test_saved_file_keeps_its_mode_or_follows_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    old = os.umask(0o027)
    try:
        saved.write(path, "a")
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o640
    path.chmod(0o604)
    saved.write(path, "b")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("b", 0o604)


def test_irregular_files_are_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    irregular = "it is not a regular file: pass the path of a file"
    folder = "it is a folder: pass the path of a file in it"
    for path, reason in (
        (tmp_path / "pipe", irregular),
        (tmp_path / "folder", folder),
        (Path("/dev/null"), irregular),
    ):
        with pytest.raises(OSError, match=rf"Cannot write .* \({reason}\)"):
            saved.write(path, "a")
    assert {item.name for item in tmp_path.iterdir()} == {"pipe", "folder"}


def test_step_and_phase_take_a_few_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    results = Results(20_000, 0)
    for number, (forward, backward) in enumerate(rng.gamma(20.0, 0.5, (20_000, 2)).tolist()):
        results.add([raw(number, forward=forward, backward=backward)])
    saved.save(run_of(results), tmp_path / "run.json.gz")
    size = (tmp_path / "run.json.gz").stat().st_size
    assert size < 20_000 * 2 * 4


def test_history_is_written_in_whole_numbers(tmp_path: Path) -> None:
    results = Results(10, 2)
    results.add([raw(number, 0.25, forward=1.5) for number in (1, 2, 5)])
    results.add([raw(6, 0.25, backward=1.0)])
    saved.save(run_of(results), tmp_path / "run.json")
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["warmup_steps"] == 2
    assert found["history"] == {
        "unit_ms": 1e-4,
        "steps": [1, 1, 3, 1],
        "host_wait": [2500, 2500, 2500, 2500],
        "phases": {"forward": [15000, 15000, 15000, -1], "backward": [-1, -1, -1, 10000]},
    }
