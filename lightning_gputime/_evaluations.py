"""The evaluation loops of a trainer, one at a time."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning_gputime import _lightning
from lightning_gputime._options import Options
from lightning_gputime._run.evaluation import Evaluation


class Evaluations:
    """Times the validation, test and prediction loops of a trainer, apart from its training.

    Args:
        options: How steps are timed.
        keep: Is called with the stage, the number and the means of each.
    """

    def __init__(
        self, options: Options, keep: Callable[[str, int, Mapping[str, float]], None]
    ) -> None:
        self._options, self._keep = options, keep
        self._now: Evaluation | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_now": None}  # Events cannot be pickled.

    @property
    def is_running(self) -> bool:
        """Whether one runs."""
        return self._now is not None

    def start(self, stage: str, trainer: _lightning.Trainer, model: _lightning.Module) -> None:
        """Says that one starts, whose means are logged under its name."""
        prefix = f"{self._options.prefix}/{stage}"
        number = _lightning.step_number(trainer)
        keep = partial(self._keep, stage, number)
        self._now = Evaluation(
            _lightning.clock_of(trainer, self._options.clock),
            _lightning.evaluation_loop_of(trainer, model),
            # Nothing is due before the end.
            _lightning.mean_log_of(trainer, prefix, sys.maxsize, keep),
            lag=self._options.lag,
            number=number,
            # A number is of the batches of training.
            items=self._options.items if callable(self._options.items) else None,
        )

    def batch_begins(self, batch: object) -> None:
        """Says that a batch is there."""
        if self._now is not None:
            self._now.batch_begins(batch)

    def batch_ends(self) -> None:
        """Says that the step of a batch is over."""
        if self._now is not None:
            self._now.batch_ends()

    def end(self) -> None:
        """Says that it is over."""
        if self._now is not None:
            self._now.finish()
            self._now = None

    def abort(self) -> None:
        """Ends it without a wait for the device."""
        if self._now is not None:
            self._now.abort()
            self._now = None


class EvaluationHooks:
    """The hooks of a callback in which its trainer evaluates, but for validation inside a fit."""

    _evaluations: Evaluations

    @_lightning.never_raises
    def on_test_start(self, *args: Any) -> None:
        self._evaluations.start("test", *args)

    @_lightning.never_raises
    def on_predict_start(self, *args: Any) -> None:
        self._evaluations.start("predict", *args)

    @_lightning.never_raises
    def on_validation_batch_start(
        self,
        trainer: _lightning.Trainer,
        pl_module: _lightning.Module,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._evaluations.batch_begins(batch)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    @_lightning.never_raises
    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self._evaluations.batch_ends()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    @_lightning.never_raises
    def on_test_end(self, *_: Any, **__: Any) -> None:
        self._evaluations.end()

    on_predict_end = on_test_end
