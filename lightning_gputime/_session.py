"""A timer at work on one model: from the attaching of its hooks to their removal."""

from collections.abc import Sequence
from threading import get_ident
from typing import Any

from torch import nn

from lightning_gputime._boundaries import Boundaries
from lightning_gputime._measurement import Measurement
from lightning_gputime._named import activate, deactivate
from lightning_gputime._probe import Probe
from lightning_gputime._recorder import Recorder


class Session:
    """What both front ends hold while they are attached.

    Args:
        recorder: Gets the marks.
        model: The model that is timed.
        optimizers: The optimizers whose updates are timed.
        measurement: Gets the steps of training.
        every_n_steps: One step in so many is timed, the last of them.
        probe: Fills the device's queue before some steps.
        options: Those of `Boundaries`.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        optimizers: Sequence[Any],
        measurement: Measurement | None = None,
        every_n_steps: int = 1,
        probe: Probe | None = None,
        **options: Any,
    ) -> None:
        self.recorder = recorder
        self._measurement = measurement
        self._every_n_steps = every_n_steps
        self._probe = probe
        self._thread = -1
        self.boundaries = Boundaries(recorder, model, optimizers, **options)
        activate(recorder)

    def is_here(self) -> bool:
        """Tells whether the calling thread is the one that is timed."""
        return get_ident() == self._thread

    def begin(self, number: int) -> None:
        """Starts the step `number` here, in the calling thread. What is open is dropped."""
        self._thread = get_ident()
        self.boundaries.step_ended()
        if self._probe is not None:
            self._probe.interrupt()
        self._begin(number)

    def end_step(self, number: int) -> None:
        """Ends the open step under `number`, and begins the next one."""
        measurement = self._measurement
        is_due = measurement is not None and measurement.is_due(number)
        if self._every_n_steps == 1 and self._probe is None:
            skipped_update = self.boundaries.step_ended() == 0
            self.recorder.end_step(number, skipped_update, is_due)
        else:
            self._end_one_of_some(number, is_due)
        if is_due and measurement is not None and measurement.compares_at_logs:
            # The exchange is no part of the step that has begun.
            self.recorder.pause()
            measurement.compare_at_log()
            self.recorder.resume()

    def _end_one_of_some(self, number: int, is_due: bool) -> None:
        """As `end_step`, where not all steps are timed, or not all alike."""
        probe = self._probe
        if probe is not None:
            probe.enter(number)
        timed = self._is_timed(number)
        skipped_update = self.boundaries.step_ended(timed=timed) == 0
        if timed:
            probed = probe is not None and probe.number == number
            self.recorder.end_step(number, skipped_update, is_due, probed)
        elif is_due or number % self._every_n_steps == 0:
            self.recorder.drain()  # A step ago one was timed.
        self._begin(number + 1, goes_on=timed)
        if probe is not None:
            probe.leave()

    def _begin(self, number: int, *, goes_on: bool = False) -> None:
        if not self._is_timed(number):
            self.recorder.rest()
            return
        if not goes_on:
            self.recorder.begin()
        if self._probe is not None and self._probe.is_due(number):
            self._probe.fill(self.recorder, number)

    def _is_timed(self, number: int) -> bool:
        probe = self._probe
        if probe is not None and probe.leaves_out(number):
            return False
        is_probed = probe is not None and (number == probe.number or probe.is_due(number))
        return is_probed or (number + 1) % self._every_n_steps == 0

    def sync(self) -> None:
        """Compares the ranks of a distributed run, in all steps that have ended."""
        if self._measurement is not None and self._measurement.compares_ranks:
            self.recorder.flush()
            self._measurement.sync()

    def remove(self) -> None:
        """Takes everything off the model, the optimizers and torch. Safe to call twice."""
        deactivate(self.recorder)
        self.boundaries.remove()
        self.recorder.rest()
        if self._measurement is not None:
            self._measurement.end()
