"""The evaluation loops of Lightning's trainer, as its hooks tell them."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_gputime import _lightning
from lightning_gputime._results.advice import Setup
from lightning_gputime._results.results import Results
from lightning_gputime._results.summary import PhaseSummary
from lightning_gputime._run.evaluation import Evaluations
from lightning_gputime._runs.environment import cores_of_rank, known_of_loader

STAGES = {"val": "validation", "test": "test", "predict": "prediction"}
"""For each kind of evaluation, as it is called in keys, its name in the table."""


def start(timer: Any, stage: str, trainer: _lightning.Trainer, model: _lightning.Module) -> None:
    """Start to time an evaluation loop, whose means are logged under the name of its stage."""
    options, number = timer._options, _lightning.step_number(trainer)
    epochs = _lightning.Epochs(trainer)
    epochs.begins()
    means = _lightning.mean_log_of(
        trainer,
        options.prefix,
        sys.maxsize,  # Nothing is due before the end.
        partial(timer._keep_evaluation, stage, number),
        stage=stage,
        beside=epochs.row,
    )
    timer._evaluations.start(
        stage,
        _lightning.clock_of(trainer, options.clock),
        _lightning.evaluation_loop_of(trainer, model),
        means,
        number=number,
        # A number is of the batches of training.
        items=options.items if callable(options.items) else None,
        setup=_setup_of(stage, trainer),
    )


def summary_of(evaluations: Evaluations, stage: str) -> PhaseSummary:
    """Return the statistics of the newest loop of a stage, as far as it was read.

    Raises:
        ValueError: If there is no such stage.
    """
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {', '.join(('fit', *STAGES))}, got {stage!r}")
    none = Results(1, 0, hint=f"No {STAGES[stage]} loop has run since the last fit began.")
    return replace(evaluations.results.get(stage, none).summary(), stage=STAGES[stage])


def _setup_of(stage: str, trainer: _lightning.Trainer) -> Setup:
    known = known_of_loader(_lightning.evaluation_loaders_of(trainer, stage))
    return Setup(cores=cores_of_rank(trainer.world_size), **known)


def tells(method: Callable[[Evaluations], None]) -> Callable[..., None]:
    """Return a hook of a callback that tells its evaluations something."""

    @_lightning.never_raises
    def hook(self: Any, *_: Any, **__: Any) -> None:
        method(self._evaluations)

    return hook


@_lightning.never_raises
def begins_batch(
    self: Any,
    trainer: _lightning.Trainer,
    pl_module: _lightning.Module,
    batch: Any,
    batch_idx: int,
    dataloader_idx: int = 0,
) -> None:
    """Start the step of an evaluation's batch, as a hook of a callback."""
    self._evaluations.batch_begins(batch)


def starts(stage: str) -> Callable[..., None]:
    """Return a hook of a callback that starts an evaluation."""

    @_lightning.never_raises
    def hook(self: Any, trainer: _lightning.Trainer, model: _lightning.Module) -> None:
        start(self, stage, trainer, model)

    return hook
