"""Hooks of modules. Compiled code may call them: this file is traced, see `apply_compile_skips`."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from lightning_gputime._compat.torch_ import hooks_of_calls
from lightning_gputime._instrumentation.patching import Registration, do_nothing
from lightning_gputime._messages import messages


class _ModuleHook:
    """A hook of a module: no error in it reaches the call of the module."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, *values: Any) -> None:
        # Inside a compiled region a hook that touches Python state recompiles at every call.
        if is_dynamo_compiling():
            return
        try:
            self._call(module, *values)
        except Exception as error:
            self._call = do_nothing
            messages.warning("A module is no longer timed, because a hook failed: %r", error)

    @property
    def __name__(self) -> str:
        # `torch.jit.trace` reads it, and wants different names.
        return f"lightning_gputime_{id(self)}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Beside hooks of others it travels into files and copies of a model: there it is a function
        # that does nothing, and that any Python has.
        return getattr, (contextlib.nullcontext, "__exit__")


def without_hooks(getstate: Callable[[Any], Any], _: list[Any]) -> Callable[[Any], Any]:
    """Wrap `nn.Module.__getstate__`: files and copies of a model have none of our hooks.

    Of a file `torch.load` accepts no function but those that were declared safe. A dictionary with
    hooks of others stays as it is: their handles refer to it.
    """

    def state_without_hooks(self: nn.Module) -> Any:
        state = getstate(self)
        bare: dict[str, Any] = {}
        for name, kinds, hooks in hooks_of_calls(self):
            if hooks and all(isinstance(hook, _ModuleHook) for hook in hooks.values()):
                bare |= {name: OrderedDict(), kinds: OrderedDict()}
        return {**state, **bare} if bare and isinstance(state, dict) else state

    return state_without_hooks


def hook_before(
    module: nn.Module, call: Callable[..., None], *, first: bool = True, with_kwargs: bool = False
) -> Registration:
    """Call `call(module, args)`, or with its kwargs, too, before each call of a module."""
    # The method of the base class: a scripted module refuses its own, and yet calls the hook.
    # `prepend`: FSDP2 puts its own hook first, too, and what it waits for is part of the call.
    register = nn.Module.register_forward_pre_hook
    return Registration(register, module, _ModuleHook(call), prepend=first, with_kwargs=with_kwargs)


def hook_after(
    module: nn.Module, call: Callable[..., None], *, first: bool = False
) -> Registration:
    """Call `call(module, args, output)` after each call of a module that does not raise.

    A hook that is called after an error, too (`always_call`), would be compiled anew at each
    attach: torch guards its identity, and the ninth hits its limit.
    """
    return Registration(nn.Module.register_forward_hook, module, _ModuleHook(call), prepend=first)
