"""The thread that runs a loop: while it lives, no other one may read its steps."""

from threading import Thread, current_thread, get_ident


class Runner:
    """Knows whether the thread whose steps are timed still lives."""

    def __init__(self) -> None:
        self._thread: Thread | None = None

    def begins_here(self) -> int:
        """Takes the calling thread, and returns its identity."""
        self._thread = current_thread()
        return get_ident()

    def lets_read(self, timed: int) -> bool:
        """Tells whether steps can be read here: else two threads would, in no order.

        Args:
            timed: The identity of the thread that is timed; -1 if none is.
        """
        if get_ident() == timed:
            return True
        return self._thread is None or not self._thread.is_alive()
