"""Timers for a Trainer of Lightning and for a Fabric that have none."""

from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_gputime._auto_instrumentation import adding, options_of_all, tells_errors
from lightning_gputime.callback import GPUPhaseTimer
from lightning_gputime.fabric import FabricPhaseTimer


class TrainerAdder(pl.Callback):
    """A callback whose place a `GPUPhaseTimer` takes when a Trainer begins."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self._wanted = wanted

    @tells_errors()
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        timer = GPUPhaseTimer(**options_of_all(self._wanted))
        # In place of its own, which raises where a name is wrong: `on_train_start` says that.
        vars(timer)["on_fit_start"] = partial(_name_file, timer, self._wanted)
        if adding.take_place(self, trainer.callbacks, timer):  # type: ignore[attr-defined]
            timer.setup(trainer, pl_module, stage)


@tells_errors()
def _name_file(timer: GPUPhaseTimer, wanted: dict[str, Any], *_: Any) -> None:
    """Let each fit of a Trainer save to a file of its own."""
    timer._path = adding.path_to_save(wanted)


class FabricAdder:
    """A callback whose place a `FabricPhaseTimer` takes when something is set up."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self._wanted = wanted

    @tells_errors()
    def on_after_setup(self, fabric: Any, module: Any) -> None:
        timer = FabricPhaseTimer(**options_of_all(self._wanted))
        timer._submodules(getattr(module, "module", module))  # Raises if a name is wrong.
        if adding.take_place(self, fabric._callbacks, timer):
            timer.on_after_setup(fabric, module)
            adding.show_at_exit(timer, self._wanted)
