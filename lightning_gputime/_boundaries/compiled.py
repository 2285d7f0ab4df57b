"""Boundaries around code that `torch.compile` took whole: nothing is hooked inside."""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from lightning_gputime._boundaries.comm import is_sharded
from lightning_gputime._boundaries.patching import Attachments, Subscription, patch_function
from lightning_gputime._phases import OTHER, TRAINING_STEP
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._untraced import untraced


@untraced
class CompiledStep:
    """`training_step` of a LightningModule that was compiled whole: one phase of that name.

    Forward and loss cannot be told apart inside.
    """

    name = TRAINING_STEP
    # As if the model were called in every step: a backward is always taken for its own.
    calls = 1
    was_ever_called = True

    def __init__(self, recorder: Recorder, attachments: Attachments, model: nn.Module) -> None:
        self._recorder = recorder
        attachments.add(patch_function(model, self.name, self))
        recorder.tell_once(
            "%s is compiled: forward and loss are one phase of that name.", self.name
        )

    def call_begins(self, *_: Any, **__: Any) -> bool:
        """Mark the start."""
        self._recorder.mark(self.name)
        return True

    def call_ends(self, result: Any = None) -> None:
        """Mark the end."""
        self._recorder.mark(OTHER)

    def count_unseen(self, steps: int) -> None:
        """Do nothing: there is nothing to count."""

    def step_ended(self, timed: bool) -> None:
        """Do nothing: there is nothing to count."""

    def backward_begins(self, tensors: Any, *, is_last: bool = True) -> None:
        """Do nothing: what computed the tensors is not seen."""

    def clear(self) -> None:
        """Do nothing: no calls are kept."""


@untraced
class _CompiledCall:
    """Notifies of the calls of a module that was compiled in place, as hooks of it would."""

    def __init__(
        self, module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]
    ) -> None:
        self._module, self._enter, self._leave = module, enter, leave

    def call_begins(self, *args: Any, **kwargs: Any) -> bool:
        self._enter(self._module, args, kwargs)
        return True

    def call_ends(self, result: Any = None) -> None:
        self._leave(self._module, (), result)


def patch_compiled_call(
    module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]
) -> Subscription:
    """Call functions before and after each call of a module that was compiled in place.

    A hook on the module would be traced. This stays outside: one graph, `fullgraph`, too, and it is
    called each time.
    """
    return patch_function(module, "_compiled_call_impl", _CompiledCall(module, enter, leave))


def is_compiled(model: nn.Module) -> bool:
    """Tells whether a module is the result of `torch.compile`, or was compiled in place."""
    return hasattr(model, "_orig_mod") or model._compiled_call_impl is not None


def inside_compiled(parts: Mapping[str, nn.Module], model: nn.Module) -> list[str]:
    """Returns the names of the modules that run inside compiled code, where no hook fires."""
    inside = {id(module) for root, module in _in_compiled(model) if module is not root}
    return [name for name, module in parts.items() if id(module) in inside]


def hides_collectives(model: nn.Module) -> bool:
    """Tells whether compiled code of a model certainly runs collectives, which nothing shows there.

    Those of a SyncBatchNorm, and of tensor parallelism; FSDP's are outside.
    """
    dimensions = int(any(map(is_sharded, model.modules())))
    for _, module in _in_compiled(model):
        if isinstance(module, nn.SyncBatchNorm):
            return True
        for parameter in module.parameters(recurse=False):
            # A DTensor. FSDP shards one dimension of the ranks itself, and gathers it outside.
            placements = getattr(parameter, "placements", ())
            if sum(one.is_shard() for one in placements) > dimensions:
                return True
    return False


def _in_compiled(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yields the modules that are compiled, and those inside, with the one that was compiled."""
    for module in (model, *model.modules()):
        if module._compiled_call_impl is not None:
            yield from ((module, one) for one in module.modules())
        elif is_compiled(module):
            original: nn.Module = module._orig_mod  # type: ignore[assignment]  # by `is_compiled`
            yield from ((module, one) for one in original.modules())


def has_compiled() -> bool:
    """Return whether torch.compile has compiled anything in this process: its code guards hooks."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["stats"] or dynamo.counters["frames"])
