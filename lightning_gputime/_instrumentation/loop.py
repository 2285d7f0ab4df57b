"""What a timer is told of the loop that it times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_gputime._compat.names import Expected


@dataclass(slots=True)
class Batch:
    """Whether the loop is at work on a batch. A loop that does not say so always is.

    Outside of it calls of the model are somebody else's, such as a callback's that samples images.
    """

    is_open: bool = True
    is_fetched: bool = False
    """Whether the next one is fetched now: a call of the model without grad is a part of that."""

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


@dataclass(frozen=True, slots=True)
class Loop:
    """What a loop runs, as far as it can be seen from outside.

    The calls of `model` are `forward`, and those of the modules inside where it is not called
    itself. The updates of `optimizers` end `optimizer`.
    """

    model: nn.Module
    optimizers: Sequence[Any] = ()
    # What the loop calls `zero_grad` on, where that is not the optimizers.
    optimizer_wrappers: Sequence[Any] = ()
    # What the trainer calls in place of `model` to run the training step (DDP), if so.
    wrapper: nn.Module | None = None
    compiled_step: bool = False  # The model's `training_step` is compiled as a whole.
    # Calls in eval mode without grad are no `forward`; with None where a backward was seen.
    pause_evaluation: bool | None = False
    submodules: Mapping[str, nn.Module] = field(default_factory=dict)  # By name.
    wrap_backward: bool = True  # Stand in for what runs the autograd engine.
    splits_loss: bool = False  # Time the loss that a model of transformers computes inside.
    batch: Batch = field(default_factory=Batch)  # The loop keeps it up to date.
    needs_updates: bool = False  # Only updates of optimizers tell where steps end.
    expects: Sequence[Expected] = ()  # Checked in the first steps.
    counts_steps: bool = False  # Step numbers are the trainer's, which counts updates.
    accumulate_grad_batches: int = 1  # Where `counts_steps` is set.
    every_step_log: str = ""  # Option by which the trainer logs each step; empty if it does not.

    @property
    def called(self) -> nn.Module:
        """What the trainer calls to run a training step."""
        return self.model if self.wrapper is None else self.wrapper


def is_training(model: nn.Module) -> bool:
    """Return whether a model is in training mode; of a container or wrapper, any model inside."""
    # Methods of the base class, as everywhere: a model may have other things under their names.
    # A wrapper has one child, as DDP's, whose mode may be set past it.
    inside = [*nn.Module.children(model)]
    if isinstance(model, nn.ModuleList | nn.ModuleDict) or len(inside) == 1:
        return any(map(is_training, inside))
    return model.training


def is_engine(model: nn.Module) -> bool:
    """Return whether a model is DeepSpeed's engine, which knows its optimizer and its steps."""
    # Of the class: the `__getattr__` of a model may have an answer to any name.
    return hasattr(type(model), "is_gradient_accumulation_boundary")
