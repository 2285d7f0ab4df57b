"""Comparison of ranks, and the exchange of their times."""

import itertools
import json
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch.distributed

from lightning_gputime._measurement.means import MeanLog
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.ranks import BatchMeans, RankTotals, compare, since, totals_of
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.sums import Sums
from lightning_gputime._messages import messages
from lightning_gputime._options import Options
from lightning_gputime._phases import StepRecord
from lightning_gputime._session.rank_store import deadline_in, open_store, wait_for

_TIMEOUT_S = 3.0
"""Maximum time to wait for late ranks at the end. When a process dies, Lightning's launcher ends
the others after 5 s. This must be shorter, so that the next collective can raise a more helpful
error first."""

_KEPT_ROUNDS = 10  # A rank deletes what it sent this many rounds ago.
_MAX_OPEN_ROUNDS = 5  # Rank zero compares older rounds without the ranks that are missing.

_ABSENT = (
    "The times of these ranks did not arrive, and are left out until they do: %s. Attach the same"
    " timers on all ranks, in the same order, and run the same number of steps."
)


class RankComparer:
    """Comparison of the ranks over the same steps, regardless of how many each rank has read.

    Ranks do not wait for each other during training. In a collective, all ranks would wait, and
    each would count the wait as its own time. Instead, rank zero compares the times that have
    arrived. Later times are added by the next comparison, or when the user reads the results.
    """

    def __init__(self, results: Results, means: MeanLog, options: Options) -> None:
        self._results, self._means = results, means
        self._exchange = open_exchange() if options.sync_ranks else None
        self._at_logs = options.sync_ranks == "log"
        self._is_logged = "ranks" in options.logged_groups
        # Newest steps, to subtract those that other ranks may not have read.
        self._recent: deque[StepRecord] = deque(maxlen=options._lag + 1)
        self._local = BatchMeans()
        self._compared = -1  # Number of the last step that `compare_all` has compared.
        self._before: dict[int, RankTotals] = {}  # Newest totals of each rank.
        self.due_step: int | None = None
        """Number of the last step of the comparison that is due; None if none is due."""

    @property
    def is_on(self) -> bool:
        return self._exchange is not None

    def steps_read(self, steps: ReadSteps) -> None:
        if self._exchange is not None:
            self._recent.extend(steps.measured)
            self._local.add(steps.measured)

    def log_is_due(self, finished: int) -> None:
        """Record that a log is due of the steps up to `finished`, which all ranks have read."""
        if self._at_logs and self._exchange is not None:
            self.due_step = finished

    def compare_if_due(self) -> None:
        """Compare the ranks if that is due. All ranks must call it at the end of the same step."""
        finished, self.due_step = self.due_step, None
        # Skip the steps that were already compared at the end of an epoch.
        if finished is not None and finished >= self._means.next_due(self._compared):
            # Other ranks may not have read later steps, so subtract these.
            later = Sums(step for step in self._recent if step.number > finished)
            self._send(since(self._totals(), totals_of(later)), finished)
            self.compare_arrived()

    def compare_all(self, newest: int | None) -> None:
        """Compare the ranks over all steps that were read. All ranks must call it."""
        if newest is not None:
            self._compared = newest
        self._send(self._totals())
        self.compare_arrived()

    def compare_arrived(self) -> None:
        """Compare the times that all ranks have sent so far, without waiting."""
        if self._exchange is not None:
            self._compare(self._exchange, wait=False)

    def finish(self) -> None:
        """Compare the ranks for the last time, after `compare_all`.

        Other ranks may still be training. Rank zero waits for them here only if the comparison is
        logged. Otherwise the first reader of the results waits.
        """
        if (exchange := self._exchange) is None:
            return
        if self._is_logged:
            self._compare(exchange, wait=True)
        elif exchange.is_waiting:
            self._results.ranks.complete_later(partial(self._compare, exchange, wait=True))

    def remove(self) -> None:
        self._exchange = None

    def _totals(self) -> RankTotals:
        return totals_of(self._results.sums, self._local.deviation_ms)

    def _send(self, totals: RankTotals, finished: float = math.inf) -> None:
        if self._exchange is not None:
            number = int(min(finished, max(self._means.newest or 0, 0)))
            try:
                self._exchange.send(totals, number)
            except Exception as error:
                self._give_up(error)

    def _compare(self, exchange: "Exchange", *, wait: bool) -> None:
        try:
            for number, gathered in exchange.arrived(wait=wait):
                before = self._before
                windows = {rank: since(now, before.get(rank)) for rank, now in gathered.items()}
                # Absent ranks keep the totals that they sent last.
                before.update(gathered)
                if len(before) > 1:
                    self._results.ranks.add(compare(before))
                if len(windows) > 1 and (ranks := compare(windows)) is not None:
                    metrics = {f"ranks/{key}": value for key, value in ranks.metrics().items()}
                    self._means.writer.write(metrics, number)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        messages.warning("The times of the ranks are no longer compared: %r", error)
        self.remove()


class Exchange:
    """Exchange of totals: each rank sends them to rank zero, without waiting.

    Each call of `send` is a round: all ranks must call it equally often.

    Args:
        store: Store of the process group for this purpose.
        rank: Number of this rank.
        world_size: Number of ranks.
        timeout_s: Maximum time for which rank zero waits for late ranks (in seconds).
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, *, timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, range(world_size)
        self._timeout_s = timeout_s
        self._rounds = itertools.count()
        # On rank zero: its totals and the number of their last step, by round, until the totals of
        # all other ranks have arrived.
        self._open: dict[int, tuple[int, RankTotals]] = {}
        # On rank zero: ranks that were late last time, and ranks that a warning has reported.
        self._late, self._reported = set[int](), set[int]()

    @property
    def is_waiting(self) -> bool:
        """True if totals of other ranks are still to arrive."""
        return bool(self._open)

    def send(self, totals: RankTotals, number: int) -> None:
        """Send the totals of the steps up to this number, without waiting."""
        round_ = next(self._rounds)
        if self._rank == 0:
            self._open[round_] = number, totals
            return
        self._store.set(f"{round_}/{self._rank}", json.dumps(asdict(totals)))
        # Rank zero does not read older totals.
        self._store.delete_key(f"{round_ - _KEPT_ROUNDS}/{self._rank}")

    def arrived(self, *, wait: bool) -> Iterator[tuple[int, dict[int, RankTotals]]]:
        """Yield the rounds that all ranks have sent, oldest first. Call only on rank zero.

        A round consists of the number of its last step and the totals by rank. With `wait`, wait
        up to `timeout_s` for late ranks, then leave them out.
        """
        deadline = deadline_in(self._timeout_s, self._store) if wait else -math.inf
        newest = max(self._open, default=0)
        for round_, (number, totals) in [*self._open.items()]:
            is_final = wait or round_ <= newest - _MAX_OPEN_ROUNDS
            arrived = self._arrived_ranks(round_, deadline, is_final=is_final)
            if arrived is None:
                return
            del self._open[round_]
            keys = [f"{round_}/{rank}" for rank in arrived]
            values = self._store.multi_get(keys) if keys else []
            received = [RankTotals(**json.loads(value)) for value in values]
            yield number, {0: totals, **dict(zip(arrived, received, strict=True))}

    def _arrived_ranks(self, round_: int, deadline: float, *, is_final: bool) -> list[int] | None:
        """Return the ranks whose totals of a round have arrived; None if it is too early."""
        # Do not wait for a late rank until its totals of the round before have arrived.
        late = {rank for rank in self._late if not self._store.check([f"{round_ - 1}/{rank}"])}
        awaited = {f"{round_}/{rank}": rank for rank in self._ranks[1:] if rank not in late}
        if not is_final and not self._store.check([*awaited]):
            return None
        arrived = [awaited[key] for key in wait_for(self._store, [*awaited], deadline)]
        self._late = late.union(awaited.values()).difference(arrived)
        if new := sorted(self._late - self._reported):
            self._reported.update(new)
            messages.warning(_ABSENT, ", ".join(map(str, new)))
        return arrived


def open_exchange() -> Exchange | None:
    """Return an exchange between the ranks of the process group; None for a single rank."""
    store = open_store("ranks")
    if store is None:
        return None
    return Exchange(store, torch.distributed.get_rank(), torch.distributed.get_world_size())
