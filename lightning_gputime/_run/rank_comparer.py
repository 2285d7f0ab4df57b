"""Compares the ranks of a distributed run: when, over which steps, and how rank zero gets them."""

import itertools
import json
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed

from lightning_gputime._boundaries.boundaries import Boundaries
from lightning_gputime._boundaries.comm import is_distributed
from lightning_gputime._messages import messages
from lightning_gputime._options import Options
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.means import MeanLog
from lightning_gputime._results.observers import ReadSteps
from lightning_gputime._results.ranks import (
    ITEMS_TIME,
    Noise,
    RankSummary,
    Totals,
    compare,
    since,
    totals_of,
)
from lightning_gputime._results.results import Results
from lightning_gputime._results.sums import Sums

T = TypeVar("T")

# Timers are attached in the same order on every rank, so their numbers agree.
_runs = itertools.count()

_FOR_EVER = 1 << 40
"""Added to how often rank zero has read: it never reads again."""

_TIMEOUT_S = 3.0
"""Less than the 5 s after which Lightning's launcher ends this process if another one has died: the
error of the training's next collective is to come first, and says more."""

_MAX_MISSES = 10
"""A rank that was late this often is waited for no more."""


class RankComparer:
    """Compares the ranks, in the same steps on all of them, whatever each has read.

    Args:
        results: This rank's steps: their sums are compared, and they keep the outcome.
        means: Log the outcome, under the number of a step.
        options: When: never, at the end of each epoch, or also at each log; and the recorder's lag.
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
        # The newest steps: what not every rank must have read yet is not compared yet.
        self._recent: deque[StepRecord] = deque(maxlen=options.lag + 1)
        self._noise = Noise()
        self.boundaries: Boundaries | None = None
        """They see how the ranks share the work."""
        # The number of the last step that `compare_all` has compared.
        self._compared = -1
        self._before: dict[int, Totals] = {}
        self.due_step: int | None = None
        """The number up to which to compare the ranks when a step has ended; else None."""

    @property
    def is_on(self) -> bool:
        """Whether there are other ranks, and they are compared."""
        return self._exchange is not None

    def steps_read(self, steps: ReadSteps) -> None:
        """Take the steps that were read, without those of the warm-up."""
        if self._exchange is not None:
            self._recent.extend(steps.measured)
            self._noise.add(steps.measured)

    def log_is_due(self, finished: int) -> None:
        """Call where a log is due: with "log", so is a comparison.

        Args:
            finished: The number of the newest step that every rank has read by now.
        """
        if self._at_logs and self._exchange is not None:
            self.due_step = finished

    def compare_if_due(self) -> None:
        """Compare the ranks if that is due. All ranks call it at the end of the same step."""
        finished, self.due_step = self.due_step, None
        # Not when a step is read: one rank may read it a step later than another, and wait there
        # for the other. Nor where the end of an epoch has compared them since.
        if finished is not None and finished >= self._means.next_due(self._compared):
            early = Sums(step for step in self._recent if step.number > finished)
            self._compare(since(self._totals(), totals_of(early)), min(finished, self._newest_read))

    def compare_all(self, newest: int | None) -> None:
        """Compare the ranks in all steps that were read. All ranks must call it.

        Args:
            newest: The number of the last step that has ended, if one has.
        """
        if newest is not None:
            self._compared = newest
        self._compare(self._totals(), self._newest_read)

    def summary(self) -> RankSummary | None:
        """Return all ranks beside each other, on rank zero; None where there is one rank."""
        # A rank that has left stays, with what it sent last.
        return compare(self._before) if len(self._before) > 1 else None

    def remove(self) -> None:
        """Wait for no rank any more, and tell the others. Safe to call twice."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            try:
                exchange.leave()
            except Exception as error:
                # The first process, which has the store, may have ended before this one.
                messages.debug("This rank could not say that it leaves: %r", error)

    def abandon(self) -> None:
        """Forget the other ranks, and do not tell them."""
        self._exchange = None

    def _totals(self) -> Totals:
        with_host = not self._results.on_host_clock
        stage = self.boundaries.stage if self.boundaries is not None else None
        totals = totals_of(self._results.sums, self._noise, stage, with_host=with_host)
        if self.boundaries is not None and self.boundaries.shares_batches:
            # They would be counted once per rank.
            return {name: one for name, one in totals.items() if name != ITEMS_TIME}
        return totals

    @property
    def _newest_read(self) -> int:
        return max(self._means.newest or 0, 0)

    def _compare(self, totals: Totals, number: int) -> None:
        # Inside DDP's join the others may wait for this rank in a collective.
        is_joining = self.boundaries is not None and self.boundaries.is_joining
        if self._exchange is None or is_joining:
            return
        try:
            # Empty on the ranks but zero.
            gathered = self._exchange.gather(totals)
            windows = {
                rank: since(now, self._before.get(rank, {})) for rank, now in gathered.items()
            }
            self._before.update(gathered)
            if len(self._before) > 1:
                self._results.ranks = self.summary()
            if len(windows) > 1 and (ranks := compare(windows)) is not None:
                metrics = {f"ranks/{key}": value for key, value in ranks.metrics().items()}
                self._means.log_values(metrics, number)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        messages.warning("The times of the ranks are not compared any more: %r", error)
        self.remove()


class Exchange:
    """Gathers the totals of all ranks on rank zero, through the store of the process group.

    Not a collective: in one a missing rank would block all others, and end the group when it
    times out. Here each rank writes and goes on, and only rank zero waits, for a bounded time.
    It does not wait for ranks without a timer, nor for those that have left.

    Args:
        store: Any store that all ranks share.
        rank: Number of this process.
        world_size: Number of processes.
        timeout_s: How long rank zero waits for late ranks, at most a third of the store's timeout
            (in seconds). It looks for a late rank again once that has caught up.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, *, timeout_s: float = _TIMEOUT_S
    ) -> None:
        # Not at the top: torch can be built without it.
        from torch._C._distributed_c10d import PrefixStore

        self._store = PrefixStore(f"lightning_gputime/{next(_runs)}", store)
        self._rank = rank
        # The others may wait in a collective for rank zero meanwhile, and raise after their group's
        # timeout, which the store has, too.
        self._timeout_s = min(timeout_s, store.timeout.total_seconds() / 3)
        # How often this rank has gathered, and before which window it has deleted what it sent.
        self._window = 0
        self._deleted = 0
        # On rank zero: the others that still take part, None before the first gathering; how often
        # each was late; those that are late now; and how many had left when it last looked.
        self._present: set[int] | None = None
        self._misses = Counter[int]()
        self._late = set[int]()
        self._n_left = 0
        self._others = [*range(1, world_size)]
        if rank:
            self._store.set(f"here/{rank}", "")
        elif self._store.add("left", 0):
            # Those who have left before this begins took part in another measurement.
            self._others = [one for one in self._others if not self._store.check([f"left/{one}"])]
        self._world_size = world_size

    def gather(self, totals: Totals) -> dict[int, Totals]:
        """Send `totals`. All ranks must call it at the same places of the training.

        Returns:
            On rank zero, the totals of all ranks that took part; else an empty dict.
        """
        window, self._window = self._window, self._window + 1
        if self._rank:
            self._send(window, totals)
            return {}
        ranks = self._wait_for(window)
        store = self._store
        values = store.multi_get([f"{window}/{rank}" for rank in ranks]) if ranks else []
        store.add("read", 1)
        return {0: totals, **{r: json.loads(v) for r, v in zip(ranks, values, strict=True)}}

    def _send(self, window: int, totals: Totals) -> None:
        self._store.set(f"{window}/{self._rank}", json.dumps(totals))
        # What rank zero has read by now is no longer needed.
        for old in range(self._deleted, min(self._store.add("read", 0), window)):
            self._store.delete_key(f"{old}/{self._rank}")
            self._deleted = old + 1

    def leave(self) -> None:
        """Tell the others that this rank sends, or reads, nothing any more."""
        if self._rank:
            self._store.set(f"left/{self._rank}", "")
            # After the key: who sees this number change must find it.
            self._store.add("left", 1)
        else:
            self._store.add("read", _FOR_EVER)

    def _wait_for(self, window: int) -> list[int]:
        if self._present is None:
            self._present = self._find_present()
        self._late = {rank for rank in self._late if not self._has_caught_up(rank, window)}
        there = self._those(str(window), sorted(self._present - self._late), self._timeout_s)
        if missing := self._present.difference(there, self._late):
            if new := missing - self._misses.keys():
                messages.warning(
                    "The times of these ranks did not arrive, and are left out until they do: %s",
                    ", ".join(map(str, sorted(new))),
                )
            self._misses.update(missing)
            self._late |= missing
        return there

    def _find_present(self) -> set[int]:
        # With a timer each rank is there before its first step, which the ranks of DDP end
        # together.
        present = {*self._those("here", self._others, 1.0)}
        if absent := [rank for rank in range(1, self._world_size) if rank not in present]:
            messages.warning(
                "These ranks have no timer, or attached more or fewer timers than rank 0 before"
                " this one; they are not compared: %s",
                ", ".join(map(str, absent)),
            )
        return present

    def _has_caught_up(self, rank: int, window: int) -> bool:
        # It keeps what it has sent last, and that of the window before until it sends once more.
        sent = (f"{at}/{rank}" for at in (window - 1, window))
        return self._misses[rank] < _MAX_MISSES and any(self._store.check([key]) for key in sent)

    def _those(self, key: str, ranks: list[int], timeout_s: float) -> list[int]:
        """Wait until each of `ranks` has written `key` or left; return those that have written."""
        store, deadline = self._store, time.monotonic() + timeout_s
        while ranks and not store.check([f"{key}/{rank}" for rank in ranks]):
            # One number for all ranks, so that a wait for a thousand does not ask for a key of
            # each.
            n_left, is_late = store.add("left", 0), time.monotonic() > deadline
            if n_left != self._n_left or is_late:
                self._n_left = n_left
                there = [rank for rank in ranks if store.check([f"{key}/{rank}"])]
                coming = [r for r in ranks if r in there or not store.check([f"left/{r}"])]
                if self._present is not None:
                    self._present -= {*ranks} - {*coming}
                if is_late:
                    return there
                ranks = coming
            else:
                time.sleep(0.001)
        return ranks


def among_ranks(open_one: Callable[[Any, int, int], T]) -> T | None:
    """Open something among the ranks of the default process group; None without others.

    Args:
        open_one: Takes the group's store, the number of this process, and how many there are.
    """
    if not is_distributed():
        return None
    store = torch.distributed.distributed_c10d._get_default_store()
    return open_one(store, torch.distributed.get_rank(), torch.distributed.get_world_size())


def open_exchange() -> Exchange | None:
    """Return an exchange among the ranks of the default process group; None without others."""
    return among_ranks(Exchange)
