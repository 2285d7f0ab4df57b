"""The callbacks that `lightning_suite` puts into each Trainer."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_gputime import GPUPhaseTimer, SlowStep, StepTimes

_PHASES = ("data", "callbacks", "forward", "loss", "backward", "optimizer", "other")
_KEYS = tuple(f"{name}_ms" for name in (*_PHASES, "step"))
_FIT_KEYS = ("fit/set_up", "fit/steps", "fit/rest")


class Keys(pl.Callback):
    """Log as many keys as the timer, at the same times, to the same places."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Count batches of this fit from zero."""
        self._batches = 0

    def _log(self, trainer: pl.Trainer, keys: Sequence[str], stage: str = "") -> None:
        values = {f"phase_time/{stage}{key}": 1.0 for key in keys}
        row = {**values, "epoch": trainer.current_epoch}
        for logger in trainer.loggers:
            logger.log_metrics(metrics=row, step=self._batches)
        self._publish(trainer, values)

    def _publish(self, trainer: pl.Trainer, values: dict[str, float]) -> None:
        trainer.callback_metrics.update({key: torch.tensor(one) for key, one in values.items()})

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Log as often as the trainer logs."""
        self._batches += 1
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # has no hint
        if every and self._batches % every == 0:
            self._log(trainer, _KEYS)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Publish what other callbacks may read."""
        self._publish(trainer, {f"phase_time/{key}": 1.0 for key in _KEYS})

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Log the means of an evaluation."""
        if not trainer.sanity_checking:
            self._log(trainer, _KEYS, "val/")

    def on_test_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Log the means of an evaluation."""
        self._log(trainer, _KEYS, "test/")

    def on_predict_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Log the means of an evaluation."""
        self._log(trainer, _KEYS, "predict/")

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Log the steps since the last log, and the wall time."""
        self._log(trainer, _KEYS + _FIT_KEYS)


class _Observer:
    """An observer that does little."""

    steps = slow = 0

    def on_step(self, times: StepTimes) -> None:
        self.steps += 1

    def on_slow_step(self, step: SlowStep) -> None:
        self.slow += 1

    def metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        return {"observed": float(self.steps)}

    def summary(self) -> str:
        return f"{self.steps} steps"


def _with_all_options() -> GPUPhaseTimer:
    return GPUPhaseTimer(
        save_path=os.path.join(tempfile.mkdtemp(prefix="foreign-"), "run.json.gz"),
        _lag=0,
        warmup_steps=1,
        history_size=100,
        modules="all",
        annotate=True,
        memory=True,
        every_n_steps=1,
        probe_every_n_steps=3,
        sync_ranks="log",
        flops=1e9,
        observers=[repr, _Observer()],
    )


MAKERS = {
    "nothing": pl.Callback,
    "keys": Keys,
    "default": GPUPhaseTimer,
    "every_3": lambda: GPUPhaseTimer(every_n_steps=3),
    "all": _with_all_options,
}


def make() -> pl.Callback:
    """Return the callback that the environment names: the entry point of the package."""
    return MAKERS[os.environ["FOREIGN_CALLBACK"]]()
