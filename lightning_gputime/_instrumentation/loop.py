"""A training loop: its models, optimizers and loaders, and checks of these arguments."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_gputime._compat import Expected
from lightning_gputime._messages import format_value

_CORRECT_CALL = "GPUPhaseHooks(model, optimizer)"


class Search(Enum):
    """State of the search for evaluations among model calls in eval mode without grad."""

    NEVER = 0  # The trainer reports its evaluations.
    AFTER_BACKWARD = 1  # Until the first backward, the loop may be inference.
    ACTIVE = 2


class BatchState:
    """State of the current batch: always open, unless a front end closes it.

    Attributes:
        is_open: True while the loop works on a batch. Model calls outside of it belong to other
            code, such as a callback that samples images.
        is_fetching: True while the loader fetches the next batch. A model call without grad is then
            part of the fetch.
    """

    is_open = True
    is_fetching = False

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


@dataclass(frozen=True, slots=True)
class Loop:
    """Models, optimizers and properties of a training loop."""

    # Its calls are `forward`. If only modules inside it are called, these calls are `forward`.
    model: nn.Module
    optimizers: Sequence[Any] = ()  # Their updates end the phase `optimizer`.
    optimizer_wrappers: Sequence[Any] = ()  # Other objects on which it may call `zero_grad`.
    # Module, such as DDP, that a trainer calls instead of `model` to run the training step.
    wrapper: nn.Module | None = None
    compiled_step: bool = False  # The model's `training_step` is compiled.
    # The trainer runs the training step in the closure of the update.
    trains_in_closure: bool = False
    search: Search = Search.NEVER  # Initial state of the search for evaluations.
    wrap_backward: bool = True  # Patch the function that runs the autograd engine.
    splits_loss: bool = False  # Time the loss that a transformers model computes inside `forward`.
    batch: BatchState = field(default_factory=BatchState)
    needs_updates: bool = False  # Only optimizer updates show where steps end.
    expects: Sequence[Expected] = ()  # Labels that the self-check looks for in the first steps.
    counts_steps: bool = False  # The trainer numbers the steps, by updates.
    accumulate_grad_batches: int = 1  # Micro-batches per step, used if `counts_steps` is set.
    # Trainer's option that makes it log every step; empty if it does not log every step.
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


def is_distributed() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def is_sharded(module: nn.Module) -> bool:
    # By FSDP. Compare names, because importing it is slow.
    names = {kind.__name__ for kind in type(module).__mro__}
    return not names.isdisjoint(("FSDPModule", "FullyShardedDataParallel"))


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters that an optimizer updates; empty without torch-style groups."""
    try:
        return [item for group in optimizer.param_groups for item in group["params"]]
    except (AttributeError, KeyError, TypeError, IndexError):
        return []


def is_optimizer(value: Any) -> bool:
    """Return whether a value is a torch optimizer or a wrapper, such as DeepSpeed's."""
    if isinstance(value, Optimizer):
        return True
    attributes = getattr(value, "__dict__", {})
    inner = [attributes.get(name) for name in ("optimizer", "base")]  # `base`: schedulefree.
    has_inner = any(isinstance(optimizer, Optimizer) for optimizer in inner)
    return has_inner and hasattr(value, "zero_grad")


def attribute_of(owner: object, name: str) -> Any:
    """Return an attribute of a user's object; None if it is missing or raises."""
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def loaders_in(loader: object) -> list[object]:
    """Return a list of the loaders in a list, tuple or dict; for a single loader, a list of it."""
    inside = [*loader.values()] if isinstance(loader, dict) else loader
    # A longer list is a list of batches, not of loaders.
    return [*inside] if isinstance(inside, list | tuple) and 0 < len(inside) <= 10 else [loader]


def dataset_of(loader: object) -> object:
    """Return the dataset of a loader, without `Subset` wrappers."""
    dataset = attribute_of(loader, "dataset")
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def check_model(model: Any, optimizers: Any = None) -> nn.Module:
    if isinstance(model, Optimizer) and isinstance(optimizers, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got the optimizer {type(model).__name__}: the"
            f" arguments are swapped, write {_CORRECT_CALL}"
        )
    if not isinstance(model, nn.Module):
        is_list = isinstance(model, list | tuple)
        advice = "; for several models give torch.nn.ModuleList([...])" if is_list else ""
        raise TypeError(f"model must be a torch.nn.Module, got {_describe(model)}{advice}")
    if any(
        isinstance(module, nn.DataParallel) and len(module.device_ids) > 1
        for module in nn.Module.modules(model)
    ):
        raise ValueError(
            "model must not be or contain a torch.nn.DataParallel: its replicas run in threads on"
            " several devices, which cannot be timed. Use torch.nn.parallel.DistributedDataParallel"
        )
    return model


def check_optimizers(optimizers: Any, model: nn.Module) -> list[Any]:
    """Return the optimizers in a list without duplicates."""
    if optimizers is None:
        # A DeepSpeed engine contains its optimizer.
        inner = getattr(model, "optimizer", None) if is_engine(model) else None
        return [inner] if is_optimizer(inner) else []
    given = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    for optimizer in given:
        if not is_optimizer(optimizer):
            # If the list contains a None, show the entire list.
            raise TypeError(
                "optimizers must be None, a torch.optim.Optimizer or a list of them, got"
                f" {format_value(optimizers) if optimizer is None else _describe(optimizer)}"
            )
    return list(dict.fromkeys(given))


def _describe(value: Any) -> str:
    """Return a description of a wrong argument for an error message, with the likely fix."""
    kind = type(value).__name__
    if isinstance(value, type):
        return f"the class {value.__name__}: pass an instance, such as {value.__name__}(...)"
    # `model.parameters()` returns a generator.
    if isinstance(value, torch.Tensor) or kind == "generator":
        return "parameters: pass the optimizer that updates them"
    if isinstance(value, DataLoader | Dataset):
        return f"a {kind}: write {_CORRECT_CALL}, and pass the loader to timer.steps(loader)"
    trainers = [base for base in type(value).__mro__ if base.__name__ == "Trainer"]
    if trainers:
        is_transformers = trainers[0].__module__.startswith("transformers.")
        timer = "huggingface.TransformersPhaseTimer" if is_transformers else "GPUPhaseTimer"
        return f"a {kind}: write Trainer(callbacks=[lightning_gputime.{timer}()])"
    for name in ("optimizer", *getattr(value, "__dict__", ())):
        if isinstance(getattr(value, name, None), Optimizer):
            return f"a {kind}: pass the inner optimizer, its attribute `{name}`"
    return format_value(value)


def check_loader(loader: Any) -> None:
    usage = "steps() takes the loader: for batch in timer.steps(loader)"
    if isinstance(loader, nn.Module | Optimizer):
        role = "model" if isinstance(loader, nn.Module) else "optimizer"
        raise TypeError(
            f"{usage}; got the {role} {type(loader).__name__}, which goes to {_CORRECT_CALL}"
        )
    has_items = isinstance(loader, Iterable) or hasattr(loader, "__getitem__")
    if isinstance(loader, type) or not has_items:
        raise TypeError(f"{usage}; got {format_value(loader)}, which has no items")
