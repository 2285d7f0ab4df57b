"""Schedule of the timed steps. It depends only on their index, so that all ranks agree."""

import math
from collections.abc import Callable
from dataclasses import dataclass

GOLDEN = 0.6180339887498949
"""Golden ratio minus 1. Its multiples, modulo 1, are spread as evenly as possible."""
_LOG_EVERY_N_WINDOWS = 8  # 1 of this many windows covers a step that writes logs.


@dataclass(frozen=True, slots=True)
class Windows:
    """Number and size of timing windows: consecutive steps that are timed.

    Steps are divided into intervals, and each interval into `count` parts with one window each.

    Attributes:
        size: Number of timed steps in a window.
        interval: Number of steps in an interval; usually the steps between two logs.
        count: Number of windows in an interval.
        end_in_log: True if logs may be written at the end of each interval.
        recurrence: Index of a long step and the distance to the next, as agreed by all ranks; None
            if each rank predicts its long steps.
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
        """Return the index of the first step of part `k`, and of the first step after it.

        Parts are counted from 0 over all intervals.
        """
        intervals_before, place = divmod(k, self.count)
        start = intervals_before * self.interval
        first = start + place * self.interval // self.count
        end = start + (place + 1) * self.interval // self.count
        return first, end


class Schedule:
    """Choice of the timed steps by their index, which counts all steps from 0.

    The offsets of timing windows in their parts are spread evenly and have no period, so that
    periodic work of the loop is timed neither too often nor too rarely. If long steps recur, up to
    half of the windows are moved: from the usual offset onto an expected long step. Some windows
    cover the end of an interval, where logs are written. All ranks compute the same offsets.

    Args:
        windows: Number and size of timing windows.
        next_long: Returns the index of a long step and the expected distance to the next; None if
            no long step is expected.
    """

    def __init__(
        self, windows: Windows, next_long: Callable[[], tuple[int, int] | None] = lambda: None
    ) -> None:
        self.windows = windows
        self._next_long = next_long
        self._first_part = 0  # Part with the first of the current windows.
        self._next_part = 0  # Part whose window is placed next.
        # True if the last window was not moved. Then the next may be, so at most half are moved.
        self._may_move = False
        # Index of the first step of the newest window, and of the first step after it.
        self._start, self._stop = 0, 0
        self.moved_window_size = 0
        """Size of the newest window if it was moved onto an expected long step; else 0."""

    def follow(self, windows: Windows, index: int) -> None:
        """Switch to other windows at the step of this index."""
        self.windows = windows
        self._start, self._stop = index, index
        self.moved_window_size = 0
        part = index // windows.interval * windows.count
        while windows.part(part)[0] < index:
            part += 1
        self._first_part, self._next_part = part, part

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
        """Place a window in the next part."""
        windows, k = self.windows, self._next_part
        self._next_part += 1
        first, end = windows.part(k)
        recurrence = (windows.recurrence or self._next_long()) if self._may_move else None
        is_moved = False
        if recurrence is not None and (long_step := _next_long_step(*recurrence, first)) < end:
            is_moved = True
            start = long_step - windows.size // 2
        elif windows.end_in_log and (k - self._first_part) % _LOG_EVERY_N_WINDOWS == 0:
            # Loggers run at the end of the last step of an interval, or at the start of the next
            # step, so cover both.
            start = end + 1 - windows.size
        else:
            # Use squares: plain multiples of the golden ratio hit some periods twice as often.
            start = first + int((k + 1) ** 2 * GOLDEN % 1 * (end - first))
        self._may_move = not is_moved
        self.moved_window_size = windows.size if is_moved else 0
        self._start = max(start, self._stop)
        self._stop = self._start + windows.size


def _next_long_step(last: int, distance: int, first: int) -> int:
    """Return the index of the next expected long step after `last`, from step `first` on."""
    distances = max(math.ceil((first - last) / distance), 1)
    return last + distances * distance
