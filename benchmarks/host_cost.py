"""Measures what timing a step costs the host: Python alone, with events that do nothing.

The floor is five bare events, recorded in one step and read in the next. The times are those of a
step that does next to nothing, in a warm cache; inside a real training they are larger. The counts
are exact: how many of Python's instructions, and of its functions, the package runs in a step.

    python benchmarks/host_cost.py --out benchmarks/results/host_cost.json
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from models import Batch, Repeat
from torch import Tensor, nn

import lightning_gputime
from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer

PACKAGE = os.path.dirname(lightning_gputime.__file__)
STEPS = 1000


class NoEvent:
    """An event that is always over."""

    __slots__ = ()

    def record(self) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""

    def query(self) -> bool:
        """Returns True."""
        return True

    def elapsed_time(self, end_event: Any, /) -> float:
        """Returns 1 (in milliseconds)."""
        return 1.0


class NoClock:
    """The clock of these events."""

    event = NoEvent
    host_ns = staticmethod(time.perf_counter_ns)

    def is_capturing(self) -> bool:
        """Returns False."""
        return False

    def for_graphs(self) -> None:
        """Returns None."""


class Net(nn.Module):
    """A net of many modules, of which it calls none."""

    def __init__(self, modules: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(modules))
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x`."""
        return x


class NoUpdate(torch.optim.Optimizer):
    """An optimizer without an update."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net.parameters(), {})

    def step(self, closure: Any = None) -> Any:
        """Runs the closure."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing."""


class Task(pl.LightningModule):
    """A LightningModule of this net."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns a loss that nothing depends on."""
        loss: Tensor = self.net(batch[0]).sum() + self.net.weight
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return NoUpdate(self)


@contextmanager
def no_backward() -> Iterator[None]:
    """Lets backward do nothing."""
    backward = torch.autograd.backward
    torch.autograd.backward = lambda *args, **kwargs: None
    try:
        yield
    finally:
        torch.autograd.backward = backward


class Nothing:
    """No timer."""

    def __init__(self, net: Net, optimizer: NoUpdate) -> None:
        pass

    def boundary(self, i: int) -> None:
        """Is called at each boundary of a step."""

    def end_step(self) -> None:
        """Is called at the end of each step."""

    def remove(self) -> None:
        """Is called at the end of the measurement."""


class Floor(Nothing):
    """Five bare events a step, read one step late."""

    def __init__(self, net: Net, optimizer: NoUpdate) -> None:
        self._sets = [[NoEvent() for _ in range(5)] for _ in range(2)]
        self._step = 0

    def boundary(self, i: int) -> None:
        self._sets[self._step % 2][i].record()

    def end_step(self) -> None:
        self._step += 1
        events = self._sets[self._step % 2]
        events[-1].synchronize()
        for i in range(4):
            events[i].elapsed_time(events[i + 1])


class Hooks(Nothing):
    """This package."""

    def __init__(self, net: Net, optimizer: NoUpdate) -> None:
        self.timer = GPUPhaseHooks(net, optimizer, clock=NoClock()).attach()
        self.end_step = self.timer.step  # type: ignore[method-assign]
        self.remove = self.timer.remove  # type: ignore[method-assign]


def plain_loop(net: Net, optimizer: NoUpdate, way: Nothing, steps: int) -> None:
    """Trains for some steps."""
    x, loss = torch.zeros(()), torch.zeros(())
    boundary: Callable[[int], None] = way.boundary
    for _ in range(steps):
        boundary(0)
        net(x)
        boundary(1)
        boundary(2)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        boundary(3)
        optimizer.step()
        boundary(4)
        way.end_step()


def fit(timer: GPUPhaseTimer | None, steps: int) -> float:
    """Returns the time of a step in Lightning (in microseconds)."""

    class Clock(pl.Callback):
        started = ended = 0.0

        def on_train_batch_start(self, *args: Any) -> None:
            if args[-1] == 20:
                self.started = time.perf_counter()

        def on_train_end(self, *args: Any) -> None:
            self.ended = time.perf_counter()

    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[clock, *([timer] if timer else [])],
    )
    batch = torch.zeros(1), torch.zeros(1)
    trainer.fit(Task(), Repeat(batch, steps + 20))
    return (clock.ended - clock.started) / steps * 1e6


def time_hooks(rounds: int, modules: int = 10) -> dict[str, float]:
    """Returns the added time a step of each way (in microseconds), the median of all rounds."""
    net = Net(modules)
    optimizer = NoUpdate(net)
    ways = {"none": Nothing, "floor": Floor, "GPUPhaseHooks": Hooks}
    found: dict[str, list[float]] = {name: [] for name in ways}
    with no_backward():
        for _ in range(rounds):
            for name in random.sample(list(ways), len(ways)):
                way = ways[name](net, optimizer)
                plain_loop(net, optimizer, way, 50)
                start = time.perf_counter()
                plain_loop(net, optimizer, way, STEPS)
                found[name].append((time.perf_counter() - start) / STEPS * 1e6)
                way.remove()
    base = statistics.median(found.pop("none"))
    return {name: statistics.median(times) - base for name, times in found.items()}


def time_callback(rounds: int) -> float:
    """Returns the added time a step of the callback (in microseconds)."""
    with_timer, without = [], []
    with no_backward():
        for _ in range(rounds):
            with_timer.append(fit(GPUPhaseTimer(clock=NoClock(), summary=False), STEPS))
            without.append(fit(None, STEPS))
    return statistics.median(with_timer) - statistics.median(without)


class Counter:
    """Counts what Python runs of this package."""

    def __init__(self) -> None:
        self.instructions = self.functions = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Is called by `sys.settrace`."""
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "call":
            self.functions += 1
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.instructions += 1
        return self

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts inside."""
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(None)


def count_hooks(steps: int = 400) -> dict[str, float]:
    """Returns what the package runs in a step of a plain loop."""
    net = Net()
    optimizer, counter = NoUpdate(net), Counter()
    with no_backward():
        way = Hooks(net, optimizer)
        plain_loop(net, optimizer, way, 50)
        with counter.counting():
            plain_loop(net, optimizer, way, steps)
        way.remove()
    return {"instructions": counter.instructions / steps, "functions": counter.functions / steps}


def main(rounds: int) -> dict[str, Any]:
    """Measures everything; returns what was found."""
    added = time_hooks(rounds)
    added["GPUPhaseTimer"] = time_callback(max(rounds // 4, 1))
    results: dict[str, Any] = {
        "added_us": added,
        "ratio_to_floor": {name: us / added["floor"] for name, us in added.items()},
        "by_modules_us": {
            modules: time_hooks(rounds, modules)["GPUPhaseHooks"] for modules in (10, 100, 1000)
        },
        "counts": count_hooks(),
    }
    print(json.dumps(results, indent=2))
    return {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": f"python benchmarks/host_cost.py --rounds {rounds}",
        **results,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    measured = main(arguments.rounds)
    if arguments.out:
        arguments.out.write_text(json.dumps(measured, indent=2) + "\n")
