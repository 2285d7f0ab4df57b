"""Measures what timing a step costs the host.

Without `--cuda` the events do nothing, so that what is left is Python's own cost; with it they are
those of the GPU, in a stream that is empty, as it is where training is bound by launches. The floor
is five bare events, recorded in one step and read in the next. The times are those of a step that
does next to nothing, in a warm cache. The counts are exact: how many of Python's instructions, and
of its functions, the package runs in a step.

    python benchmarks/host_cost.py
    python benchmarks/host_cost.py --cuda --out benchmarks/results/host_cost_cuda.json
"""

import argparse
import json
import logging
import os
import platform
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from models import Batch, Repeat
from peers import FiveEvents
from record import command, save
from torch import Tensor, nn

import lightning_gputime
from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer
from lightning_gputime._record.clock import Clock, clock_for

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


def new_event(cuda: bool) -> Any:
    """Returns an event of the GPU, or one that does nothing."""
    return torch.Event(device="cuda", enable_timing=True) if cuda else NoEvent()


def clock(cuda: bool) -> Clock:
    """Returns the clock that has these events."""
    return clock_for(torch.device("cuda"), tell=False) if cuda else NoClock()


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

    def __init__(self, net: Net, optimizer: NoUpdate, cuda: bool) -> None:
        pass

    def boundary(self, i: int) -> None:
        """Is called at each boundary of a step."""

    def end_step(self) -> None:
        """Is called at the end of each step."""

    def remove(self) -> None:
        """Is called at the end of the measurement."""


class Floor(Nothing):
    """Five bare events a step, read one step late."""

    def __init__(self, net: Net, optimizer: NoUpdate, cuda: bool) -> None:
        self._events = FiveEvents(lambda: new_event(cuda))
        self.boundary = self._events.record  # type: ignore[method-assign]
        self.end_step = self._events.read  # type: ignore[method-assign]


class Hooks(Nothing):
    """This package."""

    def __init__(self, net: Net, optimizer: NoUpdate, cuda: bool) -> None:
        self.timer = GPUPhaseHooks(net, optimizer, clock=clock(cuda)).attach()
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


IN_LIGHTNING: dict[str, Callable[[bool], list[pl.Callback]]] = {
    "none": lambda cuda: [],
    "callback that does nothing": lambda cuda: [pl.Callback()],
    "floor": lambda cuda: [FiveEvents(lambda: new_event(cuda))],
    "GPUPhaseTimer": lambda cuda: [GPUPhaseTimer(clock=clock(cuda), summary=False)],
    "GPUPhaseTimer(every_n_steps=10)": lambda cuda: [
        GPUPhaseTimer(clock=clock(cuda), summary=False, every_n_steps=10)
    ],
}


def fit(callbacks: list[pl.Callback]) -> float:
    """Returns the time of a step in Lightning (in microseconds)."""

    class Stopwatch(pl.Callback):
        started = ended = 0.0

        def on_train_batch_start(self, *args: Any) -> None:
            if args[-1] == 50:
                self.started = time.perf_counter()

        def on_train_end(self, *args: Any) -> None:
            self.ended = time.perf_counter()

    stopwatch = Stopwatch()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[stopwatch, *callbacks],
    )
    batch = torch.zeros(1), torch.zeros(1)
    trainer.fit(Task(), Repeat(batch, STEPS + 50))
    return (stopwatch.ended - stopwatch.started) / STEPS * 1e6


def time_hooks(rounds: int, cuda: bool, modules: int = 10) -> dict[str, float]:
    """Returns the added time a step of each way in a plain loop (in microseconds)."""
    net = Net(modules)
    optimizer = NoUpdate(net)
    ways = {"none": Nothing, "floor": Floor, "GPUPhaseHooks": Hooks}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in random.sample(list(ways), len(ways)):
            way = ways[name](net, optimizer, cuda)
            plain_loop(net, optimizer, way, 50)
            start = time.perf_counter()
            plain_loop(net, optimizer, way, STEPS)
            found[name].append((time.perf_counter() - start) / STEPS * 1e6)
            way.remove()
    return added(found)


def time_callbacks(rounds: int, cuda: bool) -> dict[str, float]:
    """Returns the added time a step of each way in Lightning (in microseconds)."""
    found: dict[str, list[float]] = {name: [] for name in IN_LIGHTNING}
    for _ in range(rounds):
        for name in random.sample(list(IN_LIGHTNING), len(IN_LIGHTNING)):
            found[name].append(fit(IN_LIGHTNING[name](cuda)))
    return added(found)


def added(found: dict[str, list[float]]) -> dict[str, float]:
    """Returns the first quartile of each way less that of none."""
    quiet = {name: statistics.quantiles(times)[0] for name, times in found.items()}
    base = quiet.pop("none")
    return {name: round(us - base, 2) for name, us in quiet.items()}


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
    way = Hooks(net, optimizer, cuda=False)
    plain_loop(net, optimizer, way, 50)
    with counter.counting():
        plain_loop(net, optimizer, way, steps)
    way.remove()
    return {"instructions": counter.instructions / steps, "functions": counter.functions / steps}


def main(rounds: int, cuda: bool) -> dict[str, Any]:
    """Measures everything; returns what was found."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with no_backward():
        plain, lightning = time_hooks(rounds, cuda), time_callbacks(rounds, cuda)
        results: dict[str, Any] = {
            "added_us": {"plain": plain, "lightning": lightning},
            "ratio_to_floor": {
                "plain": round(plain["GPUPhaseHooks"] / plain["floor"], 2),
                "lightning": round(lightning["GPUPhaseTimer"] / lightning["floor"], 2),
            },
            "by_modules_us": {
                modules: time_hooks(rounds, cuda, modules)["GPUPhaseHooks"]
                for modules in (10, 100, 1000)
            },
        }
        if not cuda:
            results["counts"] = count_hooks()
    print(json.dumps(results, indent=2))
    return {
        "events": torch.cuda.get_device_name() if cuda else "none",
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": command(),
        **results,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cuda", action="store_true", help="take the events of the GPU")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    save(arguments.out, main(arguments.rounds, arguments.cuda))
