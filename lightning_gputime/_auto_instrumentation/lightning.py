"""Timers for a Trainer of Lightning and for a Fabric that have none."""

from typing import Any

import lightning.pytorch as pl

from lightning_gputime._auto_instrumentation.adding import (
    options_of_all,
    show_at_exit,
    take_place,
)
from lightning_gputime.callback import GPUPhaseTimer
from lightning_gputime.fabric import PhaseTimeCallback


class TrainerAdder(pl.Callback):
    """A callback whose place a `GPUPhaseTimer` takes when a Trainer begins."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self._wanted = wanted

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Add the timer."""
        timer = GPUPhaseTimer(**self._wanted)
        if take_place(trainer.callbacks, self, timer):  # type: ignore[attr-defined]  # has no hint
            timer.setup(trainer, pl_module, stage)


class FabricAdder:
    """A callback whose place a `PhaseTimeCallback` takes when something is set up."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self._wanted = wanted

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Add the timer."""
        timer = PhaseTimeCallback(**options_of_all(self._wanted))
        if take_place(fabric._callbacks, self, timer):
            timer.on_after_setup(fabric, module)
            show_at_exit(timer, self._wanted)
