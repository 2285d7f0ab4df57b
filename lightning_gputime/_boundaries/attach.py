"""Former names of `patching`, for the rooms that still use them."""

import weakref
from typing import Any, Protocol

from lightning_gputime._boundaries.patching import FunctionPatch, Wrap, patch_function

StandIn = FunctionPatch


class Removable(Protocol):
    """What can be taken off again."""

    def remove(self) -> None:
        """Take it off. Safe to call twice."""


def listen(owner: Any, name: str, listener: Any, announce: Wrap | None = None) -> FunctionPatch:
    """See `patch_function`."""
    return patch_function(owner, name, listener, announce).patch


def listen_while_alive(owner: Any, name: str, listener: Any, announce: Wrap) -> FunctionPatch:
    """As `listen`, while anybody else has the listener. Safe to call twice."""

    def forget(reference: Any) -> None:
        patch.remove_listener(reference)

    patch = patch_function(owner, name, weakref.ref(listener, forget), announce).patch
    patch.replacement._stand_in = patch
    return patch
