"""Sessions of the process that are attached, and those whose timer was lost.

Module state, because forks and garbage collection concern all sessions.
"""

import os
from typing import Any, Protocol
from weakref import WeakSet

from lightning_gputime._instrumentation import named


class Attached(Protocol):
    """A session, as this module needs it."""

    def wake(self) -> None:
        """Attach the hooks again at the end of the open step."""

    def remove(self) -> None:
        """Remove all hooks."""

    def abandon(self) -> list[Any]:
        """End all timing, and leave hooks that do nothing. Return the objects that hold events."""
        raise NotImplementedError


_attached = WeakSet[Attached]()
_lost: list[Attached] = []
_kept: list[Any] = []


def add(session: Attached) -> None:
    # Each timer must see the calls of the other's model, to know whose backward follows.
    for other in _attached:
        other.wake()
    _attached.add(session)


def discard(session: Attached) -> None:
    _attached.discard(session)


def is_alone() -> bool:
    """Return True if at most one session is attached."""
    return len(_attached) <= 1


def lose(session: Attached) -> None:
    """End a session whose timer was deleted. Its hooks are removed by the next session."""
    # A timer is deleted at any moment, even while hooks run.
    session.abandon()
    _lost.append(session)


def remove_lost() -> None:
    """Remove the hooks of sessions whose timer was deleted."""
    while _lost:
        _lost.pop().remove()


def _abandon_all() -> None:
    # Iterate over a copy: each session discards itself. Keep the events: destroying one calls CUDA,
    # which aborts a forked process.
    _kept.extend(session.abandon() for session in [*_attached])
    _kept.append(named.abandon_all())  # Also those of evaluations.
    _lost.clear()


# A forked process, such as a worker of a data loader, inherits the hooks and must not time.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
