import contextlib
import errno
import io
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import Adder, FakeGPU, Layer
from fake_lightning import Loader, MemoryLogger, Model, SavingTrainer, fit, trainer
from processes import run
from torch import Tensor

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer, load
from lightning_gputime._measurement.wall_clock import (
    STEPS,
    VALIDATION,
    WallClock,
    WallClockBreakdown,
)


class HostWork(pl.Callback):
    """Keeps the host busy in the hooks of a trainer, for a known time each (in milliseconds)."""

    def __init__(self, gpu: FakeGPU, **ms: float) -> None:
        for hook, time in ms.items():
            setattr(self, hook, lambda *_, _ms=time, **__: gpu.host_work(_ms))


class Slow(Model):
    """A model whose steps are host work alone, the first of them longer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.gpu.host_work(500.0 if self.trainer.global_step == 0 else 100.0)
        return self.loss(batch)


def checked(gpu: FakeGPU, **more: Any) -> GPUPhaseTimer:
    """A fit of two epochs of three steps, with a validation in each and host work everywhere."""
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, warmup_steps=0, **more)
    work = HostWork(
        gpu,
        on_fit_start=7.0,
        on_sanity_check_start=3.0,
        on_validation_batch_end=5.0,
        on_train_epoch_start=2.0,
        on_train_epoch_end=11.0,
        on_train_end=13.0,
    )
    saves = pl.callbacks.LambdaCallback(
        on_validation_end=lambda trainer, _: (
            trainer.sanity_checking or trainer.save_checkpoint("none")
        )
    )
    SavingTrainer.gpu = gpu
    trainer(timer, work, saves, kind=SavingTrainer, max_epochs=2, num_sanity_val_steps=1).fit(
        Slow(gpu), Loader(gpu, 3), Loader(gpu, 2)
    )
    return timer


def test_wall_clock_entries_cover_the_fit() -> None:
    gpu = FakeGPU()
    whole_fit = checked(gpu).summary().wall_clock
    assert whole_fit is not None
    whole = {name: round(s * 1e3) for name, s in whole_fit.entries_s.items()}
    device = {name: ms for name, ms in whole.items() if name in ("first step", "steps")}
    # The host may wait for the device in a step, and does nothing else but the work above.
    assert {name: ms for name, ms in whole.items() if name not in device} == {
        "set-up": 7,
        "sanity check": 8,
        "validation": 20,
        "checkpoints": 80,
        "epoch ends": 26,
        "tear-down": 13,
    }
    assert device["first step"] == pytest.approx(500, abs=20)
    assert device["steps"] == pytest.approx(500, abs=80)


# Plain loops


class TakesHost:
    """A plain loop whose steps take the host 5 ms, the first one 50, and a fetch 1."""

    def __init__(self) -> None:
        self.gpu = FakeGPU()
        self.net = Layer(self.gpu, 0.0)
        self.optimizer = Adder(self.net.parameters(), self.gpu, 0.0)
        self.timer = GPUPhaseHooks(self.net, self.optimizer, _clock=self.gpu, warmup_steps=0)
        self.ms = 50.0

    def batches(self, n: int = 4) -> Iterator[Tensor]:
        for _ in range(n):
            self.gpu.host_work(1.0)
            yield torch.ones(1, 2)

    def step(self, x: Tensor) -> None:
        self.gpu.host_work(self.ms)
        self.ms = 5.0
        self.net(x).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, n: int = 4) -> None:
        for x in self.timer.steps(self.batches(n)):
            self.step(x)


STEPS_MS = {"first step": 51.0, "steps": 66.0}  # Three loops of four steps each.


def entries_ms(timer: GPUPhaseHooks) -> dict[str, float]:
    """Return the entries of a training, in milliseconds."""
    found = timer.summary().wall_clock
    assert found is not None
    return {name: round(1e3 * s, 6) for name, s in found.entries_s.items()}


def between(loop: TakesHost) -> None:
    for _ in range(3):
        loop.train()
        loop.gpu.host_work(20.0)


def leaves(loop: TakesHost) -> None:
    for _ in range(3):
        for i, x in enumerate(loop.timer.steps(loop.batches(99))):
            loop.step(x)
            if i == 3:
                break
        loop.gpu.host_work(20.0)


def raises(loop: TakesHost) -> None:
    def fails() -> Iterator[Tensor]:
        yield from loop.batches()
        raise RuntimeError("mine")

    for _ in range(3):
        with contextlib.suppress(RuntimeError):
            for x in loop.timer.steps(fails()):
                loop.step(x)
        loop.gpu.host_work(20.0)


def pauses(loop: TakesHost) -> None:
    for i, x in enumerate(loop.timer.steps(loop.batches(12))):
        loop.step(x)
        if i % 4 == 3:
            with loop.timer.paused(), loop.timer.paused():
                loop.gpu.host_work(20.0)


def pauses_around_a_loop(loop: TakesHost) -> None:
    for _ in range(2):
        loop.train(6)
        with loop.timer.paused():
            loop.gpu.host_work(12.0)
            for _ in loop.timer.steps(range(4)):
                loop.gpu.host_work(7.0)


def evaluates(loop: TakesHost) -> None:
    for i, x in enumerate(loop.timer.steps(loop.batches(12))):
        loop.step(x)
        if i in (4, 8):
            loop.net.eval()
            with torch.no_grad():
                for y in loop.timer.steps(loop.batches(2)):
                    loop.gpu.host_work(19.0)
                    loop.net(y)
            loop.net.train()


def once(loop: TakesHost) -> None:
    loop.gpu.host_work(30.0)
    loop.train(12)
    loop.gpu.host_work(30.0)


@pytest.mark.parametrize(
    ("run_loops", "outside"),
    [
        (between, {"between loops": 60.0}),
        (leaves, {"between loops": 60.0}),
        (raises, {"between loops": 60.0}),
        (pauses, {"paused": 60.0}),
        (pauses_around_a_loop, {"paused": 80.0}),
        (evaluates, {"evaluation": 80.0}),
        (once, {"set-up": 30.0, "tear-down": 30.0}),
    ],
)
def test_breakdown_of_plain_loops_has_all_time_from_attach_to_remove(
    run_loops: Callable[[TakesHost], None], outside: dict[str, float]
) -> None:
    loop = TakesHost()
    begin = loop.gpu.now
    with loop.timer:
        run_loops(loop)
    summary = loop.timer.summary()
    assert summary.wall_clock is not None
    entries_ms = {name: round(1e3 * s, 6) for name, s in summary.wall_clock.entries_s.items()}
    assert entries_ms == STEPS_MS | outside
    assert sum(entries_ms.values()) == pytest.approx((loop.gpu.now - begin) / 1e6)
    breakdown = summary.time_breakdown
    assert breakdown is not None
    assert {name: round(1e3 * breakdown[name].seconds, 6) for name in outside} == outside
    assert breakdown.wall_s == pytest.approx(sum(entries_ms.values()) / 1e3)
    assert breakdown.scope == "training"


def test_breakdown_of_a_loop_that_calls_step_has_the_time_after_its_last_step() -> None:
    loop = TakesHost()
    with loop.timer:
        loop.gpu.host_work(30.0)  # Nothing shows where the first step starts.
        for x in loop.batches():
            loop.step(x)
            loop.timer.step()
        loop.gpu.host_work(40.0)
    assert entries_ms(loop.timer) == {"first step": 81.0, "steps": 18.0, "tear-down": 40.0}


@pytest.mark.parametrize("every_n_steps", [1, 2, "auto"])
def test_steps_of_a_loop_that_calls_step_are_steps(every_n_steps: Any) -> None:
    loop = TakesHost()
    options: dict[str, Any] = {"_clock": loop.gpu, "warmup_steps": 0}
    timer = GPUPhaseHooks(loop.net, loop.optimizer, every_n_steps=every_n_steps, **options)
    with timer:
        for x in loop.batches(20):
            loop.step(x)
            timer.step()
    assert entries_ms(timer) == {"first step": 51.0, "steps": 114.0}


def test_measurement_that_is_over_has_the_breakdown_of_its_loops() -> None:
    loop = TakesHost()
    with loop.timer:
        between(loop)
    loop.train()  # Untimed.
    with loop.timer:
        loop.ms = 50.0
        between(loop)
        copy = pickle.loads(pickle.dumps(loop.timer.summary()))
        loop.gpu.host_work(1000.0)
        assert loop.timer.summary().wall_clock != copy.wall_clock
    found = loop.timer.summary().wall_clock
    assert found is not None
    assert found.entries_s["between loops"] == pytest.approx(1.06)
    assert copy.wall_clock.entries_s["between loops"] == pytest.approx(0.06)


# Loggers and copies


def test_wall_clock_is_logged_once() -> None:
    gpu, logger = FakeGPU(), MemoryLogger()
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, warmup_steps=0, log=["fit"])
    fit(gpu, Slow(gpu), 3, timer=timer, logger=logger)
    whole_fit = timer.summary().wall_clock
    assert whole_fit is not None
    [(step, logged)] = [call for call in logger.calls if "phase_time/fit/wall_s" in call[1]]
    assert step == 2
    assert logged["phase_time/fit/wall_s"] == whole_fit.wall_s
    assert logged["phase_time/fit/first_step_share"] == whole_fit.shares["first step"]


def test_copied_wall_clock_stops() -> None:
    wall_clock = WallClock(iter([n * 1_000_000_000 for n in (0, 2, 3, 7, 9)]).__next__)
    wall_clock.switch_to(STEPS)
    copy = pickle.loads(pickle.dumps(wall_clock))
    wall_clock.switch_to(VALIDATION)
    assert copy.summary() == WallClockBreakdown({"set-up": 2.0, "steps": 1.0})
    copy.switch_to(VALIDATION)
    assert copy.summary() == WallClockBreakdown({"set-up": 2.0, "steps": 1.0})
    wall_clock.stop()
    wall_clock.stop()
    assert wall_clock.summary() == WallClockBreakdown(
        {"set-up": 2.0, "steps": 5.0, "validation": 2.0}
    )


# The file that a fit leaves


def test_fit_is_saved_when_it_ends(tmp_path: Path) -> None:
    gpu = FakeGPU()
    path = tmp_path / "runs" / "run.json.gz"
    timer = checked(gpu, save_path=path)
    run = load(path)
    assert run.summary() == timer.summary()
    assert run.summary().wall_clock == timer.summary().wall_clock
    assert [(evaluation["stage"], evaluation["step"]) for evaluation in run.evaluations] == [
        ("val", 2),
        ("val", 5),
    ]
    assert run.evaluations[0]["forward_ms"] == timer.summary().rows["forward"].mean_ms
    assert run.environment.precision == "32-true"
    assert run.environment.accumulate_grad_batches == 1


class Killed(Model):
    """A model whose fifth step fails."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == 4:
            raise self.error
        return super().training_step(batch, batch_idx)

    error: BaseException = RuntimeError("out of memory")


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_failed_run_saves_its_steps(error: BaseException, tmp_path: Path) -> None:
    gpu = FakeGPU()
    model = Killed(gpu)
    model.error = error
    path = tmp_path / "run.json.gz"
    with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
        fit(
            gpu,
            model,
            9,
            timer=GPUPhaseTimer(_clock=gpu, print_summary=False, save_path=path, _lag=0),
        )
    assert load(path).history["step"].tolist() == [0, 1, 2, 3]
    assert load(path).summary().wall_clock is not None


class Gone(io.StringIO):
    """A standard output that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_run_is_saved_when_its_output_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = FakeGPU()
    model, path = Killed(gpu), tmp_path / "run.json.gz"
    model.error = KeyboardInterrupt()
    monkeypatch.setattr("lightning_gputime._output.table.sys.stdout", Gone())
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(gpu, model, 9, timer=GPUPhaseTimer(_clock=gpu, save_path=path, _lag=0))
    monkeypatch.undo()
    assert load(path).history["step"].tolist() == [0, 1, 2, 3]
    assert "The table could not be shown: BrokenPipeError()" in caplog.text


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_start"])
def test_fit_without_steps_keeps_the_old_file(hook: str, tmp_path: Path) -> None:
    gpu = FakeGPU()
    path = tmp_path / "run.json.gz"
    fit(gpu, Model(gpu), 3, timer=GPUPhaseTimer(_clock=gpu, print_summary=False, save_path=path))
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise RuntimeError(f"in {hook}")

    callback = pl.callbacks.LambdaCallback(**{hook: fail})
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, save_path=path)
    with pytest.raises(RuntimeError, match=f"in {hook}"):
        fit(gpu, Model(gpu), 3, timer=timer, callbacks=[callback])
    assert path.read_bytes() == before


def test_save_path_is_relative_to_the_start_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    gpu = FakeGPU()
    callback = pl.callbacks.LambdaCallback(on_train_start=lambda *_: os.chdir(other))
    for save in ("run.json.gz", "~/home.json.gz"):
        monkeypatch.chdir(tmp_path)
        timer = GPUPhaseTimer(_clock=gpu, print_summary=False, save_path=save)
        fit(gpu, Model(gpu), 2, timer=timer, callbacks=[callback])
    assert list(other.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"other", "run.json.gz", "home.json.gz"}


def test_run_is_saved_after_each_epoch(tmp_path: Path) -> None:
    gpu = FakeGPU()
    path = tmp_path / "run.json.gz"
    found = []

    def look(*_: Any) -> None:
        # The file that would exist if the process were killed in this epoch.
        found.append(path.is_file() and len(load(path).history))

    callback = pl.callbacks.LambdaCallback(on_train_epoch_start=look)
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, save_path=path, _lag=0)
    fit(gpu, Model(gpu), 3, timer=timer, callbacks=[callback], max_epochs=2)
    assert found == [False, 3]
    assert len(load(path).history) == 6


_KILLED = """
import os, signal, sys
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_gputime import GPUPhaseTimer

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 25:
            os.kill(os.getpid(), getattr(signal, name))
        return self.net(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())

# A forked process for each, which shares the imports.
for name in sys.argv[1:]:
    if not os.fork():
        break
    os.wait()
else:
    sys.exit()
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
timer = GPUPhaseTimer(save_path=f"{name}.json.gz")
Trainer(max_epochs=4, callbacks=[timer], **quiet).fit(Model(), torch.zeros(10, 2, 4))
"""


@pytest.fixture(scope="module")
def of_killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder to which processes save that are killed in the middle of the third epoch."""
    folder = tmp_path_factory.mktemp("killed")
    run("-c", _KILLED, "SIGKILL", "SIGTERM", cwd=folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("SIGKILL", 10), ("SIGTERM", 26)])
def test_killed_process_leaves_a_file(name: str, steps: int, of_killed: Path) -> None:
    path = of_killed / f"{name}.json.gz"
    # By SIGKILL whole epochs: the first, and each that ends when saving has got cheap enough.
    assert len(load(path).history) >= steps
    assert load(path).summary().wall_clock is not None


def test_saving_at_the_end_of_epochs_takes_little_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, saved = FakeGPU(), []
    monkeypatch.setattr(GPUPhaseTimer, "save", lambda *_: saved.append(0))
    start, *epochs = (
        [0.0],
        [0.0, 0.0, 0.0, 1.0],  # At the end of the batch and of the epoch, and around the file.
        [50.0, 50.0],
        [100.9, 100.9],
        [100.9, 101.0, 101.0, 101.5],
    )
    now = iter(sum(epochs, start))
    monkeypatch.setattr("lightning_gputime._runs.live_file.time.perf_counter", now.__next__)
    path = tmp_path / "run.json.gz"
    fit(
        gpu,
        Model(gpu),
        1,
        max_epochs=4,
        timer=GPUPhaseTimer(_clock=gpu, print_summary=False, save_path=path),
    )
    # At the end of the first epoch, which takes a second; of the fourth, 100 s later; at the end.
    assert len(saved) == 3


def test_epochs_without_save_path_read_no_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As in tests of others that count the calls of a clock that they put in its place.
    clock = Mock(return_value=0.0)
    monkeypatch.setattr("time.perf_counter", clock)
    gpu = FakeGPU()
    fit(gpu, Model(gpu), 1, max_epochs=2, timer=GPUPhaseTimer(_clock=gpu, print_summary=False))
    clock.assert_not_called()


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_warns_once_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("os.replace", full)
    gpu = FakeGPU()
    timer = GPUPhaseTimer(
        _clock=gpu, print_summary=False, save_path=tmp_path / "run.json.gz", warmup_steps=0
    )
    with caplog.at_level(logging.WARNING, "lightning_gputime"):
        fit(gpu, Model(gpu), 3, timer=timer, max_epochs=2)
    assert timer.summary().steps == 6
    told = [
        record.getMessage() for record in caplog.records if "is not saved" in record.getMessage()
    ]
    assert len(told) == 1
    assert "Its file has the last saved state, or does not exist" in told[0]
    assert "run.json.gz (No space left on device)" in told[0]
    assert list(tmp_path.iterdir()) == []
