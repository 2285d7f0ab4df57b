"""Callables that stand in for others while somebody wants to know of their calls."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

from lightning_gputime._untraced import leave_untraced, untraced


class Listener(Protocol):
    """Who wants to know."""

    def before(self, *args: Any, **kwargs: Any) -> bool:
        """Is told of a call. Returns whether `after` shall be told of its end."""

    def after(self) -> None:
        """Is told that the call returned or raised."""


class StandIn:
    """What `owner.name` is replaced by, until the last listener leaves.

    All listeners share one stand-in, so they may leave in any order. If somebody else has replaced
    the stand-in meanwhile, it stays inside theirs and does nothing.
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

    def leave(self, listener: Listener) -> None:
        """Forgets a listener. Safe to call twice."""
        if listener in self.listeners:
            self.listeners.remove(listener)
        if self.listeners or vars(self._owner).get(self._name) is not self._call:
            return
        if self._was_own:
            setattr(self._owner, self._name, self._original)
        else:
            delattr(self._owner, self._name)


def listen(owner: Any, name: str, listener: Listener) -> StandIn:
    """Lets a listener know of the calls of `owner.name`, until it leaves what is returned."""
    stand_in = getattr(vars(owner).get(name), "_stand_in", None) or StandIn(owner, name)
    stand_in.listeners.append(listener)
    return stand_in


def _announced(call: Callable[..., Any], listeners: list[Listener]) -> Callable[..., Any]:
    # Without the attributes of a compiled function: torch would take this for that function.
    @functools.wraps(call, updated=())
    def announced(*args: Any, **kwargs: Any) -> Any:
        told = []
        # Over a copy, because a listener may leave when it is told.
        for listener in [*listeners]:
            if listener.before(*args, **kwargs):
                told.append(listener)
        try:
            return call(*args, **kwargs)
        finally:
            for listener in told:
                listener.after()

    # What is announced may still be compiled.
    return untraced(announced)
