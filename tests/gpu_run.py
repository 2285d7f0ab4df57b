"""Train on two GPUs, and write the median times of each rank.

python tests/gpu_run.py STRATEGY DIRECTORY

A strategy is one of Lightning's, or a plain loop with DeepSpeed's engine: "zero1" or "zero3". The
loop runs in two CPU processes if there is no GPU.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from fake_lightning import trainer
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer
from lightning_gputime._timer import Timer


class Net(pl.LightningModule):
    """A net that is large enough to be sharded."""

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
    """Writes the results of a timer that precedes it in the list of callbacks."""

    def __init__(self, timer: GPUPhaseTimer, directory: Path) -> None:
        self.timer, self.directory = timer, directory

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        write(self.timer, trainer.global_rank, self.directory)


def write(timer: Timer, rank: int, directory: Path) -> None:
    """Write the median times of a rank, and print the table of rank 0."""
    rows = timer.summary().rows
    times = {name: row.p50_ms for name, row in rows.items()}
    (directory / f"rank{rank}.json").write_text(json.dumps(times))
    if rank == 0:
        print(timer.summary())


def train_engine(rank: int, stage: int, directory: str) -> None:
    """Train a net with DeepSpeed's engine in one of two processes."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(rank)
    import deepspeed

    deepspeed.init_distributed("nccl" if has_gpu else "gloo")
    width, count = (4096, 256) if has_gpu else (512, 64)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters()),
        config={
            "train_micro_batch_size_per_gpu": count,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    batches = torch.randn(40, count, width)
    with GPUPhaseHooks(engine) as timer:
        for x in timer.steps(batches):
            engine.backward(engine(x.to(engine.device)).pow(2).mean())
            engine.step()
    write(timer, rank, Path(directory))
    torch.distributed.destroy_process_group()


def main(name: str, directory: Path) -> None:
    if name.startswith("zero"):
        spawn(train_engine, (int(name[-1]), str(directory)), nprocs=2)
        return
    strategy: Any = name
    if name == "fsdp2":
        strategy = pl.strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    timer = GPUPhaseTimer(print_summary=False)
    loader = DataLoader(TensorDataset(torch.randn(40 * 512, 4096)), batch_size=256)
    options: dict[str, Any] = {"accelerator": "gpu", "devices": 2, "strategy": strategy}
    trainer(timer, Writer(timer, directory), **options).fit(Net(), loader)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
