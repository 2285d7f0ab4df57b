"""A timer at work on one model: from the attaching of its hooks to their removal."""

from collections.abc import Sequence
from threading import get_ident
from typing import Any

from torch import nn

from lightning_gputime._boundaries import Boundaries
from lightning_gputime._measurement import Measurement
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
        measurement: Measurement,
        every_n_steps: int,
        probe: Probe | None,
        **options: Any,
    ) -> None:
        self.recorder = recorder
        self._measurement = measurement
        self._every_n_steps = every_n_steps
        self._probe = probe
        # Whether all steps are timed, and all alike.
        self._is_plain = every_n_steps == 1 and probe is None
        self._thread = -1
        # Of all steps; their numbers may leave some out, or repeat.
        self._index = 0
        self._timed_at: int | None = None
        # The steps before this index are not timed, nor is the next, and nothing waits to be read.
        # Known by the index alone: all ranks must pass over the same ones.
        self._quiet_until = 0
        self._is_removed = False
        # What the open step is; probed, if not here, then perhaps on other ranks.
        self._is_timed = self._is_probed = self._follows_probed = False
        self.boundaries = Boundaries(recorder, model, optimizers, **options)

    def is_here(self) -> bool:
        """Tells whether the calling thread is the one that is timed."""
        return get_ident() == self._thread

    def begin(self, number: int) -> None:
        """Starts the step `number` here, in the calling thread. What is open is dropped."""
        self._thread = get_ident()
        self.boundaries.step_ended()
        self._quiet_until = 0
        self._is_probed = False
        self._begin_next(goes_on=False, at_end=False)

    def end_step(self, number: int) -> None:
        """Ends the open step under `number`, and begins the next one."""
        measurement = self._measurement
        if self._index < self._quiet_until:
            self._index += 1
            measurement.newest = number
            self.boundaries.step_ended(timed=False)
            self.recorder.pass_over()
            if self.recorder.label is not None:
                self.recorder.rest()  # It recorded a graph.
            return
        measurement.step_ends(number)
        if self._is_plain:
            skipped_update = self.boundaries.step_ended()
            self.recorder.end_step(number, skipped_update, measurement.owes_log)
        else:
            self._end_one_of_some(number)
        if measurement.owes_comparison:
            # The exchange is no part of the step that has begun.
            self.recorder.pause()
            measurement.compare_at_log()
            self.recorder.resume()
        # A user's function may have removed the timer.
        if not self._is_plain and not self._is_removed:
            self._begin_next(goes_on=self._is_timed, at_end=True)

    def _end_one_of_some(self, number: int) -> None:
        """Ends the open step, where not all steps are timed, or not all alike."""
        if self._probe is not None:
            self._probe.end_step(usual=not (self._is_probed or self._follows_probed))
        skipped_update = self.boundaries.step_ended(timed=self._is_timed)
        if self._is_timed:
            self._timed_at = self._index
            self.recorder.end_step(number, skipped_update, self._measurement.owes_log)
        else:
            self.recorder.pass_over(self._measurement.owes_log)
        self._index += 1

    def _begin_next(self, *, goes_on: bool, at_end: bool) -> None:
        """Begins a step; if it goes on, the last mark of the one before is its first."""
        probe, index = self._probe, self._index
        # Only at the end of a step: the fetch of an epoch's first batch can take any time.
        to_fill = probe is not None and at_end and probe.is_due(index)
        is_others = probe is not None and at_end and not to_fill and probe.is_others(index)
        self._follows_probed, self._is_probed = self._is_probed, to_fill or is_others
        is_left_out = is_others or self._follows_probed
        self._is_timed = not is_left_out and (to_fill or (index + 1) % self._every_n_steps == 0)
        if not self._is_timed:
            self.recorder.rest()
            is_read = self._timed_at is None or index > self._timed_at + self.recorder.lag
            if at_end and probe is None and is_read:
                self._quiet_until = index + self._every_n_steps - 2 - index % self._every_n_steps
        elif not goes_on:
            self.recorder.begin()
        if to_fill and self._is_timed and probe is not None:
            probe.fill(self.recorder)
        if probe is not None:
            probe.leave()

    def sync(self) -> None:
        """Compares the ranks of a distributed run, in all steps that have ended."""
        if self._measurement.compares_ranks:
            self.recorder.flush()
            self._measurement.sync()

    def remove(self) -> None:
        """Takes everything off the model, the optimizers and torch. Safe to call twice."""
        self._is_removed = True
        self.boundaries.remove()
        self.recorder.rest()
        self._measurement.end(self.boundaries.model_was_called)
