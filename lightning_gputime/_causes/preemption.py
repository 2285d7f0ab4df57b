"""Processors that the loop's thread did not get: they ran others, or it was stopped."""

import os
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from operator import itemgetter
from statistics import median
from typing import NamedTuple

from lightning_gputime._causes.scene import Scene
from lightning_gputime._causes.usual import AROUND, Usual
from lightning_gputime._phases import BACKWARD, FORWARD, LOSS, OPTIMIZER
from lightning_gputime._untraced import untraced

_SOURCE = "/proc/thread-self/schedstat"

_WORTH_MS = 2.0
"""In shorter steps it does not look: beside an H200, a reading took the host 6 us."""

# So many steps it remembers: those that are not judged yet, and those around them.
_MOST = 1_000


class _Turn(NamedTuple):
    """How long the thread was away in one step, and in line (in milliseconds); its turns."""

    idle_ms: float
    queued_ms: float
    slices: int


@untraced
class Preemption:
    """Reads, at the end of each step, what Linux's scheduler has counted for the loop's thread.

    That is exact for the time in which the thread was ready and others ran. A process that was
    stopped waits for nothing: there the thread was away from the processor, for longer at a time
    than threads of Python take turns, in a phase in which it has nothing to wait for. That it was
    blocked in a call of the system cannot be told from it.

    Args:
        now_ns: Returns the host's time (in nanoseconds).
        read: Stands in for `os.pread` of Linux's counters.
    """

    def __init__(
        self, now_ns: Callable[[], int], read: Callable[[int, int, int], bytes] | None = None
    ) -> None:
        self._now_ns = now_ns
        self._given = read
        self._file = -1
        self._read = read
        self._newest: deque[tuple[int, bytes]] = deque(maxlen=_MOST)
        self._is_worth_it = True

    def attach(self) -> None:
        """Does nothing: only `loop_begins` knows the thread."""

    def loop_begins(self) -> None:
        """Begins to look at the calling thread."""
        if self._given is None and self._open():
            self._read = os.pread
        self.step_ends()

    def _open(self) -> bool:
        try:
            self.remove()
            self._file = os.open(_SOURCE, os.O_RDONLY | os.O_CLOEXEC)
            # A kernel without these statistics has zeros there.
            if int(os.pread(self._file, 64, 0).split()[0]):
                return True
        except (OSError, AttributeError, ValueError, IndexError):
            pass
        self.remove()
        return False

    def remove(self) -> None:
        file, self._file = self._file, -1
        self._read = self._given
        if file != -1:
            os.close(file)

    def step_ends(self) -> None:
        """Must be called just before the end of each step is marked."""
        # Every step pays for this. What is read is taken apart only where one was slow.
        # Another thread may end it meanwhile.
        read = self._read
        if read is not None and self._is_worth_it:
            try:
                self._newest.append((self._now_ns(), read(self._file, 64, 0)))
            except OSError:
                self._read = None

    def steps_were_read(self, usual: Usual) -> None:
        """Looks no more where steps are too short for that, and looks again where they are not."""
        was_worth_it, self._is_worth_it = self._is_worth_it, usual.host_ms >= _WORTH_MS
        if was_worth_it and not self._is_worth_it:
            self.steps_pass()

    def steps_pass(self) -> None:
        """Must be told where steps begin that nobody looks at."""
        self._newest.append((self._now_ns(), b""))

    def testify(self, scene: Scene) -> None:
        newest = [*self._newest]
        last = bisect_right(newest, scene.end_ns, key=itemgetter(0)) - 1
        # The samples before the marks at its begin and at its end.
        if last < 1 or newest[last][0] <= scene.begin_ns:
            return
        if not (newest[last - 1][1] and newest[last][1]):
            return  # It began, or ended, where nobody looked.
        own = _turn(newest[last - 1], newest[last])
        # All of it, though some is usual on a busy machine: it may have fallen elsewhere than it
        # usually does, and must not count for what runs there.
        scene.claim_growth("preemption", "others had the processor", own.queued_ms, _anywhere)
        least_ms = 1.2e3 * sys.getswitchinterval()
        if own.idle_ms <= least_ms:
            return  # Before what takes longest: most slow steps have another cause.
        around = newest[max(last - AROUND, 0) : last + 1]
        turns = [_turn(*pair) for pair in pairwise(around) if pair[0][1] and pair[1][1]]
        usual_idle_ms, _, usual_slices = map(median, zip(*turns, strict=True))
        stopped_ms = own.idle_ms - usual_idle_ms
        slices = max(own.slices - usual_slices, 1)
        if stopped_ms / slices > least_ms:
            scene.claim_growth("preemption", "stopped, or blocked", stopped_ms, _is_at_work)


def _turn(before: tuple[int, bytes], after: tuple[int, bytes]) -> _Turn:
    """Returns what lies between two samples."""
    ran, queued, slices = (
        int(now) - int(then) for then, now in zip(before[1].split(), after[1].split(), strict=True)
    )
    return _Turn((after[0] - before[0] - ran - queued) / 1e6, queued / 1e6, slices)


def _anywhere(name: str) -> bool:
    return True


def _is_at_work(name: str) -> bool:
    return name.partition("/")[0] in (FORWARD, LOSS, BACKWARD, OPTIMIZER)
