"""Thread whose time is recorded."""

from threading import get_ident, local
from typing import Any
from weakref import ref


class TimedThread:
    """Thread that is timed.

    Its id is forgotten when the thread ends, because a new thread may get the same id.
    """

    def __init__(self) -> None:
        self.timed = -1
        """Id of the thread while a step is timed; else -1."""
        self.home = -1
        """Id of the thread of the loop, also between timed steps; -1 without a thread."""
        self.was_elsewhere = False
        """True once a boundary was called in another thread."""
        self._local = local()
        self._end: Any = None

    def start(self) -> None:
        """Time the calling thread."""
        if get_ident() != self.home:
            self._move_here()
        self.timed = self.home

    def stop(self) -> None:
        """Do not time any thread until `start`, which the calling thread is expected to call."""
        if get_ident() != self.home:
            self._move_here()
        self.timed = -1

    def _move_here(self) -> None:
        # This set is deleted when the thread ends, or when another thread is timed.
        alive = set[None]()
        vars(self._local)["alive"] = alive
        self._end = ref(alive, self.forget)
        self.home = get_ident()

    def is_idle_here(self) -> bool:
        """Return True in the thread `home` while no step is timed.

        Call it only in a thread that is not timed. If another thread is timed, set `was_elsewhere`.
        """
        if self.timed == -1:
            return get_ident() == self.home
        self.was_elsewhere = True
        return False

    def forget(self, _: object = None) -> None:
        """Forget the thread, because it has ended, or because this process was forked."""
        self.timed = self.home = -1
