"""Arguments of a timer of a plain loop: an error names the likely fix."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_gputime._instrumentation.loop import is_engine
from lightning_gputime._instrumentation.optimizer import is_optimizer
from lightning_gputime._messages import format_value

_RIGHT = "GPUPhaseHooks(model, optimizer)"


def check_model(model: Any, optimizers: Any = None) -> nn.Module:
    if isinstance(model, Optimizer) and isinstance(optimizers, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got the optimizer {type(model).__name__}: the"
            f" arguments are swapped, write {_RIGHT}"
        )
    if not isinstance(model, nn.Module):
        several = "; for several models give torch.nn.ModuleList([...])"
        more = several if isinstance(model, list | tuple) else ""
        raise TypeError(f"model must be a torch.nn.Module, got {_given(model)}{more}")
    parallel = [
        module for module in nn.Module.modules(model) if isinstance(module, nn.DataParallel)
    ]
    if any(len(module.device_ids) > 1 for module in parallel):
        raise ValueError(
            "model must not be a torch.nn.DataParallel, which runs its replicas in threads on"
            " several devices: use torch.nn.parallel.DistributedDataParallel"
        )
    return model


def check_optimizers(optimizers: Any, model: nn.Module) -> list[Any]:
    if optimizers is None:
        own = getattr(model, "optimizer", None) if is_engine(model) else None
        return [own] if is_optimizer(own) else []
    several = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    for optimizer in several:
        if not is_optimizer(optimizer):
            raise TypeError(
                "optimizers must be None, a torch.optim.Optimizer or a list of them, got"
                f" {format_value(optimizers) if optimizer is None else _given(optimizer)}"
            )
    return list(dict.fromkeys(several))


def _given(one: Any) -> str:
    kind = type(one).__name__
    if isinstance(one, type):
        return f"the class {one.__name__}: give an instance, such as {one.__name__}(...)"
    # A generator is what `model.parameters()` returns.
    if isinstance(one, torch.Tensor) or kind == "generator":
        return "parameters: give the optimizer that updates them"
    if isinstance(one, DataLoader | Dataset):
        return f"a {kind}: write {_RIGHT}, and give the loader to timer.steps(loader)"
    trainers = [base for base in type(one).__mro__ if base.__name__ == "Trainer"]
    if trainers:
        of_transformers = trainers[0].__module__.startswith("transformers.")
        timer = "huggingface.TransformersPhaseTimer" if of_transformers else "GPUPhaseTimer"
        return f"a {kind}: write Trainer(callbacks=[lightning_gputime.{timer}()])"
    for name in ("optimizer", *getattr(one, "__dict__", ())):
        if isinstance(getattr(one, name, None), Optimizer):
            return f"a {kind}: give the optimizer inside, its attribute `{name}`"
    return format_value(one)


def check_loader(loader: Any) -> None:
    right = "steps() takes the loader: for batch in timer.steps(loader)"
    if isinstance(loader, nn.Module | Optimizer):
        what = "model" if isinstance(loader, nn.Module) else "optimizer"
        raise TypeError(f"{right}; got the {what} {type(loader).__name__}, which goes to {_RIGHT}")
    has_items = isinstance(loader, Iterable) or hasattr(loader, "__getitem__")
    if isinstance(loader, type) or not has_items:
        raise TypeError(f"{right}; got {format_value(loader)}, which has no items")
