"""The FLOPs of a call, counted on a copy of the module whose tensors have no memory."""

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch.autograd import graph
from torch.utils import checkpoint, flop_counter

from lightning_gputime._work.calls import Call, Like, Opaque

aten: Any = torch.ops.aten

# These compute the scores of the forward once more, in place of keeping them.
_RECOMPUTING = (
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)

# What a copy shares with its original: it is no part of the computation, and may be large.
_SHARED = (
    torch.utils.data.Dataset,
    torch.utils.data.DataLoader,
    torch.Generator,
    torch.Stream,
    torch.Event,
)
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
_KNOWN_NAMESPACES = ("aten", "prims", "prim", "higher_order", "_c10d_functional", "profiler")


class UncountableError(Exception):
    """The FLOPs of a call cannot be counted; the message says why."""


@dataclass(slots=True)
class Flops:
    """FLOPs of a call; a multiplication and an addition are two.

    Attributes:
        forward: Of the forward.
        backward: Of its backward, without what is computed a second time.
        recomputed: Of what backward computes a second time: by activation checkpointing, and the
            scores of an attention that does not keep them.
    """

    forward: float = 0.0
    backward: float = 0.0
    recomputed: float = 0.0

    def scaled(self, factor: float) -> "Flops":
        """Returns those of a call that is larger by a factor."""
        return Flops(*(factor * one for one in (self.forward, self.backward, self.recomputed)))


@dataclass(frozen=True, slots=True)
class Count:
    """What was counted of a call.

    Attributes:
        whole: All of it.
        parts: The modules that are timed apart, by name.
        uncounted: Operators that have no formula, and may be work.
    """

    whole: Flops
    parts: Mapping[str, Flops]
    uncounted: tuple[str, ...]


def count(call: Call, parts: Mapping[str, nn.Module]) -> Count:
    """Counts the FLOPs of a call and of its backward, without a computation.

    The module is copied onto fake tensors, and the copy is called: the module, its buffers and all
    random numbers stay as they are. Hooks of the module are not called.

    Args:
        call: The call.
        parts: The modules that are timed apart, by name.

    Raises:
        UncountableError: If it cannot be.
    """
    try:
        with _undisturbed():
            return _counted(call, parts)
    except UncountableError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise UncountableError(f"{type(error).__name__}: {lines[0][:200]}") from error


class _Counter(flop_counter.FlopCounterMode):
    """Adds up by forward, backward, and what backward computes again."""

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_formulas())
        self.is_backward = False
        self.found: dict[str, Flops] = {}
        self.uncounted: set[str] = set()

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        formula: Any = self.flop_registry.get(func_packet)
        if formula is None:
            name = getattr(func_packet, "_qualified_op_name", "")
            if name and name.partition("::")[0] not in _KNOWN_NAMESPACES:
                self.uncounted.add(name)
            return out
        flops = formula(*args, **kwargs, out_val=out)
        # What is computed again is recorded again.
        again = flops if self.is_backward and torch.is_grad_enabled() else 0
        if func_packet.__name__ in _RECOMPUTING:
            again = _scores(*args[1:3])
        for name in {*self.mod_tracker.parents}:
            of = self.found.setdefault(name, Flops())
            of.recomputed += again
            if self.is_backward:
                of.backward += flops - again
            else:
                of.forward += flops
        return out


def _formulas() -> dict[Any, Any]:
    """Returns the formulas that torch leaves out: those of the attention on a CPU."""
    flash = "_scaled_dot_product_flash_attention_for_cpu"

    def forward(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
        return int(flop_counter.sdpa_flop_count(*shapes[:3]))

    def backward(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
        return int(flop_counter.sdpa_backward_flop_count(*shapes[:4]))

    return {getattr(aten, flash): forward, getattr(aten, f"{flash}_backward"): backward}


def _scores(query: Tensor, key: Tensor) -> float:
    *batch, length, width = query.shape
    return 2.0 * torch.Size(batch).numel() * length * width * key.shape[-2]


def _counted(call: Call, parts: Mapping[str, nn.Module]) -> Count:
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

    module = unwrapped(call.module)
    _check(module)
    paths = {id(one): path for path, one in module.named_modules()}
    # Without a kernel for fakes an operator would run on real tensors, and one that takes the
    # address of a fake's memory would get none.
    mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
    mode._allow_unsafe_data_ptr_access = False
    with FakeCopyMode(mode):
        copied = _copy(module)
    counter = _Counter()
    with ExitStack() as stack:
        if call.autocast is not None:
            kind, dtype = call.autocast
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
        stack.enter_context(torch.set_grad_enabled(call.with_grad))
        stack.enter_context(mode)
        args, kwargs = _fakes(call.args), _fakes(call.kwargs)
        stack.enter_context(counter)
        outputs = [one for one in _tensors(copied(*args, **kwargs)) if one.grad_fn is not None]
        if outputs:
            counter.is_backward = True
            _backward(outputs)
    root = type(copied).__name__
    names = {name: paths.get(id(unwrapped(one))) for name, one in parts.items()}
    return Count(
        counter.found.get("Global", Flops()),
        {
            name: counter.found.get(f"{root}.{path}" if path else root, Flops())
            for name, path in names.items()
            if path is not None
        },
        tuple(sorted(counter.uncounted)),
    )


def _backward(outputs: list[Tensor]) -> None:
    # Not by `torch.autograd.backward`, which a timer hears of.
    grads = tuple(torch.ones_like(one) for one in outputs)
    with torch.no_grad():
        run: Callable[..., Any] = graph._engine_run_backward
        run(
            tuple(outputs),
            grads,
            False,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    assert _current_graph_task_id() == -1


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns what is inside the wrappers of `torch.compile` and of DDP."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def _check(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise UncountableError("the module is scripted")
    for name, one in (*module.named_parameters(), *module.named_buffers()):
        if hasattr(one, "placements") or hasattr(one, "_fsdp_flattened") or hasattr(one, "ds_id"):
            raise UncountableError(f"{name} is shared with other ranks (FSDP, tensor parallelism)")
        if isinstance(one, nn.UninitializedParameter):
            raise UncountableError(f"{name} has no shape yet")


def _copy(module: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    # From the inside, so that what is inside a wrapper is copied before it.
    for one in reversed([*module.modules()]):
        for name, value in vars(one).items():
            if name.endswith(_HOOKS) and isinstance(value, dict):
                memo[id(value)] = type(value)()
            elif isinstance(value, _SHARED) or type(value).__name__ == "ProcessGroup":
                memo[id(value)] = value
    for one in reversed([*module.modules()]):
        inner = unwrapped(one)
        if inner is not one:
            memo[id(one)] = copy.deepcopy(inner, memo)
    copied = copy.deepcopy(module, memo)
    for one in copied.modules():
        one._compiled_call_impl = None
        if isinstance(one, nn.SyncBatchNorm):
            one.eval()  # Has no FLOPs here, and would ask the other ranks.
    return copied


def _fakes(value: Any) -> Any:
    if isinstance(value, Like):
        made = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        return made.requires_grad_() if value.requires_grad else made
    if isinstance(value, Opaque):
        raise UncountableError(f"it takes a {value.kind}, which is no tensor")
    if isinstance(value, dict):
        return {key: _fakes(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_fakes(one) for one in value]
    if isinstance(value, tuple):
        several = [_fakes(one) for one in value]
        return type(value)(*several) if hasattr(value, "_fields") else tuple(several)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Lets random numbers stay as they are, and warnings be silent."""
    python, of_numpy = random.getstate(), np.random.get_state()
    # On a device checkpointing would set the state of random numbers by a fake one.
    states = checkpoint.get_device_states
    checkpoint.get_device_states = lambda *_: ([], [])
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        checkpoint.get_device_states = states
        random.setstate(python)
        np.random.set_state(of_numpy)
