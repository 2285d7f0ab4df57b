"""Hooks and patches: which calls they record, and that user code and copies do not notice them."""

import copy
import io
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from conftest import AUTOGRAD, hooks_of, installed
from fake_gpu import STEP_MS, FakeGPU, Layer, steps
from fake_loop import Loop, hooks
from torch import nn

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


def test_children_inside_the_model_call_lose_their_hooks(gpu: FakeGPU, time_step: TimeStep) -> None:
    model = nn.Sequential(*(Layer(gpu, 1.0) for _ in range(10)))
    bare = installed(*model)
    timed = time_step(model)
    assert installed(*model) != bare
    model(X)
    assert timed.end_step() == {"forward": 10.0}
    assert installed(*model) == bare
    model(X)
    assert timed.end_step() == {"forward": 10.0}


def test_children_regain_hooks_if_forward_does_not_run(gpu: FakeGPU, time_step: TimeStep) -> None:
    model = nn.Sequential(Layer(gpu, 1.0), Layer(gpu, 2.0))
    timed = time_step(model)
    model(X)
    timed.end_step()
    model[0](X)
    assert timed.end_step() == {"data": 1.0}
    model[0](X)
    assert timed.end_step() == {"forward": 1.0}


def test_child_that_is_also_called_alone_keeps_its_hooks(gpu: FakeGPU, time_step: TimeStep) -> None:
    model = nn.Sequential(Layer(gpu, 1.0), Layer(gpu, 2.0))
    timed = time_step(model)
    for _ in range(3):
        model(X)
        gpu.work(8.0)
        model[0](X)
        assert timed.end_step() == {"forward": 12.0}


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


def test_foreign_patch_keeps_working_after_the_timer_is_removed(gpu: FakeGPU) -> None:
    before = AUTOGRAD._engine_run_backward
    model = Layer(gpu, 1.0, 2.0)
    timed = Timed(gpu, model)
    ours = AUTOGRAD._engine_run_backward
    AUTOGRAD._engine_run_backward = theirs = lambda *args, **kwargs: ours(*args, **kwargs)
    timed.timer.remove()
    assert AUTOGRAD._engine_run_backward is theirs
    model(X).sum().backward()
    AUTOGRAD._engine_run_backward = before
    assert model.linear.weight.grad is not None
    assert len(timed.timer.history()) == 0


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
    AUTOGRAD._engine_run_backward = before
    assert len(steps(timer)) > since
    assert steps(timer) == [STEP_MS] * 6
    assert len(calls) == 60 - 20  # `theirs` was installed in step 20.
