"""Hooks and patches: which calls they record, and that user code and copies do not notice them."""

import copy
import io
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import AUTOGRAD, hooks_of, installed
from fake_gpu import STEP_MS, Adder, FakeGPU, Layer, batches, steps, work
from fake_loop import Loop, hooks
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks


class Timed:
    """An attached timer of a model and its optimizers, with steps that the test ends."""

    def __init__(self, gpu: FakeGPU, model: nn.Module, *optimizers: Any, **options: Any) -> None:
        self.timer = GPUPhaseHooks(
            model, optimizers, _clock=gpu, _lag=0, warmup_steps=0, **options
        ).attach()

    def end_step(self) -> dict[str, float]:
        self.timer.step()
        self.timer.flush()
        assert self.timer.last_step is not None
        return {name: ms for name, ms in self.timer.last_step.phase_ms.items() if ms}


TimeStep = Callable[..., Timed]
X = torch.ones(1, 2)


@pytest.fixture
def time_step(gpu: FakeGPU) -> Iterator[TimeStep]:
    """Return a function that attaches timers, which are removed at the end of the test."""
    with ExitStack() as stack:

        def make(*args: Any, **options: Any) -> Timed:
            timed = Timed(gpu, *args, **options)
            stack.callback(timed.timer.remove)
            return timed

        yield make


def test_only_the_outermost_call_records_events(gpu: FakeGPU, time_step: TimeStep) -> None:
    model = nn.Sequential(Layer(gpu, 1.0), nn.Sequential(Layer(gpu, 2.0), Layer(gpu, 4.0)))
    timed = time_step(model)
    before = gpu.created
    model(X)
    gpu.work(8.0)
    assert gpu.created - before == 2
    assert timed.end_step() == {"forward": 7.0, "other": 8.0}


@pytest.mark.parametrize(
    ("called", "phases"),
    [
        # The calls of each step: the model, or its first layer.
        (["model", "model"], [{"forward": 3.0}] * 2),
        (["first, first"] * 3, [{"forward": 2.0 + 8.0}] * 3),
        # Modules regain their hooks after a step without a call of the model.
        (["model", "first", "first"], [{"forward": 3.0}, {"data": 1.0}, {"forward": 1.0}]),
        # A module that is also called alone keeps its hooks.
        (["model, first"] * 3, [{"forward": 12.0}] * 3),
    ],
)
def test_modules_have_hooks_while_the_loop_may_call_them(
    gpu: FakeGPU, time_step: TimeStep, called: list[str], phases: list[dict[str, float]]
) -> None:
    model = nn.Sequential(Layer(gpu, 1.0), Layer(gpu, 2.0))
    bare = installed(*model)
    timed = time_step(model)
    assert installed(*model) != bare
    for names, expected in zip(called, phases, strict=True):
        for number, name in enumerate(names.split(", ")):
            gpu.work(8.0 if number else 0.0)
            (model if name == "model" else model[0])(X)
        assert timed.end_step() == expected
    # Modules that only the model calls lose their hooks.
    assert (installed(*model) == bare) == ("first" not in ", ".join(called))


def test_timers_can_be_removed_in_any_order(gpu: FakeGPU) -> None:
    before = AUTOGRAD._engine_run_backward
    model = Layer(gpu, 1.0, 2.0)
    bare = installed(model)
    first, second, third = (Timed(gpu, model) for _ in range(3))
    first.timer.remove()
    model(X).sum().backward()
    assert len(first.timer.history()) == 0
    assert second.end_step()["backward"] == third.end_step()["backward"] == 2.0
    third.timer.remove()
    second.timer.remove()
    assert AUTOGRAD._engine_run_backward is before
    assert installed(model) == bare


def saved(thing: object) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


DUPLICATES = pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda item: pickle.loads(pickle.dumps(item))]
)


def test_timed_model_saves_the_same_state_dict(time_step: TimeStep) -> None:
    model = small_model()
    model.register_forward_hook(print)
    bare = saved(model.state_dict())
    time_step(model)
    assert saved(model.state_dict()) == bare


@DUPLICATES
def test_copy_of_a_timed_model_has_no_hooks(
    time_step: TimeStep, duplicate: Callable[[Any], Any]
) -> None:
    model = small_model()
    for entry in (model, torch.fx.symbolic_trace(model)):
        bare = duplicate(entry)
        time_step(entry)
        assert hooks_of(entry) != hooks_of(bare)
        copied = duplicate(entry)
        assert hooks_of(copied) == hooks_of(bare)
        assert vars(copied).keys() == vars(bare).keys()
        assert torch.equal(copied(X), entry(X))


@pytest.mark.parametrize("has_hook", [False, True])
def test_saved_timed_model_loads_without_the_package(time_step: TimeStep, has_hook: bool) -> None:
    # Saves the entire model, like `word_language_model` in pytorch/examples.
    model = small_model()
    if has_hook:
        model.register_forward_hook(print)
    bare = saved(model)
    time_step(model)
    file = saved(model)
    assert has_hook or file == bare
    # A file without hooks loads with `weights_only`.
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.ReLU]):
        loaded = torch.load(io.BytesIO(file), weights_only=not has_hook)
    assert torch.equal(loaded(X), model(X))
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        [pickled] = [archive.read(name) for name in archive.namelist() if name.endswith(".pkl")]
    assert b"lightning_gputime" not in pickled


def test_copy_keeps_foreign_hooks_and_handles(time_step: TimeStep) -> None:
    model = nn.Linear(2, 2)
    model.handle = model.register_forward_hook(lambda *_: torch.zeros(1))  # type: ignore[assignment]
    net = nn.Sequential(model)
    timed = time_step(net)
    copied: Any = copy.deepcopy(net)[0]
    assert torch.equal(copied(X), torch.zeros(1))
    copied.handle.remove()
    assert copied(X).shape == (1, 2)
    assert torch.equal(model(X), torch.zeros(1))
    timed.timer.remove()
    assert torch.equal(model(X), torch.zeros(1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated.*:DeprecationWarning")
def test_model_is_traced_while_it_is_timed(time_step: TimeStep) -> None:
    model = small_model()
    time_step(model)
    assert torch.equal(torch.jit.trace(model, X)(X), model(X))


class CopiesAttributes(torch.optim.SGD):
    """An optimizer whose copies get all its attributes."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


@DUPLICATES
def test_zero_grad_of_a_copied_optimizer_clears_the_copy(
    time_step: TimeStep, duplicate: Callable[[Any], Any]
) -> None:
    model = nn.Linear(2, 2)
    optimizer = CopiesAttributes(model.parameters(), lr=0.1)
    timed = time_step(model, optimizer)
    assert "zero_grad" in vars(optimizer)
    copied = duplicate(optimizer)
    for entry in (optimizer, copied):
        entry.param_groups[0]["params"][0].grad = torch.ones(2, 2)
    copied.zero_grad()
    assert copied.param_groups[0]["params"][0].grad is None
    assert model.weight.grad is not None
    timed.timer.remove()
    optimizer.zero_grad()
    assert model.weight.grad is None


class Unhooked(torch.optim.Optimizer):
    """An optimizer without hooks, so that the timer patches its `step`."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        self.param_groups = [{"params": [*parameters], "lr": 1.0}]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_lr_scheduler_accepts_a_timed_optimizer(time_step: TimeStep) -> None:
    model = nn.Linear(2, 2)
    optimizer = Unhooked(model.parameters())
    time_step(model, optimizer)
    assert "step" in vars(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()


def test_foreign_patch_installed_between_timed_steps_is_called(loop: Loop) -> None:
    before, calls = AUTOGRAD._engine_run_backward, []
    ours: Any = None

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return ours(*args, **kwargs)

    with hooks(loop, every_n_steps=10) as timer:
        for x in timer.steps(loop.batches(60)):
            if ours is None:
                ours = AUTOGRAD._engine_run_backward
            elif AUTOGRAD._engine_run_backward is before:
                # `theirs` calls our patch, which the next timed step installs around `theirs`.
                AUTOGRAD._engine_run_backward = theirs
                calls.clear()
                since = len(timer.history())
            loop.train(x)
    assert AUTOGRAD._engine_run_backward is theirs
    loop.train(torch.ones(1, 2))  # `theirs` calls our patch, which is no longer used.
    AUTOGRAD._engine_run_backward = before
    assert len(steps(timer)) > since
    assert steps(timer) == [STEP_MS] * 6
    assert len(calls) == 61 - 20  # `theirs` was installed in step 20.


# Several timers


def test_nested_and_sequential_timers_measure_the_same(loop: Loop) -> None:
    with hooks(loop) as outer:
        loop.train_all(outer.steps(loop.batches(2)))
        with hooks(loop) as inner:
            loop.train_all(outer.steps(inner.steps(loop.batches(3))))
    assert steps(outer) == [STEP_MS] * 5
    assert steps(inner) == [STEP_MS] * 3


def time_two(gpu: FakeGPU, n: int, *options: dict[str, Any]) -> list[list[dict[str, float]]]:
    """Train two models alternately, each with its timer, and return the steps of both."""
    loops = [Loop(gpu) for _ in options]
    timers = [hooks(loop, **each).attach() for loop, each in zip(loops, options, strict=True)]
    for _ in range(n):
        for loop, timer in zip(loops, timers, strict=True):
            loop.train(torch.ones(1, 2))
            timer.step()
    for timer in timers:
        timer.remove()
    return [steps(timer) for timer in timers]


def test_two_timers_on_two_models_do_not_mix(gpu: FakeGPU) -> None:
    first, second = time_two(gpu, 3, {}, {})
    # Each step of the other model counts as `data` of this timer.
    other = sum(STEP_MS.values()) - STEP_MS["data"] + 0.125
    alone = {**STEP_MS, "data": 0.125, "other": 0.0}
    assert first == [alone, *[{**alone, "data": other}] * 2]
    assert second == [{**alone, "data": other}] * 3


@pytest.mark.parametrize(
    "options",
    [
        ({}, {"every_n_steps": 4}),
        ({"every_n_steps": 4}, {}),
        ({"every_n_steps": 2}, {"every_n_steps": 2}),
        ({"every_n_steps": 3}, {"every_n_steps": 2}),
        ({}, {"lines": True}),
        ({"lines": True}, {"lines": True}),
    ],
)
def test_two_timers_with_sampled_steps_do_not_mix(
    gpu: FakeGPU, options: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    for timed in time_two(gpu, 24, *options):
        assert len(timed) >= 6
        assert {phases["backward"] for phases in timed} == {STEP_MS["backward"]}


# Modules and losses that the timer discovers when the loop calls them


def train(gpu: FakeGPU, model: nn.Module, loss_of: Callable[[Tensor], Tensor]) -> GPUPhaseHooks:
    optimizer = Adder(iter([*model.parameters()]), gpu, 2.0)
    with GPUPhaseHooks(model, optimizer, _clock=gpu, warmup_steps=0) as timer:
        for x in timer.steps(batches(gpu, 3)):
            loss_of(x).backward()
            optimizer.step()
    return timer


def test_teacher_in_eval_mode_keeps_the_fast_path_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = Mock(wraps=torch._transformer_encoder_layer_fwd)
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", fast)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    teacher = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    model = nn.ModuleDict({"teacher": teacher, "student": nn.Linear(16, 16)})
    optimizer = torch.optim.SGD(model["student"].parameters())
    x = torch.randn(4, 8, 16)
    with GPUPhaseHooks(model, optimizer) as timer:
        for _ in timer.steps(range(3)):
            with torch.no_grad():
                target = teacher(x)
            (model["student"](x) - target).square().mean().backward()
            optimizer.step()
    assert fast.call_count == 2 * 3


def test_model_of_layers_with_a_fast_path_is_timed(gpu: FakeGPU) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(2, 1, 2, dropout=0.0, batch_first=True)

    model = Layers()
    timer = train(gpu, model, lambda x: work(model.layer(x.unsqueeze(0)), gpu, 4.0, 7.75).sum())
    assert ["forward" in step for step in steps(timer)] == [False, True, True]


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated.*:DeprecationWarning")
@pytest.mark.parametrize("is_scripted", [True, False], ids=["scripted", "traced"])
def test_scripted_or_traced_child_is_timed_and_keeps_no_hooks(is_scripted: bool) -> None:
    x = torch.ones(1, 2)
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    child: Any = torch.jit.script(inner) if is_scripted else torch.jit.trace(inner, x)
    model = nn.ModuleDict({"child": child, "head": nn.Linear(2, 1)})
    optimizer = torch.optim.SGD(model.parameters())
    with GPUPhaseHooks(model, optimizer, warmup_steps=0) as timer:
        for _ in timer.steps(range(3)):
            model["head"](model["child"](x)).sum().backward()
            optimizer.step()
    phases = {"data", "other", "forward", "loss", "backward", "optimizer"}
    assert [set(step) for step in steps(timer)] == [phases] * 3
    assert not any(module._forward_pre_hooks for module in (model, child, model["head"]))


class WithLoss(nn.Module):
    """A model that returns its loss. Its first call raises if it `fails_once`."""

    def __init__(self, gpu: FakeGPU, *, fails_once: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = Layer(gpu, 1.0, 1.0), Layer(gpu, 2.0, 2.0)
        self.fails = fails_once

    def forward(self, z: Tensor) -> Tensor:
        if self.fails:
            self.fails = False
            raise MemoryError
        return self.decoder(z).pow(2).mean()  # type: ignore[no-any-return]


def loss_with_encoder(model: WithLoss, x: Tensor) -> Tensor:
    loss: Tensor = model(model.encoder(x))
    return loss


def retried_loss(model: WithLoss, x: Tensor) -> Tensor:
    with suppress(MemoryError):
        return model(x)  # type: ignore[no-any-return]
    return model(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("loss_of", "is_inside", "ms"),
    [(loss_with_encoder, False, 3.0), (loss_with_encoder, True, 3.0), (retried_loss, False, 2.0)],
    ids=["with a part", "inside a container", "with a retry"],
)
def test_model_that_returns_its_loss_is_forward(
    gpu: FakeGPU, loss_of: Callable[[Any, Tensor], Tensor], is_inside: bool, ms: float
) -> None:
    model = WithLoss(gpu, fails_once=loss_of is retried_loss)
    bare = installed(*model.modules())
    timed = nn.ModuleList([model]) if is_inside else model
    timer = train(gpu, timed, lambda x: loss_of(model, x))
    assert [(step["forward"], step["backward"]) for step in steps(timer)] == [(ms, ms)] * 3
    assert installed(*model.modules()) == bare
