"""Where steps go when they were read, and when a log is due."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from lightning_gputime._causes.analyzer import SlowStepAnalyzer
from lightning_gputime._options import Options
from lightning_gputime._record.pending_steps import BATCH
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.means import MeanLog
from lightning_gputime._results.observers import ReadSteps, call_safely, methods, step_calls
from lightning_gputime._session.rank_comparer import RankComparer


class StepDispatcher:
    """Hand the steps that were read to all observers, in order, and know when a log is due."""

    def __init__(
        self, observers: Sequence[Any], means: MeanLog, ranks: RankComparer, options: Options
    ) -> None:
        self._observers = [*observers, *options.observers]
        self._means, self._ranks = means, ranks
        self._warmup = options.timed_warmup_steps
        self._calls = methods(observers, "steps_read")
        # The numbers of the last steps that ended and were due, as many as are needed to know which
        # one ended `lag` steps ago: every rank has read it by now, if it was timed.
        self._ended: deque[int] = deque(maxlen=options._lag + 1)
        self.due = -math.inf  # From this number on a step is the next to be logged; at first, any.

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
        call_safely(methods(self._observers, "remove"))


class UserCalls:
    """Call the observers of the user's, and a progress bar, with the steps that were read.

    The analyzer notes when the calls run: that may be why a step is slow.
    """

    def __init__(
        self, observers: Sequence[Any], bars: Sequence[Any], analyzer: SlowStepAnalyzer
    ) -> None:
        own = step_calls(observers)
        self._on_step = [*own, *bars]
        self._on_slow_step = methods(observers, "on_slow_step")
        told = {"observers": own or self._on_slow_step, "the progress bar": bars}
        self._names = " or ".join(name for name, calls in told.items() if calls)
        self._analyzer = analyzer
        # Number of steps that may be handed over together: an observer, or the progress bar, shall
        # have each step as soon as it can be read.
        self.batch = 1 if self._on_step else BATCH

    def steps_read(self, steps: ReadSteps) -> None:
        """Call them. They may read the timer, which has the steps by now, or remove it."""
        slow = self._analyzer.newest
        if not self._on_step and not slow:
            return
        self._analyzer.start_own_call()
        for step in steps if self._on_step else ():
            call_safely(self._on_step, step.times())
        for one in slow:
            call_safely(self._on_slow_step, one)
        self._analyzer.end_own_call(self._names)
        self._analyzer.start_own_call()  # Loggers are next.
