"""The FLOPs of a call, counted on a copy of the module whose tensors have no memory."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch.autograd import graph
from torch.utils import flop_counter

from lightning_gputime._work.calls import Call
from lightning_gputime._work.copies import (
    OnlyCopies,
    UncountableError,
    check,
    copied,
    fakes,
    unwrapped,
)
from lightning_gputime._work.undisturbed import undisturbed

aten: Any = torch.ops.aten

# Torch's own formulas leave the one for a CPU out, and refuse fewer heads of keys than of queries.
_ATTENTION = [
    f"_scaled_dot_product_{kind}"
    for kind in (
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
        "flash_attention_for_cpu",
    )
]
# They compute the scores of the forward once more, in place of keeping them.
_RECOMPUTING = {f"{name}_backward" for name in _ATTENTION}
_KNOWN_NAMESPACES = ("aten", "prims", "prim", "higher_order", "_c10d_functional", "profiler")
# Of torch's own operators, those that are work if they have no formula.
_WORK = re.compile(r"rnn|lstm|gru|mm(_|$)|mv$|dot$|conv|linear|attention|transformer|linalg|cdist")
_NO_WORK = re.compile(r"upsample|vector_norm|convert")


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
        computed_in: How many FLOPs have factors of which type, and are convolutions.
    """

    whole: Flops
    parts: Mapping[str, Flops]
    uncounted: tuple[str, ...]
    computed_in: Mapping[tuple[torch.dtype, bool], float]


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
        with undisturbed():
            return _counted(call, parts)
    except UncountableError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise UncountableError(f"{type(error).__name__}: {lines[0][:200]}") from error


class _Counter(flop_counter.FlopCounterMode):
    """Adds up by forward, backward, and what backward computes again.

    Args:
        by_module: Whether for each module, too.
    """

    def __init__(self, *, by_module: bool) -> None:
        super().__init__(display=False, custom_mapping=_formulas())
        if not by_module:
            # Torch's refuses gradients of a batch that are computed in the forward.
            self.mod_tracker: Any = _NoModules()
        self.is_backward = False
        self.found: dict[str, Flops] = {}
        self.uncounted: set[str] = set()
        self.computed_in: Counter[tuple[torch.dtype, bool]] = Counter()

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        formula: Any = self.flop_registry.get(func_packet)
        if formula is None:
            name = getattr(func_packet, "_qualified_op_name", "")
            namespace, _, operator = name.partition("::")
            is_work = _WORK.search(operator) and not _NO_WORK.search(operator)
            if name and (namespace not in _KNOWN_NAMESPACES or is_work):
                self.uncounted.add(name)
            return out
        flops = formula(*args, **kwargs, out_val=out)
        factor = next(one for one in args if isinstance(one, Tensor))
        # Of two complex numbers a product is four, with two additions, and a sum is two.
        flops *= 4 if factor.is_complex() else 1
        self.computed_in[factor.dtype, "conv" in func_packet.__name__] += flops
        # What is computed again is recorded again.
        again = flops if self.is_backward and torch.is_grad_enabled() else 0
        if func_packet.__name__ in _RECOMPUTING:
            query, key = args[1].shape, args[2].shape
            again = _product(query, key, query[-1])
        for name in {*self.mod_tracker.parents}:
            of = self.found.setdefault(name, Flops())
            of.recomputed += again
            if self.is_backward:
                of.backward += flops - again
            else:
                of.forward += flops
        return out


class _NoModules(nullcontext[None]):
    """Stands for torch's own, which tells in which modules one is."""

    parents = frozenset(("Global",))


def _formulas() -> dict[Any, Any]:
    """Returns the formulas of attention, by its operators: as if each token saw all others."""

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> float:
        return _product(query, key, query[-1] + value[-1])

    def backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> float:
        return _product(query, key, 3 * query[-1] + 2 * value[-1])

    names: dict[str, Any] = dict.fromkeys(_ATTENTION, forward)
    names |= dict.fromkeys(_RECOMPUTING, backward)
    return {getattr(aten, name): one for name, one in names.items() if hasattr(aten, name)}


def _product(query: Sequence[int], key: Sequence[int], width: int) -> float:
    """Returns FLOPs of products between queries and keys, of all widths together."""
    return 2.0 * math.prod(query[:-1]) * key[-2] * width


def _counted(call: Call, parts: Mapping[str, nn.Module]) -> Count:
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

    module = unwrapped(call.module)
    check(module)
    paths = {id(one): path for path, one in module.named_modules()}
    # Without a kernel for fakes an operator would run on real tensors, and one that takes the
    # address of a fake's memory would get none.
    mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
    mode._allow_unsafe_data_ptr_access = False
    with FakeCopyMode(mode):
        copy = copied(module, call.trained, mode.from_tensor)
    counter = _Counter(by_module=bool(parts))
    with ExitStack() as stack:
        # Also where it was off: it may be on around the loop.
        kind, dtype = call.autocast
        on = dtype is not None
        stack.enter_context(torch.autocast(kind, dtype, enabled=on, cache_enabled=False))
        stack.enter_context(torch.set_grad_enabled(call.with_grad))
        stack.enter_context(mode)
        args, kwargs = fakes(call.args), fakes(call.kwargs)
        stack.enter_context(OnlyCopies(module))
        stack.enter_context(counter)
        outputs = [one for one in _tensors(copy(*args, **kwargs)) if one.grad_fn is not None]
        if outputs:
            # Of something after them, as of a loss: a hook does not see where backward begins.
            losses = [one.clone() for one in outputs]
            counter.is_backward = True
            _backward(losses)
    root = type(copy).__name__
    names = {name: paths.get(id(unwrapped(one))) for name, one in parts.items()}
    return Count(
        counter.found.get("Global", Flops()),
        {
            name: counter.found.get(f"{root}.{path}" if path else root, Flops())
            for name, path in names.items()
            if path is not None
        },
        tuple(sorted(counter.uncounted)),
        counter.computed_in,
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
