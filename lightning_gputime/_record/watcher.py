"""Other uses of marks: show them in other profilers, and locate them in the code.

To locate a mark means to store the place in the user's code that was running at the mark.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from lightning_gputime._messages import WarnOnce
from lightning_gputime._phases import LIKELY
from lightning_gputime._record.clock import Mark

LOCATED_STEPS = 5
"""Number of consecutive steps whose marks are located. Locating a mark takes about 3 us."""
FIRST_LOCATED = (3, 48, 98)
"""Locating starts after these numbers of timed steps. The last two cover steps 50 and 100, because
loggers, checks and checkpoints often run every 50 steps."""


class Annotator:
    """Show each phase in traces of torch.profiler, and as an NVTX range in traces of Nsight."""

    def __init__(self) -> None:
        self._ranges = ExitStack()
        self._has_nvtx = torch.cuda.is_available()

    def __call__(self, label: str | None) -> None:
        """End the range of the last label, and start a range for this label unless it is None."""
        self._ranges.close()
        if label is not None:
            name = f"phase/{LIKELY.get(label, label)}"
            self._ranges.enter_context(torch.autograd.profiler.record_function(name))
            if self._has_nvtx:
                # Unlike `nvtx.range`, ranges with a number may overlap with the user's ranges.
                number = torch.cuda.nvtx.range_start(name)
                self._ranges.callback(torch.cuda.nvtx.range_end, number)


class MarkWatcher:
    """Show marks in other profilers, and locate the marks of some steps in the code.

    Args:
        annotate: Called with each new label, and with None at the end.
        locate: Called at each located mark; returns the place in the user's code.
        warn_once: Reports an error of one of these functions, which is then not called again.
    """

    def __init__(
        self,
        annotate: Callable[[str | None], None] | None,
        locate: Callable[[], Any] | None,
        warn_once: WarnOnce,
    ) -> None:
        self._annotate, self._locate, self._warn_once = annotate, locate, warn_once
        self.is_located = False
        """True while new marks are located."""
        self.is_shown = annotate is not None
        """True while labels are shown in other profilers."""
        self.to_locate = 0
        """Number of timed steps to locate after the open step."""

    def show(self, label: str | None) -> None:
        """Show the start of a label in other profilers; with None, the end of the last label."""
        if self._annotate is not None:
            try:
                self._annotate(label)
            except Exception as error:
                self._annotate, self.is_shown = None, False
                self._warn_once("Phases are no longer shown in other profilers: %r", error)

    def locate(self, mark: Mark) -> Mark:
        """Return a mark with its place, and True if gradients are enabled there.

        After an error, return the mark itself.
        """
        if self._locate is not None:
            try:
                return (*mark[:3], (self._locate(), torch.is_grad_enabled()))
            except Exception as error:
                self._locate, self.to_locate, self.is_located = None, 0, False
                self._warn_once("Phases are no longer located in the code: %r", error)
        return mark

    def locate_next(self, steps: int) -> None:
        """Locate the marks of the next timed steps in the code."""
        if self._locate is not None:
            self.to_locate = steps

    def stop_locating(self) -> None:
        """Do not locate further marks of the open step."""
        self.is_located = False

    def start_step(self) -> None:
        """Start a step that does not follow a timed step."""
        if self.to_locate:
            self.to_locate -= 1
            self.is_located = True

    def prepare_end(self, timed_steps: int) -> None:
        """Locate the mark that ends this step and starts the next, if the next step is located.

        Args:
            timed_steps: Number of timed steps, including this step.
        """
        if timed_steps in FIRST_LOCATED:
            self.locate_next(LOCATED_STEPS)
        if self.to_locate:
            self.is_located = True

    def end_step(self) -> None:
        """End a located step, after its last mark. Continue if the next step is located, too."""
        if self.to_locate:
            self.to_locate -= 1
        else:
            self.is_located = False
