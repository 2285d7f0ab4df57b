"""The FLOPs of one call of a model, counted on a copy whose tensors have no memory."""

import copy
import inspect
import math
import random
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_modules
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.flop_counter import flop_registry

# Torch's own formulas leave the one for a CPU out, and refuse fewer heads of keys than of queries.
_ATTENTION = re.compile(
    r"_scaled_dot_product_(flash|efficient|cudnn|fused)_attention(_overrideable|_for_cpu)?"
    r"(_backward)?"
)
# Operators of other namespaces, and these, may be work if they have no formula.
_KNOWN_NAMESPACES = ("aten", "prims", "prim", "_c10d_functional", "profiler")
_WORK = re.compile(
    r"(?!.*(upsample|vector_norm|convert))"
    r".*(rnn|lstm|gru|mm(_|$)|mv$|dot$|conv|linear|attention|transformer|linalg|cdist)"
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
# A copy shares these with its original: they may be large, and compute nothing.
_DATA = (torch.utils.data.Dataset, torch.utils.data.DataLoader)
_SHARED_AMONG_RANKS = ("placements", "_fsdp_flattened", "ds_id")


class UncountableError(Exception):
    """The FLOPs of a call cannot be counted; the message says why."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a module, described without its tensors' memory."""

    module: nn.Module
    args: Any  # With a function in place of each tensor, which makes one like it.
    with_grad: bool
    trained: bytes  # Of each parameter whether it needs a gradient.
    device: torch.device
    autocast: torch.dtype | None


# FLOPs of one call: of its forward, of its backward, and of what backward computes again. A
# multiplication and an addition are two FLOPs.
CallFlops = tuple[float, float, float]


def describe_call(
    module: nn.Module, args: Any, kwargs: Any, trained: bytes, device: torch.device
) -> Call:
    kind = device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    described = tree_map(_describe, (tuple(args), dict(kwargs or {})))
    return Call(module, described, torch.is_grad_enabled(), trained, device, autocast)


def _describe(value: Any) -> Any:
    if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided:
        like = {one: getattr(value, one) for one in ("dtype", "device", "requires_grad")}
        return partial(torch.empty, value.shape, **like)
    if isinstance(value, Mapping):
        return tree_map(_describe, dict(value))
    if isinstance(value, _PLAIN):
        return value
    kind = f"{value.layout} tensor" if type(value) is Tensor else type(value).__name__
    raise UncountableError(f"it takes a {kind}, which is no plain tensor")


def count_flops(call: Call) -> tuple[CallFlops, list[str]]:
    """Count the FLOPs of a call and of its backward.

    Also return the operators for which there is no formula, and which are left out. A copy of the
    module is called on fake tensors: the module, its hooks and random numbers stay as they are.
    """
    _check(call.module)
    counter = _Counter()
    with _undisturbed(call.device):
        _run(call, counter)
    return (counter.forward, counter.backward, counter.again), sorted(counter.uncounted)


def _check(module: nn.Module) -> None:
    """Raise if a copy would compute something else, or if others would hear of it."""
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise UncountableError("the module, or a part of it, is scripted")
    for one in (*module.parameters(), *module.buffers()):
        if any(hasattr(one, attribute) for attribute in _SHARED_AMONG_RANKS):
            raise UncountableError("it is shared with other ranks (FSDP, tensor parallelism)")
    if torch.is_anomaly_enabled():
        raise UncountableError("detect_anomaly would look for NaN in what has no values")
    if any(vars(of_modules)[f"_global_{kind}_hooks"] for kind in kinds):
        raise UncountableError("there are hooks on all modules of the process")
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise UncountableError("there are hooks on saved tensors around the loop")
    for name, value in _named_outside(module):
        if isinstance(value, list | dict | deque) and any(map(torch.is_tensor, tree_leaves(value))):
            raise UncountableError(f"its forward may keep tensors outside of the model: {name}")


def _named_outside(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what the methods of a module name that is no part of it."""
    kinds = {kind for one in module.modules() for kind in type(one).__mro__}
    for kind in kinds - {nn.Module, object}:
        yield from vars(kind).items()
        for method in map(inspect.unwrap, vars(kind).values()):
            if inspect.isfunction(method):
                named = inspect.getclosurevars(method)
                yield from (*named.globals.items(), *named.nonlocals.items())


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Let random numbers stay as they are, and no mode around the loop see what runs."""
    python, of_numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), _disable_current_modes():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)


def _run(call: Call, counter: "_Counter") -> None:
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

    # Without a kernel for fakes an operator would run on real tensors, and one that takes the
    # address of a fake's memory would get none.
    mode = FakeTensorMode(allow_fallback_kernels=False)
    mode._allow_unsafe_data_ptr_access = False
    with FakeCopyMode(mode):
        model = _copied(unwrapped(call.module), mode)
    for parameter, needs_grad in zip(model.parameters(), call.trained, strict=True):
        parameter.requires_grad_(bool(needs_grad))
    on = call.autocast is not None
    with ExitStack() as stack:
        # Also where it was off: it may be on around the loop.
        stack.enter_context(torch.autocast(call.device.type, call.autocast, on, False))
        stack.enter_context(torch.set_grad_enabled(call.with_grad))
        # In this thread: the modes and the sequence numbers are those of a thread.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(mode)
        stack.enter_context(counter)
        args, kwargs = tree_map_only(partial, lambda make: make(), call.args)
        outputs = [one for one in _tensors(model(*args, **kwargs)) if one.grad_fn is not None]
        counter.is_backward = True
        grads = [torch.ones_like(one) for one in outputs]
        if outputs:
            # Not by `torch.autograd.backward`, which a timer hears of.
            run: Any = torch.autograd.Variable._execution_engine.run_backward
            run(tuple(outputs), tuple(grads), False, False, (), True, accumulate_grad=True)


def _copied(module: nn.Module, mode: Any) -> nn.Module:
    """Copy a module without its hooks and what is compiled; in a mode that makes fakes."""
    memo: dict[int, Any] = {}
    # From the inside, so that what is inside a wrapper is copied before it.
    for one in reversed([*module.modules()]):
        for name, value in vars(one).items():
            if name.endswith(_HOOKS) and isinstance(value, dict):
                memo[id(value)] = type(value)()
            elif isinstance(value, torch.Generator):
                memo[id(value)] = value.clone_state()
            elif isinstance(value, _DATA):
                memo[id(value)] = value
            else:
                # A weight that a hook computes, whose gradient is work, or an output that is kept.
                for tensor in tree_leaves(value):
                    if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                        memo[id(tensor)] = mode.from_tensor(tensor.detach()).requires_grad_()
        if unwrapped(one) is not one:
            memo[id(one)] = copy.deepcopy(unwrapped(one), memo)
    new: nn.Module = copy.deepcopy(module, memo)
    for one in new.modules():
        one._compiled_call_impl = None
        if isinstance(one, nn.SyncBatchNorm):
            one.eval()  # Has no FLOPs here, and would ask the other ranks.
    return new


def unwrapped(module: nn.Module) -> nn.Module:
    while True:
        inner = getattr(module, "_orig_mod", None)
        if isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def _tensors(value: Any) -> Iterator[Tensor]:
    for one in tree_leaves(value):
        if isinstance(one, Tensor):
            yield one
        elif hasattr(one, "__dict__"):
            yield from _tensors(vars(one))


class _Counter(TorchDispatchMode):
    """FLOPs, added up: forward, backward, and what backward computes again.

    Not torch's `FlopCounterMode`, which puts hooks on all modules of the process.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_backward = False
        self.forward = self.backward = self.again = 0.0
        self.uncounted: set[str] = set()  # Operators that may be work, and have no formula.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

        kwargs = kwargs or {}
        if getattr(func, "namespace", "") == "c10d":
            raise UncountableError(f"its forward communicates with other ranks, by {func}")
        if any(type(one) is nn.Parameter for one in tree_leaves((args, kwargs))):
            raise UncountableError(
                "its forward leads to parameters that are not those of a copy, as a lambda does"
                " that has kept self"
            )
        if func is torch.ops.aten.clone.default and not isinstance(args[0], FakeTensor):
            with unset_fake_temporarily():
                # A state of random numbers, that checkpointing keeps.
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        self._add(getattr(func, "_overloadpacket", func), args, kwargs, out)
        return out

    def _add(self, operator: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = getattr(operator, "__name__", "")
        flops, again = 0.0, 0.0
        if _ATTENTION.fullmatch(name):
            flops, again = _attention_flops(name, args)
        elif operator in flop_registry:
            flops = float(flop_registry[operator](*args, **kwargs, out_val=out))
        else:
            name = getattr(operator, "_qualified_op_name", "") or str(operator)
            namespace, _, operation = name.partition("::")
            if namespace not in _KNOWN_NAMESPACES or _WORK.match(operation):
                self.uncounted.add(name)
            return
        factor = next(one for one in args if isinstance(one, Tensor))
        # Of two complex numbers a product is four, with two additions, and a sum is two.
        flops *= 4 if factor.is_complex() else 1
        if not self.is_backward:
            self.forward += flops
            return
        # What is computed again is recorded again.
        again = flops if torch.is_grad_enabled() else again
        self.backward += flops - again
        self.again += again


def _attention_flops(name: str, tensors: Sequence[Tensor]) -> tuple[float, float]:
    """Return the FLOPs of attention as if each token saw all others, and those computed again."""
    is_backward = name.endswith("_backward")
    query, key, value = (one.shape for one in tensors[is_backward:][:3])
    # One product of queries and keys, of each width.
    of_width = 2.0 * math.prod(query[:-1]) * key[-2]
    if not is_backward:
        return of_width * (query[-1] + value[-1]), 0.0
    # The scores of the forward are computed again, as they are not kept.
    return of_width * (3 * query[-1] + 2 * value[-1]), of_width * query[-1]
