"""Schedule of the timed steps. It depends only on their index, so that all ranks agree."""

from collections.abc import Callable
from dataclasses import dataclass

GOLDEN = 0.6180339887498949
"""Golden ratio. Its successive multiples, modulo 1, are spread as evenly as possible."""
_WINDOWS_PER_LOG = 8  # 1 of this many windows covers the step that writes logs.


@dataclass(frozen=True, slots=True)
class Windows:
    """Number and size of timing windows. An interval has `count` parts, with one window in each.

    Attributes:
        size: Number of timed steps in a window.
        interval: Number of steps between two logs.
        count: Number of windows in an interval.
        end_in_log: True if logs are written at the end of intervals.
        recurrence: Index of a long step and the distance to the next, as agreed by all ranks.
    """

    size: int = 1
    interval: int = 1
    count: int = 1
    end_in_log: bool = False
    recurrence: tuple[int, int] | None = None

    @property
    def cover_all(self) -> bool:
        """True if every step is timed."""
        return self.size * self.count == self.interval

    @property
    def every_n_steps(self) -> float:
        """`n` if 1 of every `n` steps is timed."""
        return self.interval / (self.size * self.count)

    def part(self, k: int) -> tuple[int, int]:
        """Return the indices of the first step of the k-th part, and of the step after its last."""
        interval, place = divmod(k, self.count)
        edges = (place * self.interval // self.count, (place + 1) * self.interval // self.count)
        return interval * self.interval + edges[0], interval * self.interval + edges[1]


class Schedule:
    """Choice of the timed steps by their index, which counts all steps from 0.

    The offsets of timing windows in their parts are spread evenly and have no period, so that
    periodic work of the loop is timed neither too often nor too rarely. If long steps recur, up to
    half of the windows are moved onto long steps. Some windows cover the end of an interval, where
    logs are written. All ranks compute the same offsets.

    Args:
        windows: Number and size of timing windows.
        next_long: Returns the index of a long step and the expected distance to the next.
    """

    def __init__(
        self, windows: Windows, next_long: Callable[[], tuple[int, int] | None] = lambda: None
    ) -> None:
        self.windows = windows
        self._next_long = next_long
        self._first_part = self._next_part = 0
        self._may_move = False  # True after a window at its usual place: the next may be moved.
        self._start = self._stop = 0  # The newest window.
        self.expected_long_steps = 0
        """Size of the newest window if it was moved onto an expected long step; else 0."""

    def follow(self, windows: Windows, index: int) -> None:
        """Switch to other windows at the step of this index."""
        self.windows = windows
        self._start = self._stop = index
        self.expected_long_steps = 0
        part = index // windows.interval * windows.count
        while windows.part(part)[0] < index:
            part += 1
        self._first_part = self._next_part = part

    def next_timed(self, index: int) -> int:
        """Return the index of the next timed step from `index` on.

        `index` must not decrease from call to call.
        """
        if self.windows.cover_all:
            return index
        while index >= self._stop:
            self._place_window()
        return max(index, self._start)

    def _place_window(self) -> None:
        windows, k = self.windows, self._next_part
        self._next_part += 1
        first, last = windows.part(k)
        # Use squares: plain multiples of the golden ratio hit some periods twice as often.
        start = first + int((k + 1) ** 2 * GOLDEN % 1 * (last - first))
        recurrence = (windows.recurrence or self._next_long()) if self._may_move else None
        self._may_move, self.expected_long_steps = True, 0
        if recurrence is not None and (long_step := _first_long(recurrence, first)) < last:
            start = long_step - windows.size // 2
            self._may_move, self.expected_long_steps = False, windows.size
        elif windows.end_in_log and (k - self._first_part) % _WINDOWS_PER_LOG == 0:
            # Loggers run at the end of the last step of an interval, or at the start of the next.
            start = last + 1 - windows.size
        self._start = max(start, self._stop)
        self._stop = self._start + windows.size


def _first_long(recurrence: tuple[int, int], first: int) -> int:
    """Return the index of the first expected long step, starting from step `first`."""
    last, distance = recurrence
    return last + max(-(-(first - last) // distance), 1) * distance
