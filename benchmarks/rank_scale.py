"""Measures what it costs to compare many ranks.

The ranks are simulated: one process writes for all of them, through a real TCP store.

    python benchmarks/rank_scale.py --out benchmarks/results/rank_scale.json
"""

import argparse
import json
import platform
import statistics
import time
import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from record import command, save
from torch._C._distributed_c10d import TCPStore

from lightning_gputime._results.ranks import Totals, compare
from lightning_gputime._run import exchange
from lightning_gputime._run.exchange import Exchange

PHASES = ("data", "forward", "loss", "backward", "backward/comm", "optimizer", "other", "step")


def totals(rank: int, steps: int) -> Totals:
    """Returns what a rank may have added up."""
    return dict.fromkeys(PHASES, ((10.0 + rank % 7 / 10) * steps, steps))


def measure(world_size: int, steps: int) -> dict[str, Any]:
    """Compares `world_size` ranks once, and returns what it took."""
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, None, False)
    # Each rank is a process of its own, whose first timer this is.
    with mock.patch.object(exchange, "_runs", iter([0] * world_size)):
        zero, *others = [
            Exchange(client if rank else server, rank, world_size) for rank in range(world_size)
        ]
    send_ms = []
    for rank, other in enumerate(others, start=1):
        start = time.perf_counter()
        other.gather(totals(rank, steps))
        send_ms.append((time.perf_counter() - start) * 1e3)
    tracemalloc.start()
    start = time.perf_counter()
    gathered = zero.gather(totals(0, steps))
    gather_ms = (time.perf_counter() - start) * 1e3
    start = time.perf_counter()
    ranks = compare(gathered)
    compare_ms = (time.perf_counter() - start) * 1e3
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ranks is not None
    assert len(ranks.ranks) == world_size
    return {
        "ranks": world_size,
        "steps": steps,
        "sent_bytes": len(json.dumps(totals(1, steps))),
        "send_ms": statistics.median(send_ms),
        "gather_ms": gather_ms,
        "compare_ms": compare_ms,
        "peak_bytes_on_rank_zero": peak,
    }


def main() -> dict[str, Any]:
    """Measures several numbers of ranks and steps; returns what was found."""
    results = [
        measure(ranks, steps)
        for ranks, steps in [(8, 1000), (128, 1000), (1024, 1000), (1024, 10**6)]
    ]
    for result in results:
        print(result, flush=True)
    return {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "command": command(),
        "results": results,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    save(out, main())
