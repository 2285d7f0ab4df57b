"""Names the slow rank, and holds `backward/comm` against the kernel trace.

Each rank trains 8 Linear(4096) under DDP, then under FSDP2, while one rank is delayed in one phase.

    torchrun --nproc-per-node 2 benchmarks/ranks.py --out benchmarks/results/ranks_x2.json
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from record import save
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_gputime import GPUPhaseHooks

CASES = ("balanced", "data", "forward", "backward", "optimizer")
LATE_MS = 17.0
STEPS, TRACED = 30, 10
SLOW_RANK = 1


class LateBackward(torch.autograd.Function):
    """The identity, whose backward keeps the GPU busy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cycles: int) -> Tensor:
        """Returns `x`."""
        ctx.cycles = cycles
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Spins, and returns the gradient."""
        torch.cuda._sleep(ctx.cycles)
        return grads[0], None


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
        late: Tensor = LateBackward.apply(x, self.late.get("backward", 1))  # type: ignore[no-untyped-call]
        return late


class Loop:
    """A plain training loop in which one rank is late in one phase."""

    def __init__(self, strategy: str, case: str, cycles: int) -> None:
        self.late = {case: cycles} if torch.distributed.get_rank() == SLOW_RANK else {}
        self.model: nn.Module = Net(self.late).cuda()
        if strategy == "fsdp2":
            for layer in self.model.layers:
                fully_shard(layer)
            fully_shard(self.model)
        else:
            view = strategy == "ddp bucket view"
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=view)
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


def cycles_of(ms: float) -> int:
    """Returns how many cycles `torch.cuda._sleep` needs to take `ms`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10_000_000)
    start.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    end.synchronize()
    cycles: float = 100_000_000 / start.elapsed_time(end) * ms
    return round(cycles)


def exposed_in_trace(path: str) -> list[float]:
    """Returns, for each step, how long backward went on after its last kernel of this rank's own.

    That is the last on the stream of the computation that begins before the last NCCL kernel ends,
    copies into a reduce-scatter not counted: what DDP and FSDP2 copy is communication.
    """
    events = json.loads(Path(path).read_text())["traceEvents"]
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    delimiters = [e for e in kernels if "erfinv" in e["name"]]
    stream = delimiters[0]["args"]["stream"]
    exposed = []
    for begin, end in zip(delimiters[::2], delimiters[1::2], strict=True):
        inside = [e for e in kernels if begin["ts"] < e["ts"] < end["ts"]]
        nccl = [e["ts"] + e["dur"] for e in inside if "nccl" in e["name"].lower()]
        own = [
            e["ts"] + e["dur"]
            for e in inside
            if e["args"]["stream"] == stream
            and e["ts"] < max(nccl)
            and "chunk_cat" not in e["name"]
        ]
        exposed.append((end["ts"] - max(own)) / 1000)
    return exposed


def measure(strategy: str, case: str, cycles: int) -> dict[str, Any]:
    """Returns what this rank's timer says, and on the side of it the trace."""
    loop = Loop(strategy, case, cycles)
    with GPUPhaseHooks(loop.model, loop.optimizer, lag=0) as timer:
        for x in timer.steps(loop.batches(STEPS)):
            loop.step(x)
    summary = timer.summary()
    traced = GPUPhaseHooks(loop.model, loop.optimizer, lag=0, warmup_steps=0)
    with (
        traced,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler,
    ):
        for x in traced.steps(loop.batches(TRACED)):
            loop.step(x)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "trace.json")
        profiler.export_chrome_trace(path)
        # The first steps under the profiler are slow to launch.
        trace_ms = exposed_in_trace(path)[3:]
    comm_ms = traced.history()["backward/comm_ms"][3:]
    return {
        "phases_ms": {name: row.mean_ms for name, row in summary.rows.items()},
        "step_ms": summary.step.mean_ms,
        "sentence": summary.ranks.sentence if summary.ranks is not None else None,
        "comm_ms": statistics.mean(comm_ms.tolist()),
        "comm_in_trace_ms": statistics.mean(trace_ms),
        "largest_difference_ms": max(abs(comm_ms - trace_ms).tolist()),
    }


def main(out: Path | None) -> None:
    """Measures all strategies and cases; rank zero prints and writes what all ranks found."""
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    world_size = torch.distributed.get_world_size()
    cycles = cycles_of(LATE_MS)
    results: dict[str, dict[str, list[Any]]] = {}
    for strategy in ("ddp", "ddp bucket view", "fsdp2"):
        results[strategy] = {}
        for case in CASES:
            found: list[Any] = [None] * world_size
            torch.distributed.all_gather_object(found, measure(strategy, case, cycles))
            results[strategy][case] = found
            if local_rank == 0:
                print(f"{strategy}, {case}: {found[0]['sentence'] or 'nobody is named'}")
                for rank, one in enumerate(found):
                    backward, comm = (one["phases_ms"][k] for k in ("backward", "backward/comm"))
                    print(
                        f"  rank {rank}: step {one['step_ms']:.3f} backward {backward:.3f}"
                        f" compute {backward - comm:.3f} comm {comm:.3f}; under the profiler: comm"
                        f" {one['comm_ms']:.3f} trace {one['comm_in_trace_ms']:.3f}"
                        f" largest difference {one['largest_difference_ms']:.3f}",
                        flush=True,
                    )
    if local_rank == 0 and out is not None:
        result = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "command": f"torchrun --nproc-per-node {world_size} benchmarks/ranks.py",
            "late_ms": LATE_MS,
            "slow_rank": SLOW_RANK,
            "results": results,
        }
        save(out, result)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    main(parser.parse_args().out)
