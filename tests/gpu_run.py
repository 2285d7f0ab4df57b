"""Trains on two GPUs with one of Lightning's strategies; each rank writes its median times.

python tests/gpu_run.py STRATEGY DIRECTORY
"""

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gputime import GPUPhaseTimer


class Net(pl.LightningModule):
    """A net that is worth sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))

    def configure_model(self) -> None:
        mesh = getattr(self, "device_mesh", None)
        if mesh is not None:
            from torch.distributed.fsdp import fully_shard

            for layer in self.net:
                fully_shard(layer, mesh=mesh["data_parallel"])
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self(batch[0]).pow(2).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Writer(pl.Callback):
    """Writes what the timer before it in the list has measured."""

    def __init__(self, timer: GPUPhaseTimer, directory: Path) -> None:
        self.timer, self.directory = timer, directory

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        rows = self.timer.summary().rows
        path = self.directory / f"rank{trainer.global_rank}.json"
        path.write_text(json.dumps({name: row.p50_ms for name, row in rows.items()}))


def main(name: str, directory: Path) -> None:
    strategy: Any = name
    if name == "fsdp2":
        strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    timer = GPUPhaseTimer()
    pl.Trainer(
        accelerator="gpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[timer, Writer(timer, directory)],
    ).fit(Net(), DataLoader(TensorDataset(torch.randn(40 * 512, 4096)), batch_size=256))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
