"""Trains the fake model in several processes; each writes the steps that its timer measured.

python tests/ddp_run.py STRATEGY DEVICES DIRECTORY
"""

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from fake_gpu import FakeGPU, steps
from fake_lightning import Loader, Model, trainer

from lightning_gputime import GPUPhaseTimer


class Writer(pl.Callback):
    """Writes what the timer before it in the list has measured."""

    def __init__(self, timer: GPUPhaseTimer, directory: Path) -> None:
        self.timer, self.directory = timer, directory

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        result: dict[str, Any] = {
            "steps": steps(self.timer),
            "hooks": sum(len(module._forward_hooks) for module in pl_module.modules()),
            "wrapped": trainer.strategy.model is not pl_module,
        }
        path = self.directory / f"rank{trainer.global_rank}.json"
        path.write_text(json.dumps(result))


def main(strategy: str, devices: int, directory: Path) -> None:
    gpu = FakeGPU()
    timer = GPUPhaseTimer(clock=gpu, warmup_steps=0)
    runner = trainer(timer, Writer(timer, directory), strategy=strategy, devices=devices)
    runner.fit(Model(gpu), Loader(gpu, 3))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
