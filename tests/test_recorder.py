"""The recorder: the times of each step that its marks give, its waits for the GPU, and errors."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_gpu import FakeEvent, FakeGPU, raw

from lightning_gputime import StepTimes
from lightning_gputime._phases import EXCLUDED, LineTime, StepRecord
from lightning_gputime._record.pending_steps import LineMark, Wait
from lightning_gputime._record.recorder import Recorder


class StoringRecorder(Recorder):
    """A recorder that stores the steps that it emits."""

    def __init__(self, gpu: FakeGPU, lag: int = 1, **options: Any) -> None:
        self.gpu = gpu
        self.records: list[StepRecord] = []
        super().__init__(gpu, lag=lag, **{"emit": self.take, **options})
        self.begin()

    def take(self, steps: list[StepRecord], since_ns: int) -> None:
        self.records.extend(steps)

    def step(self, number: int, forward_ms: float = 4.0, backward_ms: float = 6.0) -> None:
        self.mark("forward")
        self.gpu.work(forward_ms, host_ms=1.0)
        self.mark("backward")
        self.gpu.work(backward_ms, host_ms=1.0)
        self.end_step(number)

    def play(self, script: str) -> None:
        """Run the commands of a script, separated by semicolons.

        A number is work on the GPU (in ms), `wait` a wait of 3 ms for other ranks, and `end` the
        end of a step. Other commands are methods with their arguments.
        """
        for number, command in enumerate(script.split(";")):
            name, _, text = command.strip().partition(" ")
            arguments = [word for word in text.split(", ") if word]
            if name == "end":
                self.end_step(number)
            elif name[0].isdigit():
                self.gpu.work(float(name))
            elif name == "wait":
                has_begun = self.begin_wait("<waits>")
                self.gpu.work(3.0)
                if has_begun:
                    self.end_wait()
            elif name == "mark_instead":
                old, label = arguments
                self.mark_instead(label, of=old)
            elif name == "wait_begins":
                self.begin_wait(*arguments)
            elif name == "wait_ends":
                self.end_wait()
            else:
                owners = [self, self.open, self.named, self.pending]
                method = next(getattr(owner, name) for owner in owners if hasattr(owner, name))
                method(*arguments)

    @property
    def emitted(self) -> list[StepTimes]:
        return [record.times() for record in self.records]

    def numbers(self) -> list[int]:
        return [record.number for record in self.records]

    def phases(self) -> list[dict[str, float]]:
        """Resolve all pending steps, and return the phases of each step."""
        self.pending.flush()
        return [dict(times.phase_ms) for times in self.emitted]


class Annotated(StoringRecorder):
    """A recorder that also passes each label to an annotator."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.labels: list[str | None] = []
        super().__init__(gpu, annotate=self.labels.append)


def in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@pytest.fixture
def recorder(gpu: FakeGPU) -> StoringRecorder:
    return StoringRecorder(gpu)


SAVES = "callbacks/Saves.on_train_batch_end"
STEP = "mark forward; 4; mark backward; 6; end"
SCRIPTS: dict[str, tuple[str, list[dict[str, float]]]] = {
    "a phase named while paused begins with the resume": (
        "mark forward; pause; enter_phase export; 70; resume; 2; leave_phase export; 1; end",
        [{"data": 1, "export": 2}],
    ),
    "the end of a named phase continues the phase before it": (
        "mark forward; 1; enter_phase augment; 2; enter_phase crop; 4; leave_phase crop; 8;"
        "leave_phase augment; 16; end",
        [{"data": 0, "forward": 17, "augment": 10, "crop": 4}],
    ),
    "boundaries inside a named phase do not count": (
        "enter_phase teacher; mark forward; 2; mark other; 3; leave_phase teacher; 1; end",
        [{"data": 0, "teacher": 5, "other": 1}],
    ),
    "named phases can end in any order": (
        "enter_phase fetch; 1; enter_phase load; 2; leave_phase fetch; 4; leave_phase load; 8; end;"
        "enter_phase fetch; 1; enter_phase load; 2; leave_phase fetch; 4; leave_phase load; 8; end",
        [{"data": 8, "fetch": 1, "load": 6}] * 2,
    ),
    "a phase named while idle begins with the first step": (
        "stop; enter_phase augment; 5; begin; 2; leave_phase augment; 1; end",
        [{"data": 1, "augment": 2}],
    ),
    "the optimizer follows a backward named by hand": (
        "enter_phase backward; 5; leave_phase backward; 1; enter_phase optimizer; 2;"
        "leave_phase optimizer; 4; end",
        [{"data": 0, "backward": 5, "optimizer": 3, "other": 4}],
    ),
    "mark_instead renames the time since its label, or begins a new phase": (
        "mark <after forward>; 1; mark_instead <after forward>, loss; 2; mark forward; 4;"
        "mark_instead <after forward>, loss; 8; end",
        [{"data": 0, "loss": 11, "forward": 4}],
    ),
    "the mark before the last one can be renamed": (
        "mark forward; 4; relabel_before data, other; mark <after forward>; 1;"
        "relabel_before loss, data; relabel_before forward, loss; end;"
        "relabel_before data, loss; 1; end",
        [{"loss": 4, "other": 1}, {"data": 1}],
    ),
    "data follows a pause by hand that outlasts its step": (
        f"mark forward; 4; enter_phase {EXCLUDED}; 16; end; 32; leave_phase {EXCLUDED}; 1; end",
        [{"data": 0, "forward": 4}, {"data": 1}],
    ),
    # Waits for other ranks, of 3 ms each.
    "waits of a renamed phase are renamed with it": (
        "mark <after forward>; 1; wait; 1; mark_instead <after forward>, loss; 2; mark forward;"
        "wait; 4; mark <after forward>; relabel_before forward, loss; mark backward; 8; end",
        [{"data": 0, "loss": 14, "loss/comm": 6, "backward": 8}],
    ),
    "a wait in a pause by hand is not counted": (
        f"mark forward; 4; wait; enter_phase {EXCLUDED}; wait; 13; leave_phase {EXCLUDED}; 1; wait;"
        "end",
        [{"data": 0, "forward": 11, "forward/comm": 6}],
    ),
    "a pause inside a wait ends it": (
        f"mark forward; 4; wait_begins <waits>; 3; enter_phase {EXCLUDED}; 16; wait_ends;"
        f"leave_phase {EXCLUDED}; 1; end",
        [{"data": 0, "forward": 8, "forward/comm": 3}],
    ),
    "an evaluation is excluded with its waits and the fetch before it": (
        "mark data; 1; wait; mark <evaluation>; 4; wait; pause <evaluation>; 16; wait; resume data;"
        "mark data; 2; wait; mark forward; 4; end",
        [{"data": 5, "data/comm": 3, "forward": 4}],
    ),
    "a wait after the end of a step is not part of it": (
        "mark forward; 4; mark backward; 8; wait; mark optimizer; 2; mark <after update>; 1; wait;"
        "end_at <after update>, 0",
        [{"data": 0, "forward": 4, "backward": 11, "backward/comm": 3, "optimizer": 2}],
    ),
    "a wait that does not end is ended with its step": (
        "mark forward; 4; wait_begins <waits>; 3; end; 1; wait_ends; wait; end",
        [{"data": 0, "forward": 7, "forward/comm": 3}, {"data": 4, "data/comm": 3}],
    ),
}


@pytest.mark.parametrize(("script", "phases"), SCRIPTS.values(), ids=SCRIPTS)
def test_marks_divide_a_step_into_phases(
    recorder: StoringRecorder, script: str, phases: list[dict[str, float]]
) -> None:
    recorder.play(script)
    assert recorder.phases() == phases


@pytest.mark.parametrize(
    ("script", "waits"),
    [
        ("0.02; end", [(0.02, 20_000)]),
        ("0.019999; end", [(0.019999, 0)]),  # Too short to show when the device has finished.
        ("end_untimed; end_untimed; 9; end; 9; end", [(3.0, 9_000_000), (9.0, 18_000_000)]),
    ],
)
def test_host_wait_is_per_step_and_shows_when_the_device_has_finished(
    gpu: FakeGPU, script: str, waits: list[tuple[float, int]]
) -> None:
    recorder = StoringRecorder(gpu, lag=0)
    recorder.play(script)
    assert [(record.wait_ms, record.finished_ns) for record in recorder.records] == waits


def test_step_can_be_waited_for_at_its_end_with_all_earlier_steps(gpu: FakeGPU) -> None:
    recorder = StoringRecorder(gpu, lag=3)
    recorder.step(0)
    recorder.mark("forward")
    gpu.work(10.0)
    recorder.end_step(1, wait=Wait.FOR_THIS_STEP)
    assert [(times.step, times.step_ms) for times in recorder.emitted] == [(0, 11.0), (1, 10.0)]
    recorder.step(2)
    assert recorder.numbers() == [0, 1]


def test_mark_reached_after_its_step_is_waited_for(gpu: FakeGPU, recorder: StoringRecorder) -> None:
    recorder.play("mark forward; 50; mark backward")
    gpu.free_at = gpu.now  # The rest of the step runs on another stream, which is idle.
    gpu.host_work(10.0)
    recorder.end_step(0)
    recorder.pending.drain()
    assert recorder.numbers() == [0]
    assert recorder.emitted[0].phase_ms["forward"] == 50.0


def test_drain_does_not_wait_for_unfinished_steps(gpu: FakeGPU, recorder: StoringRecorder) -> None:
    recorder.step(0)
    recorder.pending.drain()
    assert recorder.emitted == []
    gpu.host_work(100.0)
    recorder.pending.drain()
    assert recorder.numbers() == [0]
    assert gpu.waits == []
    # The next mark reuses an event of the step that was read.
    created = gpu.created
    recorder.mark("forward")
    assert (recorder.label, gpu.created) == ("forward", created)


@pytest.mark.parametrize("has_marks", [True, False])
def test_recorder_breaks_no_capture_of_a_graph(gpu: FakeGPU, has_marks: bool) -> None:
    recorder = StoringRecorder(gpu)
    for number in range(3):
        recorder.step(number)
    recorder.pending.flush()  # Marks reuse events from now on.
    recorder.step(3)
    with gpu.capture():
        recorder.pending.drain()
        recorder.pending.end_untimed(read=True)
        recorder.step(4) if has_marks else recorder.end_step(4)
    recorder.step(5)
    recorder.step(6)
    recorder.pending.flush()
    assert not gpu.capture_broken
    # The step after the capture had already begun in it.
    assert recorder.numbers() == [0, 1, 2, 3, 6]


@pytest.mark.parametrize("end", ["end_step", "end_untimed"])
def test_steps_are_emitted_in_full_batches_or_on_request(gpu: FakeGPU, end: str) -> None:
    recorder = StoringRecorder(gpu, read_size=3)
    for number in range(5):
        recorder.step(number)
        assert recorder.numbers() == ([0, 1, 2] if number >= 3 else [])
    recorder.pending.end_untimed()
    assert recorder.numbers() == [0, 1, 2]
    if end == "end_step":
        recorder.end_step(5, read=True)
    else:
        recorder.pending.end_untimed(read=True)
    assert recorder.numbers() == [0, 1, 2, 3, 4]


def test_error_at_a_step_end_loses_only_pending_steps(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = StoringRecorder(gpu, read_size=9)
    recorder.step(0)
    recorder.step(1)
    with monkeypatch.context() as broken:
        broken.setattr(FakeEvent, "query", lambda _: 1 / 0)
        recorder.step(2)
    assert recorder.label is None
    assert recorder.emitted == []
    recorder.step(3)
    assert recorder.label == "data"
    recorder.step(4)
    recorder.pending.flush()
    # Step 0 was finished, 1 and 2 were pending, and 3 had not begun.
    assert recorder.numbers() == [0, 4]
    # In the first step the device idles for 1 ms, until the first launch.
    assert [times.step_ms for times in recorder.emitted] == [11.0, 10.0]
    error = "ZeroDivisionError('division by zero')"
    assert caplog.messages == [f"Skipped a step that could not be timed: {error}"]


def test_consumer_error_does_not_reach_the_loop(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    def emit(steps: list[StepRecord], _: int) -> None:
        numbers.extend(step.number for step in steps)
        if numbers == [0]:
            raise OSError("disk full")

    numbers: list[int] = []
    recorder = StoringRecorder(gpu, lag=0, emit=emit)
    for number in range(4):
        recorder.step(number)
    assert numbers == [0, 2, 3]  # Step 1 began before the error, and step 2 after it.
    assert "could not be timed: OSError('disk full')" in caplog.text


def test_failed_mark_stops_recording_until_the_step_ends(
    gpu: FakeGPU, recorder: StoringRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(FakeEvent, "record", lambda _: 1 / 0)
        recorder.mark("forward")
    assert recorder.label is None
    created = gpu.created
    recorder.play("mark backward; mark_instead backward, loss; mark_in_backward backward/comm")
    recorder.play("enter_phase augment; leave_phase augment; pause; resume")
    assert recorder.label is None
    assert gpu.created == created
    recorder.end_step(0)
    assert recorder.label == "data"
    recorder.step(1)
    assert recorder.phases() == [{"data": 0.0, "forward": 5.0, "backward": 6.0}]


def test_annotator_gets_each_label_and_none_between_timed_steps(gpu: FakeGPU) -> None:
    recorder = Annotated(gpu)
    recorder.play(
        "mark backward; mark_in_backward backward/comm; mark forward; pause; resume other"
    )
    recorder.play("pause; end; stop; stop")
    paused = ["forward", None, "other"]
    assert recorder.labels == ["data", "backward", *paused, None, "data", None]


def test_failing_annotator_is_reported_once_and_dropped(
    gpu: FakeGPU, caplog: pytest.LogCaptureFixture
) -> None:
    labels: list[str | None] = []

    def fail(label: str | None) -> None:
        labels.append(label)
        raise RuntimeError("no profiler")

    recorder = StoringRecorder(gpu, annotate=fail)
    recorder.step(0)
    recorder.pause()
    assert recorder.phases() == [{"data": 0.0, "forward": 5.0, "backward": 6.0}]
    assert labels == ["data"]
    text = "Phases are no longer shown in other profilers: RuntimeError('no profiler')"
    assert caplog.messages == [text]


def test_emitted_step_has_every_field(gpu: FakeGPU) -> None:
    recorder = StoringRecorder(gpu, lag=0)
    gpu.host_work(1.0)
    recorder.mark("forward")
    gpu.work(4.0, host_ms=1.0)
    recorder.end_step(0)
    lines: list[LineMark] = []
    recorder.examine(lines)
    recorder.mark("other")
    event = gpu.event()
    event.record()
    lines.append(LineMark(gpu.now, gpu.now + 1, event, "train:3", starts=True))
    gpu.work(2.0)
    recorder.end_step(1, skipped_update=True, index=7, items=3.0)
    gpu.host_work(1.0)
    recorder.end_step(2, items=0.0)
    ms = 1_000_000
    # The host waits for the first step until 6 ms, and for the second until 8 ms.
    first = raw(0, 4.0, data=1.0, forward=5.0)
    first = first._replace(host_ns=(0, ms, 2 * ms), finished_ns=6 * ms, reached_ns=6 * ms)
    second = raw(1, 2.0, data=0.0, other=2.0)._replace(host_ns=(2 * ms, 6 * ms, 6 * ms))
    second = second._replace(finished_ns=8 * ms, reached_ns=8 * ms, skipped_update=True)
    line = LineTime(6 * ms, 6 * ms + 1, 0.0, "train:3", starts=True)
    second = second._replace(step_index=7, items=3.0, lines=(line,))
    third = raw(2, data=1.0)._replace(host_ns=(6 * ms, 9 * ms), items=0.0)
    assert recorder.records == [first, second, third]


def test_mark_in_backward_is_ignored_elsewhere(gpu: FakeGPU, recorder: StoringRecorder) -> None:
    def communicate() -> None:
        in_thread(lambda: recorder.mark_in_backward("backward/comm"))
        gpu.work(1.0)

    communicate()
    recorder.mark("backward")
    gpu.work(2.0)
    communicate()
    created = gpu.created
    communicate()
    assert gpu.created == created
    recorder.mark("other")
    for name in ("backward", "augment", "backward/part"):
        recorder.enter_phase(name)
        communicate()
        recorder.leave_phase(name)
    recorder.end_step(0)
    backward = {"backward": 6.0, "backward/comm": 3.0, "backward/part": 1.0}
    assert recorder.phases() == [{"data": 1.0, **backward, "other": 0.0, "augment": 1.0}]


@pytest.mark.parametrize(("lag", "n_read"), [(0, 2), (2, 0)])
def test_step_can_end_at_its_update_during_a_pause(gpu: FakeGPU, lag: int, n_read: int) -> None:
    recorder = StoringRecorder(gpu, lag=lag)
    recorder.play("mark forward; 4; mark <after update>; mark other; 16; pause")
    ended: list[bool] = []
    in_thread(lambda: ended.append(recorder.end_at("<after update>", 0)))
    ended.append(recorder.end_at("<after update>", 0))
    assert ended == [False, True]
    assert (recorder.state.name, recorder.label) == ("OPEN", "data")
    gpu.work(1.0)
    assert gpu.waits == []
    recorder.end_step(1)
    assert len(recorder.emitted) == n_read
    assert recorder.phases() == [{"data": 0.0, "forward": 4.0}, {"data": 1.0}]
    assert recorder.numbers() == [0, 1]


def test_forked_process_uses_no_event_of_its_parent(gpu: FakeGPU) -> None:
    recorder = StoringRecorder(gpu, read_size=9)
    for number in range(4):
        recorder.step(number)
    recorder.pending.flush()
    # A finished step, a pending step and free events all belong to the parent.
    recorder.step(4)
    recorder.step(5)
    recorder.abandon()
    assert (recorder.state.name, recorder.label) == ("IDLE", None)
    created = gpu.created
    recorder.begin()
    recorder.step(6)
    recorder.pending.flush()
    assert gpu.created == created + 4  # The events of step 6.
    assert recorder.numbers() == [0, 1, 2, 3, 6]


@pytest.mark.parametrize("after_fetch", [True, False])
def test_evaluation_detected_late_is_fully_excluded(gpu: FakeGPU, after_fetch: bool) -> None:
    recorder = Annotated(gpu)
    recorder.play("1" if after_fetch else "1; mark forward; 4")
    recorder.play("mark <evaluation>; 16; pause <evaluation>")
    assert (recorder.state.name, recorder.label) == ("PAUSED", EXCLUDED)
    assert recorder.labels[-1] is None
    recorder.play("mark loss; 32")
    in_thread(lambda: recorder.resume("other"))
    assert recorder.state.name == "PAUSED"
    recorder.play("resume other; 0.5; end")
    # A fetch right before the evaluation belongs to it.
    before = {} if after_fetch else {"data": 1.0, "forward": 4.0}
    assert recorder.phases() == [{**before, "other": 0.5}]


def test_new_thread_that_reuses_the_id_of_the_timed_thread_is_not_timed(
    gpu: FakeGPU, recorder: StoringRecorder
) -> None:
    thread_ids: list[int] = []

    def train() -> None:
        thread_ids.append(threading.get_ident())
        recorder.begin()
        recorder.step(0)

    def disturb() -> None:
        thread_ids.append(threading.get_ident())
        recorder.mark("forward")
        recorder.enter_phase("a")
        recorder.pause(now=True)
        recorder.end_step(1)

    for target in (train, *[disturb] * 10):
        in_thread(target)
    created = gpu.created
    if thread_ids[0] not in thread_ids[1:]:
        pytest.skip("the thread id was not reused")
    assert (recorder.pending.ended, recorder.label) == (1, "data")
    recorder.stop()
    recorder.pending.flush()
    assert recorder.numbers() == [0]
    train()
    assert recorder.pending.ended == 2
    assert gpu.created < created + 8


# Waits, which interrupt the phase in which they begin


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
