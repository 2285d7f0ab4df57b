"""What becomes of the times of each step while a timer is attached."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from lightning_gputime._events import log
from lightning_gputime._exchange import Exchange, open_exchange
from lightning_gputime._log import PhaseLog
from lightning_gputime._phases import BACKWARD, OPTIMIZER, StepTimes
from lightning_gputime._probe import Probe
from lightning_gputime._ranks import Totals, compare, since, totals_of
from lightning_gputime._raw import RawStep, Sums
from lightning_gputime._recorder import BATCH
from lightning_gputime._results import Results

SyncRanks = bool | Literal["log"]


class Measurement:
    """Hands each step to the results, the log and the user, and compares the ranks.

    Args:
        results: Get every step.
        phase_log: Gets every step.
        sync_ranks: When the ranks are compared: never, at each `sync`, or also at each log.
        lag: That of the recorder.
        on_step: Are called with every step.
        probe: Takes the steps that were probed; nobody else gets them.
    """

    def __init__(
        self,
        results: Results,
        phase_log: PhaseLog,
        *,
        sync_ranks: SyncRanks,
        lag: int,
        on_step: Sequence[Callable[[StepTimes], object]],
        probe: Probe | None = None,
    ) -> None:
        self._results = results
        self._probe = probe
        self._log = phase_log
        self.newest: int | None = None
        """The number of the last step that ended."""
        # Those of the last steps that ended, as many as are needed to know which one ended `lag`
        # steps ago: every rank has read it by now, if it was timed.
        self._ended: deque[int] = deque(maxlen=lag + 1)
        self._finished = -1
        # From this number on a step is the next to be logged.
        self._due = math.inf
        # The number of the last step that `sync` has compared.
        self._synced = -1
        self._on_step = [getattr(one, "update", one) for one in on_step]
        self._at_logs = sync_ranks == "log"
        # The newest steps: what a rank has read before the others must is not compared yet.
        self._recent: deque[RawStep] = deque(maxlen=lag + 1)
        self.owes_log = False
        """Whether a log is due, and the steps for it are not read."""
        self.owes_comparison = False
        """Whether ranks are to be compared when the step is over that has ended last."""
        self._before: dict[int, Totals] = {}
        self._exchange: Exchange | None = None
        if sync_ranks:
            try:
                self._exchange = open_exchange()
            except Exception as error:
                self._give_up(error)

    @property
    def batch(self) -> int:
        """How many steps may be handed over together."""
        return 1 if self._on_step else BATCH

    @property
    def compares_ranks(self) -> bool:
        """Whether there are other ranks, and they are compared."""
        return self._exchange is not None

    @property
    def compares_at_logs(self) -> bool:
        """Whether they are compared at each log."""
        return self._at_logs and self._exchange is not None

    @property
    def _newest_read(self) -> int:
        return max(self._log.newest or 0, 0)

    def add(self, steps: list[RawStep]) -> None:
        """Takes the next steps."""
        if self._probe is not None:
            steps = self._without_probed(steps, self._probe)
            if not steps:
                return
        sums = Sums(steps)
        self._recent.extend(self._results.add(steps, sums))
        if self._log.add(steps, sums):
            self.owes_log = False
        for call in [*self._on_step]:
            try:
                for step in steps:
                    call(step.times())
            except Exception as error:
                log.warning("on_step is called no more, because it failed: %r", error)
                self._on_step.remove(call)

    def _without_probed(self, steps: list[RawStep], probe: Probe) -> list[RawStep]:
        steps = probe.take(steps, self._results.sums)
        newest = None if probe.failure else probe.newest
        self._log.busy = newest.times() if newest is not None else None
        return steps

    def step_ends(self, number: int) -> None:
        """Must be told the number of each step that ends; then says what it owes."""
        if self.newest is None:
            self._log.start(number - 1)
            self._due = self._log.next_due(number - 1)
        self.newest = number
        self._ended.append(number)
        if number >= self._due and len(self._ended) == self._ended.maxlen:
            self._finished = self._ended[0]
            if self._finished >= self._due:
                self._due = self._log.next_due(self._finished)
                read = self._log.newest
                self.owes_log = read is not None and self._finished >= self._log.next_due(read)
                self.owes_comparison = self.compares_at_logs

    def compare_at_log(self) -> None:
        """Compares the ranks, with "log"."""
        self.owes_comparison = False
        # Not when a step is read: one rank may read it a step later than another, and wait there
        # for the other.
        if self._finished >= self._log.next_due(self._synced):
            early = Sums(step for step in self._recent if step.number > self._finished)
            totals = since(totals_of(self._results.sums), totals_of(early))
            self._compare(totals, min(self._finished, self._newest_read))

    def sync(self) -> None:
        """Compares the ranks, in all that was read up to here. All ranks must call it."""
        if self.newest is not None:
            self._synced = self.newest
        self._compare(totals_of(self._results.sums), self._newest_read)

    def end(self, model_was_called: bool = True) -> None:
        """Logs what is left over, and waits for no rank any more."""
        self._log.log()
        ran = self._results.sums.phases
        if BACKWARD in ran and OPTIMIZER in ran and not model_was_called:
            log.warning("No call of the model was seen: is it the module that the loop calls?")
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            try:
                exchange.leave()
            except Exception as error:
                # The first process, which has the store, may have ended before this one.
                log.debug("This rank could not say that it leaves: %r", error)

    def _compare(self, totals: Totals, number: int) -> None:
        if self._exchange is None:
            return
        try:
            gathered = self._exchange.gather(totals)
            windows = {
                rank: since(now, self._before.get(rank, {})) for rank, now in gathered.items()
            }
            self._before.update(gathered)
            # Comparing needs two; on the ranks but zero nothing was gathered.
            if len(self._before) > 1:
                self._results.ranks = compare(self._before)
            if len(windows) > 1 and (ranks := compare(windows)) is not None:
                metrics = {f"ranks/{key}": value for key, value in ranks.metrics().items()}
                self._log.log_now(metrics, number)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        log.warning("The times of the ranks are not compared any more: %r", error)
        self._exchange = None
