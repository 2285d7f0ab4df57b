"""Measures what timing a step costs: added time per step, against no timer at all.

All ways of timing run in one process, interleaved in random order over several rounds. "no timer"
runs twice; the difference between the two is the noise.

    python benchmarks/overhead.py --out benchmarks/results/overhead.json
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import Batch, Task, load
from torch import nn

from lightning_gputime import GPUPhaseHooks

STEPS = {"mlp": 400, "gpt4": 150, "gpt12": 60, "resnet50": 60}
BOUNDARIES = 5  # begin, after forward, after loss, after backward, after the update


class Nothing:
    """No timer."""

    def __init__(self, task: Task, optimizer: torch.optim.Optimizer) -> None:
        pass

    def boundary(self, i: int) -> None:
        """Is called at each boundary of a step."""

    def end_step(self) -> None:
        """Is called at the end of each step."""

    def remove(self) -> None:
        """Is called at the end of the measurement."""


class FiveEvents(Nothing):
    """The floor: five bare events a step, read one step late."""

    def __init__(self, task: Task, optimizer: torch.optim.Optimizer) -> None:
        self._sets = [
            [torch.Event(device="cuda", enable_timing=True) for _ in range(BOUNDARIES)]
            for _ in range(2)
        ]
        self._step = 0

    def boundary(self, i: int) -> None:
        self._sets[self._step % 2][i].record()

    def end_step(self) -> None:
        self._step += 1
        if self._step > 1:
            events = self._sets[self._step % 2]
            events[-1].synchronize()
            for i in range(BOUNDARIES - 1):
                events[i].elapsed_time(events[i + 1])


class FourSynchronize(Nothing):
    """The host's clock, after waiting for the device at each boundary."""

    def __init__(self, task: Task, optimizer: torch.optim.Optimizer) -> None:
        self.times = [0.0] * BOUNDARIES

    def boundary(self, i: int) -> None:
        if i > 0:
            torch.cuda.synchronize()
        self.times[i] = time.perf_counter()


class Hooks(Nothing):
    """This package."""

    lag = 1

    def __init__(self, task: Task, optimizer: torch.optim.Optimizer) -> None:
        self._timer = GPUPhaseHooks(task.net, optimizer, lag=self.lag).attach()
        self.end_step = self._timer.step  # type: ignore[method-assign]
        self.remove = self._timer.remove  # type: ignore[method-assign]


class HooksLag0(Hooks):
    """This package, with every step read when it ends."""

    lag = 0


WAYS: dict[str, type[Nothing]] = {
    "no timer": Nothing,
    "no timer, again": Nothing,
    "five events": FiveEvents,
    "GPUPhaseHooks()": Hooks,
    "GPUPhaseHooks(lag=0)": HooksLag0,
    "four synchronize": FourSynchronize,
}


def run(task: Task, batch: Batch, optimizer: Any, way: Nothing, steps: int) -> None:
    """Trains for some steps."""
    x, y = batch
    boundary: Callable[[int], None] = way.boundary
    for _ in range(steps):
        boundary(0)
        with torch.autocast("cuda", torch.bfloat16):
            out = task.net(x)
            boundary(1)
            loss = nn.functional.cross_entropy(out.flatten(0, -2), y.flatten())
        boundary(2)
        optimizer.zero_grad()
        loss.backward()
        boundary(3)
        optimizer.step()
        boundary(4)
        way.end_step()


def measure(model: str, rounds: int) -> dict[str, list[float]]:
    """Returns the time per step of each way in each round (in milliseconds)."""
    task, batch = load(model, torch.device("cuda"))
    optimizer = task.configure_optimizers()
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    run(task, batch, optimizer, Nothing(task, optimizer), 20)
    for _ in range(rounds):
        for name in random.sample(list(WAYS), len(WAYS)):
            way = WAYS[name](task, optimizer)
            run(task, batch, optimizer, way, 10)
            torch.cuda.synchronize()
            start = time.perf_counter()
            run(task, batch, optimizer, way, STEPS[model])
            torch.cuda.synchronize()
            found[name].append((time.perf_counter() - start) / STEPS[model] * 1e3)
            way.remove()
    return found


def main(models: list[str], rounds: int) -> dict[str, Any]:
    """Measures every way on every model; returns what was found."""
    results = {}
    for model in models:
        found = measure(model, rounds)
        base = statistics.median(found["no timer"])
        results[model] = {
            name: {
                "median_ms": statistics.median(ms),
                "min_ms": min(ms),
                "max_ms": max(ms),
                "ratio": statistics.median(ms) / base,
            }
            for name, ms in found.items()
        }
        for name, row in results[model].items():
            print(f"{model:9} {name:22} {row['median_ms']:8.4f} ms {row['ratio']:8.4f}", flush=True)
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": f"python benchmarks/overhead.py --rounds {rounds} --models {' '.join(models)}",
        "rounds": rounds,
        "steps": {model: STEPS[model] for model in models},
        "results": results,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    measured = main(arguments.models, arguments.rounds)
    if arguments.out:
        arguments.out.write_text(json.dumps(measured, indent=2) + "\n")
