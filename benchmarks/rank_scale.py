"""Measures what it costs to compare many ranks.

The ranks are simulated: one process writes for all of them, through a real TCP store.

    python benchmarks/rank_scale.py --out benchmarks/results/rank_scale.json
"""

import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from record import environment, new_parser, save
from torch._C._distributed_c10d import TCPStore

from lightning_gputime._measurement.ranks import RankTotals, compare
from lightning_gputime._session.rank_comparer import Exchange

T = TypeVar("T")

PHASES = ("data", "forward", "loss", "backward", "backward/comm", "optimizer", "other", "step")
SIZES = ((8, 1000), (128, 1000), (1024, 1000), (1024, 10**6), (10_000, 1000))
"""Numbers of ranks and of steps."""


def totals(rank: int, steps: int) -> RankTotals:
    """Return what a rank may have added up."""
    return RankTotals(dict.fromkeys(PHASES, ((10.0 + rank % 7 / 10) * steps, steps)))


def exchanges(world_size: int) -> list[Exchange]:
    """Returns the exchange of each rank."""
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, None, False)
    return [Exchange(client if rank else server, rank, world_size) for rank in range(world_size)]


def timed(call: Callable[..., T], *args: Any) -> tuple[T, float]:
    """Returns what a call returns, and how long it took (in milliseconds)."""
    start = time.perf_counter()
    result = call(*args)
    return result, (time.perf_counter() - start) * 1e3


def measure(world_size: int, steps: int) -> dict[str, Any]:
    """Compares `world_size` ranks once, and returns what it took."""
    zero, *others = exchanges(world_size)
    send_ms = [
        timed(other.send, totals(rank, steps), steps - 1)[1]
        for rank, other in enumerate(others, start=1)
    ]
    tracemalloc.start()
    zero.send(totals(0, steps), steps - 1)
    [(_, gathered)], gather_ms = timed(lambda: [*zero.arrived(wait=False)])
    ranks, compare_ms = timed(compare, gathered)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ranks is not None
    assert len(ranks.ranks) == world_size
    return {
        "ranks": world_size,
        "steps": steps,
        "sent_bytes": len(json.dumps(asdict(totals(1, steps)))),
        "send_ms": statistics.median(send_ms),
        "gather_ms": gather_ms,
        "compare_ms": compare_ms,
        "peak_bytes_on_rank_zero": peak,
    }


def main() -> list[dict[str, Any]]:
    """Measures several numbers of ranks and steps; prints and returns what was found."""
    results = []
    for size in SIZES:
        results.append(measure(*size))
        print(results[-1], flush=True)
    return results


if __name__ == "__main__":
    out = new_parser(__doc__).parse_args().out
    save(out, environment("machine", "torch", "command") | {"results": main()})
