"""A timer at work on one model: from the attaching of its hooks to their removal."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_gputime._boundaries import Boundaries
from lightning_gputime._measurement import Measurement
from lightning_gputime._named import activate, deactivate
from lightning_gputime._recorder import Recorder


class Session:
    """What both front ends hold while they are attached.

    Args:
        recorder: Gets the marks.
        model: The model that is timed.
        optimizers: The optimizers whose updates are timed.
        measurement: Gets the steps of training.
        options: Those of `Boundaries`.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        optimizers: Sequence[Any],
        measurement: Measurement | None = None,
        **options: Any,
    ) -> None:
        self.recorder = recorder
        self._measurement = measurement
        self.boundaries = Boundaries(recorder, model, optimizers, **options)
        activate(recorder)

    def begin(self) -> None:
        """Starts a step here, in the calling thread. What the open one held is dropped."""
        self.boundaries.step_ended()
        self.recorder.begin()

    def end_step(self, number: int) -> None:
        """Ends the open step under `number`."""
        boundaries = self.boundaries
        skipped_update = bool(boundaries.optimizers) and not boundaries.updates
        self.recorder.end_step(number, skipped_update=skipped_update)
        boundaries.step_ended()
        if self._measurement is not None:
            self._measurement.step_ended(number)

    def sync(self) -> None:
        """Compares the ranks of a distributed run, in all steps that have ended."""
        if self._measurement is not None and self._measurement.compares_ranks:
            self.recorder.flush()
            self._measurement.sync()

    def remove(self) -> None:
        """Takes everything off the model, the optimizers and torch. Safe to call twice."""
        deactivate(self.recorder)
        self.boundaries.remove()
        self.recorder.stop()
        if self._measurement is not None:
            self._measurement.end()
