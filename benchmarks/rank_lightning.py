"""What `ranks.py` trains in Lightning, with a late rank."""

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from loops import bare_trainer
from rank_nets import Delimiter, Job, Listener, Net, shard
from torch import Tensor

from lightning_gputime import GPUPhaseTimer
from lightning_gputime._output.summary import PhaseSummary


class Loader:
    """Yields batches of shape (batch, width); a rank may be late in it."""

    def __init__(self, job: Job, n: int) -> None:
        self._job, self._n = job, n

    def __iter__(self) -> Iterator[Tensor]:
        x = torch.randn(self._job.batch, self._job.width, device=self._job.device)
        for _ in range(self._n):
            self._job.late("data")
            yield x

    def __len__(self) -> int:
        return self._n


class LateCallback(pl.Callback):
    """A callback in which a rank may be late."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def on_train_batch_end(self, *_: Any) -> None:
        self._job.late("callback")


class LateTask(pl.LightningModule):
    """A net in which a rank may be late; it delimits its phases."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.net = job, Net(job)
        self.delimit = Delimiter(job.device)

    def configure_model(self) -> None:
        """Shards the net, if the strategy has a mesh."""
        mesh = getattr(self, "device_mesh", None)
        if mesh is not None and not hasattr(self.net, "unshard"):
            shard(self.net, mesh["data_parallel"])

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        """Returns the loss of one batch."""
        self.delimit()
        with self.job.autocast(x):
            out = self.net(x)
            self.delimit()
            loss: Tensor = out.square().mean()
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        self.delimit()

    def on_after_backward(self) -> None:
        self.delimit()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.job.late("optimizer")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.delimit()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=self.job.is_cuda)


class LightningLoop:
    """Lightning's loop in which one rank may be late.

    Args:
        job: What is trained.
        strategy: Lightning's name of how the ranks share the work, or "fsdp2".
    """

    windows = ("forward", "loss", "backward", "optimizer", "data")
    """What follows each delimiter of a step."""

    def __init__(self, job: Job, strategy: str) -> None:
        self.job, self.strategy = job, strategy

    def train(
        self, steps: int, warmup_steps: int, observers: Sequence[Listener] = ()
    ) -> PhaseSummary:
        """Trains some steps, with a new net; returns what the timer says."""
        job = self.job
        with job.device:
            task = LateTask(job)
        timer = GPUPhaseTimer(print_summary=False, warmup_steps=warmup_steps, observers=observers)
        strategy: Any = self.strategy
        if strategy == "fsdp2":
            # By default all ranks of a host are for tensor parallelism, and nothing is sharded.
            strategy = pl.strategies.ModelParallelStrategy(dist.get_world_size(), 1)
        trainer = bare_trainer(
            accelerator="gpu" if job.is_cuda else "cpu",
            devices=dist.get_world_size(),
            strategy=strategy,
            max_epochs=1,
            callbacks=[timer, LateCallback(job)],
        )
        trainer.fit(task, Loader(job, steps))
        return timer.summary()
