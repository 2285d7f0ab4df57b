"""Time an inference of a small MobileNet by three methods.

Time stamps around the call measure the launches. Waiting for the device before and after it, or
events, measure the inference.

    python examples/experiments/inference.py
"""

import time
from itertools import pairwise, repeat

import torch
from common import find_device, launch, show, synchronize
from torch import nn

from lightning_gputime import GPUPhaseHooks


def block(channels: int, out: int, stride: int) -> nn.Sequential:
    """Return an inverted residual block without its residual."""
    wide = 4 * channels
    return nn.Sequential(
        nn.Conv2d(channels, wide, 1, bias=False),
        nn.BatchNorm2d(wide),
        nn.Hardswish(),
        nn.Conv2d(wide, wide, 3, stride, padding=1, groups=wide, bias=False),
        nn.BatchNorm2d(wide),
        nn.Hardswish(),
        nn.Conv2d(wide, out, 1, bias=False),
        nn.BatchNorm2d(out),
    )


def mobile_net(width: int) -> nn.Sequential:
    """Return a net of depthwise separable convolutions."""
    channels = [width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
    blocks = [block(a, b, 1 if a == b else 2) for a, b in pairwise(channels)]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, 1000),
    )


@torch.inference_mode()
def main(
    width: int = 32, size: int = 224, batch: int = 32, n: int = 50, warmup: int = 5
) -> dict[str, dict[str, float]]:
    """Measure and print."""
    device = find_device()
    net = mobile_net(width).eval().to(device)
    images = torch.randn(batch, 3, size, size, device=device)

    with GPUPhaseHooks(net, warmup_steps=warmup) as timer:
        for x in timer.steps(repeat(images, n)):
            net(x)
    forward = timer.summary().rows["forward"]

    waited = []
    for x in repeat(images, n):
        synchronize(device)
        start = time.perf_counter()
        net(x)
        synchronize(device)
        waited.append((time.perf_counter() - start) * 1e3)
    rows = {
        "1. time stamps": {"inference": forward.host_mean_ms},
        "2. synchronize": {"inference": sum(waited[warmup:]) / (n - warmup)},
        "3. events": {"inference": forward.mean_ms},
    }
    show(f"Inference of a batch of {batch}", rows)
    return rows


if __name__ == "__main__":
    launch(main, width=8, size=64, batch=8)
