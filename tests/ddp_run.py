"""Trains the fake model in several processes; each writes the steps that its timer measured.

python tests/ddp_run.py DIRECTORY "DEVICES STRATEGY"...

The cases run one after the other, where possible in the same processes.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed
from fake_gpu import FakeGPU, batches, between_batches, steps
from fake_lightning import Loader, Model, trainer
from torch import Tensor

from lightning_gputime import GPUPhaseTimer


class RankLogger(pl.loggers.Logger):
    """Stores the logged metrics of the ranks."""

    name, version = "ranks", 0

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, float] = {}

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.update((key, ms) for key, ms in metrics.items() if "/ranks/" in key)


class RankLoader(Loader):
    """A loader that is slower by 3 ms on each rank than on the one before."""

    def __iter__(self) -> Iterator[Tensor]:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return batches(self.gpu, self.n, copy_ms=1.0 + 3.0 * rank)


class Writer(pl.Callback):
    """Writes the results of a timer that precedes it in the list of callbacks."""

    def __init__(self, timer: GPUPhaseTimer, logger: "RankLogger", directory: Path) -> None:
        self.timer, self.logger, self.directory = timer, logger, directory

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ranks = self.timer.summary().ranks
        result: dict[str, Any] = {
            "sentence": None if ranks is None else ranks.sentence,
            "logged": self.logger.metrics,
            "steps": steps(self.timer),
            "parts of data": between_batches(self.timer),
            "hooks": sum(len(module._forward_hooks) for module in pl_module.modules()),
            "wrapped": trainer.strategy.model is not pl_module,
        }
        path = self.directory / f"rank{trainer.global_rank}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result))


def train(strategy: str, devices: int, directory: Path) -> None:
    gpu = FakeGPU()
    timer = GPUPhaseTimer(_clock=gpu, warmup_steps=0, log="all")
    logger = RankLogger()
    writer = Writer(timer, logger, directory)
    runner = trainer(timer, writer, strategy=strategy, devices=devices, logger=logger)
    runner.fit(Model(gpu), RankLoader(gpu, 3))


if __name__ == "__main__":
    for case in sys.argv[2:]:
        devices, strategy = case.split()
        train(strategy, int(devices), Path(sys.argv[1], case))
