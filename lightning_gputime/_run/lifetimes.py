"""Sessions that outlive what they belong to: in a process that was forked off, or a lost timer."""

import os
from typing import Protocol
from weakref import WeakSet

from lightning_gputime._boundaries import named


class Ending(Protocol):
    """A session, as far as other sessions and its end are concerned."""

    def wake(self) -> None:
        """Turn hooks on that are off between timed steps."""

    def abandon(self) -> None:
        """End it without touching the device, or what others hold."""

    def remove(self) -> None:
        """Take everything off. Safe to call twice."""


# Module state, because a fork and the loss of a timer happen to no session in particular.
_attached: "WeakSet[Ending]" = WeakSet()
_lost: list[Ending] = []


def attached(session: Ending) -> None:
    """Note that a session is attached: take off those that nobody has, and wake the others."""
    # Here, and not where a timer is lost: Python may notice that at any moment.
    _take_off_lost()
    for other in _attached:
        other.wake()  # Each must know of the calls of the other's model.
    _attached.add(session)


def is_alone() -> bool:
    """Return whether one session at most is attached."""
    return len(_attached) <= 1


def detached(session: Ending) -> None:
    """Note that a session is not attached any more. Safe to call twice."""
    _attached.discard(session)
    _take_off_lost()


def lost(session: Ending) -> None:
    """Note that nobody has a session any more, and that it is still on the model."""
    _lost.append(session)


def _take_off_lost() -> None:
    while _lost:
        _lost.pop().remove()


def _abandon_all() -> None:
    # Over a copy: each takes itself out.
    for session in [*_attached]:
        session.abandon()
    named.abandon_all()  # Those of evaluations, too.
    _lost.clear()


# A process that is forked off, such as a data loader's worker, has the hooks and no timer.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
