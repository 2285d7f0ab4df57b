"""The calls of backward, as marks."""

from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch

from lightning_gputime._boundaries.attach import listen
from lightning_gputime._boundaries.comm import CommBoundary
from lightning_gputime._boundaries.compiled import CompiledStep
from lightning_gputime._boundaries.forward import ForwardBoundary
from lightning_gputime._boundaries.loop import Batch
from lightning_gputime._boundaries.optimizer import OptimizerBoundary
from lightning_gputime._phases import AFTER_BACKWARD, BACKWARD, FORWARD, OPTIMIZER
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._untraced import untraced


@untraced
class BackwardBoundary:
    """`backward`: the calls of `torch.autograd.backward`.

    `Tensor.backward` looks that name up at each call, so this one place sees `loss.backward()`,
    `scaler.scale(loss).backward()`, `fabric.backward(loss)` and direct calls.
    """

    def __init__(
        self,
        recorder: Recorder,
        batch: Batch,
        model: ForwardBoundary | CompiledStep,
        optimizers: Sequence[OptimizerBoundary],
        communication: CommBoundary | None = None,
    ) -> None:
        self._recorder = recorder
        self._batch = batch
        self._model = model
        self._optimizers = optimizers
        self._communication = communication
        self._returns_to: str | None = None
        self._stand_in = listen(torch.autograd, "backward", self)

    def call_begins(self, tensors: Any = None, *_: Any, **__: Any) -> bool:
        """EndedStep the begin, but not of a backward inside a backward, nor of another timer's."""
        recorder = self._recorder
        if self._returns_to is not None or get_ident() != recorder.thread:
            return False
        if not self._batch.is_open:
            return False
        if not self._model.calls and self._is_anothers():
            return False
        self._returns_to = FORWARD if recorder.label == FORWARD else AFTER_BACKWARD
        recorder.mark(BACKWARD)
        if self._communication is not None:
            self._communication.begin(tensors)
        return True

    def call_ends(self) -> None:
        """EndedStep the end."""
        if self._communication is not None:
            self._communication.end()
        label, self._returns_to = self._returns_to or AFTER_BACKWARD, None
        for optimizer in self._optimizers:
            if optimizer.depth:
                label = OPTIMIZER  # In a closure, which belongs to the update.
        self._recorder.mark(label)

    def remove(self) -> None:
        self._stand_in.forget(self)

    def _is_anothers(self) -> bool:
        # Two timers on two models, such as a GAN's: the one is meant whose model was called.
        for other in self._stand_in.listeners:
            if isinstance(other, BackwardBoundary) and other._model.calls:
                return True
        return False
