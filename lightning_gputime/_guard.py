"""The hooks of a timer, which a trainer calls: no error of theirs reaches the training."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from lightning_gputime._untraced import untraced

Hook = TypeVar("Hook", bound=Callable[..., None])

_NO_INSTANCE = (
    "callbacks must be instances, got the class of a timer: write it with parentheses, as in"
    " Trainer(callbacks=[GPUPhaseTimer()])"
)


def needs_instance(hook: Hook) -> Hook:
    """Answer the class in place of a timer, for a hook that may raise before training."""

    @functools.wraps(hook)
    def guarded(self: Any = None, *args: Any, **kwargs: Any) -> None:
        if not hasattr(self, "_give_up"):
            raise TypeError(_NO_INSTANCE)
        hook(self, *args, **kwargs)

    return cast("Hook", guarded)


def never_raises(hook: Hook) -> Hook:
    """Ends the timing, and lets the training go on, when a hook of a timer's fails."""

    @functools.wraps(hook)
    def guarded(self: Any = None, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            if not hasattr(self, "_give_up"):
                # A trainer has called the function of the class itself.
                raise TypeError(_NO_INSTANCE) from None
            self._give_up(error)

    # A step that is compiled calls some of them.
    untraced(hook)
    return cast("Hook", untraced(guarded))
