"""The evaluations of a Trainer, one at a time."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._options import Options
from lightning_gputime._record.clock import clock_for
from lightning_gputime._results.means import MeanLog
from lightning_gputime._results.results import Results
from lightning_gputime._run.evaluation import Evaluating, Evaluation


class Evaluations(Evaluating):
    """Times the loops of `evaluate` and `predict`, apart from training.

    Args:
        options: How steps are timed.
        keep: Is called with the stage, the number and the means of each.
    """

    def __init__(
        self, options: Options, keep: Callable[[str, int, Mapping[str, float]], None]
    ) -> None:
        super().__init__(options, keep)
        self._model: nn.Module | None = None
        self._trainer: Any = None
        self._stage, self._found = "", dict[str, float]()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_model": None, "_trainer": None}

    def start(self, trainer: Any, stage: str) -> None:
        """Says that one begins, whose metrics have this prefix."""
        self.abort()
        self._stage, self._found, self._trainer = stage, {}, trainer
        self._begin(trainer.model)

    def batch_begins(self, model: nn.Module, batch: object) -> None:
        """Says that a batch is there, and what is called with it."""
        if self._now is not None:
            if model is not self._model:
                # It was wrapped or compiled meanwhile; the first fetch is lost.
                self._now.abort()
                self._begin(model)
            self._now.batch_begins(batch)

    def end(self) -> None:
        """Says that it is over."""
        super().end()
        self.abort()

    def abort(self) -> None:
        """Ends it without a wait for the device."""
        super().abort()
        self._model = self._trainer = None

    def take(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Returns the means that belong to what is logged, the first time."""
        if f"{self._stage}_runtime" not in logs:
            return {}
        found, self._found = self._found, {}
        return found

    def _begin(self, model: nn.Module) -> None:
        options, args = self._options, self._trainer.args
        number = self._trainer.state.global_step
        prefix = f"{options.prefix}/{self._stage}"

        def publish(metrics: Mapping[str, float]) -> None:
            self._keep(self._stage, number, metrics)
            # As the Trainer names its own.
            name = f"{self._stage}_{options.prefix}"
            self._found = {key.replace(prefix, name, 1): ms for key, ms in metrics.items()}

        self._model = model
        self._now = Evaluation(
            options.clock or clock_for(args.device),
            Loop(model, wrap_backward=False),
            # Nothing is due before the end.
            MeanLog(prefix, sys.maxsize, (), publish),
            Results(1, 0),
            lag=options.lag,
            number=number,
            items=options.items,
        )
