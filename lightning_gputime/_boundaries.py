"""Where one phase ends and the next begins: all boundaries of a training step together."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from lightning_gputime._backward import BackwardBoundary
from lightning_gputime._communication import CommunicationBoundary
from lightning_gputime._exchange import is_distributed
from lightning_gputime._modules import CompiledStep, ModuleBoundary, Removable
from lightning_gputime._named import activate, deactivate
from lightning_gputime._optimizers import OptimizerBoundary, ZeroGradBoundary
from lightning_gputime._parts import PartBoundaries, hidden
from lightning_gputime._recorder import Recorder

B = TypeVar("B", bound=Removable)


class Boundaries:
    """Puts marks at the boundaries of a training step, also by `phase`, until it is removed.

    Args:
        recorder: Gets the marks.
        model: Its calls are `forward`, and those of its direct children where it is not called
            itself.
        optimizers: Their updates end `optimizer`.
        optimizer_wrappers: What the loop calls `zero_grad` on, where that is not the optimizers.
        wrapper: What the trainer calls in place of `model` to run the training step (DDP), if so.
        compiled_step: Whether the model's `training_step` is compiled as a whole.
        pause_evaluation: Whether calls of the model in eval mode without grad are no `forward`.
        parts: The modules that are sub-phases, by name.
        backward: Whether to time `torch.autograd.backward`, by wrapping it.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        optimizers: Sequence[Any],
        *,
        optimizer_wrappers: Sequence[Any] = (),
        wrapper: nn.Module | None = None,
        compiled_step: bool = False,
        pause_evaluation: bool = False,
        parts: Mapping[str, nn.Module] | None = None,
        backward: bool = True,
    ) -> None:
        self._recorder = recorder
        self._removables: list[Removable] = []
        try:
            self._model = self._keep(
                CompiledStep(recorder, model)
                if compiled_step
                else ModuleBoundary(recorder, model, wrapper, pause_evaluation, bool(optimizers))
            )
            self._parts = self._keep(PartBoundaries(recorder, parts)) if parts else None
            if parts and (names := hidden(parts, model)):
                recorder.tell_once(
                    "These modules run inside compiled code, and are not timed apart: %s",
                    ", ".join(names),
                )
            self.optimizers = [
                self._keep(OptimizerBoundary(recorder, optimizer)) for optimizer in optimizers
            ]
            for optimizer in (*optimizers, *optimizer_wrappers):
                self._keep(ZeroGradBoundary(recorder, optimizer))
            if backward:
                communication = None
                if is_distributed():
                    called = model if wrapper is None else wrapper
                    communication = self._keep(CommunicationBoundary(recorder, called))
                self._keep(BackwardBoundary(recorder, self._model, self.optimizers, communication))
            activate(recorder)
        except BaseException:
            self.remove()
            raise

    def _keep(self, boundary: B) -> B:
        self._removables.append(boundary)
        return boundary

    @property
    def updates(self) -> int:
        """How many optimizer updates were seen since the last `step_ended`."""
        return sum(optimizer.updates for optimizer in self.optimizers)

    @property
    def model_was_called(self) -> bool:
        """Whether a call of the model, or of a part of it, was seen in any step that has ended."""
        return self._model.was_ever_called

    def step_ended(self, *, timed: bool = True) -> bool:
        """Must be called at the end of each step.

        Returns:
            Whether there are optimizers, and none of them ran its update.
        """
        skipped_update = bool(self.optimizers)
        for optimizer in self.optimizers:
            if optimizer.step_ended():
                skipped_update = False
        self._model.step_ended(timed)
        if timed and self._parts is not None:
            self._parts.step_ended()
        return skipped_update

    def remove(self) -> None:
        """Takes everything off the model, the optimizers and torch. Safe to call twice."""
        deactivate(self._recorder)
        for boundary in self._removables:
            boundary.remove()
