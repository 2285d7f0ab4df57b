"""The calls of a Trainer's methods, of which its timers are told."""

import functools
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ReferenceType

from lightning_gputime._boundaries.attach import listen_while_alive

# By the ids of Trainers and the names of methods: a method may call that of its base class.
_running: set[tuple[int, str]] = set()


def hear(cls: type, methods: Mapping[str, tuple[str, str]], timer: Any) -> None:
    """Tells a timer, while it lives, of calls of methods of the Trainers it is a callback of.

    It stands at the class, not at the Trainer, which stays what it is. Safe to call twice.

    Args:
        cls: The class of the Trainer, or one that it is derived from.
        methods: For the name of a method of the Trainer's the names of two of the timer's: one that
            is called before it, with the Trainer and the arguments, and one that is called after
            it, with the error, if one was raised.
        timer: Is told.
    """
    for name, (begins, ends) in methods.items():
        owner = next((one for one in cls.__mro__ if name in vars(one)), None)
        if owner is not None:
            announce = functools.partial(_told, name, begins, ends)
            listen_while_alive(owner, name, timer, announce)


def _told(
    name: str,
    begins: str,
    ends: str,
    call: Callable[..., Any],
    listeners: list[ReferenceType[Any]],
) -> Callable[..., Any]:
    # What is wrapped may be another's wrapper, with attributes of its own.
    @functools.wraps(call, updated=())
    def told(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if not listeners:
            told._stand_in.come_off()  # type: ignore[attr-defined]  # set by `StandIn`
        key = id(trainer), name
        handler = getattr(trainer, "callback_handler", None)
        callbacks = {id(one) for one in getattr(handler, "callbacks", ())}
        timers = [one for one in (one() for one in [*listeners]) if id(one) in callbacks]
        if not timers or key in _running:
            return call(trainer, *args, **kwargs)
        error: BaseException | None = None
        _running.add(key)
        try:
            for timer in timers:
                getattr(timer, begins)(trainer, *args, **kwargs)
            return call(trainer, *args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            _running.discard(key)
            for timer in timers:
                getattr(timer, ends)(error)
            error = None  # Its traceback holds this frame.

    return told
