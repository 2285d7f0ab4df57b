"""Ways to train together in two processes; rank 1 is late in some place."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from lightning_gputime import GPUPhaseHooks
from lightning_gputime._measurement.ranks import totals_of
from lightning_gputime._timer import Timer

LATE_MS, WARMUP, STEPS = 40.0, 2, 12

Told = dict[str, Any]
"""The totals of a rank, and what rank zero says of all."""

WIDTH, LAYERS, MICRO_BATCHES = 8, 4, 2
PLACES = ("nobody", "data", "forward", "third layer", "backward", "optimizer")


class Late(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

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
    """A layer that may be late."""

    late: Any = (0.0, 0.0)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        result: Tensor = super().forward(input)
        if any(self.late):
            result = Late.apply(result, *self.late)  # type: ignore[no-untyped-call]
        return result


class Update(torch.optim.SGD):
    """An optimizer that may be late."""

    late = 0.0

    def step(self, closure: Any = None) -> Any:
        # Not before: Lightning computes the loss and its gradients in the closure.
        loss = super().step(closure)
        time.sleep(self.late / 1000)
        return loss


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(LAYERS)))


class Way:
    """A way to train in two processes: a model, and what a step does with it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.layers = layers()
        # Layers of this rank.
        self.parts: list[Any] = [*self.layers]
        self.model: nn.Module = self.layers
        self.calls_per_step = 1
        self.put_on()
        self.optimizer = Update(self.model.parameters(), lr=1e-3)

    def put_on(self) -> None:
        """Distributes the model."""

    def run(self, x: Tensor) -> None:
        self.model(x).square().mean().backward()

    def be_late(self, place: str, ms: float) -> None:
        a_call_ms = ms / self.calls_per_step
        # In a pipeline, rank 1 has the third layer first.
        third = self.parts[2 % len(self.parts)]
        if place == "forward":
            self.parts[0].late = (a_call_ms, 0.0)
        elif place == "third layer":
            third.late = (a_call_ms, 0.0)
        elif place == "backward":
            third.late = (0.0, a_call_ms)
        elif place == "optimizer":
            self.optimizer.late = ms


class DDP(Way):
    def put_on(self) -> None:
        self.model = nn.parallel.DistributedDataParallel(self.layers)


class FSDP1(Way):
    def put_on(self) -> None:
        self.model = FullyShardedDataParallel(
            self.layers,
            device_id=torch.device("cpu"),
            auto_wrap_policy=lambda module, recurse, nonwrapped_numel: True,
        )


class FSDP2(Way):
    def put_on(self) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for module in [*self.layers, self.layers]:
            fully_shard(module, mesh=mesh)


class TP(Way):
    def put_on(self) -> None:
        mesh = init_device_mesh("cpu", (2,))
        kinds = (ColwiseParallel, RowwiseParallel)
        parallelize_module(self.layers, mesh, {str(i): kinds[i % 2]() for i in range(LAYERS)})


class PP(Way):
    def put_on(self) -> None:
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


def batches(n: int, late_ms: float) -> Iterator[Tensor]:
    for number in range(n):
        time.sleep(late_ms / 1000)
        torch.manual_seed(number)
        yield torch.randn(8, WIDTH)


def train(way: Way, place: str) -> Told:
    """Trains while a rank is late in a place."""
    late_ms = LATE_MS if way.rank == 1 else 0.0
    way.be_late(place, late_ms)
    with GPUPhaseHooks(way.model, way.optimizer, warmup_steps=WARMUP) as timer:
        for x in timer.steps(batches(STEPS, late_ms if place == "data" else 0.0)):
            way.run(x)
            way.optimizer.step()
            way.optimizer.zero_grad()
    return told(timer)


def told(timer: Timer) -> Told:
    """Returns what a rank sends to be compared, and what rank zero says of it."""
    summary = timer.summary()
    assert summary.steps == STEPS - WARMUP
    ranks = summary.ranks
    return {
        "totals": totals_of(timer._results.sums).phases,
        "slowest_rank": ranks.slowest_rank if ranks is not None else None,
        "sentence": ranks.sentence if ranks is not None else "",
    }
