"""Trains in one of several processes, with a slow rank; rank zero writes what its timer says.

python tests/rank_run.py DIRECTORY WORLD_SIZE RANK CASE...
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from lightning_gputime import GPUPhaseHooks

BASE_MS, LATE_MS, STEPS = 10.0, 30.0, 25


class Sleep(torch.autograd.Function):
    """The identity, whose backward takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ms: float) -> Tensor:
        ctx.ms = ms
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        sleep(ctx.ms)
        return grads[0], None


class Net(nn.Module):
    def __init__(self, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.times = forward_ms, backward_ms

    def forward(self, x: Tensor) -> Tensor:
        sleep(self.times[0])
        result: Tensor = Sleep.apply(self.linear(x), self.times[1])  # type: ignore[no-untyped-call]
        return result


class Slow(torch.optim.SGD):
    def __init__(self, model: nn.Module, ms: float) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.ms = ms

    def step(self, closure: Any = None) -> Any:
        sleep(self.ms)
        return super().step(closure)


class Logger:
    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.metrics.update(metrics)


def sleep(ms: float) -> None:
    time.sleep(ms / 1000)


def batches(ms: float) -> Iterator[Tensor]:
    for _ in range(STEPS):
        sleep(ms)
        yield torch.ones(2, 4)


def train(case: str, rank: int) -> dict[str, Any]:
    late = {case: LATE_MS} if rank == 1 else {}
    ms = {
        name: BASE_MS + late.get(name, 0.0) for name in ("data", "forward", "backward", "optimizer")
    }
    net: nn.Module = Net(ms["forward"], ms["backward"])
    if case != "one raises":
        net = DistributedDataParallel(net)
    optimizer, logger = Slow(net, ms["optimizer"]), Logger()
    start = time.monotonic()
    try:
        with GPUPhaseHooks(net, optimizer, warmup_steps=2, logger=logger, log="all") as timer:
            for i, x in enumerate(timer.steps(batches(ms["data"]))):
                net(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if case == "one raises" and rank == 1 and i == STEPS - 1:
                    raise InterruptedError
    except InterruptedError:
        pass
    summary = timer.summary()
    comm = summary.rows.get("backward/comm")
    return {
        "sentence": summary.ranks.sentence if summary.ranks is not None else "",
        "behind_median_ms": summary.ranks.behind_median_ms if summary.ranks is not None else 0.0,
        "comm_ms": comm.mean_ms if comm is not None else 0.0,
        "logged": logger.metrics.get("phase_time/ranks/slowest_rank"),
        "seconds": time.monotonic() - start,
    }


def die(rank: int) -> dict[str, Any]:
    """Trains two epochs; the last rank dies when the first is over, before they are compared."""
    net = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with GPUPhaseHooks(net, optimizer) as timer:
        start = time.monotonic()
        try:
            for _ in range(2):
                for i, x in enumerate(timer.steps(batches(0.0))):
                    start = time.monotonic()
                    net(x).sum().backward()
                    optimizer.step()
                    if rank == 1 and i == STEPS - 1:
                        os._exit(3)
        except RuntimeError as error:
            return {"error": str(error), "seconds": time.monotonic() - start}
    return {"error": "", "seconds": 0.0}


def train_uneven(rank: int) -> dict[str, Any]:
    """Trains in a `Join`, in which rank zero has fewer batches than the other."""
    net = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Join([net]), GPUPhaseHooks(net, optimizer, warmup_steps=0, every_n_steps=1) as timer:
        # The last steps are far from over where rank zero has ended its loop.
        for x in timer.steps([torch.ones(2, 4)] * (40 if rank else 10)):
            sleep(5.0 * rank)
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    history = timer.history()
    return {"steps": len(history), "longest_backward_ms": float(history["backward_ms"].max())}


def main(directory: Path, world_size: int, rank: int, *cases: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size
    )
    if cases == ("dies",):
        (directory / "results.json").write_text(json.dumps(die(rank)))
        # Gloo's threads may abort a process that exits after another process has died.
        os._exit(0)
    if cases == ("uneven",):
        found = train_uneven(rank)
        if rank == 1:
            (directory / "results.json").write_text(json.dumps(found))
        torch.distributed.barrier()
        return
    results = {}
    for case in cases:
        torch.distributed.barrier()
        results[case] = train(case, rank)
    if rank == 0:
        (directory / "results.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
