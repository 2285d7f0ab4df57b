"""Choice of the timed steps: their windows, and the cost of timing, which decides how many.

The schedule depends only on the index of steps, so that all ranks agree.
"""

import math
import statistics
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from lightning_gputime._measurement.untimed import Recurrence
from lightning_gputime._phases import FIRST_STEPS, MAX_STEPS_PER_TIMED, StepRecord

GOLDEN = 0.6180339887498949
"""Golden ratio minus 1. Its multiples, modulo 1, are spread as evenly as possible."""
# Target cost of timing, as a fraction of the step: to time every step, and in windows. The latter
# is less than half of 1 %, because logs, and steps that are only counted, cost as much.
_MAX_COST_SHARE, _MAX_COST_SHARE_IN_WINDOWS = 0.008, 0.004
# Steps next to a window find cold CPU caches, too. With them, it costs 1.4 to 2.6 times as much, as
# measured in loops of 0.7 to 2.9 ms (`benchmarks/cold_cost.py`).
_COLD_START = 2.0
# Time to count an untimed step. Measured: 0 to 15 us (`benchmarks/results/cold_cost_logs.json`).
_COUNT_NS = 8_000
_N_NEWEST = 100  # Number of timed steps, spans of untimed steps, and reads that are kept.
_TRIAL_EVERY_N_STEPS = 2  # To measure the cost of timing, 1 of this many steps is timed.


@dataclass(frozen=True, slots=True)
class Windows:
    """Number and size of timing windows: consecutive steps that are timed.

    Steps are divided into intervals, and each interval into `count` parts with one window each.
    """

    size: int = 1  # Number of timed steps in a window.
    interval: int = 1  # Number of steps in an interval; usually the steps between two logs.
    count: int = 1  # Number of windows in an interval.
    end_in_log: bool = False  # True if logs may be written at the end of each interval.
    # Long steps, as agreed by all ranks; None if each rank predicts its own.
    recurrence: Recurrence | None = None

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
        intervals_before, k_in_interval = divmod(k, self.count)
        start = intervals_before * self.interval
        first = start + k_in_interval * self.interval // self.count
        end = start + (k_in_interval + 1) * self.interval // self.count
        return first, end


class Schedule:
    """Choice of the timed steps by their index, which counts all steps from 0.

    The offsets of timing windows in their parts are spread evenly and have no period, so that
    periodic work of the loop is timed neither too often nor too rarely. If long steps recur, up to
    half of the windows are moved: from the usual offset onto an expected long step. Some windows
    cover the end of an interval, where logs are written. All ranks compute the same offsets.

    `next_long` returns the index of the next expected long step from an index on; infinity if there
    is none.
    """

    def __init__(
        self, windows: Windows, next_long: Callable[[int], float] = lambda _: math.inf
    ) -> None:
        self.windows = windows
        self._next_long = next_long
        self._first_part = 0  # Part with the first of the current windows.
        self._next_part = 0  # Part whose window is placed next.
        # True if the last window was not moved. Then the next may be, so at most half are moved.
        self._may_move = False
        # Index of the first step of the newest window, and of the first step after it.
        self._start, self._stop = 0, 0

    def follow(self, windows: Windows, index: int) -> None:
        """Switch to other windows at the step of this index."""
        self.windows = windows
        self._start, self._stop = index, index
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
        long_step = math.inf
        if self._may_move:
            agreed = windows.recurrence
            long_step = self._next_long(first) if agreed is None else agreed.next_from(first)
        is_moved = long_step < end
        self._may_move = not is_moved
        if is_moved:
            start = int(long_step) - windows.size // 2
        elif windows.end_in_log and self._covers_log(k):
            # Loggers run at the end of the last step of an interval, or at the start of the next
            # step, so cover both if the window is long enough.
            start = end + 1 - windows.size
        else:
            # Use squares: plain multiples of the golden ratio hit some periods twice as often.
            start = first + int((k + 1) ** 2 * GOLDEN % 1 * (end - first))
        self._start = max(start, self._stop)
        self._stop = self._start + windows.size

    def _covers_log(self, k: int) -> bool:
        """Return True for 1 of 8 windows, which are the last of an interval.

        If there are more than 8 windows in an interval, it is the last window of each.
        """
        count = self.windows.count
        is_last = (k + 1) % count == 0
        return is_last and (k - self._first_part) // count % max(8 // count, 1) == 0


class TimingCost:
    """Cost of timing. It chooses `n` for timing 1 of `n` steps in less than 1 % of the time.

    If the GPU sets the pace, timing costs nothing, because the host waits anyway. Otherwise the
    cost is measured in the loop itself, as the host time of timed steps minus the host time of the
    untimed steps just before and after. A benchmark of an empty loop would show less, because there
    the hooks stay in the CPU caches.

    The host time of untimed steps is measured in spans of one or more steps, without hooks where
    possible: a span ends where the session next reads the clock.

    Reading the timed steps is part of the cost. A read also updates the statistics of all untimed
    steps, at the same cost for 1 timed step as for 25. So the time per step falls with the size of
    a read: its number of steps.

    A log interval has a timing window if its steps can pay for it; if not, its log divides the step
    like the newest timed steps. The number of steps between two logs, `log_every_n_steps`, is None
    if unknown, or without logs.
    """

    def __init__(self, host_ns: Callable[[], int], log_every_n_steps: int | None) -> None:
        self._host_ns, self._log_every_n_steps = host_ns, log_every_n_steps
        self.due = FIRST_STEPS
        """Index of the step before which `decide` and `schedule_next` must be called."""
        self.share: float | None = None
        """Cost of timing every step, as a fraction of an untimed step; None if unknown."""
        self._step_ns = 0.0  # Duration of an untimed step; 0 if the cost is not measured.
        self._cost_ns = 0.0  # Cost of a timed step, with its reading.
        self._span = (0, 0)  # Start (in nanoseconds) and first index of the current span.
        # Start and duration of timed steps; start and time per step of spans of untimed steps.
        self._timed_ns: deque[tuple[int, int]] = deque(maxlen=_N_NEWEST)
        self._untimed_ns: deque[tuple[int, float]] = deque(maxlen=_N_NEWEST)
        self._n_consecutive = 0  # Number of newest spans of untimed steps without a gap.
        self._span_end_ns = 0  # End of the last span of untimed steps.
        self._switches_ns: deque[int] = deque(maxlen=_N_NEWEST)  # Time to attach or remove hooks.
        # Size and duration (in nanoseconds) of reads: of the newest, and of the newest with the
        # largest size.
        self._reads = deque[tuple[int, int]](maxlen=_N_NEWEST)
        self._largest_reads = deque[tuple[int, int]](maxlen=_N_NEWEST)
        # Number of all steps that were read, their marks, and their host wait.
        self._n_read, self._n_marks, self._wait_ms = 0, 0, 0.0

    # Measurements

    def start_span(self, index: int) -> None:
        """Start a span before the step of this index."""
        self._span = self._host_ns(), index

    def end_span(self, index: int, *, is_untimed: bool = True) -> None:
        """End the span before the step of this index, and start the next.

        Between two timed steps, only the first and the last span of untimed steps are kept, because
        the others are not next to a timed step.
        """
        (start_ns, first), end_ns = self._span, self._host_ns()
        self._span = end_ns, index
        if not is_untimed:
            return
        follows_untimed = start_ns == self._span_end_ns
        self._n_consecutive = self._n_consecutive + 1 if follows_untimed else 1
        if self._n_consecutive > 2:
            self._untimed_ns.pop()  # The span before this is neither the first nor the last.
        self._untimed_ns.append((start_ns, (end_ns - start_ns) / (index - first)))
        self._span_end_ns = end_ns

    def time_switch(self, switch: Callable[[], None], index: int) -> None:
        """Attach or remove hooks by calling `switch`, record its duration, and start a span."""
        start_ns = self._host_ns()
        switch()
        self.start_span(index)
        self._switches_ns.append(self._span[0] - start_ns)

    def add_timed(self, steps: Sequence[StepRecord], since_ns: int) -> None:
        """Add timed steps whose reading took from the host time `since_ns` until now."""
        reading_ns, size = self._host_ns() - since_ns, len(steps)
        if size:
            self._n_read += size
            self._reads.append((size, reading_ns))
            # Keep the largest reads: if every step were timed, all reads would be as large.
            largest = self._largest_reads[0][0] if self._largest_reads else 0
            if size > largest:
                self._largest_reads.clear()
            if size >= largest:
                self._largest_reads.append((size, reading_ns))
        for step in steps:
            start_ns, *_, end_ns = step.host_ns
            self._timed_ns.append((start_ns, end_ns - start_ns))
        self._n_marks += sum(len(step.labels) for step in steps)
        self._wait_ms += sum(step.wait_ms for step in steps)
        # Reading is part of the cost of timing, so exclude it from the current span.
        span_start_ns, first = self._span
        self._span = span_start_ns + reading_ns, first

    # Decisions

    def decide(self) -> int:
        """Return `n` if 1 of `n` steps should be timed from now on."""
        if not self._n_read:
            return 1
        n_marks = self._n_marks / self._n_read
        wait_ns = self._wait_ms / self._n_read * 1e6
        step_ns = statistics.median([ns for _, ns in self._untimed_ns or self._timed_ns])
        # Bounds of the host time of the marks in a busy loop. Values outside are noise.
        min_marks_ns, max_marks_ns = n_marks * 3_000, n_marks * 40_000
        is_free = wait_ns >= max_marks_ns  # The host waits longer than the marks can take.
        if is_free or max_marks_ns < _MAX_COST_SHARE * step_ns:
            self._step_ns = 0.0  # The cost is not measured.
            return 1
        # Excess of each timed step over the untimed steps before and after it.
        spans, excess_ns = [*self._untimed_ns], list[float]()
        for start_ns, took_ns in self._timed_ns:
            next_ = bisect(spans, start_ns, key=itemgetter(0))
            if 0 < next_ < len(spans):
                (_, before_ns), (_, after_ns) = spans[next_ - 1 : next_ + 1]
                excess_ns.append(took_ns - (before_ns + after_ns) / 2)
        if not excess_ns:
            return _TRIAL_EVERY_N_STEPS
        marks_ns = min(max(statistics.median(excess_ns), min_marks_ns), max_marks_ns)
        # If every step were timed, all reads would be as large as the largest.
        read_ns = statistics.median(ns / steps for steps, ns in self._largest_reads)
        self.share = (marks_ns + read_ns) / step_ns
        n_read, reading_ns = map(sum, zip(*self._reads, strict=True))
        self._step_ns, self._cost_ns = step_ns, marks_ns + reading_ns / n_read
        # Choose the smallest `n` whose mean cost per step is within the target.
        if self._cost_ns < _MAX_COST_SHARE * step_ns:
            return 1
        for n in range(2, MAX_STEPS_PER_TIMED):
            if self._added_ns_per_step(n) <= _MAX_COST_SHARE_IN_WINDOWS * step_ns:
                # `windows` may time fewer steps, because an interval has whole windows.
                return round(self.windows(n).every_n_steps)
        return MAX_STEPS_PER_TIMED

    def added_share(self, n: int) -> float | None:
        """Return the cost of timing 1 of n steps and counting the others, as a fraction of a step.

        Return None if the cost is not measured: not yet, or because it is low enough to time every
        step.
        """
        if not self._step_ns:
            return None
        counting_ns = _COUNT_NS if n > 1 else 0.0
        return (self._added_ns_per_step(n) + counting_ns) / self._step_ns

    def schedule_next(self, n: int, index: int) -> None:
        """Schedule the next decision: set `due`, now that 1 of n steps will be timed.

        All ranks must pass the same `n` and index of the next step, so that they decide at the same
        steps.
        """
        # While every second step is timed to measure the cost, timing costs more than allowed. So
        # decide again when the run is 1/16 longer. Later, the cost hardly changes: wait until the
        # run is half longer. With several ranks, each decision takes effect at the next.
        steps = index // 16 if n == _TRIAL_EVERY_N_STEPS else index // 2
        self.due = index + min(max(steps, 100), 4096)

    def _added_ns_per_step(self, n: int) -> float:
        """Return the mean cost per step, timed or not, of timing 1 of n steps.

        For example, with windows of 5 of 100 steps, a cost of 200 us per timed step, and 50 us to
        attach or remove hooks: 2 * (5 * 200 + 2 * 50) / 100 = 22 us per step.
        """
        if n == 1:
            return self._cost_ns
        windows = self.windows(n)
        switch_ns = 2 * statistics.median(self._switches_ns or [0])  # Once per window.
        window_ns = _COLD_START * (self._cost_ns * windows.size + switch_ns)
        return window_ns / (windows.size * windows.every_n_steps)

    def windows(self, n: int) -> Windows:
        """Return the windows that time 1 of n steps, or fewer. All ranks get the same windows.

        For example, with a log every 50 steps and n = 4, there are two windows of 5 steps between
        two logs; with n = 30, one window of a single step.
        """
        if n == 1:
            return Windows()
        every = self._log_every_n_steps
        # Up to 5 steps, as long as an interval between logs can pay for them.
        max_steps = min(every or MAX_STEPS_PER_TIMED, MAX_STEPS_PER_TIMED)
        size = max(min(5, max_steps // n), 1)
        # As many whole log intervals as pay for a window. Without logs, any number of steps.
        interval = math.ceil(size * n / every) * every if every else size * n
        return Windows(size, interval, count=interval // (size * n), end_in_log=True)
