"""What `ranks.py` trains in a plain loop: a net in each kind of parallelism, with a late rank."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from kernels import cycles_of, spin_in_backward
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from lightning_gputime import GPUPhaseHooks
from lightning_gputime._output.summary import PhaseSummary

SLOW_RANK = 1
LAYERS = 8
MICRO_BATCHES, LAYERS_A_STAGE = 4, 4

Listener = Callable[[Any], object]
"""Is called with the times of each step."""


@dataclass(frozen=True)
class Job:
    """What is trained on this rank, and where it is late.

    Args:
        device: The device of this rank.
        width: The width of the net.
        batch: The rows of a batch.
        case: The place at which the slow rank is late.
        late_ms: How late it is in each step (in milliseconds).
        late_cycles: The same in cycles of a spin kernel; 0 if its host sleeps instead.
    """

    device: torch.device
    width: int
    batch: int
    case: str
    late_ms: float
    late_cycles: int

    @property
    def is_cuda(self) -> bool:
        """Whether it is trained on a GPU."""
        return self.device.type == "cuda"

    def late(self, place: str, parts: int = 1) -> None:
        """Is late, if this rank is at this place: so many times less if it is there so often."""
        if place != self.case or dist.get_rank() != SLOW_RANK:
            return
        if self.late_cycles:
            torch.cuda._sleep(self.late_cycles // parts)
        else:
            time.sleep(self.late_ms / 1e3 / parts)

    def autocast(self, x: Tensor) -> AbstractContextManager[object]:
        """Returns what lets a GPU compute in bfloat16, where `x` is not."""
        enabled = self.is_cuda and x.dtype == torch.float32
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)


def late_cycles(late_ms: float, device: torch.device, on_host: bool) -> int:
    """Returns for how many cycles a rank spins that is late, 0 if its host sleeps."""
    return 0 if on_host or device.type == "cpu" else cycles_of(late_ms)


class LateLinear(nn.Linear):
    """A layer that may be late in its forward."""

    def __init__(self, width: int, late: Callable[[], None]) -> None:
        super().__init__(width, width)
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor of the shape of `x`, (batch, width)."""
        self.late()
        return super().forward(x)


class Net(nn.Module):
    """Linear layers, late in the forward, in their third, or in the backward.

    Args:
        job: What is trained.
        layers: The number of linear layers.
        parts: How often it is called in a step.
        norm: Whether there is a batch norm after each.
    """

    def __init__(self, job: Job, layers: int = LAYERS, parts: int = 1, norm: bool = False) -> None:
        super().__init__()
        self.late = partial(job.late, parts=parts)
        self.layers = nn.ModuleList(
            LateLinear(job.width, partial(self.late, "third layer" if i == 2 else ""))
            for i in range(layers)
        )
        self.norms = nn.ModuleList(
            nn.BatchNorm1d(job.width) if norm else nn.Identity() for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns what the last layer does, of the shape of `x`, (batch, width)."""
        self.late("forward")
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x))
        return spin_in_backward(x.clone(), partial(self.late, "backward"))


class Delimiter:
    """A kernel of its own kind in the timed stream, to be found in a trace."""

    def __init__(self, device: torch.device) -> None:
        self._tensor = torch.zeros(1, device=device)

    def __call__(self, *_: Any) -> None:
        """Launches it."""
        self._tensor.erfinv_()


class PlainLoop:
    """A plain training loop in which one rank may be late.

    Args:
        job: What is trained.
        model: What the loop calls.
        sync: Is called after each backward.
        in_bfloat16: Whether the parameters are, so that nothing is cast.
    """

    windows: tuple[str, ...] = ("forward", "loss", "backward", "optimizer", "data")
    """What follows each delimiter of a step."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        sync: Callable[[nn.Module], None] = lambda model: None,
        in_bfloat16: bool = False,
    ) -> None:
        self.job, self.model, self.sync = job, model, sync
        self.dtype = torch.bfloat16 if in_bfloat16 and job.is_cuda else torch.float32
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=job.is_cuda)
        self.delimit = Delimiter(job.device)

    def batches(self, n: int) -> Iterator[Tensor]:
        """Yields batches of shape (batch, width)."""
        job = self.job
        x = torch.randn(job.batch, job.width, device=job.device, dtype=self.dtype)
        for _ in range(n):
            job.late("data")
            yield x

    def step(self, x: Tensor) -> None:
        """Trains one step."""
        self.delimit()
        with self.job.autocast(x):
            out = self.model(x)
            self.delimit()
            loss = out.square().mean()
        self.delimit()
        loss.backward()
        self.delimit()
        self.job.late("optimizer")
        self.sync(self.model)
        self.optimizer.step()
        self.delimit()
        self.optimizer.zero_grad()

    def train(
        self, steps: int, warmup_steps: int, observers: Sequence[Listener] = ()
    ) -> PhaseSummary:
        """Trains some steps; returns what the timer says."""
        with GPUPhaseHooks(
            self.model, self.optimizer, warmup_steps=warmup_steps, observers=observers
        ) as timer:
            for x in timer.steps(self.batches(steps)):
                self.step(x)
        return timer.summary()


class PipelineLoop(PlainLoop):
    """A stage of a pipeline, whose forwards and backwards alternate."""

    windows = ("step", "data")

    def __init__(self, job: Job) -> None:
        rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        dtype = torch.bfloat16 if job.is_cuda else torch.float32
        with job.device:
            net = Net(job, LAYERS_A_STAGE, MICRO_BATCHES).to(dtype)
        super().__init__(job, net, in_bfloat16=True)
        stage = PipelineStage(net, rank, self.last + 1, job.device)
        self.schedule = Schedule1F1B(stage, MICRO_BATCHES, nn.functional.mse_loss)

    def step(self, x: Tensor) -> None:
        """Trains one step."""
        self.delimit()
        rank = dist.get_rank()
        # With a gradient of the input each stage has as much work.
        given = (x.detach().requires_grad_(),) if rank == 0 else ()
        self.schedule.step(*given, target=torch.zeros_like(x) if rank == self.last else None)
        self.job.late("optimizer")
        self.optimizer.step()
        self.delimit()
        self.optimizer.zero_grad()


def _gradients(model: nn.Module) -> list[Tensor]:
    return [one.grad for one in model.parameters() if one.grad is not None]


def _reduce_each(model: nn.Module) -> None:
    for grad in _gradients(model):
        dist.all_reduce(grad, op=dist.ReduceOp.SUM)


def _reduce_together(model: nn.Module) -> None:
    with _coalescing_manager(async_ops=True) as works:
        for grad in _gradients(model):
            dist.all_reduce(grad, op=dist.ReduceOp.SUM)
    works.wait()


def _ddp(job: Job, view: bool = False) -> PlainLoop:
    return PlainLoop(job, _wrapped(job, _net(job), view))


def _wrapped(job: Job, net: nn.Module, view: bool = False) -> nn.Module:
    ids = [job.device] if job.is_cuda else None
    return DistributedDataParallel(net, device_ids=ids, gradient_as_bucket_view=view)


def _net(job: Job, norm: bool = False) -> Net:
    with job.device:
        return Net(job, norm=norm)


def shard(net: Net, mesh: Any = None) -> Net:
    """Lets FSDP2 shard each layer, and the rest."""
    for part in (*net.layers, net):
        fully_shard(part, mesh=mesh)
    return net


def _tensor_parallel(job: Job) -> PlainLoop:
    mesh = init_device_mesh(job.device.type, (dist.get_world_size(),))
    net = _net(job)
    if job.is_cuda:
        net = net.to(torch.bfloat16)
    styles = (ColwiseParallel, RowwiseParallel)
    plan: dict[str, ParallelStyle] = {f"layers.{i}": styles[i % 2]() for i in range(LAYERS)}
    return PlainLoop(job, parallelize_module(net, mesh, plan), in_bfloat16=True)


def _sync_batch_norm(job: Job) -> PlainLoop:
    net = nn.SyncBatchNorm.convert_sync_batchnorm(_net(job, norm=True))
    return PlainLoop(job, _wrapped(job, net))


PLAIN: dict[str, Callable[[Job], PlainLoop]] = {
    "ddp": _ddp,
    "ddp bucket view": partial(_ddp, view=True),
    "fsdp2": lambda job: PlainLoop(job, shard(_net(job))),
    "tp": _tensor_parallel,
    "pp": PipelineLoop,
    "syncbn": _sync_batch_norm,
    "all-reduce": lambda job: PlainLoop(job, _net(job), _reduce_each),
    "all-reduce coalesced": lambda job: PlainLoop(job, _net(job), _reduce_together),
}
"""The loop of each kind of parallelism. All ranks must make the same ones."""
