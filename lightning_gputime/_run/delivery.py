"""Where steps go when they were read: to the results, the log, the ranks and the user."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lightning_gputime._boundaries.forward import is_metric
from lightning_gputime._causes.analyzer import SlowStepAnalyzer
from lightning_gputime._memory import PhaseMemory
from lightning_gputime._messages import messages
from lightning_gputime._options import Options
from lightning_gputime._record.pending_steps import BATCH
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.means import MeanLog
from lightning_gputime._results.results import Results
from lightning_gputime._results.slow import SlowStep
from lightning_gputime._results.sums import Sums
from lightning_gputime._run.probe import Probe
from lightning_gputime._run.rank_comparer import RankComparer


class Delivery:
    """Hands each step that was read to all who want it, and knows when a log is due.

    Args:
        results: Keep every step for the user.
        means: Log every step.
        comparison: Gets every step but the warm-up.
        analyzer: Says why steps were slow.
        options: Have the lag of the recorder, and who is called with every slow step.
        on_step: Functions that are called with every step, and metrics that are updated with it.
        probe: Takes the steps that were probed; nobody else gets them.
    """

    def __init__(
        self,
        results: Results,
        means: MeanLog,
        comparison: RankComparer,
        analyzer: SlowStepAnalyzer,
        options: Options,
        *,
        on_step: Sequence[Any],
        probe: Probe | None = None,
    ) -> None:
        self._results = results
        self._means = means
        self._comparison = comparison
        self._probe = probe
        self._analyzer = analyzer
        self._on_slow_step = options.on_slow_step
        # To call a metric would also compute it. Others may have an `update` that is none.
        self._on_step = [one.update if is_metric(one) else one for one in on_step]
        own = {"on_step": options.on_step, "on_slow_step": options.on_slow_step}
        called = [name for name, one in own.items() if one is not None]
        # What a front end adds to the user's function is its bar.
        called += ["the progress bar"] * (len(on_step) > called.count("on_step"))
        self._called = " or ".join(called)
        self.observers: list[PhaseMemory] = []
        """Get the steps that were read."""
        self.look: Callable[[], bool] | None = None
        """Is called when steps were read, until it tells that it has seen enough."""
        # The numbers of the last steps that ended, as many as are needed to know which one ended
        # `lag` steps ago: every rank has read it by now, if it was timed.
        self._ended: deque[int] = deque(maxlen=options.lag + 1)
        # From this number on a step is the next to be logged.
        self._due = math.inf
        # Whether such a step has finished and is not read.
        self._owes_log = False

    @property
    def batch(self) -> int:
        """How many steps may be handed over together."""
        # A function of the user, or the progress bar, shall have each step as soon as it can be
        # read.
        return 1 if self._on_step else BATCH

    def step_ends(self, number: int) -> bool:
        """Must be told the number of each step that ends, if it is timed.

        Returns:
            Whether the finished steps must be read now, because they are to be logged.
        """
        ended = self._ended
        if not ended:
            self._means.start(number - 1)
            self._due = self._means.next_due(number - 1)
        ended.append(number)
        if number >= self._due and len(ended) == ended.maxlen and ended[0] >= self._due:
            finished = ended[0]
            self._due = self._means.next_due(finished)
            newest = self._means.newest
            self._owes_log = newest is not None and finished >= self._means.next_due(newest)
            self._comparison.log_is_due(finished)
        return self._owes_log

    def add(self, steps: list[StepRecord]) -> None:
        """Takes the next steps that were read."""
        if self._probe is not None:
            steps = self._without_probed(steps, self._probe)
            if not steps:
                return
        for observer in self.observers:
            observer.steps_read(steps)
        self._add(steps)

    def _add(self, steps: list[StepRecord]) -> None:
        sums = Sums(steps)
        measured = self._results.add(steps, sums)
        self._comparison.steps_read(measured)
        # Before the means, which are of its steps.
        each_ms = sums.each_ms[len(steps) - len(measured) :]
        slow = self._analyzer.steps_read(measured, each_ms)
        self._analyzer.reading_ends()
        if self._means.add(steps, sums):
            self._owes_log = False
            self._analyzer.own_calls.end("logging")
        if self.look is not None and self.look():
            self.look = None
        if self._on_step or slow:
            # Last, as these are the user's: they may read the timer, which has the steps by now, or
            # remove it.
            self._analyzer.own_calls.start()
            self._call(steps)
            self._call_slow(slow)
            self._analyzer.own_calls.end(self._called)

    def _call(self, steps: Sequence[StepRecord]) -> None:
        # Over a copy, because one that fails is taken out.
        for call in [*self._on_step]:
            try:
                for step in steps:
                    call(step.times())
            except Exception as error:
                messages.warning("on_step is called no more, because it failed: %r", error)
                self._on_step.remove(call)

    def _call_slow(self, steps: Sequence[SlowStep]) -> None:
        if self._on_slow_step is not None:
            try:
                for step in steps:
                    self._on_slow_step(step)
            except Exception as error:
                messages.warning("on_slow_step is called no more, because it failed: %r", error)
                self._on_slow_step = None

    def publish(self) -> None:
        """Lets other callbacks find the means of what was read and is not logged yet."""
        self._means.log_means(only_publish=True)

    def end(self) -> None:
        """Logs what is left over."""
        self._means.log_means()

    def _without_probed(self, steps: list[StepRecord], probe: Probe) -> list[StepRecord]:
        steps = probe.take(steps)
        newest = None if self._results.probe_failure else self._results.newest_probed
        self._means.busy = newest.times() if newest is not None else None
        return steps
