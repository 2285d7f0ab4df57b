"""Boundaries around code that `torch.compile` took whole: nothing is hooked inside."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from lightning_gputime._compat.torch_ import COMPILED_CALL, compiled_call, compiled_module
from lightning_gputime._instrumentation.comm import is_cut
from lightning_gputime._instrumentation.module_hooks import hook_after, hook_before
from lightning_gputime._instrumentation.patching import Calls, Registration, Subscription


def around_calls(
    module: nn.Module,
    enter: Callable[..., None],
    leave: Callable[..., None],
    *,
    inside: bool = False,
) -> Sequence[Subscription | Registration]:
    """Call functions before and after each call of a module; `inside` its other hooks.

    On a module that was compiled in place a hook would be traced. A patch of what it calls stays
    outside: one graph, `fullgraph`, too, and it is called each time.
    """
    if compiled_call(module) is None:
        before = hook_before(module, enter, first=not inside, with_kwargs=inside)
        return before, hook_after(module, leave, first=inside)
    calls = Calls(
        lambda *args, **kwargs: enter(module, args, kwargs),
        lambda result: leave(module, (), result),
    )
    return (Subscription(module, COMPILED_CALL, calls),)


def inside_compiled(parts: Mapping[str, nn.Module], model: nn.Module) -> list[str]:
    """Return the names of the modules that run inside compiled code, where no hook fires."""
    inside = {id(module) for root, module in _in_compiled(model) if module is not root}
    return [name for name, module in parts.items() if id(module) in inside]


def hides_collectives(model: nn.Module) -> bool:
    """Return whether compiled code of a model certainly runs collectives: nothing shows them.

    Those of a SyncBatchNorm, and of tensor parallelism; FSDP's are outside.
    """
    inside = [module for _, module in _in_compiled(model)]
    if any(isinstance(module, nn.SyncBatchNorm) for module in inside):
        return True
    return is_cut(
        (one for module in inside for one in nn.Module.parameters(module, recurse=False)), model
    )


def _in_compiled(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield the modules that are compiled, and those inside, with the one that was compiled."""
    for module in (model, *nn.Module.modules(model)):
        if compiled_call(module) is not None:
            yield from ((module, one) for one in nn.Module.modules(module))
        elif (original := compiled_module(module)) is not None:
            yield from ((module, one) for one in nn.Module.modules(original))
