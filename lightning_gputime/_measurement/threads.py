"""CPU time of threads, as counted by Linux at no cost for the loop."""

import threading
import time
from pathlib import Path

from lightning_gputime._compat.torch_ import PIN_LOOP

_MIN_NS = 2_000_000_000  # Minimum time since the start for which fractions are returned.
# Parts of thread names. Autograd's threads and the loader's pin-memory thread run little Python.
# Never blame a thread of this package, whose name starts with that of the package.
_IGNORED = ("Dummy-", PIN_LOOP.attribute, __name__.partition(".")[0])


class ThreadTimes:
    """CPU time of all Python threads since this object was created.

    Create it in the training thread.
    """

    def __init__(self) -> None:
        self._loop_id = threading.get_native_id()
        self._since_ns = time.perf_counter_ns()
        # Times of each thread at the start. A thread that starts later has no entry.
        self._start = {thread.native_id: core_times(thread.native_id) for thread in _threads()}

    def core_wait_share(self) -> float:
        """Return the fraction of the time in which the training thread waits for a CPU core.

        Return 0 if unknown.
        """
        return self._shares_of(self._loop_id)[1]

    def busiest_other(self) -> tuple[str, float]:
        """Return the name of the busiest other thread, and the fraction of the time it runs.

        Return an empty name and 0 if no other thread runs.
        """
        shares = {
            thread.name: self._shares_of(thread.native_id)[0]
            for thread in _threads()
            if thread.native_id != self._loop_id
            and not any(part in thread.name for part in _IGNORED)
        }
        return max(shares.items(), key=lambda item: item[1], default=("", 0.0))

    def _shares_of(self, native_id: int | None) -> tuple[float, float]:
        """Return the fractions of the time that a thread runs, and waits for a CPU core."""
        passed_ns = time.perf_counter_ns() - self._since_ns
        start, end = self._start.get(native_id, (0, 0)), core_times(native_id)
        if passed_ns < _MIN_NS or start is None or end is None:
            return 0.0, 0.0
        return (end[0] - start[0]) / passed_ns, (end[1] - start[1]) / passed_ns


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.native_id is not None]


def core_times(native_id: int | None) -> tuple[int, int] | None:
    """Return how long a thread of this process ran, and waited for a CPU core (in nanoseconds).

    Return None if unknown.
    """
    try:
        run_ns, wait_ns, _ = Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()
        return int(run_ns), int(wait_ns)
    except (OSError, ValueError):
        return None  # Not on Linux, or not counted by this kernel.
