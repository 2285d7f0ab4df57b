"""Copies of modules, and of what they are given, on tensors that have no memory."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_gputime._work.calls import Like, Opaque

# What a copy shares with its original: it is no part of the computation, and may be large.
_SHARED = (
    torch.utils.data.Dataset,
    torch.utils.data.DataLoader,
    torch.Stream,
    torch.Event,
    type(threading.Lock()),
    type(threading.RLock()),
)
_LARGE = 2**20  # Bytes: an array of more is data.
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


class UncountableError(Exception):
    """The FLOPs of a call cannot be counted; the message says why."""


class OnlyCopies(TorchDispatchMode):
    """Lets nothing leave the copy.

    Nothing is computed with a tensor of the module itself, whose gradient would be set: a copy
    leads to one by what it cannot follow, as a lambda that has kept `self`. And no other rank is
    asked, which may not be counting.

    Args:
        module: The module that was copied.
    """

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch._subclasses.fake_tensor import FakeTensor

        self._fake = FakeTensor
        self._own = {id(one) for one in (*module.parameters(), *module.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") == "c10d":
            raise UncountableError(f"its forward communicates with other ranks, by {func}")
        for one in tree_leaves((args, kwargs)):
            if not isinstance(one, Tensor) or isinstance(one, self._fake):
                continue
            if id(one) in self._own or one.requires_grad:
                raise UncountableError(
                    "its forward leads to parameters that are not those of a copy, as a lambda"
                    " does that has kept self"
                )
        return func(*args, **(kwargs or {}))


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
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise UncountableError("the module, or a part of it, is scripted")
    for name, one in (*module.named_parameters(), *module.named_buffers()):
        if hasattr(one, "placements") or hasattr(one, "_fsdp_flattened") or hasattr(one, "ds_id"):
            raise UncountableError(f"{name} is shared with other ranks (FSDP, tensor parallelism)")
        if isinstance(one, nn.UninitializedParameter):
            raise UncountableError(f"{name} has no shape yet")


def copied(module: nn.Module, trained: bytes, fake: Callable[[Tensor], Tensor]) -> nn.Module:
    """Returns a copy of a module, without its hooks and what is compiled.

    Args:
        module: The module.
        trained: Which of its parameters need a gradient in the copy.
        fake: Returns a tensor without memory that is like another one.
    """
    memo: dict[int, Any] = {}
    # From the inside, so that what is inside a wrapper is copied before it.
    for one in reversed([*module.modules()]):
        for name, value in vars(one).items():
            if name.endswith(_HOOKS) and isinstance(value, dict):
                memo[id(value)] = type(value)()
            elif isinstance(value, torch.Generator):
                memo[id(value)] = value.clone_state()  # Else one that is seeded in it would be.
            elif (
                isinstance(value, _SHARED)
                or type(value).__name__ == "ProcessGroup"
                or (isinstance(value, np.ndarray) and value.nbytes > _LARGE)
            ):
                memo[id(value)] = value
            elif isinstance(value, Tensor | list | tuple | dict):
                # A weight that a hook computes, as `weight_norm` does: its gradient is work. In a
                # list, an output that the module has kept.
                for tensor in tree_leaves(value):
                    if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                        memo[id(tensor)] = fake(tensor.detach()).requires_grad_()
    for one in reversed([*module.modules()]):
        inner = unwrapped(one)
        if inner is not one:
            memo[id(one)] = copy.deepcopy(inner, memo)
    new: nn.Module = copy.deepcopy(module, memo)
    for parameter, needs_grad in zip(new.parameters(), trained, strict=True):
        if parameter.requires_grad != bool(needs_grad):
            parameter.requires_grad_(bool(needs_grad))
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
        raise UncountableError(f"it takes a {value.kind}, which is no plain tensor")
    if isinstance(value, dict):
        return {key: fakes(one) for key, one in value.items()}
    if isinstance(value, list):
        return [fakes(one) for one in value]
    if isinstance(value, tuple):
        several = [fakes(one) for one in value]
        return type(value)(*several) if hasattr(value, "_fields") else tuple(several)
    return value
