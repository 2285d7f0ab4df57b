"""Sessions that outlive what they belong to: in a process that was forked off, or a lost timer."""

import os
from typing import Any
from weakref import WeakSet

from lightning_gputime._boundaries import named

# Module state, because a fork and the loss of a timer happen to no session in particular.
# `Any`, because sessions are above this module.
_attached: "WeakSet[Any]" = WeakSet()
_lost: list[Any] = []
_kept: list[Any] = []


def attached(session: Any) -> None:
    """Note that a session is attached: take off those that nobody has, and wake the others."""
    # Here, and not where a timer is lost: Python may notice that at any moment.
    _take_off_lost()
    for other in _attached:
        other.wake()  # Each must know of the calls of the other's model.
    _attached.add(session)


def is_alone() -> bool:
    return len(_attached) <= 1


def detached(session: Any) -> None:
    _attached.discard(session)
    _take_off_lost()


def lost(session: Any) -> None:
    _lost.append(session)


def _take_off_lost() -> None:
    while _lost:
        _lost.pop().remove()


def _abandon_all() -> None:
    # Over a copy: each takes itself out. Where an event is destroyed torch calls CUDA, which cannot
    # be used in that process, and aborts: they are kept.
    _kept.extend(session.abandon() for session in [*_attached])
    _kept.append(named.abandon_all())  # Those of evaluations, too.
    _lost.clear()


# A process that is forked off, such as a data loader's worker, has the hooks and no timer.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
