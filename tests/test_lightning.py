"""The places of a Lightning run at which the timer must begin, read, or keep out."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from fake_gpu import STEP_MS, FakeGPU, steps
from fake_lightning import Loader, Model, trainer

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
