"""Compare self CPU and self CUDA time of torch.profiler with our host and device columns.

The operations are products of small matrices (many launches, little work), of large matrices (the
opposite), and a sum of products, in a loop and vectorized.

    python examples/experiments/beside_the_profiler.py
"""

from collections.abc import Callable

import torch
from common import find_device, launch, show, synchronize
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_gputime import GPUPhaseHooks


class Call(nn.Module):
    """Module that calls a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self) -> None:
        """Call the function."""
        self.function()


def measure(function: Callable[[], object], n: int) -> dict[str, float]:
    """Return the times of `n` calls by the profiler and by the timer (in milliseconds)."""
    device = find_device()
    call = Call(function)
    call()
    synchronize(device)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(n):
            call()
        synchronize(device)
    events = profiler.key_averages()
    with GPUPhaseHooks(call, device=device, warmup_steps=0) as timer:
        for _ in timer.steps(range(n)):
            call()
    forward = timer.summary().rows["forward"]
    cpu_us = sum(event.self_cpu_time_total for event in events)
    # Like the profiler's total: operators would count the time of their kernels twice.
    device_us = sum(
        event.self_device_time_total
        for event in events
        if event.device_type.name != "CPU" and not event.is_user_annotation
    )
    return {
        "self CPU": cpu_us / 1e3,
        "our host": forward.host_mean_ms * n,
        "self CUDA": device_us / 1e3,
        "our device": forward.mean_ms * n,
    }


def main(
    large: int = 4096, n_small: int = 1000, n_large: int = 10, vectors: int = 100
) -> dict[str, dict[str, float]]:
    """Measure and print."""
    device = find_device()
    small_matrix = torch.rand(3, 3, device=device)
    large_matrix = torch.rand(large, large, device=device)
    a = list(torch.rand(vectors, 10, 10, device=device))
    b = list(torch.rand(vectors, 10, 10, device=device))

    def looped() -> Tensor:
        result = torch.zeros(10, 10, vectors, device=device)
        for j in range(vectors):
            result[:, :, j] = a[j] * b[j]
        return result

    def vectorized() -> Tensor:
        return torch.dstack(a) * torch.dstack(b)

    assert looped().equal(vectorized())
    rows = {
        f"{n_small} x (3, 3)": measure(lambda: small_matrix @ small_matrix.T, n_small),
        f"{n_large} x ({large}, {large})": measure(lambda: large_matrix @ large_matrix.T, n_large),
        f"{n_large} x {vectors} products, looped": measure(looped, n_large),
        f"{n_large} x {vectors} products, vectorized": measure(vectorized, n_large),
    }
    show("The profiler's columns and ours", rows)
    return rows


if __name__ == "__main__":
    launch(main, large=1024)
