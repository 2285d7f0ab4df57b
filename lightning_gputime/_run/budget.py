"""What timing costs the host, and how many steps may be timed for that."""

import math
import statistics
from collections.abc import Callable
from typing import TypeVar

from lightning_gputime._causes.inquiry import Inquiry
from lightning_gputime._options import Options
from lightning_gputime._record.clock import Clock
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._results.means import MeanLog
from lightning_gputime._results.results import Results
from lightning_gputime._run.agreement import Agreement, open_agreement

# So many steps are timed before the first decision, and at most pass between two.
_FIRST, _MOST = 64, 4096

# The clock is read inside the hooks: what is around them is not seen. It was a fifth of what the
# package runs for a timed step beyond a quiet one, see `benchmarks/host_counts.py`.
_UNSEEN = 1.25

# Waits shorter than this part of the cost may be chance.
_CERTAIN = 0.1

# At least one step in so many is timed, whatever it costs.
_WIDEST = 1000

R = TypeVar("R")


class Budget:
    """Says how far apart timed steps must lie, so that timing takes no more than a part of a run.

    It takes the time of each mark, of the end of each timed step, and of the reading. What the host
    waits for the device anyway is free: where the device sets the pace, every step is timed.

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
        # Of the steps since the last decision: what each cost that was timed, without its reading,
        # and the host's time from one end to the next.
        self._costs_ns: list[int] = []
        self._steps_ns: list[int] = []
        # What the marks of the open step have cost; None without one.
        self._marks_ns: int | None = None
        self._ended_ns: int | None = None
        # What had been seen at the last decision, see `_seen`.
        self._before = (0, 0, 0.0)
        self._tell(1)
        recorder.tell_cost(self._mark_took)

    def _mark_took(self, ns: int) -> None:
        self._marks_ns = (self._marks_ns or 0) + ns

    def around(self, end_step: Callable[[int], R]) -> Callable[[int], R]:
        """Returns what ends a step as `end_step` does, and takes the time of that."""

        def timed_end_step(number: int) -> R:
            begun_ns, marks_ns = self._now_ns(), self._marks_ns
            if self._ended_ns is not None:
                self._steps_ns.append(begun_ns - self._ended_ns)
            self._ended_ns = begun_ns
            try:
                return end_step(number)
            finally:
                if marks_ns is not None:
                    self._costs_ns.append(marks_ns + self._now_ns() - begun_ns)
                    self._marks_ns = None

        return timed_end_step

    def decide(self, every_n_steps: int) -> int:
        """Returns of how many steps one is to be timed from here on. Must be asked at `due`.

        Args:
            every_n_steps: What it is now.
        """
        self.due += min(self.due, _MOST)
        n = self._wish(every_n_steps)
        if self._agreement is not None:
            n = self._agreement.agree(n)
        self._tell(n)
        return n

    def _wish(self, every_n_steps: int) -> int:
        costs_ns, self._costs_ns = self._costs_ns, []
        steps_ns, self._steps_ns = self._steps_ns, []
        seen = self._seen()
        read_ns, n, waited_ms = (now - then for now, then in zip(seen, self._before, strict=True))
        if not costs_ns or not steps_ns or not n:
            return every_n_steps
        self._before = seen
        # Medians: an evaluation, a log or a wait now and then is no part of them.
        cost_ns = (statistics.median(costs_ns) + read_ns / n) * _UNSEEN
        free_ns = self._most * statistics.median(steps_ns)
        spare_ns = waited_ms / n * 1e6
        if self._waits_are_free and spare_ns > _CERTAIN * cost_ns:
            # Without the steps that were timed the host would have waited longer.
            free_ns += spare_ns + cost_ns / every_n_steps
        return min(max(math.ceil(cost_ns / free_ns), 1), _WIDEST) if free_ns else _WIDEST

    def _seen(self) -> tuple[int, int, float]:
        """How long reading has taken (in nanoseconds), of how many steps; how long they waited."""
        sums = self._results.sums
        return self._recorder.read_ns + self._inquiry.read_ns, sums.step.n, sums.wait_ms

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
