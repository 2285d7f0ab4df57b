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


def starts(stage: str) -> Callable[..., None]:
    """Returns a hook of a callback that starts the timing of an evaluation."""

    @_lightning.never_raises
    def hook(self: Any, *args: Any) -> None:
        self._evaluations.start(stage, *args)

    return hook
