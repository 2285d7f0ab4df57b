"""What a user gives a timer of a plain loop, checked: a mistake is answered with the likely fix."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_gputime._messages import messages, shown

_RIGHT = "GPUPhaseHooks(model, optimizer)"


def check_model(model: Any, optimizers: Any = None) -> nn.Module:
    """Returns what a user gave as the model.

    Args:
        model: What was given.
        optimizers: What was given as the optimizers, which may be the model.

    Raises:
        TypeError: If it is none.
        ValueError: If it runs in several threads.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {_mistake(model, optimizers)}")
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise ValueError(
            "model must not be a torch.nn.DataParallel, which runs its replicas in threads on"
            " several devices: use torch.nn.parallel.DistributedDataParallel"
        )
    return model


def _mistake(model: Any, optimizers: Any) -> str:
    kind = type(model).__name__
    if isinstance(model, Optimizer) or isinstance(optimizers, nn.Module):
        swapped = isinstance(model, Optimizer) and isinstance(optimizers, nn.Module)
        if swapped:
            return f"the optimizer {kind}: the arguments are swapped, write {_RIGHT}"
        loads = isinstance(model, DataLoader | Dataset)
        loader = "; the loader goes to timer.steps(loader)" if loads else ""
        return f"{shown(model)}: the model comes first, write {_RIGHT}{loader}"
    if isinstance(model, type):
        return f"the class {model.__name__}: give an instance, such as {model.__name__}(...)"
    if isinstance(model, DataLoader | Dataset):
        return f"a {kind}: write {_RIGHT}, and give the loader to timer.steps(loader)"
    several = "; for several models give torch.nn.ModuleList([...])"
    bases = type(model).__mro__
    if any(one.__name__ == "Trainer" for one in bases):
        of_transformers = any(one.__module__.startswith("transformers.") for one in bases)
        package = "lightning_gputime.huggingface"
        timer = f"{package}.PhaseTimeCallback" if of_transformers else "GPUPhaseTimer"
        return f"a {kind}: write Trainer(callbacks=[{timer}()])"
    return f"{shown(model)}{several}"


def check_optimizers(optimizers: Any) -> list[Any]:
    """Returns the optimizers that a user gave: none, one or several.

    Raises:
        TypeError: If one of them is none.
    """
    if optimizers is None:
        return []
    several = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    for optimizer in several:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "optimizers must be None, a torch.optim.Optimizer or a list of them, got"
                f" {_no_optimizer(optimizer, optimizers)}"
            )
    return list(dict.fromkeys(several))


def _no_optimizer(one: Any, given: Any) -> str:
    if isinstance(one, type):
        return f"the class {one.__name__}: give an instance, such as {one.__name__}(...)"
    if isinstance(one, torch.Tensor):
        return "parameters: give the optimizer that updates them"
    if _is_generator(one):
        return "a generator: give a list of optimizers, or, if it has parameters, their optimizer"
    for name in ("optimizer", "optim"):
        if isinstance(getattr(one, name, None), Optimizer):
            return f"a {type(one).__name__}: give the optimizer inside, its attribute `{name}`"
    if isinstance(one, DataLoader | Dataset):
        return f"a {type(one).__name__}: give the loader to timer.steps(loader)"
    if isinstance(one, nn.Module):
        return f"a {type(one).__name__}: for several models give torch.nn.ModuleList([...])"
    if isinstance(given, Mapping):
        return "a mapping: give the list of its values"
    if one is given or shown(given) == repr(given):
        return shown(given)
    return f"{shown(one)} among {len(given)}"


def _is_generator(one: Any) -> bool:
    # What `model.parameters()` and `named_parameters()` return.
    return type(one).__name__ == "generator"


def check_loader(loader: Any) -> None:
    """Checks what a loop over `steps` shall run over.

    Raises:
        TypeError: If it is no loader.
    """
    right = "steps() takes the loader: for batch in timer.steps(loader)"
    if isinstance(loader, nn.Module | Optimizer):
        what = "model" if isinstance(loader, nn.Module) else "optimizer"
        raise TypeError(f"{right}; got the {what} {type(loader).__name__}, which goes to {_RIGHT}")
    if isinstance(loader, type) or not (
        isinstance(loader, Iterable) or hasattr(loader, "__getitem__")
    ):
        number = f" (or over range({loader}))" if isinstance(loader, int) else ""
        raise TypeError(f"{right}{number}; got {shown(loader)}, which has no items")


def tell_what_is_odd(model: nn.Module, optimizers: Iterable[Any]) -> None:
    """Warns of optimizers that update nothing of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        updated = {id(one) for group in optimizer.param_groups for one in group["params"]}
        if own and updated and not own & updated:
            messages.warning(
                "None of the parameters that %s updates is one of the model's: was it made for"
                " another model, or before its parameters were replaced? Its updates are timed"
                " all the same.",
                type(optimizer).__name__,
            )


def tell_devices(model: nn.Module, timed: torch.device) -> None:
    """Says which device is timed, where the model is on several."""
    sizes: dict[torch.device, int] = {}
    for parameter in model.parameters():
        if not isinstance(parameter, nn.UninitializedParameter):
            size = sizes.get(parameter.device, 0)
            sizes[parameter.device] = size + parameter.numel()
    if len(sizes) > 1:
        where = ", ".join(f"{device} ({size:,} parameters)" for device, size in sizes.items())
        messages.warning(
            "The model is on several devices: %s. Its phases are timed on %s; for another one give"
            " device=.",
            where,
            timed,
        )
