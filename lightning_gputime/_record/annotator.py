"""Show the phases in other profilers."""

from collections.abc import Callable
from contextlib import ExitStack

import torch

from lightning_gputime._messages import WarnOnce
from lightning_gputime._phases import LIKELY


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


class Annotations:
    """Show the labels of marks in other profilers.

    Args:
        annotate: Called with each new label, and with None at the end.
        warn_once: Reports an error of this function, which is then not called again.
    """

    def __init__(self, annotate: Callable[[str | None], None] | None, warn_once: WarnOnce) -> None:
        self._annotate, self._warn_once = annotate, warn_once
        self.are_shown = annotate is not None
        """True while labels are shown in other profilers."""

    def show(self, label: str | None) -> None:
        """Show the start of a label in other profilers; with None, the end of the last label."""
        if self._annotate is not None:
            try:
                self._annotate(label)
            except Exception as error:
                self._annotate, self.are_shown = None, False
                self._warn_once("Phases are no longer shown in other profilers: %r", error)
