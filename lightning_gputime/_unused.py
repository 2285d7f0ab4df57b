"""Hooks of a callback that Lightning need not call: 2 us each, in every batch."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_gputime._lightning import Callback, Trainer, callbacks_of, defines

# What the timer never needs.
_NEVER = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
# What it needs in no batch of a step that is not timed.
_START = "on_train_batch_start"


class Unused:
    """Keeps Lightning from calling hooks of a callback: it calls none that is None.

    Args:
        callback: The callback. If another one may pass calls on to it, it keeps these.
        own: Its class, as far as it is ours: a hook that a subclass has anew is kept, too.
        trainer: Whose callback it is.
    """

    def __init__(self, callback: Callback, own: type[Callback], trainer: Trainer) -> None:
        self._hooks = vars(callback)
        callbacks = callbacks_of(trainer)
        self._unneeded = [
            name
            for names in (_NEVER, (_START,))
            if _has(callbacks, callback)
            and not any(_passes_on(one, callback, names) for one in callbacks)
            for name in names
            if getattr(type(callback), name) is getattr(own, name) and name not in self._hooks
        ]
        self._hooks.update((name, None) for name in _NEVER if name in self._unneeded)

    @property
    def may_leave_out_starts(self) -> bool:
        """Whether the hook at the start of a batch may be left out."""
        return _START in self._unneeded

    def leave_out_starts(self) -> None:
        """Leaves that hook out, until `call_starts`."""
        self._hooks[_START] = None

    def call_starts(self) -> None:
        """Lets it be called again."""
        if _START in unused_of(self._hooks):
            del self._hooks[_START]

    def remove(self) -> None:
        """Lets all be called again. Safe to call twice."""
        for name in unused_of(self._hooks):
            del self._hooks[name]


def unused_of(attributes: Mapping[str, Any]) -> list[str]:
    """Returns the hooks among the attributes of a callback that are not called."""
    names = (*_NEVER, _START)
    return [name for name in names if name in attributes and attributes[name] is None]


def _passes_on(one: Callback, callback: Callback, names: Sequence[str]) -> bool:
    """Tells whether a callback has another one, and a hook in which it may call that of it."""
    if not any(defines(one, name) for name in names):
        return False
    values = [*vars(one).values()]
    lists = [value for value in values if isinstance(value, list | tuple)]
    return any(_has(some, callback) for some in (values, *lists))


def _has(some: Sequence[object], callback: Callback) -> bool:
    # Not by `in`: what is in there may compare as it likes.
    return any(one is callback for one in some)
