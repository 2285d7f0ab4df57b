import threading

import pytest
import torch
from fake_gpu import FakeGPU

from lightning_gputime import StepTimes, phase
from lightning_gputime._boundaries import named
from lightning_gputime._record.recorder import Recorder


class Timed:
    """A recorder that `phase` finds."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.emitted: list[StepTimes] = []
        self.recorder = Recorder(
            gpu, lag=0, emit=lambda steps: self.emitted.extend(s.times() for s in steps)
        )

    def __enter__(self) -> "Timed":
        named.activate(self.recorder)
        self.recorder.begin()
        return self

    def __exit__(self, *_: object) -> None:
        named.deactivate(self.recorder)
        named.deactivate(self.recorder)


def test_phase_acts_on_the_timer_at_work(gpu: FakeGPU) -> None:
    with Timed(gpu) as timed:
        with phase("augment"):
            gpu.work(3.0)
        timed.recorder.end_step(0)
    assert timed.emitted[0].phase_ms == {"data": 0.0, "augment": 3.0}


def test_phase_is_a_decorator_too(gpu: FakeGPU) -> None:
    @phase("augment")
    def augment(depth: int) -> int:
        gpu.work(1.5)
        return augment(depth - 1) + 1 if depth else 0

    with Timed(gpu) as timed:
        assert augment(1) == 1
        gpu.work(0.5)
        timed.recorder.end_step(0)
    assert timed.emitted[0].phase_ms == {"data": 0.5, "augment": 3.0}


def test_phase_runs_its_code_without_a_timer(gpu: FakeGPU) -> None:
    with phase("augment"):
        gpu.work(3.0)
    assert gpu.free_at == 3_000_000
    assert gpu.created == 0


def test_phase_acts_on_every_timer_at_work(gpu: FakeGPU) -> None:
    with Timed(gpu) as one, Timed(gpu) as two:
        with phase("augment"):
            gpu.work(3.0)
        one.recorder.end_step(0)
        two.recorder.end_step(0)
    assert one.emitted[0].phase_ms == two.emitted[0].phase_ms == {"data": 0.0, "augment": 3.0}


def test_phase_does_nothing_in_another_thread(gpu: FakeGPU) -> None:
    def other() -> None:
        with phase("augment"):
            gpu.work(3.0)

    with Timed(gpu) as timed:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        timed.recorder.end_step(0)
    assert timed.emitted[0].phase_ms == {"data": 3.0}


def test_one_object_serves_nested_code_and_other_threads(gpu: FakeGPU) -> None:
    augment = phase("augment")

    def other() -> None:
        with augment:
            pass

    with Timed(gpu) as timed:
        with augment:
            with augment:
                gpu.work(1.0)
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            gpu.work(2.0)
        gpu.work(4.0)
        timed.recorder.end_step(0)
    assert timed.emitted[0].phase_ms == {"data": 4.0, "augment": 3.0}


def test_a_phase_ends_when_its_code_raises(gpu: FakeGPU) -> None:
    with Timed(gpu) as timed:
        with pytest.raises(KeyError), phase("augment"):
            raise KeyError
        assert timed.recorder.label == "data"


def test_a_name_that_cannot_be_a_key_is_refused_with_or_without_a_timer() -> None:
    with pytest.raises(ValueError, match="phase name 'step' is taken"):
        phase("step")


def test_compiled_code_carries_a_phase_without_a_graph_break(gpu: FakeGPU) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        with phase("augment"):
            x = x + 1
        return x * 2

    with Timed(gpu):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))
