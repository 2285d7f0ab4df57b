"""`phase` and the hooks on modules: the functions that compiled code may call.

Dynamo traces this file, and skips the others; see `apply_compile_skips`.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any, TypeVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from lightning_gputime._compat.torch_ import hooks_of_calls
from lightning_gputime._instrumentation.patching import Registration, do_nothing
from lightning_gputime._messages import messages
from lightning_gputime._phases import EXCLUDED, check_name
from lightning_gputime._record.recorder import Recorder


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
    module: nn.Module, call: Callable[..., None], *, first: bool = True
) -> Registration:
    """Return a hook that calls `call(module, args)` before each call of a module.

    With `first`, it runs before other hooks.
    """
    # Use the method of the base class: a scripted module's method raises, although its hooks run.
    # `prepend` runs ours before the hook of FSDP2, so that the waits in that hook are timed.
    register = nn.Module.register_forward_pre_hook
    return Registration(register, module, _ModuleHook(call), prepend=first)


def hook_after(module: nn.Module, call: Callable[..., None]) -> Registration:
    """Return a hook that calls `call(module, args, output)` after each call that does not raise.

    `always_call=True` would also report calls that raise. But dynamo guards the identity of such
    a hook, so each attach would recompile the model, up to the recompile limit.
    """
    return Registration(nn.Module.register_forward_hook, module, _ModuleHook(call))


# Recorders of all attached timers. Module state, so that `phase` finds them from anywhere.
_active: list[Recorder] = []


def abandon_all() -> list[Any]:
    """End all recording in a forked process.

    Return the events, which must be kept: the child process must not free events of its parent.
    """
    held = [recorder.abandon() for recorder in _active]
    _active.clear()
    return held


F = TypeVar("F", bound=Callable[..., Any])


class NamedPhase(ContextDecorator):
    """Context manager and decorator for a phase. The name `EXCLUDED` pauses the timer."""

    __slots__ = ("_name", "_recorders")

    def __init__(self, name: str, recorders: Sequence[Any]) -> None:
        # A phase inside compiled code must not cause a graph break, so skip all work there.
        if name != EXCLUDED and not torch.compiler.is_compiling():
            check_name(name)
        self._name = name
        self._recorders = recorders

    def __call__(self, func: F) -> F:
        if isgeneratorfunction(func) or iscoroutinefunction(func) or isasyncgenfunction(func):
            messages.warning(
                "A call of %s only creates a generator or coroutine. Its code runs later and is not"
                " timed as %r: write `with phase(%r)` inside it instead of @phase.",
                func.__qualname__,
                self._name,
                self._name,
            )
        return super().__call__(func)

    # Methods of `Calls`, so that a phase can listen to a patched function.

    def on_call_start(self, *_: Any, **__: Any) -> None:
        self.__enter__()

    def on_call_end(self, result: Any) -> None:
        self.__exit__()

    def __enter__(self) -> None:
        if not torch.compiler.is_compiling():
            for recorder in self._recorders:
                recorder.enter_phase(self._name)

    def __exit__(self, *_: object) -> None:
        # A generator of the user may end inside a phase when Python exits, which clears `torch`.
        if torch is not None and not torch.compiler.is_compiling():
            for recorder in self._recorders:
                recorder.leave_phase(self._name)


def phase(name: str) -> NamedPhase:
    """Return a context manager and decorator that attributes the time of its code to `name`.

    When it exits, the previous phase continues. It applies to each timer that is timing the current
    step in this thread. Without a timer, or while the code is being compiled, it does nothing, so
    it can stay in the code of a model.

    It overrides the automatic phases inside it. Standard names work, too: `with phase("loss")` in a
    model that computes its loss inside `forward` separates the two.

    Args:
        name: A name such as "augment". "forward/body" is a sub-phase: its time is also part of
            `forward`.

    Raises:
        ValueError: If the name is empty, contains "<", ">", control characters or an empty part, or
            if its first part is taken by a key: "step", "host_wait", "slow", "slow_excess",
            "lasting_change" or "local".

    Examples:
        >>> with phase("augment"):
        ...     x = augment(x)
        >>> @phase("loss")
        ... def loss_of(outputs, targets): ...
    """
    # Pass the list itself, so that a phase also acts on timers that are attached later.
    return NamedPhase(name, _active)


def activate(recorder: Recorder) -> None:
    if recorder not in _active:
        _active.append(recorder)


def deactivate(recorder: Recorder) -> None:
    if recorder in _active:
        _active.remove(recorder)
