"""Other uses of marks: ranges in other profilers, and places in the code."""

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
"""Numbers of timed steps at which locating starts: the last two cover steps 50 and 100, because
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
        """True while the marks of the open step are located."""
        self.is_shown = annotate is not None
        """True while labels are shown."""
        self.to_locate = 0
        """Number of later timed steps to locate."""

    def show(self, label: str | None) -> None:
        """Show the start of a label in other profilers; with None, the end of the last label."""
        if self._annotate is not None:
            try:
                self._annotate(label)
            except Exception as error:
                self._annotate, self.is_shown = None, False
                self._warn_once("Phases are no longer shown in other profilers: %r", error)

    def locate(self, mark: Mark) -> Mark:
        """Return a mark with its place in the code."""
        if self._locate is not None:
            try:
                return (*mark[:3], self._locate())
            except Exception as error:
                self._locate, self.to_locate, self.is_located = None, 0, False
                self._warn_once("Phases are no longer located in the code: %r", error)
        return mark

    def locate_next(self, steps: int) -> None:
        """Locate the marks of the next timed steps in the code."""
        if self._locate is not None:
            self.to_locate = steps

    def stop_locating(self) -> None:
        """Do not locate the rest of the open step."""
        self.is_located = False

    def start_step(self) -> None:
        """Start a step that does not follow a timed step."""
        if self.to_locate:
            self.to_locate -= 1
            self.is_located = True

    def prepare_end(self, timed_steps: int) -> None:
        """Prepare for the mark that ends a step: locate it if the next step is located."""
        if timed_steps in FIRST_LOCATED:
            self.locate_next(LOCATED_STEPS)
        if self.to_locate:
            self.is_located = True

    def end_step(self) -> None:
        """Handle the end of a located step, after its last mark: continue if steps are left."""
        if self.to_locate:
            self.to_locate -= 1
        else:
            self.is_located = False
