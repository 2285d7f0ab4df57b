"""Boundaries around compiled code. Hooks inside it would not run."""

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from lightning_gputime._compat.torch_ import COMPILED_CALL, compiled_call, compiled_module
from lightning_gputime._instrumentation.comm import is_tensor_parallel
from lightning_gputime._instrumentation.module_hooks import hook_after, hook_before
from lightning_gputime._instrumentation.patching import Calls, Registration, Subscription


def around_calls(
    module: nn.Module,
    enter: Callable[..., None],
    leave: Callable[..., None],
    *,
    inside: bool = False,
) -> Sequence[Subscription | Registration]:
    """Return attachments that call `enter` before and `leave` after each call of a module.

    Args:
        module: The module.
        enter: Called with the module, its arguments, and its keyword arguments if `inside` is set
            or the module is compiled.
        leave: Called with the module, its arguments (none if the module is compiled) and its
            output.
        inside: True to run closer to `forward` than the other hooks of the module.
    """
    if compiled_call(module) is None:
        before = hook_before(module, enter, first=not inside, with_kwargs=inside)
        return before, hook_after(module, leave, first=inside)
    # `module.compile()` would trace a hook into the graph. Patch the compiled call instead: the
    # patch stays outside the graph, works with `fullgraph=True`, and runs at each call.
    calls = Calls(
        lambda *args, **kwargs: enter(module, args, kwargs),
        lambda result: leave(module, (), result),
    )
    return (Subscription(module, COMPILED_CALL, calls),)


def hides_collectives(model: nn.Module) -> bool:
    """Return whether compiled code of a model runs collectives, which cannot be timed there.

    This finds SyncBatchNorm and tensor parallelism. FSDP runs its collectives outside.
    """
    inside = [module for _, module in _in_compiled(model)]
    if any(isinstance(module, nn.SyncBatchNorm) for module in inside):
        return True
    parameters = (
        parameter for module in inside for parameter in nn.Module.parameters(module, recurse=False)
    )
    return is_tensor_parallel(parameters, model)


def _in_compiled(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield pairs: a compiled module, and the module itself or any module inside it."""
    for module in (model, *nn.Module.modules(model)):
        if compiled_call(module) is not None:
            yield from ((module, inner) for inner in nn.Module.modules(module))
        elif (original := compiled_module(module)) is not None:
            yield from ((module, inner) for inner in nn.Module.modules(original))
