"""Thread of the training loop, whose time is recorded."""

from threading import get_ident, local
from typing import Any
from weakref import ref


class TimedThread:
    """Thread of the training loop: the thread that last called `start` or `stop`.

    Its id is forgotten when the thread ends, because a new thread may get the same id.
    """

    def __init__(self) -> None:
        self.home = -1
        """Id of the thread; -1 before the first call, and after the thread has ended."""
        self.timed = -1
        """Id of the same thread while a step is timed; -1 between timed steps."""
        self.was_elsewhere = False
        """True once a hook was called in another thread while a step was timed."""
        self._local = local()
        self._end_watch: Any = None  # Weak reference that calls `forget` when the thread ends.

    def start(self) -> None:
        """Time the calling thread, which becomes the thread of the loop."""
        if get_ident() != self.home:
            self._follow_calling_thread()
        self.timed = self.home

    def stop(self) -> None:
        """Time no thread until `start`. The calling thread becomes the thread of the loop."""
        if get_ident() != self.home:
            self._follow_calling_thread()
        self.timed = -1

    def _follow_calling_thread(self) -> None:
        # Python deletes this thread-local set when the thread ends. That calls `forget`.
        alive = set[None]()
        vars(self._local)["alive"] = alive
        self._end_watch = ref(alive, self.forget)
        self.home = get_ident()

    def is_idle_here(self) -> bool:
        """Return True in the thread of the loop while no step is timed.

        Call it only where `timed` is not the calling thread. If another thread is timed, set
        `was_elsewhere`.
        """
        if self.timed == -1:
            return get_ident() == self.home
        self.was_elsewhere = True
        return False

    def forget(self, _: object = None) -> None:
        """Forget the thread, because it has ended, or because this process was forked."""
        self.timed = self.home = -1
