"""When the ranks of a distributed run are set beside each other, and over which steps."""

from collections import deque
from collections.abc import Sequence

from lightning_gputime._boundaries.boundaries import Boundaries
from lightning_gputime._messages import messages
from lightning_gputime._options import Options
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.means import MeanLog
from lightning_gputime._results.ranks import ITEMS_TIME, Noise, Totals, compare, since, totals_of
from lightning_gputime._results.results import Results
from lightning_gputime._results.sums import Sums
from lightning_gputime._run.exchange import Exchange, open_exchange


class Comparison:
    """Compares the ranks, in the same steps on all of them, whatever each has read.

    Args:
        results: This rank's steps: their sums are compared, and they keep the outcome.
        means: Log the outcome, under the number of a step.
        options: When: never, at each `sync`, or also at each log; and the lag of the recorder.
    """

    def __init__(self, results: Results, means: MeanLog, options: Options) -> None:
        self._results = results
        self._means = means
        self._exchange: Exchange | None = None
        if options.sync_ranks:
            try:
                self._exchange = open_exchange()
            except Exception as error:
                self._give_up(error)
        self._at_logs = options.sync_ranks == "log"
        # The newest steps: what a rank has read before the others must is not compared yet.
        self._recent: deque[StepRecord] = deque(maxlen=options.lag + 1)
        self._noise = Noise()
        self.boundaries: Boundaries | None = None
        """Have seen how the ranks share the work, once they are there."""
        # The number of the last step that `sync` has compared.
        self._synced = -1
        self._before: dict[int, Totals] = {}
        self.owed: int | None = None
        """The number up to which the ranks are to be compared when a step is over; else None."""

    @property
    def is_on(self) -> bool:
        """Whether there are other ranks, and they are compared."""
        return self._exchange is not None

    def add(self, steps: Sequence[StepRecord]) -> None:
        """Takes the steps that were read, those of the warm-up left out."""
        if self._exchange is not None:
            self._recent.extend(steps)
            self._noise.add(steps)

    def log_is_due(self, finished: int) -> None:
        """Must be told where a log is due; then, with "log", a comparison is.

        Args:
            finished: The number of the newest step that every rank has read by now.
        """
        if self._at_logs and self._exchange is not None:
            self.owed = finished

    def pay(self) -> None:
        """Compares the ranks as owed. All ranks call it at the end of the same step."""
        finished, self.owed = self.owed, None
        # Not when a step is read: one rank may read it a step later than another, and wait there
        # for the other.
        # Nor where the end of an epoch has compared them since: once is enough.
        if finished is not None and finished >= self._means.next_due(self._synced):
            early = Sums(step for step in self._recent if step.number > finished)
            self._compare(since(self._totals(), totals_of(early)), min(finished, self._newest_read))

    def sync(self, newest: int | None) -> None:
        """Compares the ranks, in all that was read up to here. All ranks must call it.

        Args:
            newest: The number of the last step that has ended, if one has.
        """
        if newest is not None:
            self._synced = newest
        self._compare(self._totals(), self._newest_read)

    def end(self) -> None:
        """Waits for no rank any more."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            try:
                exchange.leave()
            except Exception as error:
                # The first process, which has the store, may have ended before this one.
                messages.debug("This rank could not say that it leaves: %r", error)

    def abandon(self) -> None:
        """Forgets the other ranks, and does not tell them."""
        self._exchange = None

    def _totals(self) -> Totals:
        with_host = not self._results.on_host_clock
        stage = self.boundaries.stage if self.boundaries is not None else None
        totals = totals_of(self._results.sums, self._noise, stage, with_host=with_host)
        if self.boundaries is not None and self.boundaries.shares_batches:
            # They would be counted once a rank.
            return {name: one for name, one in totals.items() if name != ITEMS_TIME}
        return totals

    @property
    def _newest_read(self) -> int:
        return max(self._means.newest or 0, 0)

    def _compare(self, totals: Totals, number: int) -> None:
        # Inside DDP's join this rank may be waited for, in a collective.
        is_joining = self.boundaries is not None and self.boundaries.is_joining
        if self._exchange is None or is_joining:
            return
        try:
            gathered = self._exchange.gather(totals)
            windows = {
                rank: since(now, self._before.get(rank, {})) for rank, now in gathered.items()
            }
            # A rank that has left stays in the summary, with what it sent last.
            self._before.update(gathered)
            # Comparing needs two; on the ranks but zero nothing was gathered.
            if len(self._before) > 1:
                self._results.ranks = compare(self._before)
            if len(windows) > 1 and (ranks := compare(windows)) is not None:
                metrics = {f"ranks/{key}": value for key, value in ranks.metrics().items()}
                self._means.log_values(metrics, number)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        messages.warning("The times of the ranks are not compared any more: %r", error)
        self.end()
