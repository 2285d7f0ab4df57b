"""Time of a loader's pin-memory thread, which copies each batch to pinned memory.

The thread takes a batch from a queue, copies it, and puts it into another queue. Both queues are
wrapped, so the time between the two calls is the time of the copy.
"""

import time
from collections.abc import Callable
from typing import Any


class PinTimes:
    """Time and number of the copies to pinned memory, in one loader.

    Only the pin-memory thread that runs calls `start` and `end`. Each epoch has a new thread.
    """

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._start_ns = 0  # Start of the current copy; 0 between copies.
        self._ns = 0  # Total time of all copies.
        self._batches = 0

    @property
    def mean_ms(self) -> float | None:
        """Time to copy a batch (in milliseconds); None if no batch was copied."""
        return self._ns / self._batches / 1e6 if self._batches else None

    def timed(self, loop: Callable[..., None]) -> Callable[..., None]:
        """Wrap the main loop of a pin-memory thread, to time its copies."""

        def timed_loop(batches: Any, pinned: Any, *args: Any, **kwargs: Any) -> None:
            loop(_InputQueue(batches, self), _OutputQueue(pinned, self), *args, **kwargs)

        return timed_loop

    def start(self) -> None:
        self._start_ns = self._now_ns()

    def end(self) -> None:
        if self._start_ns:  # It is 0 if the queue was full and the thread calls `put` again.
            self._ns += self._now_ns() - self._start_ns
            self._batches += 1
            self._start_ns = 0


class _InputQueue:
    """Queue from which the thread takes batches."""

    def __init__(self, queue: Any, times: PinTimes) -> None:
        self._queue, self._times = queue, times

    def get(self, *args: Any, **kwargs: Any) -> Any:
        batch = self._queue.get(*args, **kwargs)
        self._times.start()
        return batch


class _OutputQueue:
    """Queue into which the thread puts copies."""

    def __init__(self, queue: Any, times: PinTimes) -> None:
        self._queue, self._times = queue, times

    def put(self, *args: Any, **kwargs: Any) -> None:
        self._times.end()
        self._queue.put(*args, **kwargs)
