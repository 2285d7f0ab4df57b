"""Schedule of the timed steps. It depends only on their index, so that all ranks agree."""

import statistics
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from lightning_gputime._phases import FIRST_STEPS, MAX_STEPS_PER_TIMED, StepRecord

# Successive multiples of the golden ratio, modulo 1, are spread as evenly as possible.
_GOLDEN = 0.6180339887498949
_WINDOWS_PER_LOG = 8  # 1 of this many windows covers the step that writes logs.


@dataclass(frozen=True, slots=True)
class Plan:
    """Number of timed steps. An interval has `windows` parts, with one timing window in each.

    Attributes:
        window: Number of timed steps in a timing window.
        interval: Number of steps between two logs.
        windows: Number of timing windows in an interval.
        ends_in_log: True if logs are written at the end of intervals.
        recurrence: Index of a long step and the distance to the next, as agreed by all ranks.
    """

    window: int = 1
    interval: int = 1
    windows: int = 1
    ends_in_log: bool = False
    recurrence: tuple[int, int] | None = None

    @property
    def times_all(self) -> bool:
        return self.window * self.windows == self.interval

    @property
    def every_n_steps(self) -> float:
        """`n` if 1 of every `n` steps is timed."""
        return self.interval / (self.window * self.windows)

    def part(self, k: int) -> tuple[int, int]:
        """Return the indices of the first step of the k-th part, and of the step after its last."""
        interval, place = divmod(k, self.windows)
        edges = (place * self.interval // self.windows, (place + 1) * self.interval // self.windows)
        return interval * self.interval + edges[0], interval * self.interval + edges[1]


class Schedule:
    """Choice of the timed steps by their index, which counts all steps from 0.

    The offsets of timing windows in their parts are spread evenly and have no period, so that
    periodic work of the loop is timed neither too often nor too rarely. If long steps recur, up to
    every second window is moved onto a long step. Some windows cover the end of an interval, where
    logs are written. All ranks compute the same offsets.

    Args:
        plan: Number of timed steps.
        probe_every_n_steps: 1 of this many steps is probed; 0 for none.
        warmup_steps: Number of first steps that are not probed.
        next_long: Returns the index of a long step and the expected distance to the next.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        probe_every_n_steps: int = 0,
        warmup_steps: int = 0,
        next_long: Callable[[], tuple[int, int] | None] = lambda: None,
    ) -> None:
        self.plan = plan
        self._probe_every_n_steps, self.warmup_steps = probe_every_n_steps, warmup_steps
        self._next_long = next_long
        self._first_part = self._next_part = 0
        self._may_move = False  # True after a window at its usual place: the next may be moved.
        self._start = self._stop = 0  # The newest window.
        self.expects_long = False
        """True if the newest window covers an expected long step."""

    @property
    def times_all(self) -> bool:
        """True if every step is timed, and none is probed."""
        return self.plan.times_all and not self._probe_every_n_steps

    def follow(self, plan: Plan, index: int) -> None:
        """Switch to another plan at the step of this index."""
        self.plan = plan
        self._start = self._stop = index
        part = index // plan.interval * plan.windows
        while plan.part(part)[0] < index:
            part += 1
        self._first_part = self._next_part = part

    def is_timed(self, index: int) -> bool:
        """Return True if the plan times the step at `index`, ignoring probes."""
        return index == self.next_timed(index)

    def next_timed(self, index: int) -> int:
        """Return the index of the next timed step from `index` on.

        `index` must not decrease from call to call.
        """
        if self.plan.times_all:
            return index
        while index >= self._stop:
            self._plan_window()
        return max(index, self._start)

    def _plan_window(self) -> None:
        plan, k = self.plan, self._next_part
        self._next_part += 1
        first, last = plan.part(k)
        # Use squares: plain multiples of the golden ratio hit some periods twice as often.
        start = first + int((k + 1) ** 2 * _GOLDEN % 1 * (last - first))
        expected = None
        if self._may_move:
            expected = _expected(plan.recurrence or self._next_long(), first)
        self._may_move = expected is None or expected >= last
        self.expects_long = expected is not None and expected < last
        if expected is not None and expected < last:
            start = expected - plan.window // 2
        elif plan.ends_in_log and (k - self._first_part) % _WINDOWS_PER_LOG == 0:
            # Loggers run at the end of the last step of an interval, or at the start of the next.
            start = last + 1 - plan.window
        self._start = max(start, self._stop)
        self._stop = self._start + plan.window

    def is_probed(self, index: int) -> bool:
        """Return True if the step of this index is to be probed."""
        n = self._probe_every_n_steps
        if not n or index < self.warmup_steps:
            return False
        # Spread evenly, but never take the last of n steps: the next step may also be a probe.
        return index % n == int((index // n + 1) * _GOLDEN % 1 * (n - 1))


def _expected(recurrence: tuple[int, int] | None, first: int) -> int | None:
    """Return the index of the first expected long step, starting from step `first`."""
    if recurrence is None:
        return None
    last, distance = recurrence
    return last + max(-(-(first - last) // distance), 1) * distance


# Target cost of timing, as a fraction of the step. Below 1 %, because the cost is only estimated.
# Lower with windows, where cold caches cost nearly as much again (`benchmarks/cold_cost.py`, H200).
_MAX_COST_SHARE, _MAX_COST_SHARE_IN_WINDOWS = 0.008, 0.005
_WINDOW_STEPS = 5
# Bounds of the host time of a mark in a busy loop. Values outside are noise.
_MIN_PER_MARK_NS, _MAX_PER_MARK_NS = 3_000, 40_000
_COMPARED = 100  # Number of newest timed steps, spans of untimed steps, and reads.
_TRIAL_EVERY_N_STEPS, _TRIAL_STEPS = 2, 100  # To measure the cost of timing.
_MAX_STEPS_BETWEEN_DECISIONS = 4096


class AutoSchedule:
    """Choice of `n` for timing 1 of `n` steps, so that timing takes less than 1 % of the time.

    If the GPU sets the pace, timing costs nothing, because the host waits anyway. Otherwise the
    cost is measured in the loop itself, as the host time of timed steps minus that of the untimed
    steps just before and after. A benchmark of an empty loop would show less, because there the
    hooks stay in the CPU caches.

    Args:
        interval: Number of steps between two logs, with at least one timing window in between.
            None if the trainer decides when it logs.
    """

    def __init__(self, interval: int | None) -> None:
        self._interval = interval
        self.due = FIRST_STEPS
        """Index of the step before which `decide` and `follow` must be called."""
        self.share: float | None = None
        """Cost of timing every step, as a fraction of an untimed step; None if unknown."""
        self._step_ns = self._cost_ns = 0.0  # Duration of a step, and cost of a timed step.
        # Start and duration of timed steps; start and mean duration of spans of untimed steps.
        self._timed_ns: deque[tuple[int, int]] = deque(maxlen=_COMPARED)
        self._untimed_ns: deque[tuple[int, float]] = deque(maxlen=_COMPARED)
        self._spans = self._span_end_ns = 0  # Number and end of the newest consecutive spans.
        self._switches_ns: deque[int] = deque(maxlen=_COMPARED)
        # Sums over timed steps: number, marks and host waits.
        self._read = self._marks = 0
        self._wait_ms = 0.0
        # Number of steps of each read, and its duration.
        self._reads = deque[tuple[int, int]](maxlen=_COMPARED)
        self._largest_reads = deque[tuple[int, int]](maxlen=_COMPARED)

    def add_timed(self, steps: Sequence[StepRecord], reading_ns: int) -> None:
        for step in steps:
            start_ns, *_, end_ns = step.host_ns
            self._timed_ns.append((start_ns, end_ns - start_ns))
        self._read += len(steps)
        self._marks += sum(len(step.labels) for step in steps)
        self._wait_ms += sum(step.wait_ms for step in steps)
        if not steps:
            return
        read = len(steps), reading_ns
        self._reads.append(read)
        largest = self._largest_reads[0][0] if self._largest_reads else 0
        if len(steps) > largest:
            self._largest_reads.clear()
        if len(steps) >= largest:
            self._largest_reads.append(read)

    def add_untimed(self, start_ns: int, end_ns: int, steps: int) -> None:
        # Keep the first and the last of consecutive spans: these are next to timed steps.
        self._spans = self._spans + 1 if start_ns == self._span_end_ns else 1
        if self._spans > 2:
            self._untimed_ns.pop()
        self._untimed_ns.append((start_ns, (end_ns - start_ns) / steps))
        self._span_end_ns = end_ns

    def add_switch(self, ns: int) -> None:
        self._switches_ns.append(ns)

    def decide(self) -> int:
        """Return `n` if 1 of `n` steps should be timed from now on."""
        if not self._read:
            return 1
        marks = self._marks / self._read
        wait_ns = self._wait_ms / self._read * 1e6
        step_ns = statistics.median([ns for _, ns in self._untimed_ns or self._timed_ns])
        most_ns = marks * _MAX_PER_MARK_NS
        if wait_ns >= most_ns or most_ns < _MAX_COST_SHARE * step_ns:
            return 1
        added_ns = self._excess_ns()
        if not added_ns:
            return _TRIAL_EVERY_N_STEPS
        cost_ns = min(max(statistics.median(added_ns), marks * _MIN_PER_MARK_NS), most_ns)
        # A read also updates the statistics of all untimed steps, at the same cost for 1 timed step
        # as for 25. If every step were timed, all reads would be as large as the largest.
        reading_all_ns = statistics.median(ns / n for n, ns in self._largest_reads)
        self.share = (cost_ns + reading_all_ns) / step_ns
        n_read, reading_ns = map(sum, zip(*self._reads, strict=True))
        self._step_ns, self._cost_ns = step_ns, cost_ns + reading_ns / n_read
        return self._smallest_n()

    def added_share(self, n: int) -> float | None:
        """Return the cost of timing 1 of n steps, as a fraction of an untimed step."""
        return self._added_ns_per_step(n) / self._step_ns if self._step_ns else None

    def follow(self, n: int, index: int) -> Plan:
        """Return the plan that times 1 of n steps, from the step of this index on.

        All ranks must call it with the same `n`, so that they decide at the same steps.
        """
        # Decide often at first: with several ranks, each decision takes effect at the next.
        steps = index // 16 if n == _TRIAL_EVERY_N_STEPS else index // 2
        first = min(2 * self._longest_period, _TRIAL_STEPS)
        self.due = index + min(max(steps, first), _MAX_STEPS_BETWEEN_DECISIONS)
        return self.plan(n)

    def _excess_ns(self) -> list[float]:
        """Return the excess of each timed step over the untimed steps around it."""
        untimed_ns = [*self._untimed_ns]
        added_ns = []
        for start_ns, took_ns in self._timed_ns:
            place = bisect(untimed_ns, start_ns, key=itemgetter(0))
            if 0 < place < len(untimed_ns):
                (_, before_ns), (_, after_ns) = untimed_ns[place - 1 : place + 1]
                added_ns.append(took_ns - (before_ns + after_ns) / 2)
        return added_ns

    def _smallest_n(self) -> int:
        """Return the smallest `n` whose mean cost per step is within the target."""
        if self._cost_ns < _MAX_COST_SHARE * self._step_ns:
            return 1
        target_ns = _MAX_COST_SHARE_IN_WINDOWS * self._step_ns
        for n in range(2, self._longest_period):
            if self._added_ns_per_step(n) <= target_ns:
                return round(self.plan(n).every_n_steps)  # The plan rounds `n` to fit the interval.
        return self._longest_period

    def _added_ns_per_step(self, n: int) -> float:
        plan = self.plan(n)
        switch_ns = 2 * statistics.median(self._switches_ns or [0]) if n > 1 else 0.0
        return (self._cost_ns + switch_ns / plan.window) / plan.every_n_steps

    def plan(self, n: int) -> Plan:
        """Return the plan that times 1 of n steps, which is the same on all ranks."""
        if n == 1:
            return Plan()
        window = max(min(_WINDOW_STEPS, self._longest_period // n), 1)
        interval = max(self._interval or 0, window * n)
        ends_in_log = self._interval in (None, interval)
        return Plan(window, interval, interval // (window * n), ends_in_log=ends_in_log)

    @property
    def _longest_period(self) -> int:
        return max(min(self._interval or MAX_STEPS_PER_TIMED, MAX_STEPS_PER_TIMED), 2)
