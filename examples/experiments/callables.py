"""Time a callable on the host clock, on the device clock, and as the steps of a timer.

A kernel benchmark needs no special timer, only the right loop:

- Warm-up: `warmup_steps`.
- Inputs that are in no cache: iterate over fresh inputs.
- A cold L2 cache: overwrite it in a named phase.
- A CUDA graph: replay it.

    python examples/experiments/callables.py
"""

import time
from collections.abc import Iterable
from contextlib import nullcontext

import torch
from common import find_device, show, synchronize
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks

L2_BYTES = 256 * 2**20
"""More than the L2 cache of any current GPU."""


def time_on_the_host(model: nn.Module, x: Tensor, n: int, warmup: int) -> float:
    """Return the mean time of a call, with one wait at the end (in milliseconds)."""
    for _ in range(warmup):
        model(x)
    synchronize(x.device)
    start = time.perf_counter()
    for _ in range(n):
        model(x)
    synchronize(x.device)
    return (time.perf_counter() - start) / n * 1e3


def time_on_the_device(model: nn.Module, x: Tensor, n: int, warmup: int) -> float:
    """Return the mean time of a call between two events (in milliseconds)."""
    for _ in range(warmup):
        model(x)
    start, end = (torch.Event(device=x.device, enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(n):
        model(x)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / n


class Replay(nn.Module):
    """Model whose call is captured in a CUDA graph."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.x = x.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.y: Tensor = model(self.x)

    def forward(self, x: Tensor) -> Tensor:
        """Copy the input to the graph, and replay it."""
        self.x.copy_(x)
        self.graph.replay()
        return self.y


def time_as_steps(
    model: nn.Module, inputs: Iterable[Tensor], warmup: int, flush: bool = False
) -> dict[str, float]:
    """Return the mean time of a call (in milliseconds)."""
    device = find_device()
    cache = torch.empty(L2_BYTES if flush else 0, dtype=torch.int8, device=device)
    with GPUPhaseHooks(model, device=device, warmup_steps=warmup) as timer:
        for x in timer.steps(inputs):
            with timer.phase("flush") if flush else nullcontext():
                cache.zero_()
            model(x)
    return {"as run": timer.summary().rows["forward"].mean_ms}


@torch.inference_mode()
def main(width: int = 512, batch: int = 64, n: int = 100) -> dict[str, dict[str, float]]:
    """Measure and print."""
    device, warmup = find_device(), n // 10
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)).to(device)
    x = torch.randn(batch, width, device=device)
    fresh = torch.randn(n + warmup, batch, width, device=device)
    same = [x] * (n + warmup)

    rows = {"host's clock": {"as run": time_on_the_host(model, x, n, warmup)}}
    if device.type != "cpu":
        rows["device's clock"] = {"as run": time_on_the_device(model, x, n, warmup)}
    rows["steps"] = time_as_steps(model, same, warmup)
    rows["fresh inputs"] = time_as_steps(model, fresh, warmup)
    rows["cold L2 cache"] = time_as_steps(model, same, warmup, flush=True)
    if device.type == "cuda":
        rows["CUDA graph"] = time_as_steps(Replay(model, x), same, warmup)
    show("One call", rows)
    return rows


if __name__ == "__main__":
    main()
