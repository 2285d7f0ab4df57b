"""Models, optimizers and loops that once broke or slowed a training."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from fake_gpu import STEP_MS, FakeGPU, Layer, batches, steps
from fake_lightning import Loader, Model, callback, fit, timer_of, trainer
from fake_loop import Loop, hooks, train
from processes import start
from test_nothing_stays import left_on
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from lightning_gputime import GPUPhaseHooks, phase

# Attributes of a model that the package must not trust


@pytest.mark.parametrize(
    "value",
    [None, "text", sys, nn.Linear(2, 2), [1]],
    ids=["None", "text", "python module", "nn.Module", "list"],
)
@pytest.mark.parametrize("name", ["module", "optimizer", "gradient_state", "is_compiled"])
def test_attribute_of_a_model_changes_no_phase(gpu: FakeGPU, name: str, value: Any) -> None:
    model = Model(gpu)
    setattr(model, name, value)
    assert steps(fit(gpu, model, 2)) == [STEP_MS] * 2


def test_submodule_called_module_is_not_a_wrapper(gpu: FakeGPU) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.head = Layer(gpu, 4.0, 7.75), Layer(gpu, 1.0, 1.0)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.module(x))
            return out

    timer = train(Loop(gpu, Outer()), 2)
    assert steps(timer) == [{**STEP_MS, "forward": 5.0, "backward": 9.0}] * 2


@pytest.mark.usefixtures("two_ranks")
def test_module_of_a_line_is_named_relative_to_the_model_inside_ddp(gpu: FakeGPU) -> None:
    class Body(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = nn.parallel.DistributedDataParallel(nn.Sequential(Body(gpu, 4.0)))
    with GPUPhaseHooks(model, _clock=gpu, sync_ranks=False) as timer:
        for x in timer.steps(batches(gpu, 20)):
            model(x)
    names = {line.function: line.modules for line in timer.summary().lines}
    assert names["Body.forward"] == "0"


def test_model_whose_getattr_answers_anything_is_timed(gpu: FakeGPU) -> None:
    class Proxy(Layer):
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name.startswith("__"):
                    raise
                return self.linear

    timer = train(Loop(gpu, Proxy(gpu, 4.0, 7.75)), 2)
    assert steps(timer) == [STEP_MS] * 2


# Errors of the timer itself


class WithOtherGroups(torch.optim.Optimizer):
    """An optimizer with unusual parameter groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.kept = [*self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns nothing
        with torch.no_grad():
            for parameter in self.kept:
                parameter.sub_(1.0)


@pytest.mark.parametrize(
    "groups",
    [[{}], None, [1], [{"params": None}], [{"params": ["weight"]}]],
    ids=["no params", "None", "numbers", "params is None", "names"],
)
@pytest.mark.parametrize("is_given", [True, False])
def test_optimizer_with_odd_groups_still_updates(loop: Loop, groups: Any, is_given: bool) -> None:
    optimizer: Any = WithOtherGroups(loop.model.parameters())
    optimizer.param_groups = groups
    before = loop.model.linear.bias.clone()
    given = [loop.optimizer, *[optimizer][:is_given]]
    with GPUPhaseHooks(loop.model, given, _clock=loop.gpu, warmup_steps=0) as timer:
        for x in timer.steps(loop.batches(3)):
            loop.micro_batch(x)
            optimizer.step()
            loop.update()
    torch.testing.assert_close(loop.model.linear.bias, before - 3.0)
    assert len(timer.history()) == 3


FAILING = {
    "step()": "lightning_gputime._session.session.Session.end_step",
    "steps()": "lightning_gputime._session.session.Session.begin_step",
    "an update": "lightning_gputime._instrumentation.optimizer.OptimizerBoundary._ended_early",
    "a backward": "lightning_gputime._instrumentation.backward.BackwardBoundary.on_call_end",
    "remove()": "lightning_gputime._session.session.Session.finish",
    "the end of a loop": "lightning_gputime._session.session.Session.compare_ranks",
}


@pytest.mark.usefixtures("is_bare")
@pytest.mark.parametrize("place", FAILING)
def test_error_of_the_timer_ends_only_the_timing(
    loop: Loop, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise LookupError("of the timer")

    with hooks(loop) as timer:
        is_attribute = place == "an update"
        broken = property(fail, fail) if is_attribute else fail
        monkeypatch.setattr(FAILING[place], broken, raising=not is_attribute)
        for x in timer.steps(loop.batches(3)):
            loop.train(x)
            timer.step()
    assert "of the timer" in caplog.text


# Evaluations that fail while they are set up


@pytest.mark.parametrize("error", [KeyboardInterrupt, LookupError])
def test_error_at_the_start_of_an_evaluation_does_not_end_the_training(
    gpu: FakeGPU, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    def break_boundary(*_: Any) -> None:
        path = "lightning_gputime._instrumentation.optimizer.OptimizerBoundary.patch_zero_grad"
        monkeypatch.setattr(path, fail)

    model = Model(gpu)
    breaking = callback(on_validation_start=break_boundary)
    expectation = pytest.raises(SystemExit) if error is KeyboardInterrupt else nullcontext()
    owner = trainer(breaking, timer_of(gpu))
    with expectation:
        owner.fit(model, Loader(gpu, 3), Loader(gpu, 2))
    assert owner.state.finished == (error is LookupError)
    assert left_on(*model.modules()) == []


# Depth and length


class Recursive(nn.Module):
    """A module that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.deepest = 0

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        self.deepest = max(self.deepest, depth)
        try:
            result: Tensor = self(x, depth + 1)
        except RecursionError:
            result = self.linear(x)
        return result


def test_module_that_calls_itself_reaches_the_same_depth() -> None:
    limit = sys.getrecursionlimit()
    bare, timed = Recursive(), Recursive()
    bare(torch.ones(1, 2))
    with GPUPhaseHooks(timed, torch.optim.SGD(timed.parameters(), 0.1)) as timer:
        for x in timer.steps([torch.ones(1, 2)] * 2):
            timed(x).sum().backward()
    assert timed.deepest >= bare.deepest
    assert sys.getrecursionlimit() == limit


def test_skipped_batches_take_constant_time(loop: Loop) -> None:
    def lines_run(n: int) -> int:
        lines = 0

        def count(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal lines
            lines += event == "line"
            return count

        previous = sys.gettrace()
        with hooks(loop) as timer:
            sys.settrace(count)
            try:
                for i in timer.steps(range(n)):
                    if i < 5:
                        loop.train(torch.ones(1, 2))
            finally:
                sys.settrace(previous)
        assert len(timer.history()) == 5
        return lines

    few, many, most = (lines_run(n) for n in (400, 800, 2_000))
    # 1,200 batches run 3 times the lines of 400, or 7 times if each visits all earlier batches.
    assert most - many <= 4 * (many - few)


# Phases and micro-batches across loops


@pytest.mark.parametrize("every", [1, 10, "auto"])
def test_phase_around_a_yield_ends_with_the_fetch(loop: Loop, every: Any) -> None:
    def load() -> Any:
        for _ in range(130):
            with phase("load"):
                loop.gpu.work(1.0)
                yield torch.ones(1, 2)

    with hooks(loop, every_n_steps=every) as timer:
        for x in timer.steps(load()):
            loop.train(x)
            loop.gpu.host_work(20.0)
    first, last = steps(timer)[1], steps(timer)[-1]
    assert first == last
    assert (last["load"], last["forward"], last["backward"]) == (1.0, 4.0, 8.0)


# Ends


def test_interrupt_of_the_last_host_wait_leaves_no_hooks(
    loop: Loop, is_bare: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    timer = hooks(loop).attach()
    loop.train_all(timer.steps(loop.batches(3)))
    monkeypatch.setattr("fake_gpu.FakeEvent.synchronize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        timer.remove()
    assert is_bare()
    timer.remove()
    assert not torch_optimizer._global_optimizer_post_hooks


LEFT_AT_EXIT = """
from itertools import repeat

import torch

from lightning_gputime import GPUPhaseHooks, phase

net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
timer = GPUPhaseHooks(net, optimizer).attach()

def batches():
    for x in timer.steps(repeat(torch.ones(2, 4))):
        with phase("augment"):
            yield x

def pause():
    with timer.paused():
        yield

def train(loader):
    for _ in range(30):
        net(next(loader)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

first, second, paused = iter(timer.steps(repeat(torch.ones(2, 4)))), batches(), pause()
train(first)
train(second)
next(paused)
"""


@pytest.mark.slow
def test_loops_and_phases_that_python_ends_at_its_exit_print_no_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LEFT_AT_EXIT)
    process = start(script)
    printed, errors = process.communicate(timeout=100)
    assert process.returncode == 0
    assert "Exception" not in printed + errors
