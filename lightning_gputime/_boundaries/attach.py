"""What is put on other people's objects, and comes off again: module hooks, and stand-ins."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from lightning_gputime._boundaries.uncopied import Uncopied
from lightning_gputime._messages import messages
from lightning_gputime._untraced import leave_untraced, untraced


class Removable(Protocol):
    """What can be taken off again."""

    def remove(self) -> None:
        """Takes it off. Safe to call twice."""


class _ModuleHook:
    """A module hook of ours: no error in it reaches the call of the module."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, *values: Any) -> None:
        # Inside a compiled region a hook that touches Python state recompiles at every call.
        if torch.compiler.is_compiling():
            return
        try:
            self._call(module, *values)
        except Exception as error:
            self._call = _nothing
            messages.warning("A module is no longer timed, because a hook failed: %r", error)

    def __reduce__(self) -> tuple[Any, ...]:
        # `Uncopied` keeps it out of copies; who copies it all the same gets one that does nothing.
        return _ModuleHook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


def hook_before(
    module: nn.Module, call: Callable[..., None], *, first: bool = True, with_kwargs: bool = False
) -> Removable:
    """Lets `call(module, args)` be called before each call of a module, or with its kwargs, too."""
    hook = _ModuleHook(call)
    return Uncopied(module.register_forward_pre_hook(hook, prepend=first, with_kwargs=with_kwargs))


def hook_after(module: nn.Module, call: Callable[..., None], *, first: bool = False) -> Removable:
    """Lets `call(module, args, output)` be called after each call of a module, if it raises too."""
    return Uncopied(
        module.register_forward_hook(_ModuleHook(call), prepend=first, always_call=True)
    )


class Listener(Protocol):
    """Who wants to know of the calls of something."""

    def call_begins(self, *args: Any, **kwargs: Any) -> bool:
        """Is told of a call. Returns whether `call_ends` shall be told of its end."""

    def call_ends(self) -> None:
        """Is told that the call returned or raised."""


class StandIn:
    """What `owner.name` is replaced by, until the last listener is removed.

    All listeners share one stand-in, so they may be removed in any order. If somebody else has
    replaced the stand-in meanwhile, it stays inside theirs and does nothing.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.listeners: list[Listener] = []
        self._owner, self._name = owner, name
        self._was_own = name in vars(owner)
        self._original = getattr(owner, name)
        self._call = _announced(self._original, self.listeners)
        self._call._stand_in = self  # type: ignore[attr-defined]  # found by `listen`
        setattr(owner, name, self._call)
        # Compiled code enters ours here, or by hooks of an optimizer, which has a stand-in, too.
        leave_untraced()

    def forget(self, listener: Listener) -> None:
        """Removes a listener. Safe to call twice."""
        if listener in self.listeners:
            self.listeners.remove(listener)
        if self.listeners or vars(self._owner).get(self._name) is not self._call:
            return
        if self._was_own:
            setattr(self._owner, self._name, self._original)
        else:
            delattr(self._owner, self._name)


def listen(owner: Any, name: str, listener: Listener) -> StandIn:
    """Lets a listener know of the calls of `owner.name`, until the stand-in forgets it."""
    stand_in = getattr(vars(owner).get(name), "_stand_in", None) or StandIn(owner, name)
    stand_in.listeners.append(listener)
    return stand_in


def _announced(call: Callable[..., Any], listeners: list[Listener]) -> Callable[..., Any]:
    # Without the attributes of a compiled function: torch would take this for that function.
    @functools.wraps(call, updated=())
    def announced(*args: Any, **kwargs: Any) -> Any:
        told = []
        # Over a copy, because a listener may be removed when it is told.
        for listener in [*listeners]:
            if listener.call_begins(*args, **kwargs):
                told.append(listener)
        try:
            return call(*args, **kwargs)
        finally:
            for listener in told:
                listener.call_ends()

    # What is announced may still be compiled.
    return untraced(announced)
