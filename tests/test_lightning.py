"""The places of a Lightning run at which the timer must begin, read, or keep out."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from fake_gpu import STEP_MS, FakeGPU, steps
from fake_lightning import Loader, MemoryLogger, Model, trainer

from lightning_gputime import GPUPhaseTimer


def timer_of(gpu: FakeGPU, **options: Any) -> GPUPhaseTimer:
    return GPUPhaseTimer(clock=gpu, summary=False, **{"warmup_steps": 0, **options})


# Where an epoch begins


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("max_epochs", [1, 2])
def test_a_run_that_goes_on_in_the_middle_of_an_epoch_is_timed_from_its_first_fetch(
    gpu: FakeGPU, max_epochs: int, tmp_path: Path
) -> None:
    saves = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer(saves, enable_checkpointing=True).fit(Model(gpu), Loader(gpu, 5))
    timer = timer_of(gpu)
    runner = trainer(timer, max_epochs=max_epochs)
    runner.fit(Model(gpu), Loader(gpu, 5), ckpt_path=tmp_path / "step=2.ckpt")
    numbers = list(range(2, 5 * max_epochs))
    assert timer.history()["step"].tolist() == numbers
    assert steps(timer) == [STEP_MS] * len(numbers)


# What other callbacks find


class Finds(pl.Callback):
    """Notes the value that a callback finds in a hook."""

    def __init__(self, hook: str) -> None:
        self.found: list[float | None] = []
        setattr(self, hook, self._look)

    def _look(self, trainer: pl.Trainer, *_: Any) -> None:
        value = trainer.callback_metrics.get("phase_time/step_ms")
        self.found.append(None if value is None else float(value))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("log_every_n_steps", [2, 3, 50])
def test_at_an_epochs_end_the_means_are_there_whatever_the_order_of_the_callbacks(
    gpu: FakeGPU, log_every_n_steps: int, first: bool
) -> None:
    finds, timer = Finds("on_train_epoch_end"), timer_of(gpu)
    callbacks = [finds, timer] if first else [timer, finds]
    logger = MemoryLogger()
    runner = trainer(*callbacks, log_every_n_steps=log_every_n_steps, max_epochs=2, logger=logger)
    runner.fit(Model(gpu), Loader(gpu, 3))
    assert finds.found == [sum(STEP_MS.values())] * 2
    # The loggers get what they would get without epochs, and the rest when training ends.
    logged = {2: [1, 3, 5], 3: [2, 5], 50: [5]}
    assert [step for step, _ in logger.phase_times()] == logged[log_every_n_steps]


@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_epoch_end"])
@pytest.mark.parametrize("first", [False, True])
def test_early_stopping_and_checkpoints_can_watch_a_phase_from_the_first_epoch_on(
    gpu: FakeGPU, hook: str, first: bool, tmp_path: Path
) -> None:
    at_epoch_end = hook == "on_train_epoch_end"
    stop = pl.callbacks.EarlyStopping(
        "phase_time/step_ms", patience=1, check_on_train_epoch_end=at_epoch_end
    )
    save = pl.callbacks.ModelCheckpoint(
        tmp_path, monitor="phase_time/step_ms", save_on_train_epoch_end=at_epoch_end
    )
    timer = timer_of(gpu)
    callbacks = [stop, save, timer] if first else [timer, stop, save]
    runner = trainer(*callbacks, max_epochs=9, enable_checkpointing=True, val_check_interval=2)
    runner.fit(Model(gpu), Loader(gpu, 4), Loader(gpu, 1))
    assert steps(timer) == [STEP_MS] * (8 if at_epoch_end else 4)
    assert save.best_model_score == sum(STEP_MS.values())


def test_what_is_read_at_an_epochs_end_is_counted_once(gpu: FakeGPU) -> None:
    class Slower(Loader):
        def __iter__(self) -> Any:
            for i, batch in enumerate(super().__iter__()):
                gpu.work(float(i))
                yield batch

    logger = MemoryLogger()
    runner = trainer(timer_of(gpu), log_every_n_steps=4, max_epochs=3, logger=logger)
    runner.fit(Model(gpu), Slower(gpu, 3))
    own = sum(STEP_MS.values())
    means = [(step, metrics["phase_time/step_ms"]) for step, metrics in logger.phase_times()]
    # Over the steps 0 to 3, 4 to 7, and 8.
    assert means == [(3, own + 3 / 4), (7, own + (1 + 2 + 0 + 1) / 4), (8, own + 2.0)]
