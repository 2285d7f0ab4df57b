"""Train in one of two processes in many ways, with rank 1 late, and write the times.

python tests/wait_run.py DIRECTORY RANK
"""

import json
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_gputime import GPUPhaseHooks

LATE_MS, WARMUP, STEPS = 40.0, 2, 20
EXAMINED = 6  # Three examined steps and the step after each, which are in no statistics.
WIDTH, LAYERS, MICRO_BATCHES = 8, 4, 2
PLACES = ("nobody", "data", "forward", "third layer", "backward", "optimizer")


class Sleep(torch.autograd.Function):
    """The identity, which sleeps in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_ms: float, backward_ms: float) -> Tensor:
        ctx.ms = backward_ms
        time.sleep(forward_ms / 1000)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.ms / 1000)
        return grads[0], None, None


class Layer(nn.Linear):
    """A layer that sleeps if it is late."""

    late: Any = (0.0, 0.0)  # Delays in forward and backward, in ms.

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        result: Tensor = super().forward(input)
        if any(self.late):
            result = Sleep.apply(result, *self.late)  # type: ignore[no-untyped-call]
        return result


class Update(torch.optim.SGD):
    """An optimizer that sleeps if it is late."""

    late = 0.0  # Delay in ms.

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.late / 1000)
        return super().step(closure)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(LAYERS)))


class Way:
    """A way to train in two processes: a model, and a step on it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.layers = layers()
        self.parts: list[Any] = [*self.layers]  # Layers of this rank.
        self.model: nn.Module = self.layers
        self.calls_per_step = 1
        self.distribute()
        self.optimizer = Update(self.model.parameters(), lr=1e-3)

    def distribute(self) -> None:
        """Distribute the model. Here, do nothing."""

    def run(self, x: Tensor) -> None:
        self.model(x).square().mean().backward()

    def be_late(self, place: str, ms: float) -> None:
        call_ms = ms / self.calls_per_step
        # In a pipeline, rank 1 has the third layer first.
        third = self.parts[2 % len(self.parts)]
        if place == "forward":
            self.parts[0].late = (call_ms, 0.0)
        elif place == "third layer":
            third.late = (call_ms, 0.0)
        elif place == "backward":
            third.late = (0.0, call_ms)
        elif place == "optimizer":
            self.optimizer.late = ms


class DDP(Way):
    def distribute(self) -> None:
        self.model = nn.parallel.DistributedDataParallel(self.layers)


class FSDP1(Way):
    def distribute(self) -> None:
        self.model = FullyShardedDataParallel(
            self.layers,
            device_id=torch.device("cpu"),
            auto_wrap_policy=lambda module, recurse, nonwrapped_numel: True,
        )


class FSDP2(Way):
    def distribute(self) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for module in [*self.layers, self.layers]:
            fully_shard(module, mesh=mesh)


class TP(Way):
    def distribute(self) -> None:
        mesh = init_device_mesh("cpu", (2,))
        kinds = (ColwiseParallel, RowwiseParallel)
        parallelize_module(self.layers, mesh, {str(i): kinds[i % 2]() for i in range(LAYERS)})


class PP(Way):
    def distribute(self) -> None:
        half = LAYERS // 2
        self.parts = self.parts[half * self.rank : half * (self.rank + 1)]
        self.model = nn.Sequential(*self.parts)
        self.calls_per_step = MICRO_BATCHES
        stage = PipelineStage(self.model, self.rank, 2, torch.device("cpu"))
        self.schedule = Schedule1F1B(
            stage, MICRO_BATCHES, loss_fn=lambda output, target: output.square().mean()
        )

    def run(self, x: Tensor) -> None:
        if self.rank == 0:
            self.schedule.step(x)
        else:
            self.schedule.step(target=x)


class OwnReduce(Way):
    def run(self, x: Tensor) -> None:
        super().run(x)
        for parameter in self.model.parameters():
            distributed.all_reduce(parameter.grad)


class OwnAsync(Way):
    def run(self, x: Tensor) -> None:
        super().run(x)
        grads = [parameter.grad for parameter in self.model.parameters()]
        for work in [distributed.all_reduce(grad, async_op=True) for grad in grads]:
            work.wait()


WAYS = {way.__name__: way for way in (DDP, FSDP1, FSDP2, TP, PP, OwnReduce, OwnAsync)}
# Others launch their collectives in the same places as one of these.
IN_ALL_PLACES = ("DDP", "FSDP2", "PP")
CASES = [
    (way, place)
    for way, place in product(WAYS, PLACES)
    if way in IN_ALL_PLACES or place in ("nobody", "forward", "backward")
]


def batches(n: int, late_ms: float) -> Iterator[Tensor]:
    for number in range(n):
        time.sleep(late_ms / 1000)
        torch.manual_seed(number)
        yield torch.randn(8, WIDTH)


def train(way: Way, place: str) -> dict[str, Any]:
    """Train while rank 1 is late in a place."""
    late_ms = LATE_MS if way.rank == 1 else 0.0
    way.be_late(place, late_ms)
    with GPUPhaseHooks(way.model, way.optimizer, warmup_steps=WARMUP) as timer:
        for x in timer.steps(batches(STEPS, late_ms if place == "data" else 0.0)):
            way.run(x)
            way.optimizer.step()
            way.optimizer.zero_grad()
    return measured_by(timer)


def measured_by(timer: GPUPhaseHooks) -> dict[str, Any]:
    """Return the times of a rank, and on rank zero the comparison of ranks.

    Local times are first quartiles of steps, because a busy machine makes steps longer.
    """
    history = timer.history()[WARMUP:]
    steps_ms = {
        name.removesuffix("_ms"): np.nan_to_num(history[name])
        for name in history.dtype.names or ()
        if name.endswith("_ms") and name != "host_wait_ms"
    }
    local_ms = {name: ms.copy() for name, ms in steps_ms.items() if "/" not in name}
    waits_ms = {name: ms for name, ms in steps_ms.items() if name.endswith("/comm")}
    for name, ms in waits_ms.items():
        local_ms[name.partition("/")[0]] -= ms
        local_ms["step"] -= ms
    found = {
        "steps": timer.summary().steps,
        "waited_ms": float(np.median(sum(waits_ms.values()))),
        # Not the minimum: a single step may be wrong if the machine takes its core away.
        "local_ms": {name: float(np.quantile(ms, 0.25)) for name, ms in local_ms.items()},
    }
    if (ranks := timer.summary().ranks) is not None:
        names = ("straggler", "suspect", "phase", "line", "sentence", "notes")
        found |= {name: getattr(ranks, name) for name in names}
    return found


def gradients_and_weights(kind: type[Way], rank: int, timed: bool) -> list[Tensor]:
    """Return the gradients of each step, and the final weights, of a seeded run."""
    way = kind(rank)
    timer = GPUPhaseHooks(way.model, way.optimizer, warmup_steps=0, sync_ranks=False)
    if timed:
        timer.attach()
    grads = []
    for x in batches(4, 0.0):
        way.run(x)
        way.optimizer.step()
        grads += [full(parameter.grad) for parameter in way.model.parameters()]
        way.optimizer.zero_grad()
        if timed:
            timer.step()
    if timed:
        timer.remove()
        assert timer.summary().rows["forward/comm"].n
    return [*grads, *map(full, way.model.parameters())]


def full(tensor: Any) -> Tensor:
    """Return a copy of the part of a tensor that this rank has."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().clone()


def places() -> list[dict[str, Any]]:
    kinds = (distributed.ProcessGroup, distributed.Work, torch._C.Future)
    return [dict(vars(kind)) for kind in kinds]


def main(directory: Path, rank: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2
    )
    before = places()
    results: dict[str, Any] = {}
    for name, place in CASES:
        distributed.barrier()
        results[f"{name} {place}"] = train(WAYS[name](rank), place)
    for name in ("FSDP2", "TP"):
        runs = [gradients_and_weights(WAYS[name], rank, timed) for timed in (False, True)]
        results[f"{name} is bitwise"] = all(map(torch.equal, *runs))
    results["nothing is left"] = places() == before
    (directory / f"rank{rank}.json").write_text(json.dumps(results))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
