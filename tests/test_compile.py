"""torch.compile: every phase is timed, and nothing is compiled more often than without."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import hooks_of
from fake_gpu import Adder, FakeGPU, batches, steps, work
from fake_lightning import Loader, Model, timer_of, trainer
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer

N = 4


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """A small net that can be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class Compiled(Model):
    """A LightningModule that calls a net which is compiled in one of several ways."""

    def __init__(self, gpu: FakeGPU, how: str, backend: Any) -> None:
        super().__init__(gpu)
        net = Net()
        if how == "net.compile()":
            net.compile(backend=backend, fullgraph=True)
        self.net: Any = torch.compile(net, backend=backend) if how == "compile(net)" else net
        self.how, self.backend = how, backend

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.how == "compile(LightningModule)":
            return self.net(batch).pow(2).sum()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.how == "compile(optimizer.step)":
            optimizer.step = torch.compile(optimizer.step, backend=self.backend)  # type: ignore[method-assign]
        return optimizer


class Count:
    """A backend that counts what it compiles."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        self.compiled += 1
        return graph.forward


def compilations(run: Callable[[Count], None]) -> tuple[int, int]:
    """Return the number of compiled graphs, with recompilations, and of graph breaks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    backend = Count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(backend)
    return backend.compiled, sum(torch._dynamo.utils.counters["graph_break"].values())


PHASES = {
    "compile(net)": {"data", "other", "forward", "loss", "backward", "optimizer"},
    "net.compile()": {"data", "other", "forward", "loss", "backward", "optimizer"},
    # Lightning runs forward and loss inside the step, and so inside what is compiled.
    "compile(optimizer.step)": {"data", "other", "backward", "optimizer"},
    "compile(LightningModule)": {"data", "other", "training_step", "backward", "optimizer"},
}


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=pytest.mark.slow) if how == "compile(optimizer.step)" else how
        for how in PHASES
    ],
)
def test_lightning_compiles_the_same_and_times_every_phase(how: str, gpu: FakeGPU) -> None:
    measured: list[dict[str, float]] = []

    def fit(timed: bool, backend: Count) -> None:
        timer = timer_of(gpu)
        model: Any = Compiled(gpu, how, backend)
        bare = hooks_of(model)
        if how == "compile(LightningModule)":
            model = torch.compile(model, backend=backend)
        trainer(*([timer] if timed else []), max_epochs=2).fit(model, Loader(gpu, N))
        measured[:] = steps(timer)
        assert hooks_of(getattr(model, "_orig_mod", model)) == bare

    without = compilations(lambda backend: fit(False, backend))
    with_timer = compilations(lambda backend: fit(True, backend))
    assert without[0] >= 1
    assert with_timer == without
    assert [set(step) for step in measured] == [PHASES[how]] * (2 * N)


def test_compiled_net_that_is_called_by_itself_is_timed(gpu: FakeGPU) -> None:
    class Direct(Compiled):
        def loss(self, x: Tensor) -> Tensor:
            return work(self.net(x), self.gpu, 0.5, 0.25).sum()

    timer = timer_of(gpu)
    trainer(timer).fit(Direct(gpu, "compile(net)", "eager"), Loader(gpu, N))
    assert [set(step) for step in steps(timer)] == [PHASES["compile(net)"]] * N
    assert [step["loss"] for step in steps(timer)] == [0.5] * N


def test_compiled_lightning_module_reports_one_phase(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = torch.compile(Compiled(gpu, "compile(LightningModule)", "eager"), backend="eager")
    trainer(GPUPhaseTimer(_clock=gpu, print_summary=False)).fit(model, Loader(gpu, 2))
    told = [record.message for record in caplog.records if record.name == "lightning_gputime"]
    assert told == ["training_step is compiled: forward and loss are one phase of that name."]


@pytest.mark.parametrize("how", ["compile(model)", "model.compile()", "compile(optimizer.step)"])
def test_plain_loop_compiles_the_same_and_times_every_phase(how: str, gpu: FakeGPU) -> None:
    measured: list[dict[str, float]] = []

    def train(timed: bool, backend: Count) -> None:
        model: Any = Net()
        optimizer = Adder(model.parameters(), gpu, 2.0)
        if how == "compile(optimizer.step)":
            step = torch.compile(optimizer.step, backend=backend)
            optimizer.step = step  # type: ignore[method-assign]
        elif how == "model.compile()":
            model.compile(backend=backend, fullgraph=True)
        else:
            model = torch.compile(model, backend=backend, fullgraph=True)
        timer = GPUPhaseHooks(model, optimizer, _clock=gpu)
        if timed:
            timer.attach()
        for _ in range(2):
            for x in timer.steps(batches(gpu, N)) if timed else batches(gpu, N):
                work(model(x), gpu, 0.5, 0.25).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        timer.remove()
        names = timer.history().dtype.names or ()
        measured[:] = [{name: row[name] for name in names} for row in timer.history()]
        model(torch.ones(1, 2))  # without the timer again

    without = compilations(lambda backend: train(False, backend))
    with_timer = compilations(lambda backend: train(True, backend))
    assert without[0] == (0 if how == "compile(optimizer.step)" else 1)
    assert with_timer == without
    assert len(measured) == 2 * N
    for step in measured:
        assert (step["loss_ms"], step["backward_ms"], step["optimizer_ms"]) == (0.5, 0.25, 2.0)
        assert step["forward_ms"] == 0.0


@pytest.mark.filterwarnings("ignore:Dynamo")
def test_compiled_step_with_backward_inside_times_backward_and_optimizer(
    gpu: FakeGPU,
) -> None:
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


class Inner(nn.Module):
    """A part that can be compiled in place, unlike torch's containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x).relu()
        return result


class Outer(nn.Module):
    """A model with such a part."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Inner(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.inner(x))
        return result


def compiled_loop(how: str, backend: Count) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Returns a model, and what a loop calls of it; a part of them is compiled."""
    model = Outer()
    if how == "compile(model)":
        compiled: Any = torch.compile(model, backend=backend)
        return compiled, compiled
    if how == "model.compile()":
        model.compile(backend=backend)
    if how == "compile(part)":
        model.inner = torch.compile(model.inner, backend=backend)  # type: ignore[assignment]
    if how == "part.compile()":
        model.inner.compile(backend=backend)
    if how == "compile(function)":
        return model, torch.compile(lambda x: model(x).sin(), backend=backend)
    return model, model


@pytest.mark.parametrize(
    ("how", "modules"),
    [
        ("compile(model)", []),
        ("model.compile()", ["inner"]),
        ("compile(part)", ["inner"]),
        ("part.compile()", []),
        ("compile(function)", ["inner"]),
    ],
)
def test_timer_attached_again_compiles_nothing(gpu: FakeGPU, how: str, modules: list[str]) -> None:
    def train(timed: bool, backend: Count) -> None:
        model, call = compiled_loop(how, backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            timer = GPUPhaseHooks(model, optimizer, _clock=gpu, warmup_steps=0, modules=modules)
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
                # Inside a compiled function no hook is called.
                assert ("forward" in rows) == (how != "compile(function)")
                shown = modules and "part" in how
                assert ("forward/inner" in rows) == ("backward/inner" in rows) == bool(shown)
        call(torch.ones(1, 2)).sum().backward()

    without = compilations(lambda backend: train(False, backend))
    with_timer = compilations(lambda backend: train(True, backend))
    assert without == (1, 0)
    # A function is compiled once more where hooks inside it come or go, and never again.
    assert with_timer == ((2, 0) if how == "compile(function)" else without)


@pytest.mark.parametrize("how", ["compile(LightningModule)", "compile(net)", "net.compile()"])
def test_untimed_steps_in_blocks_compile_nothing_again(how: str, gpu: FakeGPU) -> None:
    def run(*callbacks: GPUPhaseTimer) -> tuple[int, int]:
        def fit(count: Count) -> None:
            model: Any = Compiled(gpu, how, count)
            if how == "compile(LightningModule)":
                model = torch.compile(model, backend=count)
            trainer(*callbacks).fit(model, Loader(gpu, 60))

        return compilations(fit)

    timer = timer_of(gpu, every_n_steps=10)
    assert run(timer) == run()
    assert timer.summary().steps == 6
