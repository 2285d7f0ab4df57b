"""Sessions that are attached in this process, and sessions whose timer was deleted.

Both lists are module state, because forks and garbage collection affect all sessions.
"""

import os
from typing import Any, Protocol
from weakref import WeakSet

from lightning_gputime._instrumentation import named


class Attached(Protocol):
    """The methods of a session that this module needs."""

    def wake(self) -> None:
        """Attach the hooks again at the end of the open step."""

    def remove(self) -> None:
        """Remove all hooks."""

    def abandon(self) -> list[Any]:
        """Stop timing. Hooks stay attached, but do nothing. Return all that refers to events."""
        raise NotImplementedError


_attached = WeakSet[Attached]()
_to_remove: list[Attached] = []  # Sessions whose timer was deleted, and that still have hooks.
_kept: list[Any] = []  # Events of the parent process, in a forked process.


def add(session: Attached) -> None:
    # With several timers, each needs its hooks in all steps, to tell which backward is its own.
    for other in _attached:
        other.wake()
    _attached.add(session)


def discard(session: Attached) -> None:
    _attached.discard(session)


def is_alone() -> bool:
    """Return True if at most one session is attached."""
    return len(_attached) <= 1


def lose(session: Attached) -> None:
    """End a session whose timer was deleted. The next session removes its hooks."""
    # Python may delete a timer at any moment, even while hooks run. So do not remove hooks here.
    session.abandon()
    _to_remove.append(session)


def remove_lost() -> None:
    """Remove the hooks of sessions whose timer was deleted."""
    while _to_remove:
        _to_remove.pop().remove()


def _abandon_all() -> None:
    """End all timing in a forked process."""
    # Keep the events: destroying an event calls CUDA, which aborts a forked process. Iterate over
    # a copy, because each session removes itself from the set.
    _kept.extend(session.abandon() for session in [*_attached])
    _kept.append(named.abandon_all())  # The recorders of evaluations belong to no session.
    _to_remove.clear()


# Forked processes, such as workers of a data loader, inherit the hooks but must not time anything.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
