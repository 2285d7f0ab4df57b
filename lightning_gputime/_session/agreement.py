"""Agreement of the ranks on the steps that they time. Each call of `agree` is a round."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import torch.distributed

from lightning_gputime._messages import messages
from lightning_gputime._session.rank_store import deadline_in, open_store, wait_for

# Maximum wait for rank zero. Rarely needed, because ranks in training are less than a round apart.
_TIMEOUT_S = 1.0

_NO_AGREEMENT = (
    "The ranks no longer agree on which steps are timed: %r. This rank times %s from now on, so the"
    " ranks may be compared over different steps. Attach the same timer on all ranks, or pass"
    " sync_ranks=False."
)


class Agreement:
    """Agreement of the ranks: all follow rank zero. All ranks must call `agree` equally often.

    Args:
        store: Store of the process group for this purpose.
        rank: Number of this rank.
    """

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
                if not wait_for(self._store, [agreed], deadline_in(_TIMEOUT_S, self._store)):
                    raise TimeoutError("rank 0 has not answered")
                self._agreed = [*map(int, json.loads(self._store.get(agreed)))]
        except Exception as error:
            self._has_failed, n = True, self._agreed[0]
            timed = "every step" if n == 1 else f"1 of every {n} steps"
            messages.warning(_NO_AGREEMENT, error, timed)
        return self._agreed


def open_agreement() -> Agreement | None:
    """Return an agreement of the ranks of the process group; None for a single rank."""
    store = open_store("agreement")
    return None if store is None else Agreement(store, torch.distributed.get_rank())
