"""Where steps go when they were read, and when a log is due."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from lightning_gputime._boundaries.forward import is_metric
from lightning_gputime._causes.analyzer import SlowStepAnalyzer
from lightning_gputime._messages import messages
from lightning_gputime._options import Options
from lightning_gputime._record.pending_steps import BATCH
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.means import MeanLog
from lightning_gputime._results.observers import ReadSteps, call_safely, methods
from lightning_gputime._results.slow import SlowStep
from lightning_gputime._session.rank_comparer import RankComparer


class StepDispatcher:
    """Hand the steps that were read to all observers, and know when a log is due.

    Args:
        observers: Are told of steps, in this order.
        means: Log every step; one of the observers.
        ranks: Compare ranks at each log, if that is wanted.
        options: Have the lag of the recorder, and the number of warm-up steps.
    """

    def __init__(
        self,
        observers: Sequence[Any],
        means: MeanLog,
        ranks: RankComparer,
        options: Options,
    ) -> None:
        self.observers = observers
        self._means, self._ranks = means, ranks
        self._warmup = options.timed_warmup_steps
        self._calls = methods(observers, "steps_read")
        # The numbers of the last steps that ended and were due, as many as are needed to know which
        # one ended `lag` steps ago: every rank has read it by now, if it was timed.
        self._ended: deque[int] = deque(maxlen=options.lag + 1)
        self.due = -math.inf
        """From this number on a step is the next to be logged; at first, any."""

    def end_due_step(self, number: int) -> None:
        """Note the end of the first step, or of one that is due: others need not be noted."""
        if self.due == -math.inf:
            self._means.start(number - 1)
            self.due = self._means.next_due(number - 1)
        ended = self._ended
        ended.append(number)
        if len(ended) == ended.maxlen and ended[0] >= self.due:
            finished = ended[0]
            self.due = self._means.next_due(finished)
            self._means.note_finished(finished)
            self._ranks.log_is_due(finished)

    def dispatch(self, records: list[StepRecord]) -> None:
        """Hand over the next steps that were read."""
        warmup = min(self._warmup, len(records))
        self._warmup -= warmup
        call_safely(self._calls, ReadSteps(records, warmup))

    def remove(self) -> None:
        """End all observers."""
        call_safely(methods(self.observers, "remove"))


class UserFunctions:
    """Call functions of the user's, and update metrics, with the steps that were read.

    Args:
        options: Have the user's functions.
        on_step: Those that a front end wants to be called with the `StepTimes` of each step, the
            user's included; metrics are updated with them.
        analyzer: Has the slow ones among the newest steps, and notes when the functions run: that
            is a cause, too.
    """

    def __init__(
        self, options: Options, on_step: Sequence[Any], analyzer: SlowStepAnalyzer
    ) -> None:
        # To call a metric would also compute it. Others may have an `update` that is none.
        self._on_step = [one.update if is_metric(one) else one for one in on_step]
        self._on_slow_step = options.on_slow_step
        own = {"on_step": options.on_step, "on_slow_step": options.on_slow_step}
        called = [name for name, one in own.items() if one is not None]
        # What a front end adds to the user's function is its bar.
        called += ["the progress bar"] * (len(on_step) > called.count("on_step"))
        self._names = " or ".join(called)
        self._analyzer = analyzer

    @property
    def batch(self) -> int:
        """Number of steps that may be handed over together."""
        # A function of the user, or the progress bar, shall have each step as soon as it can be
        # read.
        return 1 if self._on_step else BATCH

    def steps_read(self, steps: ReadSteps) -> None:
        """Call them. They may read the timer, which has the steps by now, or remove it."""
        slow = self._analyzer.newest
        if not self._on_step and not slow:
            return
        self._analyzer.start_own_call()
        # Over a copy, because one that fails is taken out.
        for call in [*self._on_step]:
            try:
                for step in steps:
                    call(step.times())
            except Exception as error:
                messages.warning("on_step is called no more, because it failed: %r", error)
                self._on_step.remove(call)
        self._call_slow(slow)
        self._analyzer.end_own_call(self._names)

    def _call_slow(self, slow: Sequence[SlowStep]) -> None:
        if self._on_slow_step is not None:
            try:
                for step in slow:
                    self._on_slow_step(step)
            except Exception as error:
                messages.warning("on_slow_step is called no more, because it failed: %r", error)
                self._on_slow_step = None
