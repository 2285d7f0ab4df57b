"""`phase(name)` as a context manager and as a decorator, and phases in other profilers."""

import threading
from contextlib import nullcontext

import pytest
import torch
from fake_gpu import STEP_MS, FakeGPU, Layer, steps
from fake_loop import Loop, hooks, train
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks, phase
from lightning_gputime._phases import (
    AFTER_BACKWARD,
    AFTER_UPDATE,
    in_order,
    resolve_labels,
)


@pytest.fixture
def timer(loop: Loop) -> GPUPhaseHooks:
    """Return a timer of a loop whose steps only consist of named phases."""
    return hooks(loop)


def test_phase_acts_on_each_attached_timer(gpu: FakeGPU, loop: Loop, timer: GPUPhaseHooks) -> None:
    with timer, hooks(loop) as other:
        with phase("augment"):
            gpu.work(3.0)
        gpu.work(0.5)
        timer.step()
        other.step()
    assert steps(timer) == steps(other) == [{"data": 0.5, "augment": 3.0}]


def test_phase_decorates_a_recursive_function(gpu: FakeGPU, timer: GPUPhaseHooks) -> None:
    @phase("augment")
    def augment(depth: int) -> int:
        gpu.work(1.5)
        return augment(depth - 1) + 1 if depth else 0

    with timer:
        assert augment(1) == 1
        gpu.work(0.5)
        timer.step()
    assert steps(timer) == [{"data": 0.5, "augment": 3.0}]


class HasBody(nn.Module):
    """A model whose forward takes 1 ms and a named body of 4 ms."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu, self.body = gpu, Layer(gpu, 4.0, 7.75)

    def forward(self, x: Tensor) -> Tensor:
        self.gpu.work(1.0)
        with phase("forward/body"):
            result: Tensor = self.body(x)
        return result


def test_sub_phase_is_a_part_of_its_phase_and_indented_in_the_table(gpu: FakeGPU) -> None:
    timer = train(Loop(gpu, HasBody(gpu)), 3)
    assert steps(timer) == [{**STEP_MS, "forward": 5.0, "forward/body": 4.0}] * 3
    assert "\nforward     5.000   30.1%" in str(timer.summary())
    assert "\n  body      4.000   24.1%" in str(timer.summary())


def test_phase_can_be_reused_nested_and_in_threads(gpu: FakeGPU, timer: GPUPhaseHooks) -> None:
    augment = phase("augment")

    def use(ms: float) -> None:
        with augment:
            gpu.work(ms)

    with timer:
        with augment:
            use(1.0)
            for thread in [threading.Thread(target=use, args=(8.0,)) for _ in range(2)]:
                thread.start()
                thread.join()
            gpu.work(2.0)
        thread = threading.Thread(target=use, args=(4.0,))  # Does nothing in another thread.
        thread.start()
        thread.join()
        timer.step()
    assert steps(timer) == [{"data": 4.0, "augment": 19.0}]


def test_phase_ends_when_its_code_raises(gpu: FakeGPU, timer: GPUPhaseHooks) -> None:
    with timer:
        with pytest.raises(KeyError), phase("augment"):
            raise KeyError
        gpu.work(1.0)
        timer.step()
    assert steps(timer) == [{"data": 1.0, "augment": 0.0}]


def test_phase_adds_no_graph_break_to_compiled_code(timer: GPUPhaseHooks) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        with phase("augment"):
            x = x + 1
        return x * 2

    with timer:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))
        timer.step()


def test_annotated_phases_are_ranges_in_the_profiler(loop: Loop) -> None:
    with torch.profiler.profile() as profiler:
        train(loop, 2, annotate=True)
    names = [event.name for event in profiler.events() or ()]
    for name in STEP_MS:
        assert names.count(f"phase/{name}") >= 2, name


# Labels of marks, and the phases that they become


@pytest.mark.parametrize("between", ["data", "callbacks", "callbacks/Saves.on_train_batch_end"])
def test_time_after_backward_is_other_before_the_next_micro_batch(between: str) -> None:
    labels = ("backward", AFTER_BACKWARD, between, "forward", "backward", AFTER_BACKWARD)
    resolved = resolve_labels((*labels, AFTER_UPDATE))
    assert (resolved[1], resolved[5]) == (("other",), ("optimizer",))


def test_phases_are_sorted_in_the_order_of_a_step() -> None:
    names = ["augment", "backward/comm", "other", "backward", "callbacks", "data/copy", "data"]
    data = ["data", "data/copy", "callbacks"]
    assert in_order(names) == [*data, "backward", "backward/comm", "other", "augment"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, f"'{name}'") for name in ("", "/", "forward/", "/comm", "a//b", "<x>", "step/x")),
        *((name, f"'{name}' is taken") for name in ("step", "host_wait")),
        *((name, "is not valid") for name in ("a\x85b", "a\x9bb", "a\u2028b", ["a"])),
        ("a\nb", r"'a\\nb' is not valid: .* control characters"),
        ("my augment/part 1", ""),
    ],
)
def test_phase_refuses_a_name_that_cannot_be_a_key(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        phase(name)
