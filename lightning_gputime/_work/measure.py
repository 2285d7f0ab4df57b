"""Finds what work is held against: the peak in the precision of the training."""

from collections.abc import Callable

import torch
from torch import nn

from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._messages import messages
from lightning_gputime._record.clock import device_of
from lightning_gputime._results.work import Yardstick
from lightning_gputime._work.flops import Count
from lightning_gputime._work.matmul import matmul_tflops
from lightning_gputime._work.peaks import device_name, peak_tflops
from lightning_gputime._work.precision import Precision, dtype_of, looks_like, precision_of


class Measure:
    """Fills a yardstick in, when it is known what the training computes in.

    Args:
        yardstick: What is filled in.
        loop: What runs.
        times_matmul: Whether to measure a matmul.
    """

    def __init__(self, yardstick: Yardstick, loop: Loop, *, times_matmul: bool) -> None:
        self.device = device_of(loop.model)
        self._yardstick = yardstick
        self._times_matmul = times_matmul
        self._computed_in: dict[tuple[torch.dtype, bool], float] = {}
        if loop.compiled_step and (dtype := dtype_of(loop.model)).itemsize <= 2:
            self._computed_in[dtype, False] = 1.0  # Else autocast may be in the step, unseen.

    @property
    def is_known(self) -> bool:
        """Whether a call was seen or counted."""
        return bool(self._computed_in)

    def see(self, model: nn.Module) -> None:
        """Takes a call of a model that begins here and now, where none is counted."""
        self._computed_in.update(looks_like(model, self.device))

    def add(self, count: Count) -> None:
        """Takes what was counted of a call."""
        for of, flops in count.computed_in.items():
            self._computed_in[of] = self._computed_in.get(of, 0.0) + flops

    def take(self, give_note: Callable[[str], None]) -> None:
        """Looks the peak up, and measures it, unless that is done. No step may be timed.

        Args:
            give_note: Is called with why there is no peak.
        """
        precision = precision_of(self.device, self._computed_in)
        yardstick = self._yardstick
        if precision.name == yardstick.precision and precision.name:
            return
        yardstick.precision, yardstick.peak_tflops = precision.name, None
        if not precision.name:
            give_note("it is not seen in what is computed: there is no MFU")
        elif precision.dtype is None:
            yardstick.matmul_tflops = None
            give_note(f"{precision.name} have no peak in common: there is no MFU")
        else:
            name = device_name(self.device)
            yardstick.peak_tflops = peak_tflops(name, precision.name)
            if yardstick.peak_tflops is None:
                give_note(f"no {precision.name} peak is known of {name}: there is no MFU")
            self._time_matmul(precision)

    def _time_matmul(self, precision: Precision) -> None:
        if not self._times_matmul or precision.dtype is None:
            return
        self._times_matmul = False
        try:
            self._yardstick.matmul_tflops = matmul_tflops(self.device, precision.dtype)
        except Exception as error:
            messages.warning("No matmul could be measured: %r", error)
