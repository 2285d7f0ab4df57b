"""Lines at which the CPU waits for the GPU inside a step."""

import warnings
from typing import Any

import torch

from lightning_gputime._compat.torch_ import SYNC_MODE_WARNING, SYNC_WARNING
from lightning_gputime._culprits.places import Here, frames_here
from lightning_gputime._measurement.culprits import (
    BLOCKING,
    BLOCKING_STEPS,
    UNKNOWN_PHASE,
    CulpritSums,
)
from lightning_gputime._messages import messages
from lightning_gputime._phases import likely_phase
from lightning_gputime._record.recorder import Recorder


class BlockingCalls:
    """Record the calls that wait for the GPU in a few steps, from torch's warnings about them.

    `start` sets `torch.cuda.set_sync_debug_mode` for the process, and `stop` resets it. Nothing is
    recorded if the program has set this mode itself, or treats warnings as errors.

    Args:
        sums: Sums that the calls are added to.
        recorder: Provides the label of the current phase in a timed step.
    """

    def __init__(self, sums: CulpritSums, recorder: Recorder) -> None:
        self._sums, self._recorder = sums, recorder
        self._show: Any = None  # Original `warnings.showwarning`; None while nothing is recorded.
        self._rules: list[Any] = []  # Warning filters that were added.
        self.steps_left = 0
        """Number of remaining steps in which calls are recorded."""

    def start(self) -> None:
        """Record the calls of the next `BLOCKING_STEPS` steps, unless the program prevents it."""
        try:
            warnings_are_errors = any(action == "error" for action, *_ in warnings.filters)
            if self._show is not None or warnings_are_errors or torch.cuda.get_sync_debug_mode():
                return
            self._show, self.steps_left = warnings.showwarning, BLOCKING_STEPS
            before = [*warnings.filters]
            warnings.filterwarnings("ignore", SYNC_MODE_WARNING)
            warnings.filterwarnings("always", SYNC_WARNING)
            self._rules = [rule for rule in warnings.filters if rule not in before]
            warnings.showwarning = self._record_call
            torch.cuda.set_sync_debug_mode("warn")
        except Exception as error:
            messages.warning("Calls that wait for the GPU cannot be located: %r", error)
            self.stop()

    def end_step(self) -> None:
        """End a step in which calls are recorded."""
        self.steps_left -= 1
        if self.steps_left <= 0:
            self.stop()

    def stop(self) -> None:
        """Reset torch's mode and Python's warnings. Safe to call twice."""
        self.steps_left = 0
        if self._show is None:
            return
        show, self._show = self._show, None
        if warnings.showwarning == self._record_call:  # Else other code has replaced it since.
            warnings.showwarning = show
        for rule in self._rules:
            if rule in warnings.filters:
                warnings.filters.remove(rule)  # type: ignore[attr-defined]  # It is a list.
        self._rules.clear()
        try:
            torch.cuda.set_sync_debug_mode("default")
        except Exception as error:  # CUDA calls raise after a device error.
            messages.warning("torch.cuda.set_sync_debug_mode could not be reset: %r", error)

    def _record_call(self, message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
        """Replacement for `warnings.showwarning`: record torch's warnings, and show the others."""
        if not str(message).startswith(SYNC_WARNING):
            if self._show is not None:
                self._show(message, category, *args, **kwargs)
            return
        label = self._recorder.label
        phase = UNKNOWN_PHASE if label is None else likely_phase(label)
        self._sums.add(phase, "", 0, source=Here(frames_here()), kind=BLOCKING)
