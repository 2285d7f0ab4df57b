"""Description of a training loop, which a front end passes to its timer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import nn

from lightning_gputime._compat.names import Expected


class Search(Enum):
    """State of the search for evaluations among model calls in eval mode without grad."""

    NEVER = 0  # The trainer reports its evaluations.
    AFTER_BACKWARD = 1  # Until the first backward, the loop may be inference.
    ACTIVE = 2


class BatchState:
    """State of the current batch: always open, unless a front end reports its batches.

    Attributes:
        is_open: True while the loop works on a batch. Model calls outside of it belong to other
            code, such as a callback that samples images.
        is_fetched: True while the loader fetches the next batch. A model call without grad is then
            part of the fetch.
    """

    is_open = True
    is_fetched = False

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


@dataclass(frozen=True, slots=True)
class Loop:
    """Models, optimizers and properties of a training loop.

    Attributes:
        model: Model whose calls are `forward`. If only modules inside it are called, these calls
            are `forward`.
        optimizers: Optimizers whose updates end the phase `optimizer`.
        optimizer_wrappers: Other objects on which the loop may call `zero_grad`.
        wrapper: Module, such as DDP, that a trainer calls instead of `model` to run the training
            step.
        compiled_step: True if the model's `training_step` is compiled.
        trains_in_closure: True if the trainer runs the training step in the closure of the update.
        search: Initial state of the search for evaluations.
        wrap_backward: True to patch the function that runs the autograd engine.
        splits_loss: True to time the loss that a transformers model computes inside `forward`.
        batch: State of the current batch.
        needs_updates: True if only optimizer updates show where steps end.
        expects: Labels that the self-check looks for in the first steps.
        counts_steps: True if the trainer numbers the steps, by updates.
        accumulate_grad_batches: Micro-batches per step, used if `counts_steps` is set.
        every_step_log: Name of the trainer's option that makes it log every step; empty if it does
            not log every step.
    """

    model: nn.Module
    optimizers: Sequence[Any] = ()
    optimizer_wrappers: Sequence[Any] = ()
    wrapper: nn.Module | None = None
    compiled_step: bool = False
    trains_in_closure: bool = False
    search: Search = Search.NEVER
    wrap_backward: bool = True
    splits_loss: bool = False
    batch: BatchState = field(default_factory=BatchState)
    needs_updates: bool = False
    expects: Sequence[Expected] = ()
    counts_steps: bool = False
    accumulate_grad_batches: int = 1
    every_step_log: str = ""

    @property
    def called(self) -> nn.Module:
        """The module that the trainer calls to run a training step."""
        return self.model if self.wrapper is None else self.wrapper


def is_training(model: nn.Module) -> bool:
    """Return whether a model, or any model in a container or wrapper, is in training mode."""
    # A module with a single child may be a wrapper such as DDP. `eval()` may have been called on
    # the child alone, so check the child.
    inside = [*nn.Module.children(model)]  # A user's model may redefine `children`.
    if isinstance(model, nn.ModuleList | nn.ModuleDict) or len(inside) == 1:
        return any(map(is_training, inside))
    return model.training


def is_engine(model: nn.Module) -> bool:
    """Return whether a model is a DeepSpeed engine, which contains its optimizer."""
    # Check the class, because `__getattr__` of a model may return something for any name.
    return hasattr(type(model), "is_gradient_accumulation_boundary")
