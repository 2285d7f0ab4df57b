"""Two models with work of the CPU between them: waiting to measure makes the whole longer.

The host that waits for the first model begins its own work only then. With events it works while
the device does.

    python examples/experiments/pipeline.py
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from common import find_device, show, synchronize
from torch import nn

from lightning_gputime import GPUPhaseHooks


def models(width: int) -> tuple[nn.Module, nn.Module]:
    """Returns the two parts of a net."""
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
    """Keeps the host busy."""
    x = np.random.randn(1, 3, size, size).astype(np.float32)
    x *= 1024**0.5


class Waiting:
    """Times named parts on the host's clock, and waits for the device before and after each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def part(self, name: str) -> Any:
        """Times the code inside."""
        synchronize(self._device)
        start = time.perf_counter()
        yield
        synchronize(self._device)
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)

    def mean_ms(self, name: str, warmup: int) -> float:
        """Returns the mean (in milliseconds)."""
        return float(np.mean(self.seconds[name][warmup:])) * 1e3


@torch.inference_mode()
def main(
    width: int = 512, size: int = 224, batch: int = 32, cpu_size: int = 512, n: int = 50
) -> dict[str, dict[str, float]]:
    """Measures and prints."""
    device = find_device()
    part0, part1 = (part.eval().to(device) for part in models(width))
    images = torch.randn(batch, 3, size, size, device=device)
    warmup = n // 10

    def run(part: Callable[[str], AbstractContextManager[Any]]) -> None:
        with part("part0"):
            hidden = part0(images)
        work_of_the_cpu(cpu_size)
        with part("part1"):
            part1(hidden)

    def whole(loop: Callable[[], None]) -> float:
        """Returns the time of the whole loop, per iteration (in milliseconds)."""
        synchronize(device)
        start = time.perf_counter()
        loop()
        synchronize(device)
        return (time.perf_counter() - start) / n * 1e3

    def untimed() -> None:
        for _ in range(n):
            run(lambda name: nullcontext())

    waiting = Waiting(device)

    def with_waits() -> None:
        for _ in range(n):
            run(waiting.part)

    timer = GPUPhaseHooks(nn.ModuleList([part0, part1]), warmup_steps=warmup)

    def with_events() -> None:
        with timer:
            for _ in timer.steps(range(n)):
                run(timer.phase)

    untimed()  # The first run is slower.
    total = "whole, per iteration"
    no_timer = {total: whole(untimed)}
    waits = {total: whole(with_waits)}
    events = {total: whole(with_events)}
    for name in ("part0", "part1"):
        waits[name] = waiting.mean_ms(name, warmup)
        events[name] = timer.summary().rows[name].mean_ms
    rows = {"no timer": no_timer, "synchronize": waits, "events": events}
    show("Two models, and the CPU between them", rows)
    return rows


if __name__ == "__main__":
    main()
