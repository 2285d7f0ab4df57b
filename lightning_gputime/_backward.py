"""The calls of backward, as marks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_gputime._modules import CompiledStep, ModuleBoundary
from lightning_gputime._optimizers import OptimizerBoundary
from lightning_gputime._phases import AFTER_BACKWARD, BACKWARD, FORWARD, OPTIMIZER
from lightning_gputime._recorder import Recorder


class BackwardBoundary:
    """`backward`: the calls of `torch.autograd.backward`, in which every `loss.backward()` ends."""

    def __init__(
        self,
        recorder: Recorder,
        model: ModuleBoundary | CompiledStep,
        optimizers: Sequence[OptimizerBoundary],
    ) -> None:
        self.model = model
        self._recorder = recorder
        self._optimizers = optimizers
        self._returns_to: str | None = None
        if not isinstance(torch.autograd.backward, _TimedBackward):
            torch.autograd.backward = _TimedBackward(torch.autograd.backward)
        self._timed = torch.autograd.backward
        self._timed.boundaries.append(self)

    def enter(self) -> bool:
        """Returns whether `exit` must be called: not for a backward inside a backward."""
        recorder = self._recorder
        if self._returns_to is not None or not recorder.is_here():
            return False
        self._returns_to = FORWARD if recorder.label == FORWARD else AFTER_BACKWARD
        recorder.mark(BACKWARD)
        return True

    def exit(self) -> None:
        label, self._returns_to = self._returns_to or AFTER_BACKWARD, None
        if any(optimizer.is_stepping for optimizer in self._optimizers):
            label = OPTIMIZER
        self._recorder.mark(label)

    def remove(self) -> None:
        boundaries = self._timed.boundaries
        if self in boundaries:
            boundaries.remove(self)
        if not boundaries and torch.autograd.backward is self._timed:
            torch.autograd.backward = self._timed.backward


class _TimedBackward:
    """Stands in for `torch.autograd.backward` while a timer is attached.

    `Tensor.backward` looks that name up at each call, so this one place sees `loss.backward()`,
    `scaler.scale(loss).backward()`, `fabric.backward(loss)` and direct calls.
    """

    def __init__(self, backward: Callable[..., None]) -> None:
        self.backward = backward
        self.boundaries: list[BackwardBoundary] = []
        functools.update_wrapper(self, backward)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        boundaries = self.boundaries
        if len(boundaries) > 1:
            # Of several timers, those are meant whose model was called: a GAN's have one each.
            boundaries = [one for one in boundaries if one.model.was_called] or boundaries
        entered = [boundary for boundary in boundaries if boundary.enter()]
        try:
            self.backward(*args, **kwargs)
        finally:
            for boundary in entered:
                boundary.exit()
