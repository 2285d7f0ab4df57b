"""What the ranks of a distributed run tell each other: their times, and how many steps to time."""

import itertools
import json
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch.distributed

from lightning_gputime._compat.torch_ import default_store
from lightning_gputime._instrumentation.comm import is_distributed
from lightning_gputime._measurement.means import MeanLog
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.ranks import BatchMeans, RankTotals, compare, since, totals_of
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.sums import Sums
from lightning_gputime._messages import messages
from lightning_gputime._options import Options
from lightning_gputime._phases import StepRecord

# How many exchanges of a purpose were opened.
_opened: dict[str, Iterator[int]] = defaultdict(itertools.count)

_TIMEOUT_S = 3.0
"""Less than the 5 s after which Lightning's launcher ends this process if another one has died: the
error of the training's next collective is to come first, and says more."""

# Rank zero may be this many comparisons behind.
_KEPT_TURNS = 10
# It compares without the ranks that are this many behind itself: they may have no timer.
_MAX_OPEN_TURNS = 5

# Ranks that train together are never a turn apart: who has said nothing by then has no timer.
_AGREEMENT_TIMEOUT_S = 1.0

_ABSENT = (
    "The times of these ranks did not arrive, and are left out until they do: %s. Give all ranks"
    " the same timers, attached in the same order, and as many steps."
)
_ALONE = (
    "The ranks no longer agree on which steps are timed. On this one %s: give all of them the same"
    " timer, or this one sync_ranks=False. %r"
)


class RankComparer:
    """Compares the ranks, in the same steps on all of them, whatever each has read.

    No rank waits for another one while it trains. In a collective the others would wait for it, and
    book that time as their own. Rank zero compares what has arrived, and the rest later: with the
    next comparison, or when a user reads the results.
    """

    def __init__(self, results: Results, means: MeanLog, options: Options) -> None:
        self._results, self._means = results, means
        self._exchange = open_exchange("ranks") if options.sync_ranks else None
        self._at_logs = options.sync_ranks == "log"
        self._is_logged = "ranks" in options.logged_groups
        # The newest steps: what not every rank must have read yet is not compared yet.
        self._recent: deque[StepRecord] = deque(maxlen=options._lag + 1)
        self._local = BatchMeans()
        self._compared = -1  # The number of the last step that `compare_all` has compared.
        self._before: dict[int, RankTotals] = {}
        # The number up to which to compare the ranks when a step has ended; else None.
        self.due_step: int | None = None

    @property
    def is_on(self) -> bool:
        return self._exchange is not None

    def steps_read(self, steps: ReadSteps) -> None:
        if self._exchange is not None:
            self._recent.extend(steps.measured)
            self._local.add(steps.measured)

    def log_is_due(self, finished: int) -> None:
        """Call where a log is due: with "log", so is a comparison, of steps that all have read."""
        if self._at_logs and self._exchange is not None:
            self.due_step = finished

    def compare_if_due(self) -> None:
        """Compare the ranks if that is due. All ranks call it at the end of the same step."""
        finished, self.due_step = self.due_step, None
        # Not when a step is read: one rank may read it a step later than another. Nor where the end
        # of an epoch has compared them since.
        if finished is not None and finished >= self._means.next_due(self._compared):
            early = Sums(step for step in self._recent if step.number > finished)
            self._send(since(self._totals(), totals_of(early)), finished)
            self.compare_arrived()

    def compare_all(self, newest: int | None) -> None:
        """Compare the ranks in all steps that were read. All ranks must call it."""
        if newest is not None:
            self._compared = newest
        self._send(self._totals())
        self.compare_arrived()

    def compare_arrived(self) -> None:
        """Compare what has arrived from all ranks, without a wait."""
        if self._exchange is not None:
            self._compare(self._exchange, wait=False)

    def finish(self) -> None:
        """Compare the ranks for the last time, after `compare_all`.

        Rank zero waits for late ranks only if the comparison is logged. Else the wait is left to
        the first reader of the results: other ranks may still be training.
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
                # A rank that is absent stays, with what it sent last.
                before.update(gathered)
                if len(before) > 1:
                    self._results.ranks.add(compare(before))
                if len(windows) > 1 and (ranks := compare(windows)) is not None:
                    metrics = {f"ranks/{key}": value for key, value in ranks.metrics().items()}
                    self._means.writer.write(metrics, number)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        messages.warning("The times of the ranks are not compared any more: %r", error)
        self.remove()


class Exchange:
    """What the ranks tell each other, for one purpose, through the store of the process group.

    Not a collective: in one a missing rank would block all others, and end the group when it
    times out. Here each rank writes and continues. All ranks must call a method at the same places
    of the training.

    At the end rank zero waits for late ranks, at most a third of the store's timeout.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, *, timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, range(world_size)
        # The others may wait in a collective for rank zero meanwhile, and raise after their group's
        # timeout, which the store has, too.
        self._timeout_s = min(timeout_s, store.timeout.total_seconds() / 3)
        self._turns = itertools.count()  # One for each call of `send`, or of `agree`.
        # On rank zero: its own totals, and the numbers of their steps, by turn, until the others'
        # have arrived.
        self._open: dict[int, tuple[int, RankTotals]] = {}
        # On rank zero: the others that were late, and those that were told of.
        self._late, self._told = set[int](), set[int]()
        self._agreed, self._is_alone = [1], False

    @property
    def is_waiting(self) -> bool:
        """Whether totals of other ranks are still to arrive."""
        return bool(self._open)

    def send(self, totals: RankTotals, number: int) -> None:
        """Send the `totals` of the steps up to this number, without a wait."""
        turn = next(self._turns)
        if self._rank == 0:
            self._open[turn] = number, totals
            return
        self._store.set(f"{turn}/{self._rank}", json.dumps(asdict(totals)))
        # What rank zero has not read by now, it never will.
        self._store.delete_key(f"{turn - _KEPT_TURNS}/{self._rank}")

    def arrived(self, *, wait: bool) -> Iterator[tuple[int, dict[int, RankTotals]]]:
        """On rank zero yield the turns that all ranks have sent, the oldest first.

        Each is the number of its last step, and the totals by rank. With `wait` the others have a
        bounded time to arrive, and who is late then is left out.
        """
        deadline = time.monotonic() + self._timeout_s if wait else -math.inf
        newest = max(self._open, default=0)
        for turn, (number, totals) in [*self._open.items()]:
            is_last_look = wait or turn <= newest - _MAX_OPEN_TURNS
            there = self._there(turn, deadline, is_last_look=is_last_look)
            if there is None:
                return
            del self._open[turn]
            values = self._store.multi_get([f"{turn}/{rank}" for rank in there]) if there else []
            received = [RankTotals(**json.loads(value)) for value in values]
            yield number, {0: totals, **dict(zip(there, received, strict=True))}

    def _there(self, turn: int, deadline: float, *, is_last_look: bool) -> list[int] | None:
        """Return the ranks whose totals of a turn are there; None if others are awaited."""
        late = {rank for rank in self._late if not self._store.check([f"{turn - 1}/{rank}"])}
        awaited = {f"{turn}/{rank}": rank for rank in self._ranks[1:] if rank not in late}
        if not is_last_look and not self._store.check([*awaited]):
            return None
        there = [awaited[key] for key in wait_for(self._store, [*awaited], deadline)]
        self._late = late.union(awaited.values()).difference(there)
        if new := sorted(self._late - self._told):
            self._told.update(new)
            messages.warning(_ABSENT, ", ".join(map(str, new)))
        return there

    def agree(self, wish: Sequence[int]) -> list[int]:
        """Return what all ranks do from here on: what rank zero has wished a turn ago.

        So no rank waits as long as they are less than one turn apart.
        """
        if self._is_alone:
            return self._agreed
        turn = next(self._turns)
        try:
            if self._rank == 0:
                self._store.set(f"{turn}/agreed", json.dumps([*wish]))
            if turn:
                agreed = f"{turn - 1}/agreed"
                deadline = time.monotonic() + min(_AGREEMENT_TIMEOUT_S, self._timeout_s)
                if not wait_for(self._store, [agreed], deadline):
                    raise TimeoutError("rank 0 has said nothing")
                self._agreed = [*map(int, json.loads(self._store.get(agreed)))]
        except Exception as error:
            # Those who do not share it may time other steps; nobody waits for this one.
            self._is_alone, n = True, self._agreed[0]
            messages.warning(_ALONE, "all are" if n == 1 else f"one in {n} is", error)
        return self._agreed


def wait_for(store: Any, keys: list[str], deadline: float) -> list[str]:
    """Wait until all of `keys` are written, or the time is over; return those that are."""
    # Not the store's own wait, which prints where it ends in vain.
    while keys and not store.check(keys):
        if time.monotonic() >= deadline:
            return [key for key in keys if store.check([key])]
        time.sleep(0.001)
    return keys


def open_exchange(purpose: str) -> Exchange | None:
    """Return an exchange among the ranks of the default process group; None without others."""
    if not is_distributed():
        return None
    try:
        # Not at the top: torch can be built without it.
        from torch.distributed.distributed_c10d import PrefixStore

        # Timers are attached in the same order on every rank, so their numbers agree.
        prefix = f"lightning_gputime/{purpose}/{next(_opened[purpose])}"
        if (store := default_store()) is None:
            return None
        store = PrefixStore(prefix, store)
        return Exchange(store, torch.distributed.get_rank(), torch.distributed.get_world_size())
    except Exception as error:
        messages.warning("The times of the ranks are not compared: %r", error)
        return None
