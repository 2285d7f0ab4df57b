"""What is put on other people's objects, and comes off again: module hooks, and stand-ins."""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

from torch import nn
from torch.compiler import is_compiling

from lightning_gputime._boundaries.uncopied import Uncopied
from lightning_gputime._messages import messages
from lightning_gputime._untraced import leave_untraced, untraced

# What every call of a module passes through.
_CALL = nn.Module._wrapped_call_impl.__code__


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
        if is_compiling():
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
    # The method of the base class: a scripted module refuses its own, and yet calls the hook.
    return Uncopied(
        # `prepend`: FSDP2 puts its own hook first, too, and what it waits for is part of the call.
        nn.Module.register_forward_pre_hook(
            module, _ModuleHook(call), prepend=first, with_kwargs=with_kwargs
        )
    )


def hook_after(module: nn.Module, call: Callable[..., None], *, first: bool = False) -> Removable:
    """Lets `call(module, args, output)` be called after each call of a module that does not raise.

    A hook that is called after an error, too (`always_call`), would be compiled anew at each
    attach: torch guards its identity, and the ninth hits its limit.
    """
    return Uncopied(nn.Module.register_forward_hook(module, _ModuleHook(call), prepend=first))


def callers_among(ids: Sequence[int], module: nn.Module) -> list[int]:
    """Returns those of some modules, by their ids, that are running while `module` is called."""
    # By the frames of the stack: after a call that raised, some ids are of modules that run no
    # more.
    own = _frame_of(sys._getframe(), id(module))
    if own is None:
        return list(ids)  # It is not called as others are.
    running = {id(one) for one in _modules_called(own.f_back)}
    return [one for one in ids if one in running]


class Listener(Protocol):
    """Who wants to know of the calls of something."""

    def call_begins(self, *args: Any, **kwargs: Any) -> bool:
        """Is told of a call. Returns whether `call_ends` shall be told of its end."""

    def call_ends(self, result: Any = None) -> None:
        """Is told that the call returned a result, or raised."""


Announce = Callable[[Callable[..., Any], list[Any]], Any]


class StandIn:
    """What `owner.name` is replaced by, until the last listener is removed.

    All listeners share one stand-in, so they may be removed in any order. If somebody else has
    replaced the stand-in meanwhile, it stays inside theirs and does nothing; where they put it
    back, its next call takes it off.
    """

    def __init__(self, owner: Any, name: str, announce: Announce) -> None:
        self.listeners: list[Any] = []
        self._owner, self._name = owner, name
        # A method of the class must not stay behind on the object when ours is taken off.
        self._was_own = name in vars(owner)
        # As it is kept: what `getattr` gives of a class in C++ would bind no more.
        self._original = vars(owner)[name] if self._was_own else None
        self.call: Any = untraced(announce(getattr(owner, name), self.listeners))
        self.call._stand_in = self  # found by `listen`
        setattr(owner, name, self.call)
        # Compiled code enters ours here, or by hooks of an optimizer, which has a stand-in, too.
        leave_untraced()

    def forget(self, listener: object) -> None:
        """Removes a listener. Safe to call twice."""
        if listener in self.listeners:
            self.listeners.remove(listener)
        self.come_off()

    @property
    def is_on(self) -> bool:
        """Whether it stands in, and nobody else in its place."""
        return vars(self._owner).get(self._name) is self.call

    def stay_on(self) -> None:
        """Puts itself back, if the original was: by who had replaced it before, and knew of none.

        What else stands in its place may call it.
        """
        if self.listeners and vars(self._owner).get(self._name) is self._original:
            setattr(self._owner, self._name, self.call)

    def come_off(self) -> None:
        """Puts the original back, if nobody listens, and nobody else has replaced the stand-in."""
        if self.listeners or not self.is_on:
            return
        if self._was_own:
            setattr(self._owner, self._name, self._original)
        else:
            delattr(self._owner, self._name)


def _frame_of(frame: FrameType | None, key: int) -> FrameType | None:
    """Returns the frame in which the module of an id is called, the innermost one."""
    while frame is not None:
        if frame.f_code is _CALL and id(frame.f_locals["self"]) == key:
            return frame
        frame = frame.f_back
    return None


def _modules_called(frame: FrameType | None) -> Iterator[nn.Module]:
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


def _announced(call: Callable[..., Any], listeners: list[Listener]) -> Callable[..., Any]:
    # Without the attributes of a compiled function: torch would take this for that function.
    @functools.wraps(call, updated=())
    def announced(*args: Any, **kwargs: Any) -> Any:
        told = []
        if not listeners:
            announced._stand_in.come_off()  # type: ignore[attr-defined]  # set by `StandIn`
        # Over a copy, because a listener may be removed when it is told.
        for listener in [*listeners]:
            try:
                if listener.call_begins(*args, **kwargs):
                    told.append(listener)
            except Exception as error:
                _lose(listener, listeners, error)
        if not told:
            return call(*args, **kwargs)
        result = None
        try:
            result = call(*args, **kwargs)
            return result
        finally:
            for listener in told:
                try:
                    listener.call_ends(result)
                except Exception as error:
                    _lose(listener, listeners, error)

    # What is announced may still be compiled.
    return announced


class _Method:
    """What is called in place of a method of an object, of which a copy has its own."""

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, call)
        self._owner, self._name, self._call = owner, name, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    @property
    def _stand_in(self) -> Any:
        return getattr(self._call, "_stand_in", None)

    @_stand_in.setter
    def _stand_in(self, stand_in: StandIn) -> None:
        self._call._stand_in = stand_in  # type: ignore[attr-defined]  # where `announced` has it

    def __reduce__(self) -> tuple[Any, ...]:
        # The copy of the object is there by then, and has nothing but what its class has.
        return getattr, (self._owner, self._name)


def _lose(listener: Any, listeners: list[Any], error: Exception) -> None:
    """Tells a listener no more, because it raised: its error must not reach the training."""
    if listener in listeners:
        listeners.remove(listener)
    messages.warning("A phase is no longer timed, because its boundary failed: %r", error)


def listen(owner: Any, name: str, listener: Any, announce: Announce = _announced) -> StandIn:
    """Lets a listener know of the calls of `owner.name`, until the stand-in forgets it.

    Args:
        owner: What has the function.
        name: The name of the function.
        listener: A `Listener`, or what `announce` takes for one.
        announce: Returns what is called in place of the function, and tells the listeners.
    """
    stand_in = _stand_in(owner, name, announce)
    stand_in.listeners.append(listener)
    return stand_in


def _stand_in(owner: Any, name: str, announce: Announce) -> StandIn:
    return getattr(vars(owner).get(name), "_stand_in", None) or StandIn(owner, name, announce)


def listen_while_alive(owner: Any, name: str, listener: Any, announce: Announce) -> StandIn:
    """As `listen`, while anybody else has the listener. Safe to call twice.

    The listeners are weak references here, and so is what the stand-in must be told to forget.
    """
    stand_in = _stand_in(owner, name, announce)
    reference = weakref.ref(listener, stand_in.forget)
    if reference not in stand_in.listeners:
        stand_in.listeners.append(reference)
    return stand_in


def listen_uncopied(owner: Any, name: str, listener: Any) -> StandIn:
    """As `listen`, where the owner is an object that may be copied, or pickled, meanwhile."""

    def announce(call: Callable[..., Any], listeners: list[Any]) -> Any:
        return _Method(owner, name, _announced(call, listeners))

    return listen(owner, name, listener, announce)
