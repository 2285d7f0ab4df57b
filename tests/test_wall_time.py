import errno
import io
import logging
import os
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
from fake_gpu import FakeGPU
from fake_lightning import Loader, MemoryLogger, Model, SavingTrainer, fit, trainer
from processes import run

from lightning_gputime import GPUPhaseTimer, load
from lightning_gputime._measurement.wall_time import (
    STEPS,
    VALIDATION,
    WallTimeBreakdown,
    WallTimeRecorder,
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


def test_wall_time_says_where_the_whole_fit_went() -> None:
    gpu = FakeGPU()
    whole_fit = checked(gpu).summary().wall_time
    assert whole_fit is not None
    whole = {name: round(s * 1e3) for name, s in whole_fit.entries_s.items()}
    device = {name: ms for name, ms in whole.items() if name in ("first step", "steps")}
    # The host may wait for the device in a step, and does nothing else but the work above.
    assert {name: ms for name, ms in whole.items() if name not in device} == {
        "set-up": 7,
        "sanity check": 8,
        "validation": 20,
        "checkpoints": 80,
        "epoch ends": 22,
        "the rest": 13,
    }
    assert device["first step"] == pytest.approx(500, abs=20)
    assert device["steps"] == pytest.approx(500, abs=80)


def test_the_entries_add_up_to_the_wall_time() -> None:
    gpu = FakeGPU()
    begin = gpu.host_ns()
    whole_fit = checked(gpu).summary().wall_time
    assert whole_fit is not None
    assert whole_fit.wall_s == pytest.approx((gpu.host_ns() - begin) / 1e9)
    assert sum(whole_fit.shares.values()) == pytest.approx(1.0)


def test_it_is_in_the_loggers_once() -> None:
    gpu, logger = FakeGPU(), MemoryLogger()
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, warmup_steps=0, log=["fit"])
    fit(gpu, Slow(gpu), 3, timer=timer, logger=logger)
    whole_fit = timer.summary().wall_time
    assert whole_fit is not None
    [(step, logged)] = [call for call in logger.calls if "phase_time/fit/wall_s" in call[1]]
    assert step == 2
    assert logged["phase_time/fit/wall_s"] == whole_fit.wall_s
    assert logged["phase_time/fit/first_step_share"] == whole_fit.shares["first step"]


def test_a_plain_loop_has_no_wall_time() -> None:
    from fake_loop import Loop, hooks

    with hooks(Loop(FakeGPU())) as timer:
        pass
    assert timer.summary().wall_time is None


def test_a_copy_of_the_books_is_of_the_time_until_then() -> None:
    books = WallTimeRecorder(iter([n * 1_000_000_000 for n in (0, 2, 3, 7, 9)]).__next__)
    books.switch_to(STEPS)
    copy = pickle.loads(pickle.dumps(books))
    books.switch_to(VALIDATION)
    assert copy.summary() == WallTimeBreakdown({"set-up": 2.0, "steps": 1.0})
    copy.switch_to(VALIDATION)
    assert copy.summary() == WallTimeBreakdown({"set-up": 2.0, "steps": 1.0})
    books.remove()
    books.remove()
    assert books.summary() == WallTimeBreakdown({"set-up": 2.0, "steps": 5.0, "validation": 2.0})


def test_nothing_is_left_on_the_trainer() -> None:
    gpu = FakeGPU()
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False)
    one = trainer(timer)
    profiler: Any = one.profiler  # type: ignore[attr-defined]  # has no hint
    one.fit(Model(gpu), Loader(gpu, 2))
    assert not {"start", "stop"} & vars(profiler).keys()
    pickle.dumps(timer)


def test_a_checkpoint_that_fails_is_over(tmp_path: Path) -> None:
    gpu = FakeGPU()

    class Fails(Model):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            raise ZeroDivisionError

    def save(runner: pl.Trainer, _: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            runner.save_checkpoint(tmp_path / "last.ckpt")
        gpu.host_work(40.0)

    timer = GPUPhaseTimer(_clock=gpu, print_summary=False)
    saves = pl.callbacks.LambdaCallback(on_train_epoch_end=save)
    fit(gpu, Fails(gpu), timer=timer, callbacks=[saves])
    whole_fit = timer.summary().wall_time
    assert whole_fit is not None
    assert whole_fit.entries_s["epoch ends"] >= 0.04


# The file that a fit leaves


def test_a_fit_is_saved_when_it_ends(tmp_path: Path) -> None:
    gpu = FakeGPU()
    path = tmp_path / "runs" / "run.json.gz"
    timer = checked(gpu, save_path=path)
    run = load(path)
    assert run.summary() == timer.summary()
    assert run.summary().wall_time == timer.summary().wall_time
    assert [(one["stage"], one["step"]) for one in run.evaluations] == [("val", 2), ("val", 5)]
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
def test_a_run_that_raises_leaves_what_there_is(error: BaseException, tmp_path: Path) -> None:
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
    assert load(path).summary().wall_time is not None


class Gone(io.StringIO):
    """A standard output that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_run_is_saved_where_the_interrupt_has_ended_the_reader_of_its_output_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = FakeGPU()
    model, path = Killed(gpu), tmp_path / "run.json.gz"
    model.error = KeyboardInterrupt()
    monkeypatch.setattr("lightning_gputime._measurement.table.sys.stdout", Gone())
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(gpu, model, 9, timer=GPUPhaseTimer(_clock=gpu, save_path=path, _lag=0))
    monkeypatch.undo()
    assert load(path).history["step"].tolist() == [0, 1, 2, 3]
    assert "The table could not be shown: BrokenPipeError()" in caplog.text


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_start"])
def test_a_fit_that_trains_nothing_leaves_the_file_of_before(hook: str, tmp_path: Path) -> None:
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


def test_training_that_changes_the_folder_leaves_one_file(
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
    assert {one.name for one in tmp_path.iterdir()} == {"other", "run.json.gz", "home.json.gz"}


def test_an_error_after_the_training_leaves_the_file_too(tmp_path: Path) -> None:
    gpu = FakeGPU()
    path = tmp_path / "run.json.gz"

    def fail(*_: Any) -> None:
        path.unlink()
        raise RuntimeError("at the end")

    callback = pl.callbacks.LambdaCallback(on_train_end=fail)
    timer = GPUPhaseTimer(_clock=gpu, print_summary=False, save_path=path)
    with pytest.raises(RuntimeError, match="at the end"):
        fit(gpu, Model(gpu), 3, timer=timer, callbacks=[callback])
    assert len(load(path).history) == 3


def test_a_run_that_is_killed_has_its_epochs(tmp_path: Path) -> None:
    gpu = FakeGPU()
    path = tmp_path / "run.json.gz"
    found = []

    def look(*_: Any) -> None:
        # What is there if the process ends in this epoch, without a word.
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

# A process for each, of which this one has the imports.
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
def test_a_process_that_is_killed_leaves_a_file(name: str, steps: int, of_killed: Path) -> None:
    path = of_killed / f"{name}.json.gz"
    # By SIGKILL whole epochs: the first, and each that ends when saving has got cheap enough.
    assert len(load(path).history) >= steps
    assert load(path).summary().wall_time is not None


def test_saving_at_the_end_of_epochs_takes_little_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, saved = FakeGPU(), []
    monkeypatch.setattr(GPUPhaseTimer, "save", lambda *_: saved.append(0))
    now = iter([0.0, 0.0, 1.0, 50.0, 100.9, 101.0, 101.0, 101.5])
    monkeypatch.setattr("lightning_gputime.callback.time.perf_counter", now.__next__)
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


def test_without_a_file_to_save_no_time_is_read_at_the_end_of_epochs(
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


def test_where_the_disk_is_full_training_goes_on_and_it_is_said_once(
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
    told = [one.getMessage() for one in caplog.records if "is not saved" in one.getMessage()]
    assert len(told) == 1
    assert "Its file has what was saved before, or is not there" in told[0]
    assert "run.json.gz (No space left on device)" in told[0]
    assert list(tmp_path.iterdir()) == []


def test_where_the_path_cannot_be_written_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    gpu = FakeGPU()
    timer = GPUPhaseTimer(
        _clock=gpu, print_summary=False, save_path=tmp_path / "file" / "run.json.gz", warmup_steps=0
    )
    fit(gpu, Model(gpu), 3, timer=timer)
    assert timer.summary().steps == 3
    assert "The run is not saved" in caplog.text


@pytest.mark.parametrize("path", [3, "", True])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    with pytest.raises(
        TypeError, match=r"save_path must be a path such as 'run\.json\.gz', or None"
    ):
        GPUPhaseTimer(save_path=path)


def test_without_save_there_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gpu = FakeGPU()
    fit(gpu, Model(gpu), 2)
    assert list(tmp_path.iterdir()) == []
