"""Phases as ranges in other profilers."""

import torch

from lightning_gputime._compile_skip import skip_compile
from lightning_gputime._phases import LIKELY


@skip_compile
class Annotator:
    """Put each phase into torch.profiler's trace, and as an NVTX range into that of Nsight."""

    def __init__(self) -> None:
        self._range: torch.autograd.profiler.record_function | None = None
        self._nvtx: int | None = None
        self._has_nvtx = torch.cuda.is_available()

    def __call__(self, label: str | None) -> None:
        """End the range of the last label, and begin one for this label unless it is None."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self._nvtx is not None:
            torch.cuda.nvtx.range_end(self._nvtx)
            self._nvtx = None
        if label is not None:
            name = f"phase/{LIKELY.get(label, label)}"
            self._range = torch.autograd.profiler.record_function(name)
            self._range.__enter__()
            if self._has_nvtx:
                self._nvtx = torch.cuda.nvtx.range_start(name)
