"""A fake GPU, on a clock that only tests move: exact times in tests of loops and observers.

It is as strict as a real GPU. An event that the device has not reached, or that was never
recorded, cannot be read. Every wait of the host is counted. Using an event while a graph is
captured breaks the capture.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MS = 1_000_000


class FakeGPU:
    """A device and its host, whose time passes only by `work`, `host_work` and waits of the host.

    Attributes:
        now: Time of the host (in nanoseconds).
        free_at: Time at which the device finishes its queue (in nanoseconds).
        created: Number of events.
        waits: Duration of each wait of the host (in milliseconds).
        drift: How much faster the device's clock runs than the host's, as a fraction.
        read_ms: Host time to read the time between two events (in milliseconds).
        capturing: True while a graph is captured.
        capture_broken: True once an event was used during a capture.
        streams: Streams of the device; None if all work is on one.
        device: The device that the timer sees; None for that of the model.
        memory: Peak allocated, peak reserved and total memory (in bytes).
        mhz: Clock of the device (in MHz); None if it cannot be measured.

    Examples:
        >>> gpu = FakeGPU()
        >>> model = Layer(gpu, forward_ms=2.0, backward_ms=4.0)
        >>> optimizer = Adder(model.parameters(), gpu, ms=1.0)
        >>> timer = GPUPhaseHooks(model, optimizer, **gpu.options)
    """

    def __init__(self) -> None:
        self.now = self.free_at = self.created = 0
        self.waits: list[float] = []
        self.drift = self.read_ms = 0.0
        self.capturing = False
        self.capture_broken = False
        self.graph: list[float] = []
        self.streams: Any = None
        self.device: torch.device | None = None
        self.memory: tuple[int, int, int] | None = None
        self.mhz: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of a timer that uses this device."""
        return {"_clock": self}

    @contextmanager
    def capture(self) -> Iterator[Callable[[], None]]:
        """Capture work into a graph, and yield the function that replays it."""
        self.capturing, self.graph = True, []
        graph = self.graph

        def replay() -> None:
            for device_ms in graph:
                self.work(device_ms)

        try:
            yield replay
        finally:
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

    @property
    def spin_cycles(self) -> Callable[[int], None] | None:
        """Function that launches a kernel of so many clock cycles; None without a clock."""
        mhz = self.mhz
        return None if mhz is None else lambda cycles: self.work(cycles / (1e3 * (self.mhz or mhz)))

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
    """Event of a `FakeGPU`, with the interface of `torch.Event`."""

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
    """A linear layer from 2 to 2 features that takes a known time (in milliseconds)."""

    def __init__(self, gpu: FakeGPU, forward_ms: float, backward_ms: float = 0.0) -> None:
        super().__init__()
        self._times = (gpu, forward_ms, backward_ms)
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return work(self.linear(x), *self._times)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Layer":
        return Layer(*self._times)


class Loss(nn.MSELoss):
    """A mean squared error that takes a known time (in milliseconds)."""

    def __init__(self, gpu: FakeGPU, ms: float) -> None:
        super().__init__()
        self._gpu, self._ms = gpu, ms

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return work(super().forward(input, target), self._gpu, self._ms)


class Adder(torch.optim.Optimizer):
    """An optimizer whose update changes nothing, and takes a known time (in milliseconds)."""

    def __init__(self, params: Iterable[nn.Parameter], gpu: FakeGPU, ms: float) -> None:
        super().__init__(params, {})
        self._gpu, self._ms = gpu, ms

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        self._gpu.work(self._ms)
        return loss
