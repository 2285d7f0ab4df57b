"""The evaluation loops of a trainer, one at a time."""

import sys
from typing import Any

from lightning_gputime import _lightning
from lightning_gputime._options import Options
from lightning_gputime._run.evaluation import Evaluation


class Evaluations:
    """Times the validation, test and prediction loops of a trainer, apart from its training.

    Args:
        options: How steps are timed.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._now: Evaluation | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_now": None}  # Events cannot be pickled.

    @property
    def is_running(self) -> bool:
        """Whether one runs."""
        return self._now is not None

    def start(self, stage: str, trainer: _lightning.Trainer, model: _lightning.Module) -> None:
        """Says that one starts, whose means are logged under its name."""
        self._now = Evaluation(
            _lightning.clock_of(trainer, self._options.clock),
            _lightning.evaluation_loop_of(trainer, model),
            # Nothing is due before the end.
            _lightning.mean_log_of(trainer, f"{self._options.prefix}/{stage}", sys.maxsize),
            lag=self._options.lag,
            number=_lightning.step_number(trainer),
        )

    def batch_begins(self) -> None:
        """Says that a batch is there."""
        if self._now is not None:
            self._now.batch_begins()

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
