"""What a timer is told of the loop that it times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(slots=True)
class Batch:
    """Whether the loop is at work on a batch. A loop that does not say so always is.

    Outside of it calls of the model are somebody else's, such as a callback's that samples images.
    """

    is_open: bool = True
    is_fetched: bool = False
    """Whether the next one is fetched now: a call of the model without grad is a part of that."""


@dataclass(frozen=True, slots=True)
class Loop:
    """What a loop runs, as far as it can be seen from outside.

    Attributes:
        model: Its calls are `forward`, and those of the modules inside where it is not called
            itself.
        optimizers: Their updates end `optimizer`.
        optimizer_wrappers: What the loop calls `zero_grad` on, where that is not the optimizers.
        wrapper: What the trainer calls in place of `model` to run the training step (DDP), if so.
        compiled_step: Whether the model's `training_step` is compiled as a whole.
        pause_evaluation: Whether calls of the model in eval mode without grad are no `forward`;
            with None where a backward was seen.
        submodules: The modules that are sub-phases, by name.
        wrap_backward: Whether to stand in for what runs the autograd engine.
        batch: Whether a batch is at work, which the loop keeps up to date.
        waits_before_batch: Whether the host waits for the device before each batch.
        needs_updates: Whether only the updates of optimizers tell where steps end.
    """

    model: nn.Module
    optimizers: Sequence[Any] = ()
    optimizer_wrappers: Sequence[Any] = ()
    wrapper: nn.Module | None = None
    compiled_step: bool = False
    pause_evaluation: bool | None = False
    submodules: Mapping[str, nn.Module] = field(default_factory=dict)
    wrap_backward: bool = True
    batch: Batch = field(default_factory=Batch)
    waits_before_batch: bool = False
    needs_updates: bool = False

    @property
    def called(self) -> nn.Module:
        """What the trainer calls to run a training step."""
        return self.model if self.wrapper is None else self.wrapper


def is_training(model: nn.Module) -> bool:
    """Return whether a model is in training mode; of a container or wrapper, any model inside."""
    # A wrapper has one child, as DDP's, whose mode may be set past it.
    inside = [*model.children()]
    if isinstance(model, nn.ModuleList | nn.ModuleDict) or len(inside) == 1:
        return any(map(is_training, inside))
    return model.training


def is_engine(model: nn.Module) -> bool:
    """Return whether a model is DeepSpeed's engine, which knows its optimizer and its steps."""
    return hasattr(model, "is_gradient_accumulation_boundary")
