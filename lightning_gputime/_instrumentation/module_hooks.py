"""Hooks on the calls of modules.

Compiled code may call these hooks, so dynamo traces this file; see `apply_compile_skips`.
"""

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
    """A hook on a module. An error in it is reported, but not raised in the training."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, *values: Any) -> None:
        # Inside compiled code, a hook that uses Python state would recompile at every call.
        if is_dynamo_compiling():
            return
        try:
            self._call(module, *values)
        except Exception as error:
            self._call = do_nothing
            messages.warning("A module is no longer timed, because a hook failed: %r", error)

    @property
    def __name__(self) -> str:
        # `torch.jit.trace` requires hooks to have unique names.
        return f"lightning_gputime_{id(self)}"

    def __reduce__(self) -> tuple[Any, ...]:
        # If a module also has hooks of other code, `without_hooks` cannot remove ours from files
        # and copies of the model. Pickle a method of the standard library that does nothing
        # instead: it loads without this package.
        return getattr, (contextlib.nullcontext, "__exit__")


def without_hooks(getstate: Callable[[Any], Any], _: list[Any]) -> Callable[[Any], Any]:
    """Wrap `nn.Module.__getstate__` to leave our hooks out of files and copies of a model.

    With our hooks in a file, `torch.load` with `weights_only` would reject it. A dictionary that
    also contains hooks of other code is not changed, because the handles of those hooks refer to
    the dictionary.
    """

    def state_without_hooks(self: nn.Module) -> Any:
        state = getstate(self)
        emptied: dict[str, Any] = {}
        for hooks_name, flags_name, hooks in hooks_of_calls(self):
            if hooks and all(isinstance(hook, _ModuleHook) for hook in hooks.values()):
                emptied |= {hooks_name: OrderedDict(), flags_name: OrderedDict()}
        return {**state, **emptied} if emptied and isinstance(state, dict) else state

    return state_without_hooks


def hook_before(
    module: nn.Module, call: Callable[..., None], *, first: bool = True, with_kwargs: bool = False
) -> Registration:
    """Return a hook that calls `call(module, args)` before each call of a module.

    With `first`, it runs before other hooks. With `with_kwargs`, it calls `call(module, args,
    kwargs)`.
    """
    # Use the method of the base class: a scripted module's method raises, although its hooks run.
    # `prepend` runs ours before the hook of FSDP2, so that the waits in that hook are timed.
    register = nn.Module.register_forward_pre_hook
    return Registration(register, module, _ModuleHook(call), prepend=first, with_kwargs=with_kwargs)


def hook_after(
    module: nn.Module, call: Callable[..., None], *, first: bool = False
) -> Registration:
    """Return a hook that calls `call(module, args, output)` after each call that does not raise.

    `always_call=True` would also report calls that raise. But dynamo guards the identity of such
    a hook, so each attach would recompile the model, up to the recompile limit.
    """
    return Registration(nn.Module.register_forward_hook, module, _ModuleHook(call), prepend=first)
