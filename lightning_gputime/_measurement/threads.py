"""CPU time of threads, as counted by Linux at no cost for the loop."""

import threading
import time
from pathlib import Path

from lightning_gputime._compat.torch_ import PIN_LOOP

# Parts of thread names. Autograd's threads and the loader's pin-memory thread run little Python.
# Never blame a thread of this package, whose name starts with that of the package.
_IGNORED = ("Dummy-", PIN_LOOP.attribute, __name__.partition(".")[0])


class ThreadTimes:
    """CPU time of all Python threads since this object was created in the training thread."""

    def __init__(self) -> None:
        self._loop_id = threading.get_native_id()
        self._since_ns = time.perf_counter_ns()
        # Times of each thread at the start. A thread that starts later has no entry.
        ids = [thread.native_id for thread in threading.enumerate()]
        self._start = {native_id: core_times(native_id) for native_id in ids}

    def core_wait_share(self) -> float:
        """Return the share of time that the training thread waits for a core; 0 if unknown."""
        return self._shares_of(self._loop_id)[1]

    def busiest_other(self) -> tuple[str, float]:
        """Return the name of the busiest other thread, or "", and the share of time it runs."""
        shares = {
            thread.name: self._shares_of(thread.native_id)[0]
            for thread in threading.enumerate()
            if thread.native_id not in (None, self._loop_id)
            and not any(part in thread.name for part in _IGNORED)
        }
        return max(shares.items(), key=lambda item: item[1], default=("", 0.0))

    def _shares_of(self, native_id: int | None) -> tuple[float, float]:
        """Return the fractions of the time that a thread runs, and waits for a CPU core."""
        passed_ns = time.perf_counter_ns() - self._since_ns
        start, end = self._start.get(native_id, (0, 0)), core_times(native_id)
        if passed_ns < 2e9 or start is None or end is None:
            return 0.0, 0.0
        return (end[0] - start[0]) / passed_ns, (end[1] - start[1]) / passed_ns


def core_times(native_id: int | None) -> tuple[int, int] | None:
    """Return for how many ns a thread of this process ran, and waited; None if unknown."""
    try:
        run_ns, wait_ns, _ = Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()
        return int(run_ns), int(wait_ns)
    except (OSError, ValueError):
        return None  # Not on Linux, or not counted by this kernel.
