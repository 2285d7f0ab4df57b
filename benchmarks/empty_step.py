"""A training step that does next to nothing, so that what a timer adds is seen."""

import time
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from loops import Way
from models import Batch, Task
from torch import Tensor, nn

from lightning_gputime._record.clock import Clock, clock_for


class NoEvent:
    """An event that is always over."""

    __slots__ = ()

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any, /) -> float:
        return 1.0


class NoClock:
    """The clock of these events."""

    event = NoEvent
    host_ns = staticmethod(time.perf_counter_ns)

    def is_capturing(self) -> bool:
        return False


def new_clock(cuda: bool) -> Clock:
    """Returns the clock of the GPU, or one whose events do nothing."""
    return clock_for(torch.device("cuda"), tell=False) if cuda else NoClock()


class EmptyNet(nn.Module):
    """A net of many modules, of which it calls none."""

    def __init__(self, modules: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(modules))
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x


class NoUpdate(torch.optim.Optimizer):
    """An optimizer without an update."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net.parameters(), {})

    def step(self, closure: Any = None) -> Any:
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None: ...


class EmptyTask(Task):
    """Training of this net in Lightning."""

    net: EmptyNet

    def __init__(self) -> None:
        super().__init__(EmptyNet())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).sum() + self.net.weight
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return NoUpdate(self)


def train_empty(net: EmptyNet, optimizer: NoUpdate, way: Way, steps: int) -> None:
    """Trains for some steps in a plain loop, of which not even the loss is computed."""
    x, loss = torch.zeros(()), torch.zeros(())
    boundary = way.boundary
    for _ in range(steps):
        boundary(0)
        net(x)
        boundary(1)
        boundary(2)
        optimizer.zero_grad()
        # Not `loss.backward()`, whose arguments would cost each timer's stand-in more.
        torch.autograd.backward(loss)
        boundary(3)
        optimizer.step()
        boundary(4)
        way.end_step()


def no_backward() -> AbstractContextManager[Any]:
    """Lets backward compute nothing."""
    # What `torch.autograd.backward` calls, and a timer stands in for.
    return patch.object(torch.autograd, "_engine_run_backward", lambda *args, **kwargs: None)
