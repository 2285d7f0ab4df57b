"""Timing of the steps of an evaluation loop: `data`, `forward`, `other`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_gputime._boundaries import Boundaries
from lightning_gputime._events import Clock
from lightning_gputime._log import MetricsLogger, PhaseLog
from lightning_gputime._phases import OTHER
from lightning_gputime._recorder import BATCH, Recorder


class Evaluation:
    """One run of an evaluation loop, whose means are logged when it ends.

    Args:
        model: The model that is evaluated.
        clock: Where events and host times come from.
        lag: As that of the timer.
        prefix: First part of the logged keys, such as "phase_time/val".
        step: The number that the means are logged under.
        loggers: Where to.
        publish: Also gets the metrics.
        options: Those of `Boundaries`.
    """

    def __init__(
        self,
        model: nn.Module,
        clock: Clock,
        *,
        lag: int,
        prefix: str,
        step: int,
        loggers: Sequence[MetricsLogger],
        publish: Callable[[Mapping[str, float]], None],
        **options: Any,
    ) -> None:
        self._step = step
        # Nothing is due before the end.
        self._log = PhaseLog(prefix, sys.maxsize, loggers, publish)
        self._recorder = Recorder(clock, lag=lag, emit=self._log.add, batch=BATCH)
        self._boundaries = Boundaries(self._recorder, model, [], backward=False, **options)
        self._recorder.begin()

    def begin_batch(self) -> None:
        """Ends the fetch of a batch."""
        self._recorder.mark(OTHER)

    def end_batch(self) -> None:
        """Ends a step."""
        self._boundaries.step_ended()
        self._recorder.end_step(self._step)

    def end(self) -> None:
        """Reads the last steps, logs the means, and leaves nothing behind."""
        self._recorder.flush()
        self.abort()
        self._log.log()

    def abort(self) -> None:
        """Leaves nothing behind."""
        self._boundaries.remove()
        self._recorder.rest()
