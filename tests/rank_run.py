"""Train in one of several processes, one of which is a straggler. Rank 0 writes the results.

python tests/rank_run.py DIRECTORY WORLD_SIZE RANK CASE...

In the case `dies`, which must be the last, rank 1 ends with exit code 3.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed
from fake_gpu import MS, Adder, FakeGPU, Layer, batches
from fake_loop import Logger
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from lightning_gputime import GPUPhaseHooks

BASE_MS, LATE_MS, STEPS = 10.0, 30.0, 25


def wait_for_ranks(gpu: FakeGPU) -> None:
    """Keep the fake GPU of this rank busy until the fake GPUs of all ranks are idle."""
    idle_at = torch.tensor([max(gpu.now, gpu.free_at)])
    torch.distributed.all_reduce(idle_at, torch.distributed.ReduceOp.MAX)
    gpu.work(int(idle_at) / MS - max(gpu.now, gpu.free_at) / MS)


def train(case: str, rank: int) -> dict[str, Any]:
    """Train on a fake GPU, whose backward ends with a wait for all ranks, as under DDP."""
    phases = ("data", "forward", "backward", "optimizer")
    ms = {name: BASE_MS + LATE_MS * (name == case and rank == 1) for name in phases}
    gpu = FakeGPU()
    net: nn.Module = Layer(gpu, ms["forward"], ms["backward"])
    optimizer, logger = Adder(net.parameters(), gpu, ms["optimizer"]), Logger()
    if case != "one raises":
        engine: Any = torch.autograd.Variable._execution_engine
        weight: Any = next(net.parameters())
        weight.register_post_accumulate_grad_hook(
            lambda _: engine.queue_callback(lambda: wait_for_ranks(gpu))
        )
        net = DistributedDataParallel(net)
    start = time.monotonic()
    options: dict[str, Any] = {"warmup_steps": 2, "logger": logger, "log": "all", "_clock": gpu}
    try:
        with GPUPhaseHooks(net, optimizer, **options) as timer:
            for i, x in enumerate(timer.steps(batches(gpu, STEPS, copy_ms=ms["data"]))):
                net(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if case == "one raises" and rank == 1 and i == STEPS - 1:
                    raise InterruptedError
    except InterruptedError:
        pass
    summary = timer.summary()
    metrics = {key: value for _, found in logger.calls for key, value in found.items()}
    comm = summary.rows.get("backward/comm")
    return {
        "sentence": summary.ranks.sentence if summary.ranks is not None else "",
        "excess_ms": summary.ranks.excess_ms if summary.ranks is not None else 0.0,
        "comm_ms": comm.mean_ms if comm is not None else 0.0,
        "logged": metrics.get("phase_time/ranks/straggler"),
        "seconds": time.monotonic() - start,
    }


def die(rank: int) -> dict[str, Any]:
    """Train two epochs. Rank 1 dies at the end of the first, before the ranks are compared."""
    net = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with GPUPhaseHooks(net, optimizer) as timer:
        start = time.monotonic()
        try:
            for _ in range(2):
                for i, x in enumerate(timer.steps([torch.ones(2, 4)] * STEPS)):
                    start = time.monotonic()
                    net(x).sum().backward()
                    optimizer.step()
                    if rank == 1 and i == STEPS - 1:
                        os._exit(3)
        except RuntimeError as error:
            return {"error": str(error), "seconds": time.monotonic() - start}
    return {"error": "", "seconds": 0.0}


def train_uneven(rank: int) -> dict[str, Any]:
    """Train in a `Join`, in which rank 0 has fewer batches than rank 1."""
    net = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Join([net]), GPUPhaseHooks(net, optimizer, warmup_steps=0, every_n_steps=1) as timer:
        # Rank 1 still has many steps when rank 0 has ended its loop.
        for x in timer.steps([torch.ones(2, 4)] * (40 if rank else 10)):
            time.sleep(0.005 * rank)
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
    results: dict[str, Any] = {}
    for case in cases:
        torch.distributed.barrier()
        if case == "uneven":
            uneven = train_uneven(rank)
            if rank == 1:
                (directory / "uneven.json").write_text(json.dumps(uneven))
        elif case == "dies":
            results[case] = die(rank)
        else:
            results[case] = train(case, rank)
    if rank == 0:
        (directory / "results.json").write_text(json.dumps(results))
    if "dies" in cases:
        # Gloo's threads may abort a process that exits after another process has died.
        os._exit(0)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
