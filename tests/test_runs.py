"""Saved runs: files, environment and commit."""

import errno
import gzip
import json
import math
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import Command
from fake_gpu import FakeGPU, raw
from fake_loop import Loop, run_of, train

import lightning_gputime
from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer, Run, load
from lightning_gputime._measurement.results import Results
from lightning_gputime._runs import environment, saved


def reload(run: Run, path: Path) -> Run:
    """Save a run to a file, and load it."""
    saved.save(run, path)
    return load(path)


def timer_after(steps: int = 4, **options: Any) -> GPUPhaseHooks:
    """Return a timer that has timed standard steps."""
    return train(Loop(FakeGPU()), steps, **options)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.json.gz"


def test_saved_run_loads_unchanged(path: Path) -> None:
    timer = timer_after(warmup_steps=1)
    timer.save(path)
    run = load(path)
    assert run.name == "run.json.gz"
    assert run.summary() == timer.summary()
    assert run.history.dtype == timer.history().dtype
    for name in run.history.dtype.names or ():
        assert run.history[name] == pytest.approx(timer.history()[name], abs=6e-5, nan_ok=True)
    assert (run.warmup_steps, len(run.measured)) == (1, 3)
    assert run.measured["step"].tolist() == [1, 2, 3]
    assert (run.slow_steps, run.evaluations) == ([], [])


def test_timer_and_its_saved_run_print_the_same(path: Path) -> None:
    timer = timer_after(warmup_steps=1)
    timer.save(path)
    run = load(path)
    for source in (timer, run):
        assert str(source) == str(source.summary()) == str(timer.summary())
        assert source._repr_html_() == timer.summary()._repr_html_()
        assert repr(source) == f"<{type(source).__name__}: {timer.summary().verdict}>"
        assert source.summary().diagnosis == timer.summary().diagnosis
        assert source.summary().to_dict()["diagnosis"]["code"] == timer.summary().code != ""
        with pytest.raises(KeyError, match=r"'forward_ms': did you mean forward\?"):
            source.summary().rows["forward_ms"]
    for history in (timer.history(), run.history[1:]):
        with pytest.raises(ValueError, match="named 'forward': did you mean forward_ms"):
            history["forward"]
        assert type(history["forward_ms"]) is np.ndarray


@pytest.mark.parametrize(
    ("ms", "saved_ms"), [(math.nan, math.nan), (math.inf, math.nan), (1e300, math.nan), (-1e-3, 0)]
)
def test_impossible_time_is_saved_as_absent_or_zero(ms: float, saved_ms: float, path: Path) -> None:
    step = raw(0, data=1.0, forward=2.0)._replace(device_ms=(1.0, ms))
    run = reload(run_of([step]), path)
    assert run.history["forward_ms"].tolist() == [pytest.approx(saved_ms, abs=0.0, nan_ok=True)]
    assert run.history["step_ms"].tolist() == [1.0]


def test_warm_up_outside_the_history_is_not_excluded_twice() -> None:
    results = Results(4, warmup_steps=3)
    results.add([raw(i, forward=1.0) for i in range(6)])
    history, warmup_steps = results.history_and_warmup()
    assert (history["step"].tolist(), warmup_steps) == ([2, 3, 4, 5], 1)


def test_saving_a_run_without_steps_warns(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timer_after(0).save(path)
    assert caplog.messages[1:] == ["The saved run has no steps. Save it after the training."]
    assert len(load(path).history) == 0
    assert str(load(path).summary()).startswith("No step was timed")


def test_environment_describes_the_run() -> None:
    found = timer_after(2, _lag=0, accumulate_grad_batches=2)._run().environment
    assert (found.device_type, found.world_size, found.rank) == ("cpu", 1, 0)
    assert (found.precision, found.parameters) == ("float32", 6)
    assert (found.accumulate_grad_batches, found.batch_size, found.compiled) == (2, None, False)
    assert found.package == lightning_gputime.__version__
    assert found.started.endswith("+00:00")
    assert "history_size" not in found.options  # A default.
    assert not {"_clock", "_lag"} & {*found.options}


def test_environment_records_that_the_model_is_compiled() -> None:
    net = torch.nn.Linear(2, 1)
    net._compiled_call_impl = net.forward  # as `net.compile()` does, without importing dynamo
    with GPUPhaseHooks(net, torch.optim.SGD(net.parameters())) as timer:
        pass
    assert timer._run().environment.compiled


def test_commit_is_found_in_repositories_of_any_state(tmp_path: Path) -> None:
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
    with pytest.raises(OSError, match="packed-refs"):  # The branch has no commit yet.
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
    assert timer_after()._run().environment.package == lightning_gputime.__version__


def test_error_in_the_environment_does_not_end_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(environment, "version", lambda _: 1 / 0)
    timer = timer_after(2)
    assert timer.summary().steps == 2
    assert "Cannot describe the environment of the run: ZeroDivisionError" in caplog.text


# Files that are not runs


REMOVED = object()


def changed(path: Path, changes: dict[str, Any]) -> Path:
    """Save a run, and change or remove values of its file by path, such as `history/steps`."""
    timer_after().save(path)
    content = json.loads(gzip.decompress(path.read_bytes()))
    for place, value in changes.items():
        *parents, last = place.split("/")
        parent = content
        for name in parents:
            parent = parent[name]
        key: Any = int(last) if isinstance(parent, list) else last
        if value is REMOVED:
            del parent[key]
        else:
            parent[key] = value
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


FORWARD_MS = "summary/rows/forward/mean_ms"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("format", "other", "its format is not 'lightning_gputime run'"),
        ("version", 3, "its version is 3, .* reads versions 5 to 7: update"),
        ("history", REMOVED, "it has no 'history'"),
        ("history/phases", REMOVED, "it has no 'phases'"),
        ("summary", REMOVED, "it has no 'summary'"),
        ("summary/steps", 1.5, "summary.steps must be int, not 1.5"),
        (FORWARD_MS, "1", r"summary.rows\['forward'\].mean_ms must be float, not '1'"),
        ("history/host_wait/0", REMOVED, "columns of its history differ in length"),
        ("history/phases/data/0", REMOVED, "columns of its history differ in length"),
        ("history/phases/data", ["one"] * 4, "invalid literal for int"),
        ("history/phases/data", [{}] * 4, "must be .* number, not 'dict'"),
        ("history/phases/data/0", 10**400, "too large"),
        ("history/steps/0", 10**400, "too large"),
        (FORWARD_MS, 10**400, "int too large to convert to float"),
        ("slow_steps", {}, "slow_steps must be Sequence, not {}"),
        ("slow_steps", [1], r"slow_steps\[0\] must be SlowStep, not 1"),
        ("summary/wall_clock", {"entries_s": []}, "wall_clock.entries_s must be Mapping"),
    ],
)
def test_file_with_wrong_value_is_refused(place: str, value: Any, message: str, path: Path) -> None:
    changed(path, {place: value})
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    expected = f"{path} is not a saved run: write one with timer.save(path) ("
    assert str(error.value).startswith(expected)


SLOW = {"step": 1, "step_ms": 9, "baseline_ms": 5, "phase": "l", "causes": [], "unexplained_ms": 0}


def test_control_characters_of_a_file_are_replaced(path: Path) -> None:
    cause = {"kind": "ranks", "host_ms": 1, "exposed_ms": 1, "detail": "\x1b]0;x"}
    changes = {
        "environment/device": "H200\x1b[2J\nµ",
        "summary/not_measured": ["a", "b\x9b"],
        "slow_steps": [{**SLOW, "phase": "l\x07", "causes": [cause], "unexplained_ms": -0.5}],
    }
    run = load(changed(path, changes))
    assert run.environment.device == "H200\ufffd[2J\nµ"
    assert run.summary().not_measured == ("a", "b\ufffd")
    [slow_step] = run.slow_steps
    assert (slow_step.phase, slow_step.causes[0].detail) == ("l\ufffd", "\ufffd]0;x")
    assert slow_step.unexplained_ms == -0.5  # Unlike other times, it may be negative.


@pytest.mark.parametrize("minor", [REMOVED, 0, saved.MINOR, 99])
def test_unknown_fields_are_named_only_for_later_minor_versions(
    minor: Any, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    later = {"later": {}, "summary/later": [1], "summary/rows/data/later_ms": 1.0}
    changed(path, {"minor": minor, "environment/package": "9.1.0", **later})
    assert load(path).summary().steps == 4
    if minor == 99:
        assert (
            "saved by lightning_gputime 9.1.0. This version ignores unknown fields: run.later,"
            " run.summary.later, run.summary.rows['data'].later_ms. Update"
        ) in caplog.text
    else:
        assert not caplog.text


@pytest.mark.parametrize("save_path", ["", ".", "new/", "/dev"])
def test_save_path_that_is_not_a_file_is_refused(
    save_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("the command was started"))
    with pytest.raises((TypeError, ValueError), match="save_path must be a") as error:
        GPUPhaseTimer(save_path=save_path)
    err = command("run", "--save-path", save_path, "train.py", code=2).err
    assert err == f"lightning_gputime: {error.value}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (pickle.dumps({"a": 1}), "can't decode byte"),
        (b"[" * 100_000, "recursion"),
        (gzip.compress(b"{}" * 100, mtime=0)[:-12], "ended before the end-of-stream marker"),
        (b"\x1f\x8b" + b"x" * 50, "Unknown compression method"),
        (gzip.compress(b" " * 200_001), "unpacks to more than 200000 bytes"),
    ],
)
def test_file_of_another_format_is_refused(
    content: bytes, message: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved, "_MAX_BYTES", 200_000)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"is not a saved run: .*{message}"):
        load(path)


def test_failed_save_keeps_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = timer_after()
    timer.save(path)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("os.replace", Mock(side_effect=full))
    with pytest.raises(OSError, match=r"No space left on device.*"):
        timer.save(path)
    monkeypatch.undo()
    assert [*path.parent.iterdir()] == [path]
    assert load(path).summary().steps == 4


def test_saved_file_keeps_its_mode_or_follows_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, private = tmp_path / "run.json", tmp_path / "private.json"
    old = os.umask(0o027)
    try:
        saved.write(path, "a")
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o640
    path.chmod(0o604)
    saved.write(path, "b")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("b", 0o604)
    private.touch(0o600)
    monkeypatch.setattr(os, "chmod", lambda *_, **__: None)
    saved.write(private, "new")
    assert (private.read_text(), private.stat().st_mode & 0o777) == ("new", 0o600)


def test_folders_and_special_files_are_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    irregular = "it is not a regular file: pass the path of a file"
    folder = "it is a folder: pass the path of a file in it"
    for name, reason in (("pipe", irregular), ("folder", folder), ("/dev/null", irregular)):
        with pytest.raises(OSError, match=rf"Cannot write .* \({reason}\)"):
            saved.write(tmp_path / name, "a")
    assert {item.name for item in tmp_path.iterdir()} == {"pipe", "folder"}


def test_history_is_saved_as_integers(tmp_path: Path) -> None:
    steps = [raw(number, 0.25, forward=1.5) for number in (1, 2, 5)]
    saved.save(run_of([*steps, raw(6, 0.25, backward=1.0)], warmup_steps=2), tmp_path / "run.json")
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["warmup_steps"] == 2
    assert found["history"] == {
        "unit_ms": 1e-4,
        "steps": [1, 1, 3, 1],  # Differences of step numbers.
        "host_wait": [2500, 2500, 2500, 2500],
        "phases": {"forward": [15000, 15000, 15000, -1], "backward": [-1, -1, -1, 10000]},
    }
