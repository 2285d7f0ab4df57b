"""Lightning's DDP in two processes; rank 1 is late in some place."""

import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from fake_lightning import trainer
from torch import Tensor
from wait_ways import LATE_MS, STEPS, WARMUP, Update, batches, layers, results

from lightning_gputime import GPUPhaseTimer

LATE_IN_FIT = ("nobody", "optimizer", "callback", "loader")


class Late(pl.Callback):
    """A callback that sleeps after each batch."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        time.sleep(self.ms / 1000)


class Module(pl.LightningModule):
    """A module whose optimizer may be late."""

    def __init__(self, late_ms: float) -> None:
        super().__init__()
        self.net, self.late_ms = layers(), late_ms

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = Update(self.parameters(), lr=1e-3)
        optimizer.late = self.late_ms
        return optimizer


class Loader:
    """A loader that may be late."""

    def __init__(self, late_ms: float) -> None:
        self.late_ms = late_ms

    def __iter__(self) -> Iterator[Tensor]:
        return batches(STEPS, self.late_ms)

    def __len__(self) -> int:
        return STEPS


def fit(rank: int, place: str) -> dict[str, Any]:
    """Train while rank 1 is late in a place."""
    ms = {place: LATE_MS if rank == 1 else 0.0}
    timer = GPUPhaseTimer(warmup_steps=WARMUP, print_summary=False)
    callbacks = [timer, Late(ms.get("callback", 0.0))]
    runner = trainer(*callbacks, strategy="ddp", devices=2)
    runner.fit(Module(ms.get("optimizer", 0.0)), Loader(ms.get("loader", 0.0)))
    return results(timer)
