"""Cost of timing, measured in the loop, and the choice of how many steps to time."""

import statistics
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter

from lightning_gputime._phases import FIRST_STEPS, MAX_STEPS_PER_TIMED, StepRecord
from lightning_gputime._session.schedule import Windows

# Target cost of timing, as a fraction of the step. Below 1 %, because the cost is only estimated.
# Lower with windows, where cold caches cost nearly as much again (`benchmarks/cold_cost.py`, H200).
_MAX_COST_SHARE, _MAX_COST_SHARE_IN_WINDOWS = 0.008, 0.005
_WINDOW_STEPS = 5
# Bounds of the host time of a mark in a busy loop. Values outside are noise.
_MIN_PER_MARK_NS, _MAX_PER_MARK_NS = 3_000, 40_000
_COMPARED = 100  # Number of newest timed steps, spans of untimed steps, and reads.
_TRIAL_EVERY_N_STEPS, _TRIAL_STEPS = 2, 100  # To measure the cost of timing.
_MAX_STEPS_BETWEEN_DECISIONS = 4096


class _Reads:
    """Time that reading the timed steps takes, in reads of one or more steps.

    A read also updates the statistics of all untimed steps, at the same cost for 1 timed step as
    for 25.
    """

    def __init__(self) -> None:
        self.steps = 0
        """Number of all steps that were read."""
        # Number of steps and duration of each read: the newest, and the newest of the largest size.
        self._newest = deque[tuple[int, int]](maxlen=_COMPARED)
        self._largest = deque[tuple[int, int]](maxlen=_COMPARED)

    def add(self, steps: int, ns: int) -> None:
        if not steps:
            return
        self.steps += steps
        self._newest.append((steps, ns))
        largest = self._largest[0][0] if self._largest else 0
        if steps > largest:
            self._largest.clear()
        if steps >= largest:
            self._largest.append((steps, ns))

    def mean_ns(self) -> float:
        """Return the time per timed step."""
        steps, ns = map(sum, zip(*self._newest, strict=True))
        return ns / steps

    def mean_if_large_ns(self) -> float:
        """Return the time per step if all reads are large, as when every step is timed."""
        return statistics.median(ns / steps for steps, ns in self._largest)


class TimingCost:
    """Cost of timing. It chooses `n` for timing 1 of `n` steps in less than 1 % of the time.

    If the GPU sets the pace, timing costs nothing, because the host waits anyway. Otherwise the
    cost is measured in the loop itself, as the host time of timed steps minus that of the untimed
    steps just before and after. A benchmark of an empty loop would show less, because there the
    hooks stay in the CPU caches.

    The host time of untimed steps is measured in spans of one or more steps, without hooks where
    possible: a span ends where the session next reads the clock.

    Args:
        host_ns: Clock of the host.
        log_every_n_steps: Number of steps between two logs, with at least one timing window in
            between. None if the trainer decides when it logs.
    """

    def __init__(self, host_ns: Callable[[], int], log_every_n_steps: int | None) -> None:
        self._host_ns, self._log_every_n_steps = host_ns, log_every_n_steps
        self.due = FIRST_STEPS
        """Index of the step before which `decide` and `follow` must be called."""
        self.share: float | None = None
        """Cost of timing every step, as a fraction of an untimed step; None if unknown."""
        # Duration of a step, and cost of a timed step; zero if the cost is not measured.
        self._step_ns = self._cost_ns = 0.0
        self._span = (0, 0)  # Start (in nanoseconds) and first index of the current span.
        # Start and duration of timed steps; start and mean duration of spans of untimed steps.
        self._timed_ns: deque[tuple[int, int]] = deque(maxlen=_COMPARED)
        self._untimed_ns: deque[tuple[int, float]] = deque(maxlen=_COMPARED)
        self._consecutive = self._span_end_ns = 0  # Number and end of the newest spans in a row.
        self._switches_ns: deque[int] = deque(maxlen=_COMPARED)
        self._reads = _Reads()
        # Sums over the steps that were read: marks and host waits.
        self._marks, self._wait_ms = 0, 0.0

    # Measurements

    def start_span(self, index: int) -> None:
        """Start a span before the step of this index."""
        self._span = self._host_ns(), index

    def end_span(self, index: int, *, is_untimed: bool = True) -> None:
        """End the span before the step of this index, and start the next.

        Between two timed steps, only the first and the last span of untimed steps are kept, because
        only these are next to a timed step.
        """
        (start_ns, first), end_ns = self._span, self._host_ns()
        self._span = end_ns, index
        if not is_untimed:
            return
        follows_untimed = start_ns == self._span_end_ns
        self._consecutive = self._consecutive + 1 if follows_untimed else 1
        if self._consecutive > 2:
            self._untimed_ns.pop()
        self._untimed_ns.append((start_ns, (end_ns - start_ns) / (index - first)))
        self._span_end_ns = end_ns

    def time_switch(self, switch: Callable[[], None], index: int) -> None:
        """Attach or suspend hooks with `switch`, add the time it takes, and start a span."""
        start_ns = self._host_ns()
        switch()
        self.start_span(index)
        self._switches_ns.append(self._span[0] - start_ns)

    def add_timed(self, steps: Sequence[StepRecord], since_ns: int) -> None:
        """Add timed steps whose reading took from the host time `since_ns` until now."""
        reading_ns = self._host_ns() - since_ns
        self._reads.add(len(steps), reading_ns)
        for step in steps:
            start_ns, *_, end_ns = step.host_ns
            self._timed_ns.append((start_ns, end_ns - start_ns))
        self._marks += sum(len(step.labels) for step in steps)
        self._wait_ms += sum(step.wait_ms for step in steps)
        # Reading is part of the cost of timing, so exclude it from the current span.
        start_ns, first = self._span
        self._span = start_ns + reading_ns, first

    # Decisions

    def decide(self) -> int:
        """Return `n` if 1 of `n` steps should be timed from now on."""
        if not self._reads.steps:
            return 1
        marks = self._marks / self._reads.steps
        wait_ns = self._wait_ms / self._reads.steps * 1e6
        step_ns = statistics.median([ns for _, ns in self._untimed_ns or self._timed_ns])
        min_ns, max_ns = marks * _MIN_PER_MARK_NS, marks * _MAX_PER_MARK_NS
        is_free = wait_ns >= max_ns  # The host waits longer than timing can take.
        if is_free or max_ns < _MAX_COST_SHARE * step_ns:
            self._step_ns = 0.0  # The cost is not measured.
            return 1
        excess_ns = self._excess_ns()
        if not excess_ns:
            return _TRIAL_EVERY_N_STEPS
        cost_ns = min(max(statistics.median(excess_ns), min_ns), max_ns)
        self.share = (cost_ns + self._reads.mean_if_large_ns()) / step_ns
        self._step_ns, self._cost_ns = step_ns, cost_ns + self._reads.mean_ns()
        return self._smallest_n()

    def added_share(self, n: int) -> float | None:
        """Return the cost of timing 1 of n steps, as a fraction of an untimed step."""
        return self._added_ns_per_step(n) / self._step_ns if self._step_ns else None

    def follow(self, n: int, index: int) -> Windows:
        """Return the windows that time 1 of n steps, from the step of this index on.

        All ranks must call it with the same `n`, so that they decide at the same steps.
        """
        # Decide often at first: with several ranks, each decision takes effect at the next.
        steps = index // 16 if n == _TRIAL_EVERY_N_STEPS else index // 2
        first = min(2 * self._longest_period, _TRIAL_STEPS)
        self.due = index + min(max(steps, first), _MAX_STEPS_BETWEEN_DECISIONS)
        return self.windows(n)

    def _excess_ns(self) -> list[float]:
        """Return the excess of each timed step over the untimed steps around it."""
        untimed_ns = [*self._untimed_ns]
        excess_ns = []
        for start_ns, took_ns in self._timed_ns:
            next_ = bisect(untimed_ns, start_ns, key=itemgetter(0))
            if 0 < next_ < len(untimed_ns):
                (_, before_ns), (_, after_ns) = untimed_ns[next_ - 1 : next_ + 1]
                excess_ns.append(took_ns - (before_ns + after_ns) / 2)
        return excess_ns

    def _smallest_n(self) -> int:
        """Return the smallest `n` whose mean cost per step is within the target."""
        if self._cost_ns < _MAX_COST_SHARE * self._step_ns:
            return 1
        target_ns = _MAX_COST_SHARE_IN_WINDOWS * self._step_ns
        for n in range(2, self._longest_period):
            if self._added_ns_per_step(n) <= target_ns:
                # The windows fit the log interval, which rounds `n`.
                return round(self.windows(n).every_n_steps)
        return self._longest_period

    def _added_ns_per_step(self, n: int) -> float:
        windows = self.windows(n)
        switch_ns = 2 * statistics.median(self._switches_ns or [0]) if n > 1 else 0.0
        return (self._cost_ns + switch_ns / windows.size) / windows.every_n_steps

    def windows(self, n: int) -> Windows:
        """Return the windows that time 1 of n steps, which are the same on all ranks."""
        if n == 1:
            return Windows()
        size = max(min(_WINDOW_STEPS, self._longest_period // n), 1)
        interval = max(self._log_every_n_steps or 0, size * n)
        end_in_log = self._log_every_n_steps in (None, interval)
        return Windows(size, interval, interval // (size * n), end_in_log)

    @property
    def _longest_period(self) -> int:
        """Largest `n`: each log interval has a timing window."""
        return max(min(self._log_every_n_steps or MAX_STEPS_PER_TIMED, MAX_STEPS_PER_TIMED), 2)
