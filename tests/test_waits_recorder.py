"""Waits as marks: what they interrupt, and what becomes of that."""

import threading
from collections.abc import Iterator

import pytest
from fake_gpu import FakeGPU

from lightning_gputime import StepTimes
from lightning_gputime._phases import resolve_labels
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.waits import begin_wait, end_wait


class Recorded(Recorder):
    """A recorder that keeps what it emits; each of its words takes the GPU no time."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.gpu = gpu
        self.emitted: list[StepTimes] = []
        super().__init__(
            gpu, lag=0, emit=lambda steps: self.emitted.extend(s.times() for s in steps)
        )

    def run(self, label: str, ms: float) -> None:
        """Work of a phase."""
        self.mark(label)
        self.gpu.work(ms)

    def wait(self, ms: float = 3.0, label: str = "<waits>") -> None:
        """A wait for other ranks."""
        begun = begin_wait(self, label)
        self.gpu.work(ms)
        if begun:
            end_wait(self)

    def end(self) -> dict[str, float]:
        """Ends the step, and returns its times, those that are zero left out."""
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
    ("labels", "phase"),
    [
        (("data", "<receives>", "<continues>", "forward"), "forward"),
        (("other", "<receives>", "<continues>", "forward"), "forward"),
        (("forward", "<receives>", "<continues>", "backward"), "forward"),
        (("<after forward>", "<receives>", "<continues>", "backward"), "backward"),
        (("<after forward>", "<receives>", "<continues>", "forward"), "forward"),
        (("backward", "<receives>", "<continues>", "backward"), "backward"),
        (("<after backward>", "<receives>", "<continues>", "forward", "backward"), "forward"),
        (("<after backward>", "<receives>", "<continues>", "backward"), "backward"),
        (("<after backward>", "<receives>", "<continues>", "<after update>"), "backward"),
        (("optimizer", "<receives>", "<continues>", "<after update>"), "optimizer"),
        (("<after update>", "<receives>", "<continues>", "data"), "other"),
        (("augment/part", "<receives>", "<continues>", "forward"), "augment"),
    ],
)
def test_pipeline_receive_belongs_to_the_next_pass(labels: tuple[str, ...], phase: str) -> None:
    assert resolve_labels(labels)[1] == (phase, f"{phase}/comm")
