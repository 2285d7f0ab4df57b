"""Live files: runs that are saved while the training continues, and `show --watch`."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_gpu import FakeGPU
from fake_lightning import Model, fit, timer_of
from fake_loop import Loop, hooks, training_arguments
from processes import ENVIRONMENT, start
from test_compare import run as simulated_run

from lightning_gputime import GPUPhaseTimer, load
from lightning_gputime._runs import saved
from lightning_gputime._runs.saved import Run

TRAIN = """
import os, time, torch
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
from lightning_gputime._runs import saved
saved._MIN_INTERVAL_S = 0.05
while True:
    net(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    time.sleep(0.002)
"""

WITH_TIMER = TRAIN.replace(
    "while True:",
    "import lightning_gputime\n"
    "timer = lightning_gputime.GPUPhaseHooks(net, optimizer).attach()\n"
    "while True:",
).replace("time.sleep(0.002)", "timer.step()\n    time.sleep(0.002)")


def wait_until(is_true: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of steps in each file that is written."""
    written: list[int] = []
    save = saved.save

    def save_and_count(run: Run, path: str) -> None:
        save(run, path)
        written.append(len(run.history))

    monkeypatch.setattr(saved, "save", save_and_count)
    return written


@pytest.fixture
def no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a file after each step."""
    monkeypatch.setattr(saved, "_MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(saved, "_MIN_INTERVAL_RATIO", 0)


def run_fit(gpu: FakeGPU, folder: Path) -> GPUPhaseTimer:
    return fit(gpu, Model(gpu), 12, timer=timer_of(gpu, save_path=folder / "run.json"))


@pytest.mark.usefixtures("no_interval")
def test_live_file_is_rewritten_many_times_within_one_epoch(
    tmp_path: Path, writes: list[int], gpu: FakeGPU
) -> None:
    run_fit(gpu, tmp_path)
    assert len(writes) >= 10
    assert writes == sorted(writes)
    assert 0 not in writes  # The first batches end before the device has finished a step.
    assert os.listdir(tmp_path) == ["run.json"]


def test_live_file_waits_ten_seconds_or_a_hundred_times_its_cost(
    tmp_path: Path, writes: list[int], gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = run_fit(gpu, tmp_path)
    assert len(writes) == 2  # At the end of the epoch and of the training.
    for cost_s, next_s in ((0.01, 10.0), (0.5, 50.0)):
        times = iter((100.0, 100.0 + cost_s))
        monkeypatch.setattr("lightning_gputime._runs.saved.time.perf_counter", times.__next__)
        timer._live_file.rewrite(timer.save)
        monkeypatch.undo()
        assert timer._live_file._due_s == pytest.approx(100.0 + cost_s + next_s)


@pytest.mark.usefixtures("no_interval")
def test_live_file_adds_no_host_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    often, never = FakeGPU(), FakeGPU()
    run_fit(often, tmp_path)
    monkeypatch.setattr(saved, "_MIN_INTERVAL_S", 1e9)
    run_fit(never, tmp_path)
    assert len(often.waits) == len(never.waits)


@pytest.mark.usefixtures("no_interval")
def test_failing_disk_is_reported_once_and_training_continues(
    tmp_path: Path, gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saved, "save", Mock(side_effect=OSError("No space left on device")))
    assert len(run_fit(gpu, tmp_path).history()) == 12
    assert caplog.text.count("The run is not saved") == 1


def test_live_file_recognizes_only_the_file_that_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    file = saved.LiveFile()
    assert not file.wrote(str(path))
    assert file.try_to_save(str(path), lambda name: Path(name).touch())
    assert file.wrote(str(path))
    path.unlink()
    assert not file.wrote(str(path))
    path.write_text("of another process")
    assert not file.wrote(str(path))


def test_temporary_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    old, new, other = ".run.json.abc.tmp", ".run.json.new.tmp", ".other.json.abc.tmp"
    for name in (old, new, other):
        (tmp_path / name).touch()
    for name in (old, other):
        os.utime(tmp_path / name, (0, 0))
    saved.remove_leftovers(str(tmp_path / "run.json"))
    saved.remove_leftovers(str(tmp_path / "missing" / "run.json"))
    assert {*os.listdir(tmp_path)} == {new, other}


def test_file_of_a_training_that_has_not_ended_says_so(tmp_path: Path, loop: Loop) -> None:
    path, cut = tmp_path / "run.json", "not finished when this was saved"
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(20)):
            loop.micro_batch(x)
            loop.update()
        timer.save(path)
        assert load(path).about.endswith(cut)
    timer.save(path)
    assert cut not in load(path).about


def fit_without_a_path(path: str, gpu: FakeGPU) -> None:
    timer = timer_of(gpu)
    timer._live_file.start(path)
    fit(gpu, Model(gpu), 12, timer=timer)


def train_plain_loop(path: str, gpu: FakeGPU) -> None:
    loop = Loop(gpu)
    with hooks(loop) as timer:
        timer._live_file.start(path)
        for x in timer.steps(loop.batches(12)):
            loop.train(x)


def train_with_transformers(path: str, gpu: FakeGPU) -> None:
    transformers = pytest.importorskip("transformers")
    from lightning_gputime.huggingface import TransformersPhaseTimer

    class Squares(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"loss": super().forward(x).square().mean()}

    timer = TransformersPhaseTimer(print_summary=False, warmup_steps=0)
    timer._live_file.start(path)
    args = training_arguments(Path(path).parent, max_steps=12)
    data = [{"x": torch.ones(4)}] * 16
    transformers.Trainer(Squares(4, 4), args, train_dataset=data, callbacks=[timer]).train()


@pytest.mark.usefixtures("no_interval")
@pytest.mark.parametrize("train", [fit_without_a_path, train_plain_loop, train_with_transformers])
def test_each_front_end_rewrites_the_file_of_run(
    tmp_path: Path, writes: list[int], gpu: FakeGPU, train: Callable[[str, FakeGPU], None]
) -> None:
    train(str(tmp_path / "run.json"), gpu)
    assert len(writes) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("script", [TRAIN, WITH_TIMER], ids=["no timer", "timer of the script"])
def test_killed_run_leaves_the_newest_file(tmp_path: Path, script: str) -> None:
    (tmp_path / "train.py").write_text(script)
    path = tmp_path / "run.json.gz"
    process = start("-m", "lightning_gputime", "run", "--save-path", path, "train.py", cwd=tmp_path)
    try:
        wait_until(lambda: path.exists() and load(path).summary().steps > 200)
    finally:
        process.kill()
        process.communicate()
    assert load(path).summary().diagnosis.headline
    assert len(os.listdir(tmp_path)) <= 3  # A file that was being written may remain.


@pytest.mark.slow
def test_finished_run_replaces_its_live_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN.replace("while True:", "for _ in range(400):"))
    process = start(
        "-m", "lightning_gputime", "run", "--save-path", "run.json", "train.py", cwd=tmp_path
    )
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err.count("Another process")) == (0, 0)
    assert sorted(os.listdir(tmp_path)) == ["run.json", "train.py"]
    measured = load(tmp_path / "run.json").summary().measurement
    # The loop is only found after its first steps.
    assert 395 <= measured.steps + measured.untimed_steps + measured.warmup_steps <= 400


def has_tables(file: Path, n: int) -> bool:
    return file.read_text().count("Time per step") == n


@pytest.mark.slow
def test_watch_prints_each_new_file_until_interrupted(tmp_path: Path) -> None:
    path, out = tmp_path / "run.json", tmp_path / "out"
    with out.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_gputime", "show", "--watch", str(path)],
            env=ENVIRONMENT,
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        for n in (1, 2):
            saved.save(simulated_run(n, 300), path)
            wait_until(partial(has_tables, out, n))
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
