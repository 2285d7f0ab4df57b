"""Store of the process group, through which ranks exchange values without a collective.

A missing rank would block a collective, whose timeout ends the process group. With the store, each
rank writes its values and continues.
"""

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from lightning_gputime._compat.torch_ import default_store
from lightning_gputime._instrumentation.comm import is_distributed
from lightning_gputime._messages import messages

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
    timeout_of_store_s: float = store.timeout.total_seconds()
    return time.monotonic() + min(timeout_s, timeout_of_store_s / 3)


def wait_for(store: Any, keys: list[str], deadline: float) -> list[str]:
    """Wait for all keys until the deadline of `deadline_in`. Return the keys that are written."""
    # Poll, because `store.wait` prints a message after a timeout.
    while keys and not store.check(keys):
        if time.monotonic() >= deadline:
            return [key for key in keys if store.check([key])]
        time.sleep(0.001)
    return keys
