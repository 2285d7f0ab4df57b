"""Timers for a Trainer of Lightning that has none."""

from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_gputime._auto_instrumentation import adding, options_of_all, tells_errors
from lightning_gputime.callback import GPUPhaseTimer


class TrainerAdder(pl.Callback):
    """A callback whose place a `GPUPhaseTimer` takes when a Trainer begins."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self._wanted = wanted

    @tells_errors()
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        timer = GPUPhaseTimer(**options_of_all(self._wanted))
        # In place of its own, which raises where a name is wrong: `on_train_start` says that.
        vars(timer)["on_fit_start"] = partial(_name_file, timer, self._wanted)
        if adding.take_place(self, trainer.callbacks, timer, self._wanted):  # type: ignore[attr-defined]
            timer.setup(trainer, pl_module, stage)


@tells_errors()
def _name_file(timer: GPUPhaseTimer, wanted: dict[str, Any], *_: Any) -> None:
    """Let each fit of a Trainer save to a file of its own."""
    timer._save_to(adding.path_to_save(wanted))
