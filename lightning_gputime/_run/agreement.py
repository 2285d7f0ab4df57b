"""How the ranks of a distributed run time the same steps, when each has a wish of its own."""

import itertools
import time
from typing import Any

from lightning_gputime._messages import messages
from lightning_gputime._run.rank_comparer import among_ranks

# Timers are attached in the same order on every rank, so their numbers agree.
_runs = itertools.count()

# Ranks that train together are never a turn apart: who has said nothing by then has no timer.
_LONGEST_S = 1.0

_ALONE = (
    "The ranks agree no more on which steps are timed. On this one %s: give all of them a timer"
    ", or this one sync_ranks=False. %r"
)


class Agreement:
    """Lets ranks agree on the largest of their wishes, through the store of the process group.

    No collective, and no wait as long as the ranks are less than one turn apart: in each turn a
    rank writes its wish, rank zero takes the largest of those of the turn before, and all take what
    rank zero has written a turn ago. So it takes two turns until a wish holds. Who has no timer has
    no wish.

    Args:
        store: Any store that all ranks share.
        rank: Number of this process.
        world_size: Number of processes.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        # Not at the top: torch can be built without it.
        from torch._C._distributed_c10d import PrefixStore

        self._store: Any = PrefixStore(f"lightning_gputime/agreement/{next(_runs)}", store)
        self._rank, self._ranks = rank, [*range(world_size)]
        self._turn = 0
        self._agreed = 1

    def agree(self, wish: int) -> int:
        """Says what this rank wishes. All ranks must call it at the same places of the training.

        Returns:
            What all ranks do from here on.
        """
        turn, self._turn = self._turn, self._turn + 1
        try:
            self._store.set(f"{turn}/{self._rank}", str(wish))
            if self._rank == 0 and turn >= 1:
                self._collect(turn)
            if turn >= 2:
                self._agreed = self._look(turn - 1)
        except Exception as error:
            # Those who do not share it may time other steps; nobody waits for this one.
            n = self._agreed
            messages.warning(_ALONE, "all are" if n == 1 else f"one in {n} is", error)
            self.agree = lambda wish: self._agreed  # type: ignore[method-assign]
        return self._agreed

    def _collect(self, turn: int) -> None:
        """Writes the largest wish of the turn before."""
        said = f"{turn - 1}/{{}}".format
        if not self._store.check([*map(said, self._ranks)]):
            # Asked no more: one by one they would take time in every turn.
            self._ranks = [rank for rank in self._ranks if self._store.check([said(rank)])]
        largest = max(map(int, self._store.multi_get([*map(said, self._ranks)])))
        self._store.set(f"{turn}/agreed", str(largest))

    def _look(self, turn: int) -> int:
        """Returns what rank zero has written in a turn."""
        key = f"{turn}/agreed"
        deadline = time.monotonic() + _LONGEST_S
        # Not the store's own wait, which prints where it ends in vain.
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 has said nothing")
            time.sleep(0.001)
        return int(self._store.get(key))


def open_agreement() -> Agreement | None:
    """Returns one among the ranks of the default process group; None without others."""
    return among_ranks(Agreement)
