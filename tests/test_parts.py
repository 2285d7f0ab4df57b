"""Sub-phases: the share of a module in `forward` and `backward`."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from conftest import installed
from fake_gpu import Adder, FakeGPU, Layer, batches, steps, work
from fake_loop import Loop
from fake_loop import train as train_loop
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gputime import GPUPhaseHooks, phase


class Net(nn.Module):
    """A body of 1 + 2 ms, 0.5 ms between modules, and a head of 4 ms. Backward takes twice that."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu
        self.body = nn.Sequential(Layer(gpu, 1.0, 2.0), Layer(gpu, 2.0, 4.0))
        self.head = Layer(gpu, 4.0, 8.0)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(work(self.body(x), self.gpu, 0.5, 1.0))
        return result


class Chain(nn.Module):
    """In backward, an embedding of 10 ms, 100 ms between modules, and a body of 2 + 4 ms."""

    def __init__(self, gpu: FakeGPU, body: nn.Module | None = None) -> None:
        super().__init__()
        self.gpu = gpu
        self.emb = Layer(gpu, 1.0, 10.0)
        self.body = body or nn.Sequential(Layer(gpu, 1.0, 2.0), Layer(gpu, 1.0, 4.0))
        self.drop = nn.Identity()

    def forward(self, x: Tensor, by_keyword: bool = False) -> Tensor:
        x = self.drop(work(self.emb(x), self.gpu, 1.0, 100.0))
        result: Tensor = self.body(input=x) if by_keyword else self.body(x)
        return result


class NamedInside(nn.Module):
    """A body of 3 + 6 ms, in which a phase with a module of 1 + 2 ms is named."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu, self.inner = gpu, Layer(gpu, 1.0, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        with phase("augment"):
            x = self.inner(x)
        return work(x, self.gpu, 3.0, 6.0)


def call_body_twice(net: Any, x: Tensor) -> Any:
    return net.head(net.body(net.body(x)))


def checkpoint_body(net: Any, x: Tensor) -> Any:
    return net.head(checkpoint(net.body, x.requires_grad_(), use_reentrant=False))


def call_body_by_keyword(net: Any, x: Tensor) -> Any:
    return net(x, by_keyword=True)


def train(gpu: FakeGPU, model: nn.Module, modules: Any, call: Any = None) -> list[dict[str, float]]:
    """Train for three steps, and return forward and backward with their sub-phases."""
    optimizer = Adder(model.parameters(), gpu, 2.0)
    bare = installed(*model.modules())
    with GPUPhaseHooks(model, optimizer, _clock=gpu, modules=modules, _lag=0) as timer:
        for x in timer.steps(batches(gpu, 3)):
            (call or model)(x).sum().backward()
            optimizer.step()
    assert installed(*model.modules()) == bare
    return [
        {name: ms for name, ms in step.items() if name.startswith(("forward", "backward"))}
        for step in steps(timer)
    ]


def part(name: str, forward_ms: float, backward_ms: float) -> dict[str, float]:
    """Return the sub-phases of a module."""
    return {f"forward/{name}": forward_ms, f"backward/{name}": backward_ms}


TOTAL = {"forward": 7.5, "backward": 15.0}
HEAD = part("head", 4.0, 8.0)
IN_CHAIN = {"forward": 4.0, "backward": 116.0} | part("body", 2.0, 6.0)

CASES: dict[str, tuple[Any, list[str], Any, dict[str, float]]] = {
    "a part at the start of a part that is called twice in a row": (
        Net,
        ["body", "body.0"],
        call_body_twice,
        {"forward": 10.0, "backward": 20.0}
        | part("body", 6.0, 12.0)
        | part("body/body.0", 2.0, 4.0),
    ),
    "a checkpointed part": (
        Net,
        ["body", "head"],
        checkpoint_body,
        HEAD | {"forward": 7.0, "backward": 17.0} | part("body", 3.0, 9.0),
    ),
    "a part that begins with the part around it": (
        Chain,
        ["body", "body.0"],
        None,
        IN_CHAIN | part("body/body.0", 1.0, 2.0),
    ),
    "a part that returns its input": (
        Chain,
        ["drop", "body"],
        None,
        IN_CHAIN | {"forward/drop": 0.0},
    ),
    "inputs by keyword": (Chain, ["body"], call_body_by_keyword, IN_CHAIN),
    "a part inside a named phase": (
        lambda gpu: Chain(gpu, NamedInside(gpu)),
        ["body", "body.inner"],
        None,
        {"forward": 5.0, "backward": 118.0} | part("body", 3.0, 8.0),
    ),
}


@pytest.mark.parametrize(("make", "modules", "call", "expected"), CASES.values(), ids=CASES)
def test_sub_phases_have_the_time_of_their_modules(
    gpu: FakeGPU, make: Any, modules: Any, call: Any, expected: dict[str, float]
) -> None:
    model = make(gpu)
    found = train(gpu, model, modules, call and partial(call, model))
    assert found == [expected] * 3


@pytest.fixture
def reset_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("reset_dynamo")
def test_modules_inside_a_compiled_model_are_reported_as_not_timed(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model: Any = torch.compile(net, backend="eager")
    found = train(gpu, model, ["1"])
    assert [set(step) for step in found] == [{"forward", "backward"}] * 3
    assert "inside compiled code, so they are not timed separately: 1" in caplog.text


def test_sub_phases_work_in_a_named_backward(gpu: FakeGPU) -> None:
    model = Net(gpu)
    with GPUPhaseHooks(model, _clock=gpu, modules=["head"]) as timer:
        for x in timer.steps(batches(gpu, 2)):
            loss = model(x).sum()
            with timer.phase("backward"):
                loss.backward()
    assert [step["backward/head"] for step in steps(timer)] == [8.0] * 2


def test_annotated_phases_are_ranges_in_the_profiler(loop: Loop) -> None:
    with torch.profiler.profile() as profiler:
        train_loop(loop, 2, annotate=True)
    names = [event.name for event in profiler.events() or ()]
    for name in ("data", "forward", "loss", "backward", "optimizer", "other"):
        assert names.count(f"phase/{name}") >= 2, name
