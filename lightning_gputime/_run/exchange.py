"""How the ranks of a distributed run send what they measured to rank zero."""

import itertools
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed

from lightning_gputime._boundaries.comm import is_distributed
from lightning_gputime._messages import messages
from lightning_gputime._results.ranks import Totals

T = TypeVar("T")

# Timers are attached in the same order on every rank, so their numbers agree.
_runs = itertools.count()

# Added to how often rank zero has read: it never reads again.
_FOR_EVER = 1 << 40


class Exchange:
    """Gathers the totals of all ranks on rank zero, through the store of the process group.

    Not a collective: in one a missing rank would block all others, and end the group when it
    times out. Here each rank writes and goes on, and only rank zero waits, for a bounded time.
    Ranks without a timer, and those that have left, are not waited for.

    Args:
        store: Any store that all ranks share.
        rank: Number of this process.
        world_size: Number of processes.
        timeout_s: How long rank zero waits for another rank, at most a third of the store's
            timeout; after that no more (in seconds).
    """

    def __init__(self, store: Any, rank: int, world_size: int, *, timeout_s: float = 30.0) -> None:
        # Not at the top: torch can be built without it.
        from torch._C._distributed_c10d import PrefixStore

        self._store = PrefixStore(f"lightning_gputime/{next(_runs)}", store)
        self._rank = rank
        self._others = range(1, world_size)
        # On rank zero: the others that still take part, unknown before the first gathering, and how
        # many had left when it last looked.
        self._present: set[int] | None = None
        self._gone = 0
        # The others may wait in a collective for rank zero meanwhile, and raise after their group's
        # timeout, which the store has, too.
        self._timeout_s = min(timeout_s, store.timeout.total_seconds() / 3)
        # How often this rank has gathered, and before which window it has deleted what it sent.
        self._window = 0
        self._deleted = 0
        # Those who had left before this began took part in another measurement.
        self._strangers: list[int] = []
        if rank:
            self._store.set(f"here/{rank}", "")
        elif self._store.add("left", 0):
            self._strangers = [one for one in self._others if self._store.check([f"left/{one}"])]

    def gather(self, totals: Totals) -> dict[int, Totals]:
        """Sends `totals`. All ranks must call it at the same places of the training.

        Returns:
            On rank zero, the totals of all ranks that took part; else an empty dict.
        """
        window, self._window = self._window, self._window + 1
        store = self._store
        if self._rank:
            store.set(f"{window}/{self._rank}", json.dumps(totals))
            # What rank zero has read by now is no longer needed.
            for old in range(self._deleted, min(store.add("read", 0), window)):
                store.delete_key(f"{old}/{self._rank}")
                self._deleted = old + 1
            return {}
        ranks = self._wait_for(window)
        values = store.multi_get([f"{window}/{rank}" for rank in ranks]) if ranks else []
        store.add("read", 1)
        return {0: totals, **{r: json.loads(v) for r, v in zip(ranks, values, strict=True)}}

    def leave(self) -> None:
        """Says that this rank sends, or reads, nothing any more."""
        if self._rank:
            self._store.set(f"left/{self._rank}", "")
            # After the key: who sees this number change must find it.
            self._store.add("left", 1)
        else:
            self._store.add("read", _FOR_EVER)

    def _wait_for(self, window: int) -> list[int]:
        if self._present is None:
            # With a timer each rank is there before its first step, which the ranks of DDP end
            # together.
            others = [rank for rank in self._others if rank not in self._strangers]
            self._present = set(self._those("here", others, time.monotonic() + 1.0))
            if absent := [rank for rank in self._others if rank not in self._present]:
                messages.warning(
                    "These ranks have no timer, or attached more or fewer timers than rank 0 before"
                    " this one; they are not compared: %s",
                    ", ".join(map(str, absent)),
                )
        ranks = sorted(self._present)
        there = self._those(str(window), ranks, time.monotonic() + self._timeout_s)
        if missing := self._present.difference(there):
            messages.warning(
                "The times of these ranks did not arrive, and are left out from here on: %s",
                ", ".join(map(str, sorted(missing))),
            )
            self._present -= missing
        return there

    def _those(self, key: str, ranks: list[int], deadline: float) -> list[int]:
        """Waits until all of `ranks` have written `key`, and returns those that have."""
        store = self._store
        while ranks and not store.check([f"{key}/{rank}" for rank in ranks]):
            # One number for all ranks, so that a wait for a thousand does not ask for a key of
            # each.
            gone = store.add("left", 0)
            if gone != self._gone or time.monotonic() > deadline:
                self._gone = gone
                there = [rank for rank in ranks if store.check([f"{key}/{rank}"])]
                coming = [r for r in ranks if r in there or not store.check([f"left/{r}"])]
                if self._present is not None:
                    self._present -= {*ranks} - {*coming}
                if time.monotonic() > deadline:
                    return there
                ranks = coming
                continue
            time.sleep(0.001)
        return ranks


def among_ranks(open_one: Callable[[Any, int, int], T]) -> T | None:
    """Opens something among the ranks of the default process group; None without others.

    Args:
        open_one: Takes the group's store, the number of this process, and how many there are.
    """
    if not is_distributed():
        return None
    store = torch.distributed.distributed_c10d._get_default_store()
    return open_one(store, torch.distributed.get_rank(), torch.distributed.get_world_size())


def open_exchange() -> Exchange | None:
    """Returns an exchange among the ranks of the default process group; None without others."""
    return among_ranks(Exchange)
