"""Time the same work in three ways, with and without a warm-up.

B - A is the time to launch the work, C - A the time until the device has finished it, E - D the
time on the device. Only the last two measure the work.

    python examples/experiments/launch_time.py
"""

import time

import torch
from common import find_device, launch, show, synchronize
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks


class Elementwise(nn.Module):
    """Repeated product, sum, sine and cosine."""

    def __init__(self, repeat: int) -> None:
        super().__init__()
        self.repeat = repeat

    def forward(self, a: Tensor, b: Tensor) -> None:
        """Launch the operations."""
        for _ in range(self.repeat):
            _ = a * b, a + b, torch.sin(a), torch.cos(b)


def measure(dim: int, repeat: int, warmup: int) -> dict[str, float]:
    """Return the three times of a repetition (in milliseconds)."""
    device = find_device()
    a, b = torch.randn(2, dim, dim, dim, device=device)
    work = Elementwise(repeat)
    with GPUPhaseHooks(work, device=device, warmup_steps=0) as timer:
        Elementwise(warmup)(a, b)
        synchronize(device)
        start = time.perf_counter()
        for _ in timer.steps([0]):
            work(a, b)
        synchronize(device)
        end = time.perf_counter()
    forward = timer.summary().rows["forward"]
    return {
        "launch (B - A)": forward.host_mean_ms / repeat,
        "with a wait (C - A)": (end - start) * 1e3 / repeat,
        "events (E - D)": forward.mean_ms / repeat,
    }


def main(dim: int = 512, repeat: int = 10) -> dict[str, dict[str, float]]:
    """Measure and print, first without a warm-up."""
    rows = {
        "without a warm-up": measure(dim, repeat, warmup=0),
        "with a warm-up": measure(dim, repeat, warmup=5),
    }
    show("Launch time, host time and device time", rows)
    return rows


if __name__ == "__main__":
    launch(main, dim=128)
