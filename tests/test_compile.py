"""torch.compile: every phase is timed, and a timer causes no recompilation or graph break."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from conftest import hooks_of
from fake_gpu import Adder, FakeGPU, batches, steps, work
from fake_lightning import Loader, Model, timer_of, trainer
from fake_loop import Loop, hooks
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks
from lightning_gputime._instrumentation.patching import apply_compile_skips

N = 4


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    # A timer makes the compiler skip the files of the package, which include the fake layers.
    apply_compile_skips()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Inner(nn.Module):
    """A module that can be compiled in place, unlike torch's containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x).relu()
        return result


class Net(nn.Module):
    """A small net with a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Inner(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.inner(x))
        return result


class Compiled(Model):
    """A LightningModule whose net or optimizer is compiled in one of several ways."""

    def __init__(self, gpu: FakeGPU, how: str, backend: Any) -> None:
        super().__init__(gpu)
        self.net, _ = compiled_model(how, backend)
        self.how, self.backend = how, backend

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.how == "compile(LightningModule)":
            return self.net(batch).pow(2).sum()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.how == "compile(optimizer.step)":
            compile_update(optimizer, self.backend)
        return optimizer


class Count:
    """A backend that counts compiled graphs."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        self.compiled += 1
        return graph.forward


class Compilations(NamedTuple):
    """Number of compiled graphs, including recompilations, and of graph breaks."""

    graphs: int
    graph_breaks: int


def compilations(run: Callable[[Count], None]) -> Compilations:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    backend = Count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(backend)
    graph_breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return Compilations(backend.compiled, graph_breaks)


def without_and_with(run: Callable[[bool, Count], None]) -> tuple[Compilations, Compilations]:
    """Return the compilations of a run without a timer, and with it."""
    without = compilations(lambda backend: run(False, backend))
    return without, compilations(lambda backend: run(True, backend))


def compiled_model(how: str, backend: Any) -> tuple[Any, Any]:
    """Return a model that is compiled in one of several ways, and the function to call."""
    model: Any = Net()
    call: Any = model
    if how == "compile(model)":
        model = call = torch.compile(model, backend=backend, fullgraph=True)
    elif how == "model.compile()":
        model.compile(backend=backend, fullgraph=True)
    elif how == "compile(part)":
        model.inner = torch.compile(model.inner, backend=backend)
    elif how == "part.compile()":
        model.inner.compile(backend=backend)
    elif how == "compile(function)":

        def function(x: Tensor) -> Any:
            return model(x).sin()

        call = torch.compile(function, backend=backend)
    return model, call


def compile_update(optimizer: Any, backend: Any) -> None:
    optimizer.step = torch.compile(optimizer.step, backend=backend)


ALL = {"data", "other", "forward", "loss", "backward", "optimizer"}
PHASES = {
    "compile(model)": ALL,
    "model.compile()": ALL,
    # Lightning computes forward and loss in the closure of the optimizer, which is compiled.
    "compile(optimizer.step)": ALL - {"forward", "loss"},
    "compile(LightningModule)": (ALL - {"forward", "loss"}) | {"training_step"},
}
MESSAGES = {
    "compile(optimizer.step)": "No model call was recorded",
    "compile(LightningModule)": (
        "training_step is compiled: forward and loss are one phase of that name."
    ),
}


@pytest.mark.parametrize(
    ("every", "n_batches", "n_timed"), [(1, N, N), (10, 60, 6)], ids=["each step", "sampled"]
)
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=pytest.mark.slow) if how == "compile(optimizer.step)" else how
        for how in PHASES
    ],
)
def test_lightning_compiles_the_same_and_times_every_phase(
    gpu: FakeGPU,
    caplog: pytest.LogCaptureFixture,
    how: str,
    every: int,
    n_batches: int,
    n_timed: int,
) -> None:
    measured: list[dict[str, float]] = []

    def fit(timed: bool, backend: Count) -> None:
        timer = timer_of(gpu, every_n_steps=every)
        model: Any = Compiled(gpu, how, backend)
        bare = hooks_of(model)
        if how == "compile(LightningModule)":
            model = torch.compile(model, backend=backend)
        trainer(*([timer] if timed else []), max_epochs=2).fit(model, Loader(gpu, n_batches))
        measured[:] = steps(timer)
        assert hooks_of(getattr(model, "_orig_mod", model)) == bare

    without, with_timer = without_and_with(fit)
    assert without.graphs >= 1
    assert with_timer == without
    assert [set(step) for step in measured] == [PHASES[how]] * (2 * n_timed)
    messages = [record.message for record in caplog.records if record.name == "lightning_gputime"]
    expected = [MESSAGES[how]] if how in MESSAGES else []
    assert [text.partition(", ")[0] for text in messages] == expected


def test_compiled_net_called_by_the_step_is_timed(gpu: FakeGPU) -> None:
    class Direct(Compiled):
        def loss(self, x: Tensor) -> Tensor:
            return work(self.net(x), self.gpu, 0.5, 0.25).sum()

    timer = timer_of(gpu)
    trainer(timer).fit(Direct(gpu, "compile(model)", "eager"), Loader(gpu, N))
    assert [set(step) for step in steps(timer)] == [ALL] * N
    assert [step["loss"] for step in steps(timer)] == [0.5] * N


@pytest.mark.parametrize("how", ["compile(model)", "model.compile()", "compile(optimizer.step)"])
def test_plain_loop_compiles_the_same_and_times_every_phase(how: str, gpu: FakeGPU) -> None:
    measured: list[dict[str, float]] = []

    def train(timed: bool, backend: Count) -> None:
        model, _ = compiled_model(how, backend)
        optimizer = Adder(model.parameters(), gpu, 2.0)
        if how == "compile(optimizer.step)":
            compile_update(optimizer, backend)
        timer = GPUPhaseHooks(model, optimizer, _clock=gpu, warmup_steps=0)
        if timed:
            timer.attach()
        for _ in range(2):
            for x in timer.steps(batches(gpu, N)) if timed else batches(gpu, N):
                work(model(x), gpu, 0.5, 0.25).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        timer.remove()
        measured[:] = steps(timer)
        model(torch.ones(1, 2))  # The timer is removed.

    without, with_timer = without_and_with(train)
    assert without.graphs == (0 if how == "compile(optimizer.step)" else 1)
    assert with_timer == without
    ms = {"forward": 0.0, "loss": 0.5, "backward": 0.25, "optimizer": 2.0}
    assert [{name: step[name] for name in ms} for step in measured] == [ms] * (2 * N)


@pytest.mark.filterwarnings("ignore:Dynamo")
def test_compiled_step_with_backward_inside_times_backward_and_optimizer(gpu: FakeGPU) -> None:
    model = Net()
    optimizer = Adder(model.parameters(), gpu, 2.0)

    def step(x: Tensor) -> None:
        model(x).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = torch.compile(step, backend="eager")
    with GPUPhaseHooks(model, optimizer, _clock=gpu, warmup_steps=0) as timer:
        for x in timer.steps(batches(gpu, N)):
            compiled(x)
    assert {"backward", "optimizer"} <= set(timer.summary().rows)
    assert len(timer.history()) == N


@pytest.mark.parametrize(
    "how",
    ["compile(model)", "model.compile()", "compile(part)", "part.compile()", "compile(function)"],
)
def test_reattached_timer_recompiles_at_most_the_function_around_the_model(
    gpu: FakeGPU, how: str
) -> None:
    def train(timed: bool, backend: Count) -> None:
        model, call = compiled_model(how, backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            timer = GPUPhaseHooks(model, optimizer, _clock=gpu, warmup_steps=0)
            if timed:
                timer.attach()
            for x in timer.steps(batches(gpu, N)) if timed else batches(gpu, N):
                call(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if timed:
                timer.remove()
                rows = timer.summary().rows
                assert rows["backward"].n == N
                # A compiled function calls no hooks.
                assert ("forward" in rows) == (how != "compile(function)")
        call(torch.ones(1, 2)).sum().backward()

    without, with_timer = without_and_with(train)
    assert without == (1, 0)
    # A compiled function is recompiled once, when hooks inside it appear or disappear.
    assert with_timer == ((2, 0) if how == "compile(function)" else without)


@pytest.mark.parametrize(
    "how", ["compile(model)", "compile(model=model)", "model.compile()", "compile(part)"]
)
@pytest.mark.parametrize("every", ["auto", 1])
def test_module_that_is_compiled_during_the_training_stays_timed(
    gpu: FakeGPU, how: str, every: Any
) -> None:
    def train(timed: bool, backend: Count) -> None:
        model: Any = Net()
        call = model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        timer = GPUPhaseHooks(model, optimizer, _clock=gpu, warmup_steps=0, every_n_steps=every)
        if timed:
            timers.append(timer.attach())
        for number, x in enumerate(timer.steps(batches(gpu, 60)) if timed else batches(gpu, 60)):
            if number == 40 and how == "model.compile()":
                model.compile(backend=backend)
            elif number == 40 and how == "compile(model)":
                call = torch.compile(model, backend=backend)
            elif number == 40 and how == "compile(model=model)":
                call = torch.compile(model=model, backend=backend)
            elif number == 40:
                model.inner = torch.compile(model.inner, backend=backend)
            work(call(x), gpu, 1.0, 1.0).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    timers: list[GPUPhaseHooks] = []
    without, with_timer = without_and_with(train)
    assert with_timer == without
    timers[0].remove()
    assert timers[0].summary().rows["forward"].frequency == 1.0


def test_module_that_is_compiled_for_another_use_stays_timed(loop: Loop) -> None:
    with hooks(loop, every_n_steps=1) as timer:
        for number, x in enumerate(timer.steps(loop.batches(12))):
            if number == 5:
                torch.compile(loop.model, backend="eager")
            loop.train(x)
    forward_ms = timer.history()["forward_ms"].tolist()
    assert {*forward_ms[:5], *forward_ms[6:]} == {4.0}


def test_error_of_a_compilation_reaches_the_training(gpu: FakeGPU) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with GPUPhaseHooks(model, optimizer, _clock=gpu) as timer:
        for x in timer.steps(batches(gpu, 3)):
            model.compile(backend="eager", fullgraph=True)
            # Torch does not trace its own containers.
            with pytest.raises(RuntimeError, match="found no compiled frames"):
                model(x)
