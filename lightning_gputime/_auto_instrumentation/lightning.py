"""Timers that are added to Lightning's Trainer."""

from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_gputime._auto_instrumentation import adding
from lightning_gputime._auto_instrumentation.environment import suppress_errors, timer_options
from lightning_gputime.callback import GPUPhaseTimer


class TrainerAdder(pl.Callback):
    """Placeholder callback that a `GPUPhaseTimer` replaces in `setup`."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self._wanted = wanted

    @suppress_errors()
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        timer = GPUPhaseTimer(**timer_options(self._wanted))
        # The timer's `on_fit_start` only raises if another timer has the same prefix. A timer that
        # was added from outside must not stop the script, so replace this method.
        vars(timer)["on_fit_start"] = partial(_name_file, timer, self._wanted)
        if adding.replace_with_timer(self, trainer.callbacks, timer, self._wanted):  # type: ignore[attr-defined]
            timer.setup(trainer, pl_module, stage)


@suppress_errors()
def _name_file(timer: GPUPhaseTimer, wanted: dict[str, Any], *_: Any) -> None:
    """Save each fit of the Trainer to a separate file."""
    timer._save_to(adding.path_to_save(wanted))
