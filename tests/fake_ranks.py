"""Other ranks and streams with known times on a fake GPU."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_gpu import STEP_MS, FakeGPU, between_batches, steps, work
from fake_loop import Loop, hooks
from fake_loop import train as train_loop
from torch import Tensor, distributed
from torch._C._distributed_c10d import FakeWork, HashStore
from torch.distributed import ProcessGroup, Work, _functional_collectives

from lightning_gputime import GPUPhaseHooks, phase
from lightning_gputime._ranks.exchange import Exchange
from lightning_gputime._timer import Timer

COMM_MS = 3.0
"""Duration of a collective, which starts when it is waited for."""

OWN = {**STEP_MS, "backward/comm": 0.0}
"""A standard step without waits. Its `backward/comm` is 0: each backward checks for a wait."""


class Ranks:
    """Collectives of a fake process group that take `COMM_MS` where the stream waits for them.

    They replace C++ code, which the timer's patches call, so patch them before a timer attaches.
    """

    def __init__(self, gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = gpu
        self.pending = 0  # Collectives on a separate stream that nothing has waited for yet.
        for name in ("allreduce", "allgather"):
            monkeypatch.setattr(ProcessGroup, name, self.launching(getattr(ProcessGroup, name)))
        monkeypatch.setattr(FakeWork, "wait", self.waiting(FakeWork.wait))
        wait_tensor = _functional_collectives.wait_tensor
        monkeypatch.setattr(_functional_collectives, "wait_tensor", self.waiting(wait_tensor))

    def launching(self, call: Any) -> Any:
        def launch(group: ProcessGroup, *args: Any) -> Any:
            # A synchronous collective runs on the stream of its caller.
            if getattr(args[-1], "asyncOp", True):
                self.pending += 1
            else:
                self.take(COMM_MS)
            return call(group, *args)

        return launch

    def waiting(self, call: Any) -> Any:
        def wait(*args: Any, **kwargs: Any) -> Any:
            if self.pending:
                self.pending -= 1
                self.take(COMM_MS)
            return call(*args, **kwargs)

        return wait

    def take(self, ms: float) -> None:
        """Put work on the current stream."""
        streams = self.gpu.streams
        if streams is None or streams.here is streams.timed:
            self.gpu.work(ms)
        else:
            streams.here.queued_ms += ms


class FakeStream:
    """A stream. Work on an untimed stream affects only streams that wait for it."""

    def __init__(self, gpu: FakeGPU, stream_id: int) -> None:
        self.gpu, self.stream_id, self.queued_ms = gpu, stream_id, 0.0

    def wait_event(self, event: "Event") -> None:
        ms, event.stream.queued_ms = event.stream.queued_ms, 0.0
        if self is self.gpu.streams.timed:
            self.gpu.work(ms)
        else:
            self.queued_ms += ms

    def wait_stream(self, stream: "FakeStream") -> None:
        self.wait_event(Event(stream))


class Event:
    """An event at the end of a stream's queue."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream


class FakeStreams:
    """The streams of a fake GPU: the timed stream and two others."""

    kind = FakeStream

    def __init__(self, gpu: FakeGPU) -> None:
        self.timed, self.side, self.copies = (FakeStream(gpu, number) for number in range(3))
        self.here = self.timed
        gpu.streams = self

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        self.here, before = stream, self.here
        yield
        self.here = before

    def current(self) -> int:
        return self.here.stream_id


def reduce() -> None:
    """Run a collective, and wait for it."""
    distributed.all_reduce(torch.ones(2))


def launch() -> Any:
    """Launch a collective, and return the object that waits for it."""
    return distributed.all_reduce(torch.ones(2), async_op=True)


class Shared(Loop):
    """The standard loop, with a collective in one place, or nowhere if it is empty."""

    def __init__(self, gpu: FakeGPU, place: str, collective: Callable[[], object] = reduce) -> None:
        super().__init__(gpu)
        self.place, self.collective = place, collective
        self.model.linear.register_forward_pre_hook(lambda *_: self.come_to("forward"))
        self.model.linear.weight.register_hook(lambda _: self.come_to("backward"))
        self.optimizer.register_step_pre_hook(lambda *_: self.come_to("update"))

    def come_to(self, place: str) -> None:
        if place == self.place:
            self.collective()

    def batches(self, n: int) -> Any:
        for x in super().batches(n):
            self.come_to("data")
            yield x

    def train(self, x: Tensor) -> None:
        self.come_to("other")
        if self.place == "augment":
            with phase("augment"):
                self.come_to("augment")
        self.gpu.work(0.125)
        y = self.model(x)
        self.come_to("loss")
        work(y, self.gpu, 0.5, 0.25).sum().backward()
        self.come_to("optimizer")
        self.update()


def train_ranks(
    monkeypatch: pytest.MonkeyPatch,
    bodies: Sequence[Callable[[Loop, Tensor], object]],
    n: int = 40,
    of_ranks: Mapping[int, Mapping[str, Any]] | None = None,
    samples: Mapping[int, int] | None = None,
    **options: Any,
) -> GPUPhaseHooks:
    """Train a rank with each body, one after the other, and return the timer of rank zero.

    Each has its own fake GPU, and they exchange their times through a real store. `of_ranks` are
    options of some of the ranks, and `samples` are the numbers of samples in their batches.
    """
    store = HashStore()
    for rank, body in [*enumerate(bodies)][::-1]:
        open_exchange = partial(Exchange, store, rank, len(bodies))
        monkeypatch.setattr("lightning_gputime._ranks.exchange.open_exchange", open_exchange)
        loop = Loop(FakeGPU())
        given = {"lines": True, "every_n_steps": 1, **options, **(of_ranks or {}).get(rank, {})}
        with hooks(loop, **given) as timer:
            n_samples = (samples or {}).get(rank, 1)
            batches = (x.expand(n_samples, -1) for x in loop.batches(n))
            for number, x in enumerate(timer.steps(batches)):
                loop.number = number
                body(loop, x)
    return timer


def train(loop: Loop, n: int = 3, **options: Any) -> list[dict[str, float]]:
    """Train, and return the phases of each step."""
    return phases(train_loop(loop, n, sync_ranks=False, **options))


def waiting(name: str, ms: float = COMM_MS) -> dict[str, float]:
    """Return the phases of a standard step that waits `ms` for other ranks in one of them."""
    expected = {**OWN, name: STEP_MS.get(name, 0.0) + ms}
    expected[f"{name}/comm"] = expected.get(f"{name}/comm", 0.0) + ms
    return expected


def from_module(name: str) -> Any:
    """Return a function that calls its first argument from a module with this name."""
    module = ModuleType(name)
    exec("def call(function, *args):\n    return function(*args)", vars(module))
    return vars(module)["call"]


def phases(timer: Timer) -> list[dict[str, float]]:
    """Return the phases of each step that ran, with the parts of `data` and `callbacks`."""
    pairs = zip(steps(timer), between_batches(timer), strict=True)
    return [{**step, **parts} for step, parts in pairs]


def places() -> list[dict[str, Any]]:
    """Return the attributes of the classes that the timer patches to time waits."""
    kinds = (
        ProcessGroup,
        Work,
        *Work.__subclasses__(),
        _functional_collectives.AsyncCollectiveTensor,
        FakeStream,
    )
    return [dict(vars(kind)) for kind in kinds]
