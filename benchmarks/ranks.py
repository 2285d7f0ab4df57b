"""Names the slow rank, and holds `backward/comm` against the kernel trace.

Each rank trains 8 Linear(4096) under DDP, then under FSDP2, while one rank is delayed in one phase.

    torchrun --nproc-per-node 2 benchmarks/ranks.py --out benchmarks/results/ranks_x2.json
"""

import os
import statistics
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from kernels import Event, cycles_of, end_of, of_categories, spin_in_backward, traced
from record import environment, new_parser, save
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity

from lightning_gputime import GPUPhaseHooks

STRATEGIES = ("ddp", "ddp bucket view", "fsdp2")
CASES = ("balanced", "data", "forward", "backward", "optimizer")
LATE_MS = 17.0
STEPS, TRACED = 30, 10
SLOW_RANK = 1


class Net(nn.Module):
    """8 linear layers, late in a phase."""

    def __init__(self, late: dict[str, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(8))
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the last layer does, of the shape of `x`, (batch, 4096)."""
        torch.cuda._sleep(self.late.get("forward", 1))
        for layer in self.layers:
            x = layer(x)
        return spin_in_backward(x.clone(), self.late.get("backward", 1))


def distributed(net: Net, strategy: str) -> nn.Module:
    """Returns the net under a strategy."""
    if strategy != "fsdp2":
        view = strategy == "ddp bucket view"
        return DistributedDataParallel(net, gradient_as_bucket_view=view)
    for part in (*net.layers, net):
        fully_shard(part)
    return net


class Loop:
    """A plain training loop in which one rank is late in one phase."""

    def __init__(self, strategy: str, case: str, cycles: int) -> None:
        self.late = {case: cycles} if torch.distributed.get_rank() == SLOW_RANK else {}
        self.model = distributed(Net(self.late).cuda(), strategy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.delimiter = torch.zeros(1, device="cuda")

    def batches(self, n: int) -> Iterator[Tensor]:
        """Yields batches of shape (512, 4096)."""
        x = torch.randn(512, 4096, device="cuda")
        for _ in range(n):
            torch.cuda._sleep(self.late.get("data", 1))
            yield x

    def step(self, x: Tensor) -> None:
        """Trains one step; a kernel of its own kind delimits backward in a trace."""
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(x).square().mean()
        self.delimiter.erfinv_()
        loss.backward()
        self.delimiter.erfinv_()
        torch.cuda._sleep(self.late.get("optimizer", 1))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, timer: GPUPhaseHooks, steps: int) -> None:
        """Trains some steps."""
        for x in timer.steps(self.batches(steps)):
            self.step(x)


def exposed_in_trace(events: list[Event]) -> list[float]:
    """Returns, for each step, how long backward went on after its last kernel of this rank's own.

    That is the last on the stream of the computation that begins before the last NCCL kernel ends,
    copies into a reduce-scatter not counted: what DDP and FSDP2 copy is communication.
    """
    kernels = of_categories(events, "kernel")
    delimiters = [kernel for kernel in kernels if "erfinv" in kernel["name"]]
    stream = delimiters[0]["args"]["stream"]
    exposed = []
    for begin, end in zip(delimiters[::2], delimiters[1::2], strict=True):
        inside = [kernel for kernel in kernels if begin["ts"] < kernel["ts"] < end["ts"]]
        comm_end = max(end_of(kernel) for kernel in inside if "nccl" in kernel["name"].lower())
        own_end = max(
            end_of(kernel)
            for kernel in inside
            if kernel["args"]["stream"] == stream
            and kernel["ts"] < comm_end
            and "chunk_cat" not in kernel["name"]
        )
        exposed.append((end["ts"] - own_end) / 1000)
    return exposed


def hold_against_trace(loop: Loop) -> dict[str, float]:
    """Returns the mean time of the communication by the timer and by the trace."""
    with GPUPhaseHooks(loop.model, loop.optimizer, lag=0, warmup_steps=0) as timer:
        _, events = traced(lambda: loop.train(timer, TRACED), ProfilerActivity.CUDA)
    # The first steps under the profiler are slow to launch.
    comm_ms, trace_ms = timer.history()["backward/comm_ms"][3:], exposed_in_trace(events)[3:]
    return {
        "comm_ms": statistics.mean(comm_ms.tolist()),
        "comm_in_trace_ms": statistics.mean(trace_ms),
        "largest_difference_ms": max(abs(comm_ms - trace_ms).tolist()),
    }


def measure(strategy: str, case: str, cycles: int) -> dict[str, Any]:
    """Returns what this rank's timer says, and on the side of it the trace."""
    loop = Loop(strategy, case, cycles)
    with GPUPhaseHooks(loop.model, loop.optimizer, lag=0) as timer:
        loop.train(timer, STEPS)
    summary = timer.summary()
    return {
        "phases_ms": {name: row.mean_ms for name, row in summary.rows.items()},
        "step_ms": summary.step.mean_ms,
        "sentence": summary.ranks.sentence if summary.ranks is not None else None,
        **hold_against_trace(loop),
    }


def show(strategy: str, case: str, found: list[dict[str, Any]]) -> None:
    """Prints what the ranks found."""
    print(f"{strategy}, {case}: {found[0]['sentence'] or 'nobody is named'}")
    for rank, one in enumerate(found):
        backward, comm = (one["phases_ms"][phase] for phase in ("backward", "backward/comm"))
        print(
            f"  rank {rank}: step {one['step_ms']:.3f} backward {backward:.3f}"
            f" compute {backward - comm:.3f} comm {comm:.3f}; under the profiler: comm"
            f" {one['comm_ms']:.3f} trace {one['comm_in_trace_ms']:.3f}"
            f" largest difference {one['largest_difference_ms']:.3f}",
            flush=True,
        )


def measure_all(world_size: int) -> dict[str, Any]:
    """Measures all strategies and cases; returns what all ranks found, printed by rank zero."""
    cycles = cycles_of(LATE_MS)
    results: dict[str, Any] = {strategy: {} for strategy in STRATEGIES}
    for strategy, case in product(STRATEGIES, CASES):
        found: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(found, measure(strategy, case, cycles))
        results[strategy][case] = found
        if torch.distributed.get_rank() == 0:
            show(strategy, case, found)
    return results


def main(out: Path | None) -> None:
    """Measures in a process group; rank zero saves."""
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    world_size = torch.distributed.get_world_size()
    found = environment("gpu", "torch") | {
        "command": f"torchrun --nproc-per-node {world_size} benchmarks/ranks.py",
        "late_ms": LATE_MS,
        "slow_rank": SLOW_RANK,
        "results": measure_all(world_size),
    }
    save(out if local_rank == 0 else None, found)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(new_parser(__doc__).parse_args().out)
