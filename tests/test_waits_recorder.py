"""Waits as marks, which interrupt the phase in which they begin."""

import threading
from collections.abc import Iterator

import pytest
from fake_gpu import FakeGPU

from lightning_gputime import StepTimes
from lightning_gputime._phases import resolve_labels
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.waits import begin_wait, end_wait


class Recorded(Recorder):
    """A recorder that keeps the steps it emits."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.gpu = gpu
        self.emitted: list[StepTimes] = []
        super().__init__(
            gpu, lag=0, emit=lambda steps, _: self.emitted.extend(s.times() for s in steps)
        )

    def run(self, label: str, ms: float) -> None:
        self.mark(label)
        self.gpu.work(ms)

    def wait(self) -> None:
        """Wait 3 ms for other ranks."""
        begun = begin_wait(self, "<waits>")
        self.gpu.work(3.0)
        if begun:
            end_wait(self)

    def end(self) -> dict[str, float]:
        """End the step, and return the phases that took time."""
        self.end_step(0)
        return {name: ms for name, ms in self.emitted[-1].phase_ms.items() if ms}


@pytest.fixture
def run(gpu: FakeGPU) -> Iterator[Recorded]:
    recorder = Recorded(gpu)
    recorder.begin()
    yield recorder
    assert not gpu.capture_broken


@pytest.mark.parametrize(
    ("label", "task", "is_timed"),
    [("backward", 0, True), ("optimizer", 0, True), ("forward", 0, False), ("backward", -1, False)],
)
def test_wait_in_another_thread_counts_where_that_thread_runs_the_backward(
    run: Recorded, label: str, task: int, is_timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "lightning_gputime._record.waits.current_graph_task_id"
    monkeypatch.setattr(path, lambda: task)
    run.run(label, 4.0)
    thread = threading.Thread(target=run.wait)
    thread.start()
    thread.join()
    assert run.end() == {label: 7.0, **({f"{label}/comm": 3.0} if is_timed else {})}


def test_probed_step_keeps_the_waits_after_the_spin(run: Recorded, gpu: FakeGPU) -> None:
    run.run("data", 1.0)
    run.wait()
    run.start_probe(lambda: gpu.spin(2_000_000))
    run.wait()
    run.run("forward", 4.0)
    assert run.end() == {"data": 3.0, "data/comm": 3.0, "forward": 4.0}


def test_wait_whose_mark_fails_costs_its_step_alone(
    run: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.run("forward", 4.0)
    with monkeypatch.context() as patch:
        patch.setattr(run, "_host_ns", None)
        run.wait()
    assert run.label is None
    run.end_step(0)
    run.run("forward", 4.0)
    run.wait()
    assert run.end() == {"forward": 7.0, "forward/comm": 3.0}
    assert len(run.emitted) == 1


@pytest.mark.parametrize(
    ("before", "after", "phase"),
    [
        ("data", ["forward"], "forward"),
        ("other", ["forward"], "forward"),
        ("forward", ["backward"], "forward"),
        ("<after forward>", ["backward"], "backward"),
        ("<after forward>", ["forward"], "forward"),
        ("backward", ["backward"], "backward"),
        ("<after backward>", ["forward", "backward"], "forward"),
        ("<after backward>", ["backward"], "backward"),
        ("<after backward>", ["<after update>"], "backward"),
        ("optimizer", ["<after update>"], "optimizer"),
        ("<after update>", ["data"], "other"),
        ("augment/part", ["forward"], "augment"),
    ],
)
def test_pipeline_receive_is_in_the_next_pass(before: str, after: list[str], phase: str) -> None:
    labels = (before, "<receives>", "<continues>", *after)
    assert resolve_labels(labels)[1] == (phase, f"{phase}/comm")
