"""Exchange between the ranks: their times, and which steps they time.

All goes through the store of the process group. A missing rank would block a collective, whose
timeout ends the process group. With the store, each rank writes its values and continues.
"""

import itertools
import json
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed

from lightning_gputime._attribution.surroundings import Surroundings
from lightning_gputime._compat.torch_ import default_store
from lightning_gputime._instrumentation.loop import is_distributed
from lightning_gputime._ledger.ledger import MIN_EXAMINED
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.sums import Sums
from lightning_gputime._messages import messages
from lightning_gputime._options import Options
from lightning_gputime._output.loggers import MeanLog
from lightning_gputime._phases import StepRecord
from lightning_gputime._ranks import (
    BatchContent,
    BatchMeans,
    LineTime,
    RankTotals,
    decode,
    encode,
    line_times,
    since,
    totals_of,
)
from lightning_gputime._ranks.comparison import compare

# Maximum time to wait for late ranks at the end. When a process dies, Lightning's launcher ends the
# others after 5 s. The timeout must be shorter, so that the next collective can raise an error that
# helps more.
_TIMEOUT_S = 3.0
# Maximum wait for rank zero. Rarely needed, because ranks in training are less than a round apart.
_AGREEMENT_TIMEOUT_S = 1.0

_ABSENT = (
    "The times of these ranks did not arrive, and are left out until they do: %s. Attach the same"
    " timers on all ranks, in the same order, and run the same number of steps."
)
_NO_AGREEMENT = (
    "The ranks no longer agree on which steps are timed: %r. This rank times %s from now on, so the"
    " ranks may be compared over different steps. Attach the same timer on all ranks, or pass"
    " sync_ranks=False."
)

# Numbers for the stores that are opened, by purpose.
_numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)


def open_store(purpose: str) -> Any:
    """Return a store for one purpose, which all ranks share; None for a single rank."""
    if not is_distributed():
        return None
    try:
        # Imported here, because torch can be built without it.
        from torch.distributed.distributed_c10d import PrefixStore

        # Ranks attach their timers in the same order, so their numbers agree.
        prefix = f"lightning_gputime/{purpose}/{next(_numbers[purpose])}"
        store = default_store()
        return None if store is None else PrefixStore(prefix, store)
    except Exception as error:
        messages.warning("The times of the ranks are not compared: %r", error)
        return None


def deadline_in(timeout_s: float, store: Any) -> float:
    """Return the time in `timeout_s`, or in a third of the store's timeout if that is shorter.

    Other ranks may be waiting for this rank in a collective, which has the timeout of the store.
    """
    return time.monotonic() + min(timeout_s, float(store.timeout.total_seconds()) / 3)


def wait_for(store: Any, keys: list[str], deadline: float) -> list[str]:
    """Wait for all keys until the deadline of `deadline_in`. Return the keys that are written."""
    # Poll, because `store.wait` prints a message after a timeout.
    while keys and not store.check(keys):
        if time.monotonic() >= deadline:
            return [key for key in keys if store.check([key])]
        time.sleep(0.001)
    return keys


class RankComparer:
    """Comparison of the ranks over the same steps, regardless of how many each rank has read.

    Ranks do not wait for each other during training: waiting in a collective would count as time of
    the step. Instead, rank zero compares the times that have arrived. Later times are added by the
    next comparison, or when the user reads the results.
    """

    def __init__(
        self, results: Results, means: MeanLog, options: Options, surroundings: Surroundings
    ) -> None:
        self._results, self._means, self._surroundings = results, means, surroundings
        self._exchange = open_exchange() if options.sync_ranks else None
        self._at_logs = options.sync_ranks == "log"
        self._is_logged = "ranks" in options.logged_groups
        # Newest steps. `compare_if_due` subtracts the steps that other ranks may not have read.
        self._recent: deque[StepRecord] = deque(maxlen=options._lag + 1)
        self._local = BatchMeans()  # Noise of this rank's time without waiting for other ranks.
        self._compared = -1  # Number of the last step that `compare_all` has compared.
        self._newest: dict[int, RankTotals] = {}  # Newest totals that arrived, by rank.
        # Lines of this rank, and the number of examined steps that they are from.
        self._lines: tuple[int, Sequence[LineTime]] = 0, ()
        self.due_step: int | None = None
        """Number of the last step of the comparison that is due; None if none is due."""

    @property
    def is_on(self) -> bool:
        """True if this rank sends its times."""
        return self._exchange is not None

    def steps_read(self, steps: ReadSteps) -> None:
        if self._exchange is not None:
            self._recent.extend(steps.measured)
            self._local.add(steps.measured)

    def schedule(self, finished: int) -> None:
        """Schedule a comparison of the steps up to the number `finished`, which all ranks read."""
        if self._at_logs and self._exchange is not None:
            self.due_step = finished

    def compare_if_due(self) -> None:
        """Compare the ranks if that is due. All ranks must call it at the end of the same step."""
        finished, self.due_step = self.due_step, None
        # Skip the steps that were already compared at the end of an epoch.
        if finished is not None and finished >= self._means.next_due(self._compared):
            # Subtract the steps after `finished`, which other ranks may not have read.
            later = Sums(step for step in self._recent if step.number > finished)
            self._send(lambda: since(self._totals(), totals_of(later)), finished)
            self.compare_arrived()

    def compare_all(self, newest: int | None) -> None:
        """Compare the ranks over all steps that were read. All ranks must call it.

        `newest` is the number of the last of these steps; None before the first.
        """
        if newest is not None:
            self._compared = newest
        self._send(partial(self._totals, with_details=True))
        self.compare_arrived()

    def compare_arrived(self) -> None:
        """Compare the ranks by all times that have arrived, without waiting."""
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

    def _totals(self, *, with_details: bool = False) -> RankTotals:
        """Return the totals of this rank.

        Details are its lines, its batches and its times over the run.
        """
        results, ledger = self._results, self._results.ledger
        totals = totals_of(results.sums, self._local.deviation_ms)
        if not with_details:
            return totals
        top = [name for name in totals.phases if "/" not in name]
        shares, busy_ms = {}, None
        # With fewer examined steps, phases show their pace less exactly.
        if ledger.n >= MIN_EXAMINED:
            # Computing lines takes milliseconds, so do it only if more steps were examined.
            if ledger.n > self._lines[0]:
                self._lines = ledger.n, line_times(results.line_rows())
            busy_ms = ledger.busy_ms()
            shares = ledger.host_shares()
        if results.on_host_clock:
            shares = dict.fromkeys(top, 1.0)
        return replace(
            totals,
            host_shares={name: round(shares[name], 3) for name in top if name in shares},
            lines=self._lines[1],
            busy_ms=busy_ms and round(busy_ms, 3),
            core_wait=self._surroundings.core_wait,
            batch=BatchContent(*self._surroundings.batches.mean_content()),
            windows=self._local.windows,
        )

    def _send(self, totals: Callable[[], RankTotals], last: float = math.inf) -> None:
        """Send the totals of the steps up to the number `last`; by default, of all steps."""
        if self._exchange is not None:
            number = int(min(last, max(self._means.newest or 0, 0)))
            try:
                self._exchange.send(totals(), number)
            except Exception as error:
                self._give_up(error)

    def _compare(self, exchange: "Exchange", *, wait: bool) -> None:
        try:
            for number, totals in exchange.arrived(wait=wait):
                newest = self._newest
                # Log a comparison since the last totals of each rank.
                added = {rank: since(now, newest.get(rank)) for rank, now in totals.items()}
                # Report a comparison of the run so far. Absent ranks keep their last totals.
                for rank, now in totals.items():
                    if now.windows is None and rank in newest:  # Sent without details.
                        phases, deviation_ms = now.phases, now.deviation_ms
                        now = replace(newest[rank], phases=phases, deviation_ms=deviation_ms)
                    newest[rank] = now
                if len(newest) > 1:
                    self._results.ranks.compare_later(newest)
                if len(added) > 1 and (ranks := compare(added)) is not None:
                    metrics = {f"ranks/{key}": value for key, value in ranks.metrics().items()}
                    self._means.writer.write(metrics, number)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        messages.warning("The times of the ranks are no longer compared: %r", error)
        self.remove()


class Exchange:
    """Exchange of totals: each rank sends its totals to rank zero, without waiting.

    Each call of `send` is a round: all ranks must call it equally often. Rank zero waits for late
    ranks for up to `timeout_s`.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, *, timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, range(world_size)
        self._timeout_s = timeout_s
        self._rounds = itertools.count()
        # All on rank zero. By open round, for which totals of other ranks are still to arrive: the
        # number of the last step, and the totals of rank zero.
        self._open: dict[int, tuple[int, RankTotals]] = {}
        self._late = set[int]()  # Ranks without totals in the newest round that was closed.
        self._reported = set[int]()  # Late ranks that a warning has named.

    @property
    def is_waiting(self) -> bool:
        """True if totals of other ranks are still to arrive."""
        return bool(self._open)

    def send(self, totals: RankTotals, number: int) -> None:
        round_ = next(self._rounds)
        if self._rank == 0:
            self._open[round_] = number, totals
            return
        self._store.set(f"{round_}/{self._rank}", encode(totals))
        # Rank zero has closed older rounds, and does not read their totals.
        self._store.delete_key(f"{round_ - 10}/{self._rank}")

    def arrived(self, *, wait: bool) -> Iterator[tuple[int, dict[int, RankTotals]]]:
        """Yield and close the rounds of which all totals have arrived. Start with the oldest.

        Yield the number of the round's last step, and the totals by rank. With `wait`, wait up to
        `timeout_s` for late ranks, then leave them out. Old rounds are closed without late ranks.
        """
        deadline = deadline_in(self._timeout_s, self._store) if wait else -math.inf
        newest = max(self._open, default=0)
        for round_, (number, totals) in [*self._open.items()]:
            closes = wait or round_ <= newest - 5
            ranks = self._arrived_ranks(round_, deadline, closes=closes)
            if ranks is None:
                return
            del self._open[round_]
            keys = [f"{round_}/{rank}" for rank in ranks]
            values = self._store.multi_get(keys) if keys else []
            received = [*map(decode, values)]
            yield number, {0: totals, **dict(zip(ranks, received, strict=True))}

    def _arrived_ranks(self, round_: int, deadline: float, *, closes: bool) -> list[int] | None:
        """Return the other ranks whose totals of a round have arrived.

        Return None if totals are missing, unless `closes` is set: then wait until the deadline.
        """
        # Do not wait for a late rank until its totals of the round before have arrived.
        late = {rank for rank in self._late if not self._store.check([f"{round_ - 1}/{rank}"])}
        awaited = {f"{round_}/{rank}": rank for rank in self._ranks[1:] if rank not in late}
        if not closes and not self._store.check([*awaited]):
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


class Agreement:
    """Agreement of the ranks: all follow rank zero. All ranks must call `agree` equally often."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._rounds = itertools.count()
        self._agreed = [1]  # Result of the newest round: at first, time every step.
        self._has_failed = False  # True once an exchange has failed: keep the last agreement.

    def agree(self, wish: Sequence[int]) -> list[int]:
        """Start a round. Return the wish of rank zero in the round before, which all ranks follow.

        The first number of a wish is `n` to time 1 of `n` steps. No rank waits as long as the ranks
        are less than one round apart.
        """
        if self._has_failed:
            return self._agreed
        round_ = next(self._rounds)
        try:
            if self._rank == 0:
                self._store.set(f"{round_}/agreed", json.dumps([*wish]))
            if round_:
                agreed = f"{round_ - 1}/agreed"
                deadline = deadline_in(_AGREEMENT_TIMEOUT_S, self._store)
                if not wait_for(self._store, [agreed], deadline):
                    raise TimeoutError("rank 0 has not answered")
                self._agreed = [*map(int, json.loads(self._store.get(agreed)))]
        except Exception as error:
            self._has_failed, n = True, self._agreed[0]
            timed = "every step" if n == 1 else f"1 of every {n} steps"
            messages.warning(_NO_AGREEMENT, error, timed)
        return self._agreed
