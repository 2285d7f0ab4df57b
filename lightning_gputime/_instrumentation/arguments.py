"""Checks of the arguments of `GPUPhaseHooks`. Each error names the likely fix."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_gputime._instrumentation.loop import is_engine
from lightning_gputime._instrumentation.optimizer import is_optimizer
from lightning_gputime._messages import format_value

_CORRECT_CALL = "GPUPhaseHooks(model, optimizer)"


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
