"""Copies of modules, and of what they are given, on tensors that have no memory."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gputime._work.calls import Like, Opaque

# What a copy shares with its original: it is no part of the computation, and may be large.
_SHARED = (
    torch.utils.data.Dataset,
    torch.utils.data.DataLoader,
    torch.Generator,
    torch.Stream,
    torch.Event,
    type(threading.Lock()),
    type(threading.RLock()),
)
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


class UncountableError(Exception):
    """The FLOPs of a call cannot be counted; the message says why."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns what is inside the wrappers of `torch.compile` and of DDP."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def check(module: nn.Module) -> None:
    """Checks that a module can be copied.

    Raises:
        UncountableError: If it cannot; the message says why.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise UncountableError("the module is scripted")
    for name, one in (*module.named_parameters(), *module.named_buffers()):
        if hasattr(one, "placements") or hasattr(one, "_fsdp_flattened") or hasattr(one, "ds_id"):
            raise UncountableError(f"{name} is shared with other ranks (FSDP, tensor parallelism)")
        if isinstance(one, nn.UninitializedParameter):
            raise UncountableError(f"{name} has no shape yet")


def copied(module: nn.Module, fake: Callable[[Tensor], Tensor]) -> nn.Module:
    """Returns a copy of a module, without its hooks and what is compiled.

    Args:
        module: The module.
        fake: Returns a tensor without memory that is like another one.
    """
    memo: dict[int, Any] = {}
    # From the inside, so that what is inside a wrapper is copied before it.
    for one in reversed([*module.modules()]):
        for name, value in vars(one).items():
            if name.endswith(_HOOKS) and isinstance(value, dict):
                memo[id(value)] = type(value)()
            elif isinstance(value, _SHARED) or type(value).__name__ == "ProcessGroup":
                memo[id(value)] = value
            elif isinstance(value, Tensor) and value.grad_fn is not None:
                # A weight that a hook computes, as `weight_norm` does: its gradient is work.
                memo[id(value)] = fake(value.detach()).requires_grad_()
    for one in reversed([*module.modules()]):
        inner = unwrapped(one)
        if inner is not one:
            memo[id(one)] = copy.deepcopy(inner, memo)
    new: nn.Module = copy.deepcopy(module, memo)
    for one in new.modules():
        one._compiled_call_impl = None
        if isinstance(one, nn.SyncBatchNorm):
            one.eval()  # Has no FLOPs here, and would ask the other ranks.
    return new


def fakes(value: Any) -> Any:
    """Returns arguments of a call, with a tensor for each `Like`; in a mode of fake tensors.

    Raises:
        UncountableError: If nothing like one of them can be made.
    """
    if isinstance(value, Like):
        made = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        return made.requires_grad_() if value.requires_grad else made
    if isinstance(value, Opaque):
        raise UncountableError(f"it takes a {value.kind}, which is no tensor")
    if isinstance(value, dict):
        return {key: fakes(one) for key, one in value.items()}
    if isinstance(value, list):
        return [fakes(one) for one in value]
    if isinstance(value, tuple):
        several = [fakes(one) for one in value]
        return type(value)(*several) if hasattr(value, "_fields") else tuple(several)
    return value
