"""Spin kernels of known duration, and the kernels in a trace of torch.profiler."""

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")
Event = dict[str, Any]
"""An event of a trace, with times in microseconds."""


class SpinInBackward(torch.autograd.Function):
    """Identity whose backward calls `spin`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spin: Callable[[], object]) -> Tensor:
        ctx.spin = spin
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.spin()
        return grads[0], None


def spin_in_backward(x: Tensor, spin: Callable[[], object]) -> Tensor:
    """Return `x`; its backward calls `spin`."""
    spinning: Tensor = SpinInBackward.apply(x, spin)  # type: ignore[no-untyped-call]
    return spinning


def cycles_of(ms: float) -> int:
    """Return the number of cycles to pass to `torch.cuda._sleep` for a spin of `ms`."""
    return round(100_000_000 / spin_ms(100_000_000) * ms)


def spin_ms(cycles: int) -> float:
    """Return the milliseconds that a spin kernel takes."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10_000_000)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    ms: float = start.elapsed_time(end)
    return ms


def traced(run: Callable[[], T], *activities: ProfilerActivity) -> tuple[T, list[Event]]:
    """Return the result of `run`, and the events of its trace."""
    with profile(activities=activities) as profiler:
        result = run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return result, json.loads(path.read_text())["traceEvents"]


def of_categories(events: Iterable[Event], *categories: str) -> list[Event]:
    """Return the events of these categories, sorted by start."""
    found = (event for event in events if event.get("cat") in categories)
    return sorted(found, key=lambda event: event["ts"])


def end_of(event: Event) -> float:
    end: float = event["ts"] + event["dur"]
    return end
