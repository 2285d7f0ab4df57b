"""The evaluation loops of a trainer, one at a time."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_gputime import _lightning
from lightning_gputime._options import Options
from lightning_gputime._record.clock import HostClock
from lightning_gputime._results.advice import Setup
from lightning_gputime._results.results import Results
from lightning_gputime._results.summary import PhaseSummary
from lightning_gputime._run.evaluation import Evaluating, Evaluation
from lightning_gputime._runs.setup import cores_of_rank, known_of_loader

STAGES = {"val": "validation", "test": "test", "predict": "prediction"}
"""For each kind of evaluation, as it is called in keys, its name in the table."""


class Evaluations(Evaluating):
    """Times the validation, test and prediction loops of a trainer, apart from its training.

    Args:
        options: How steps are timed.
        keep: Is called with the stage, the number and the means of each.
    """

    def __init__(
        self, options: Options, keep: Callable[[str, int, Mapping[str, float]], None]
    ) -> None:
        super().__init__(options, keep)
        # The newest of each stage, the newest last.
        self._results: dict[str, Results] = {}

    def start(self, stage: str, trainer: _lightning.Trainer, model: _lightning.Module) -> None:
        """Says that one starts, whose means are logged under its name."""
        number = _lightning.step_number(trainer)
        clock = _lightning.clock_of(trainer, self._options.clock)
        self._results.pop(stage, None)
        results = Results(self._options.history, 0, isinstance(clock, HostClock))
        results.setup = _setup_of(stage, trainer)
        self._results[stage] = results
        keep = partial(self._keep, stage, number)
        epochs = _lightning.Epochs(trainer)
        epochs.begins()
        self._now = Evaluation(
            clock,
            _lightning.evaluation_loop_of(trainer, model),
            # Nothing is due before the end.
            _lightning.mean_log_of(
                trainer, self._options.prefix, sys.maxsize, keep, stage=stage, beside=epochs.row
            ),
            results,
            lag=self._options.lag,
            number=number,
            # A number is of the batches of training.
            items=self._options.items if callable(self._options.items) else None,
        )

    def forget(self) -> None:
        """Forgets what was timed: a fit begins, which is a new measurement."""
        self._results.clear()

    @property
    def newest(self) -> str:
        """The stage of the newest one since the fit began; empty if there was none."""
        return next(reversed(self._results), "")

    def summary(self, stage: str) -> PhaseSummary:
        """Returns the statistics of the newest one of a stage, as far as it was read.

        Raises:
            ValueError: If there is no such stage.
        """
        if stage not in STAGES:
            raise ValueError(f"stage must be one of {', '.join(('fit', *STAGES))}, got {stage!r}")
        none = Results(1, 0, hint=f"No {STAGES[stage]} loop has run since the last fit began.")
        return replace(self._results.get(stage, none).summary(), stage=STAGES[stage])

    def batch_begins(self, batch: object) -> None:
        """Says that a batch is there."""
        if self._now is not None:
            self._now.batch_begins(batch)


def _setup_of(stage: str, trainer: _lightning.Trainer) -> Setup:
    known = known_of_loader(_lightning.evaluation_loaders_of(trainer, stage))
    return Setup(cores=cores_of_rank(trainer.world_size), **known)


def tells(method: Callable[[Evaluations], None]) -> Callable[..., None]:
    """Returns a hook of a callback that tells its evaluations something."""

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
    """Is the hook of a callback in which an evaluation's batch begins."""
    self._evaluations.batch_begins(batch)


def starts(stage: str) -> Callable[..., None]:
    """Returns a hook of a callback that starts an evaluation."""

    @_lightning.never_raises
    def hook(self: Any, trainer: _lightning.Trainer, model: _lightning.Module) -> None:
        self._evaluations.start(stage, trainer, model)

    return hook
