"""A GPU with a queue, on a clock that only tests move.

It is as strict as a real GPU. An event that the device has not reached, or that was never
recorded, cannot be read. Every wait of the host is counted. Using an event while a graph is
captured breaks the capture.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gputime._phases import StepRecord
from lightning_gputime._timer import Timer

MS = 1_000_000


class FakeGPU:
    """A device and its host. It is a `Clock`: pass it to a timer as `_clock`."""

    def __init__(self) -> None:
        self.now = 0  # time of the host in ns
        self.free_at = 0  # time in ns at which the device finishes its queue
        self.created = 0  # number of events
        self.waits: list[float] = []  # ms of each wait of the host
        self.drift = 0.0  # how much faster the device's clock runs than the host's
        self.read_ms = 0.0  # host time to read the time between two events
        self.capturing = False
        self.capture_broken = False
        self.graph: list[float] = []
        self.streams: Any = None  # or `FakeStreams`, which put themselves here
        self.device: torch.device | None = None
        self.memory: tuple[int, int, int] | None = None  # peak allocated and reserved, total

    @contextmanager
    def capture(self) -> Iterator[Callable[[], None]]:
        """Capture work into a graph, and yield the function that replays it."""
        self.capturing, self.graph = True, []
        graph = self.graph

        def replay() -> None:
            for device_ms in graph:
                self.work(device_ms)

        yield replay
        self.capturing = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # keep the fake out of compiled code
    def work(self, device_ms: float, host_ms: float = 0.0) -> None:
        """Launch a kernel, which takes the host `host_ms`. It runs after the queued kernels."""
        self.host_work(host_ms)
        if self.capturing:
            self.graph.append(device_ms)
            return
        self.free_at = max(self.free_at, self.now) + round(device_ms * MS)

    def host_work(self, ms: float) -> None:
        """Keep the host busy while the device works."""
        self.now += round(ms * MS)

    def event(self) -> "FakeEvent":
        self.created += 1
        return FakeEvent(self)

    def peak_memory(self) -> tuple[int, int, int] | None:
        return self.memory

    def host_ns(self) -> int:
        return self.now

    def is_capturing(self) -> bool:
        return self.capturing

    def touch(self) -> None:
        """Break a capture in progress, as each use of an event does."""
        if self.capturing:
            self.capture_broken = True
            raise RuntimeError("operation not permitted when stream is capturing")


class FakeEvent:
    def __init__(self, gpu: FakeGPU) -> None:
        self._gpu = gpu
        self._at: int | None = None

    def record(self) -> None:
        self._gpu.touch()
        self._at = max(self._gpu.free_at, self._gpu.now)

    def query(self) -> bool:
        self._gpu.touch()
        return self._at is None or self._at <= self._gpu.now

    def synchronize(self) -> None:
        self._gpu.touch()
        start = self._gpu.now
        self._gpu.now = max(self._gpu.now, self._at or 0)
        self._gpu.waits.append((self._gpu.now - start) / MS)

    def elapsed_time(self, end_event: "FakeEvent", /) -> float:
        if self._at is None or end_event._at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        self._gpu.host_work(self._gpu.read_ms)
        return (end_event._at - self._at) / MS * (1.0 + self._gpu.drift)


class _Work(torch.autograd.Function):
    """The identity, which takes time on a fake GPU in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gpu: FakeGPU, forward_ms: float, backward_ms: float) -> Tensor:
        ctx.gpu, ctx.backward_ms = gpu, backward_ms
        gpu.work(forward_ms)
        # Activation checkpointing runs this again only if it saves a tensor.
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        assert ctx.saved_tensors
        ctx.gpu.work(ctx.backward_ms)
        return grads[0], None, None, None


def work(x: Tensor, gpu: FakeGPU, forward_ms: float, backward_ms: float = 0.0) -> Tensor:
    """Return `x` after work on the GPU, which takes time in forward and in backward."""
    result: Tensor = _Work.apply(x, gpu, forward_ms, backward_ms)  # type: ignore[no-untyped-call]
    return result


class Layer(nn.Module):
    """A linear layer that takes a known time."""

    def __init__(self, gpu: FakeGPU, forward_ms: float, backward_ms: float = 0.0) -> None:
        super().__init__()
        self._times = (gpu, forward_ms, backward_ms)
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return work(self.linear(x), *self._times)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Layer":
        return Layer(*self._times)


class Loss(nn.MSELoss):
    """A loss module that takes a known time."""

    def __init__(self, gpu: FakeGPU, ms: float) -> None:
        super().__init__()
        self._gpu, self._ms = gpu, ms

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return work(super().forward(input, target), self._gpu, self._ms)


class Adder(torch.optim.Optimizer):
    """An optimizer whose update takes a known time."""

    def __init__(self, params: Iterator[nn.Parameter], gpu: FakeGPU, ms: float) -> None:
        super().__init__(params, {})
        self._gpu, self._ms = gpu, ms

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        self._gpu.work(self._ms)
        return loss


def batches(gpu: FakeGPU, n: int, host_ms: float = 0.0, copy_ms: float = 0.0) -> Iterator[Tensor]:
    """Yield batches. Each takes `host_ms` on the host, and `copy_ms` on the device."""
    for _ in range(n):
        gpu.host_work(host_ms)
        gpu.work(copy_ms)
        yield torch.ones(1, 2)


def raw(number: int, host_wait_ms: float = 0.0, /, **phase_ms: float) -> StepRecord:
    """Return a step whose phases took the host as long as the device."""
    ends = accumulate((round(ms * MS) for ms in phase_ms.values()), initial=0)
    labels, device_ms = tuple(phase_ms), tuple(phase_ms.values())
    return StepRecord(
        number, labels, device_ms, tuple(ends), host_wait_ms, finished_ns=0, skipped_update=False
    )


STEP_MS = {
    "data": 1.0,
    "other": 0.125,
    "forward": 4.0,
    "loss": 0.5,
    "backward": 8.0,
    "optimizer": 2.0,
}
"""Phases of a standard step of the fake LightningModule and the fake plain loop."""


def steps(timer: Timer) -> list[dict[str, float]]:
    """Return the phases of each step that ran, without the parts of `data` and `callbacks`.

    Leave out `callbacks` that take no time, because under Lightning each step has that phase.
    """
    found = []
    for row in _rows(timer):
        step = {name: ms for name, ms in row.items() if not name.startswith(("data/", "callbacks"))}
        found.append(step | ({"callbacks": row["callbacks"]} if row.get("callbacks") else {}))
    return found


def between_batches(timer: Timer) -> list[dict[str, float]]:
    """Return `data`, `callbacks` and their parts in each step."""
    names = ("data", "callbacks")
    return [
        {name: ms for name, ms in row.items() if name.startswith(names)} for row in _rows(timer)
    ]


def _rows(timer: Timer) -> list[dict[str, float]]:
    timer.flush()
    history = timer.history()
    names = [name for name in history.dtype.names or () if name.endswith("_ms")]
    return [
        {
            name.removesuffix("_ms"): float(row[name])
            for name in names
            if name not in ("step_ms", "host_wait_ms") and not math.isnan(row[name])
        }
        for row in history
    ]
