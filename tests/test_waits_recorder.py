"""Waits as marks, which interrupt the phase in which they begin."""

from collections.abc import Iterator

import pytest
from fake_gpu import FakeGPU
from test_recorder import StoringRecorder, in_thread

from lightning_gputime._phases import resolve_labels


@pytest.fixture
def recorder(gpu: FakeGPU) -> Iterator[StoringRecorder]:
    yield StoringRecorder(gpu)
    assert not gpu.capture_broken


@pytest.mark.parametrize(
    ("label", "graph_task_id", "is_timed"),
    [("backward", 0, True), ("optimizer", 0, True), ("forward", 0, False), ("backward", -1, False)],
)
def test_wait_in_another_thread_counts_only_if_the_thread_runs_backward(
    recorder: StoringRecorder,
    label: str,
    graph_task_id: int,
    is_timed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = "lightning_gputime._record.recorder.current_graph_task_id"
    monkeypatch.setattr(path, lambda: graph_task_id)  # -1 outside a backward.
    recorder.play(f"mark {label}; 4")
    in_thread(lambda: recorder.play("wait"))
    recorder.end_step(0)
    comm = {f"{label}/comm": 3.0} if is_timed else {}
    assert recorder.phases() == [{"data": 0.0, label: 7.0, **comm}]


def test_wait_whose_mark_fails_drops_only_its_step(
    recorder: StoringRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.play("mark forward; 4")
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "_host_ns", None)
        recorder.play("wait")
    assert recorder.label is None
    recorder.play("end; mark forward; 4; wait; end")
    assert recorder.phases() == [{"data": 0.0, "forward": 7.0, "forward/comm": 3.0}]


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
