"""Time two models with CPU work between them: waiting makes the pipeline slower.

With `synchronize`, the CPU starts its work only when the first model has finished. With events, CPU
and device work at the same time.

    python examples/experiments/pipeline.py
"""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from common import find_device, in_turn, launch, show, synchronize
from torch import nn

from lightning_gputime import GPUPhaseHooks


def models(width: int) -> tuple[nn.Module, nn.Module]:
    """Return two parts of a net."""
    part0 = nn.Sequential(
        nn.Conv2d(3, width, 3, 2, padding=1),
        nn.GELU(),
        nn.Conv2d(width, 2 * width, 3, 2, padding=1),
        nn.GELU(),
    )
    part1 = nn.Sequential(
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(),
        nn.Linear(2 * width, 2048),
        nn.GELU(),
        nn.Linear(2048, 512),
        nn.GELU(),
        nn.Linear(512, 1),
    )
    return part0, part1


def work_of_the_cpu(size: int) -> None:
    """Keep the CPU busy."""
    x = np.random.randn(1, 3, size, size).astype(np.float32)
    x *= 1024**0.5


class Waiting:
    """Timer of named parts that waits for the device before and after each part."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def part(self, name: str) -> Any:
        """Time the code inside."""
        synchronize(self._device)
        start = time.perf_counter()
        yield
        synchronize(self._device)
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)


@torch.inference_mode()
def main(
    width: int = 512,
    size: int = 224,
    batch: int = 32,
    cpu_size: int = 512,
    n: int = 20,
    rounds: int = 5,
) -> dict[str, dict[str, float]]:
    """Measure in random order over several rounds, and print."""
    device = find_device()
    part0, part1 = (part.eval().to(device) for part in models(width))
    images = torch.randn(batch, 3, size, size, device=device)
    waiting = Waiting(device)
    timer = GPUPhaseHooks(nn.ModuleList([part0, part1]))

    def run(part: Callable[[str], AbstractContextManager[Any]]) -> None:
        with part("part0"):
            hidden = part0(images)
        work_of_the_cpu(cpu_size)
        with part("part1"):
            part1(hidden)

    def without_a_timer() -> None:
        for _ in range(n):
            run(lambda name: nullcontext())

    def with_waits() -> None:
        for _ in range(n):
            run(waiting.part)

    def with_events() -> None:
        with timer:
            for _ in timer.steps(range(n)):
                run(timer.phase)

    ways = {"no timer": without_a_timer, "synchronize": with_waits, "events": with_events}
    without_a_timer()  # The first run is slower.
    rows = {
        name: {"whole, per iteration": statistics.median(ms / n for _, ms in runs)}
        for name, runs in in_turn(ways, rounds, device).items()
    }
    for name in ("part0", "part1"):
        rows["synchronize"][name] = statistics.median(waiting.seconds[name]) * 1e3
        rows["events"][name] = timer.summary().rows[name].p50_ms
    show("Two models, and the CPU between them", rows)
    return rows


if __name__ == "__main__":
    launch(main, width=32, size=96, batch=4, cpu_size=128)
