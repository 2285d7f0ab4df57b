"""What timing costs the host, and how many steps may be timed for that."""

import math
import statistics
from collections import deque
from collections.abc import Callable

from lightning_gputime._causes.inquiry import Inquiry
from lightning_gputime._options import Options
from lightning_gputime._record.clock import Clock
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._results.means import MeanLog
from lightning_gputime._results.results import Results
from lightning_gputime._results.summary import MOST_APART
from lightning_gputime._run.agreement import Agreement, open_agreement

# So many steps are timed before the first decision, and at most pass between two.
_FIRST, _MOST = 64, 4096

# The clock is read inside the hooks: what is around them is not seen. It was a fifth of what the
# package runs for a timed step beyond a quiet one, see `benchmarks/host_counts.py`.
_UNSEEN = 1.25

# In a step that is not timed hooks take the host so many times as long as the end of it, of which
# alone the clock is read: 6.5 and 7 times in a plain loop and in Lightning (`host_cost.py`).
_QUIET = 6.5

# Waits shorter than this part of the cost may be chance.
_CERTAIN = 0.1

# So many of the newest are judged: steps that were timed, steps, and readings of many at once. They
# are measured in the last steps before a decision.
_COSTS, _STEPS, _READINGS = 16, 64, 9

# The waits of fewer steps may be chance.
_ENOUGH = 8


class Budget:
    """Says how far apart timed steps must lie, so that timing takes no more than a part of a run.

    It takes the time of each mark, of the end of each timed step, and of the reading; and by how
    long the other steps take to end it knows what hooks take in each. What the host waits for the
    device anyway is free: where the device sets the pace, every step is timed.

    Args:
        most: The part of the training's time that timing may take, such as 0.01.
        clock: The timer's.
        recorder: Makes the marks.
        inquiry: Reads the steps.
        results: Have seen how long the host waited, and are told what is decided.
        means: Log what is decided.
        lag: That of the recorder.
        warmup_steps: Before these are over nothing is decided.
        agreement: Lets all ranks decide the same; None where there is one, or they do not share.
    """

    def __init__(
        self,
        most: float,
        clock: Clock,
        recorder: Recorder,
        inquiry: Inquiry,
        results: Results,
        means: MeanLog,
        *,
        lag: int,
        warmup_steps: int,
        agreement: Agreement | None,
    ) -> None:
        self._most = most
        self._now_ns = clock.host_ns
        self._recorder, self._inquiry, self._results = recorder, inquiry, results
        self._means = means
        # Without a lag each step ends with a wait, which the loop would not have without a timer.
        self._waits_are_free = lag > 0
        self._agreement = agreement
        self.due = max(_FIRST, warmup_steps)
        """The index of the step before which it must be asked."""
        # What each step cost that was timed, without its reading, and the end of each that was
        # not; the reading of each, where some were read; and the host's time from the end of one
        # step to that of the next.
        self._costs_ns: deque[int] = deque(maxlen=_COSTS)
        self._quiet_ns: deque[int] = deque(maxlen=_COSTS)
        self._readings_ns: deque[float] = deque(maxlen=_READINGS)
        self._steps_ns: deque[int] = deque(maxlen=_STEPS)
        # How many steps have ended, about: the index of the open one.
        self._ended = 0
        # What the marks of the open step have cost; None without one.
        self._marks_ns: int | None = None
        self._ended_ns: int | None = None
        # What reading had taken, and how many were read, when it was last looked at.
        self._read = (0, 0)
        # How many steps had been read, and how long the host had waited for them (in milliseconds),
        # when that was last looked at; and what it would wait for each if none were timed.
        self._waited = (0, 0.0)
        self._spare_ns = 0.0
        self._tell(1)
        recorder.tell_cost(self._mark_took)

    def _mark_took(self, ns: int) -> None:
        self._marks_ns = (self._marks_ns or 0) + ns

    def around(self, end_step: Callable[[int], bool]) -> Callable[[int], bool]:
        """Returns what ends a step as `end_step` does, and takes the time of that."""

        def timed_end_step(number: int) -> bool:
            self._ended += 1
            if self._ended < self.due - _STEPS:
                # Long before the next decision: what it takes to measure would be paid, too.
                self._marks_ns = self._ended_ns = None
                return end_step(number)
            goes_on_timed = True
            begun_ns, marks_ns = self._now_ns(), self._marks_ns
            read_ns = self._inquiry.read_ns
            if self._ended_ns is not None:
                self._steps_ns.append(begun_ns - self._ended_ns)
            self._ended_ns = begun_ns
            try:
                goes_on_timed = end_step(number)
                return goes_on_timed
            finally:
                if marks_ns is not None:
                    # What was read in it is counted for itself.
                    begun_ns += self._inquiry.read_ns - read_ns
                    self._costs_ns.append(marks_ns + self._now_ns() - begun_ns)
                    self._marks_ns = None
                    self._look_at_reading()
                elif not goes_on_timed:
                    self._quiet_ns.append(self._now_ns() - begun_ns)

        return timed_end_step

    def decide(self, every_n_steps: int) -> int:
        """Returns of how many steps one is to be timed from here on. Must be asked at `due`.

        Args:
            every_n_steps: What it is now.
        """
        self.due += min(self.due, _MOST)
        n = self._wish(every_n_steps)
        if self._agreement is not None:
            # It may wait for others, once: that is no part of the step that has begun.
            self._recorder.pause()
            n = self._agreement.agree(n)
            self._recorder.resume()
        self._tell(n)
        return n

    def _look_at_reading(self) -> None:
        read_ns = self._inquiry.read_ns
        before_ns, before = self._read
        n = self._results.sums.step.n
        if read_ns > before_ns and n > before:
            self._readings_ns.append((read_ns - before_ns) / (n - before))
        self._read = read_ns, n

    def _wish(self, every_n_steps: int) -> int:
        if not self._costs_ns or not self._steps_ns:
            return every_n_steps
        # Medians: what is cold, an evaluation, a log or a wait now and then is no part of them.
        cost_ns = statistics.median(self._costs_ns)
        if self._readings_ns:
            cost_ns += statistics.median(self._readings_ns)
        cost_ns *= _UNSEEN
        # Nothing of this is known before the first step that passes.
        quiet_ns = _QUIET * statistics.median(self._quiet_ns or [0])
        self._look_at_waits(cost_ns / every_n_steps + quiet_ns, cost_ns)
        free_ns = self._most * statistics.median(self._steps_ns) + self._spare_ns - quiet_ns
        return min(max(math.ceil(cost_ns / free_ns), 1), MOST_APART) if free_ns > 0 else MOST_APART

    def _look_at_waits(self, spent_ns: float, cost_ns: float) -> None:
        sums = self._results.sums
        n, waited_ms = sums.step.n - self._waited[0], sums.wait_ms - self._waited[1]
        if n < _ENOUGH or not self._waits_are_free:
            return
        self._waited = sums.step.n, sums.wait_ms
        spare_ns = waited_ms / n * 1e6
        # Without what it has spent on each step the host would have waited longer.
        self._spare_ns = spare_ns + spent_ns if spare_ns > _CERTAIN * cost_ns else 0

    def _tell(self, every_n_steps: int) -> None:
        self._results.one_in, self._results.max_overhead = every_n_steps, self._most
        self._means.timed_share = 1 / every_n_steps


def budget_of(
    options: Options,
    clock: Clock,
    recorder: Recorder,
    inquiry: Inquiry,
    results: Results,
    means: MeanLog,
) -> Budget | None:
    """Returns the budget that the options ask for, if they do."""
    if options.max_overhead is None:
        return None
    return Budget(
        options.max_overhead,
        clock,
        recorder,
        inquiry,
        results,
        means,
        lag=options.lag,
        warmup_steps=options.warmup_steps,
        agreement=open_agreement() if options.sync_ranks else None,
    )
