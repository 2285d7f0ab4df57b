"""Sessions that are attached in this process, and sessions whose timer was deleted.

They are module state, because forks and garbage collection affect all sessions.
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
        """Stop timing, and disable the hooks. Return the objects that refer to events."""
        raise NotImplementedError


_attached = WeakSet[Attached]()
_lost: list[Attached] = []
_kept: list[Any] = []


def add(session: Attached) -> None:
    # Each timer must see the calls of the other models, to know which backward is its own.
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
    # Do not remove them here: Python may delete a timer at any moment, even while hooks run.
    session.abandon()
    _lost.append(session)


def remove_lost() -> None:
    """Remove the hooks of sessions whose timer was deleted."""
    while _lost:
        _lost.pop().remove()


def _abandon_all() -> None:
    # Iterate over a copy, because each session discards itself. Keep the events, because destroying
    # an event calls CUDA, which aborts a forked process.
    _kept.extend(session.abandon() for session in [*_attached])
    _kept.append(named.abandon_all())  # The remaining recorders are those of evaluations.
    _lost.clear()


# Forked processes, such as workers of a data loader, inherit the hooks but must not time anything.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
