"""Traces of slow steps, with a profiler that takes known times on the fake GPU."""

import gzip
import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import FakeGPU, work
from fake_loop import Logger, Loop, hooks
from processes import finish
from processes import start as start_process
from torch.profiler import record_function

from lightning_gputime import GPUPhaseHooks, SlowStep
from lightning_gputime._causes import capture, tracer
from lightning_gputime._causes import files as trace_files
from lightning_gputime._causes.cutting import cut

FIRST = {20: 100.0, 30: 100.0}
"""Slow steps that are read with the 50th: then a window begins."""


class Profile:
    """A profiler that takes the host 2 ms to start, and as much to stop."""

    running = started = 0

    def __init__(self, gpu: FakeGPU) -> None:
        self.gpu = gpu

    def start(self) -> None:
        Profile.running += 1
        Profile.started += 1
        self.gpu.host_work(2.0)

    def stop(self) -> None:
        Profile.running -= 1
        self.gpu.now = max(self.gpu.now, self.gpu.free_at)
        self.gpu.host_work(2.0)

    def export_chrome_trace(self, path: str) -> None:
        self.gpu.host_work(500.0)
        Path(path).write_text(trace_of(range(30)))


def trace_of(numbers: range) -> str:
    """A trace with a range of 100 us for each step, and in it a launch of a later kernel."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "ts": 0.0}]
    for n in numbers:
        at = 100.0 * n
        name = f"lightning_gputime step {n}"
        args = {"correlation": n}
        ids = {"External id": 1000 + n}
        common = {"pid": 1, "tid": 1}
        events += [
            {"ph": "X", "cat": "user_annotation", "name": name, "ts": at, "dur": 100.0, "args": ids}
            | common,
            {"ph": "X", "cat": "cpu_op", "name": f"aten::mm {n}", "ts": at + 10, "dur": 5.0}
            | common,
            {"ph": "X", "cat": "cuda_runtime", "name": f"launch {n}", "ts": at + 12, "dur": 1.0}
            | common
            | {"args": args},
            {"ph": "s", "cat": "ac2g", "id": n, "name": "ac2g", "ts": at + 12} | common,
            {"ph": "f", "cat": "ac2g", "id": n, "name": "ac2g", "ts": at + 150} | common,
            {"ph": "X", "cat": "kernel", "name": f"gemm {n}", "ts": at + 150, "dur": 5.0}
            | common
            | {"args": args},
            {"ph": "X", "cat": "gpu_user_annotation", "name": name, "ts": at + 150, "dur": 5.0}
            | common
            | {"args": ids},
        ]
    return json.dumps({"schemaVersion": 1, "deviceProperties": [], "traceEvents": events}, indent=1)


@pytest.fixture(autouse=True)
def fake_profile(monkeypatch: pytest.MonkeyPatch, gpu: FakeGPU) -> Iterator[None]:
    monkeypatch.setattr(tracer, "_new_profile", lambda: Profile(gpu))
    Profile.running = Profile.started = 0
    before = {name: getattr(torch.autograd.profiler, name) for name in tracer._BEGINS}
    yield
    assert Profile.running == 0
    for name, one in before.items():
        assert getattr(torch.autograd.profiler, name) is one


def train(
    loop: Loop,
    late: dict[int, float],
    n: int,
    folder: Path | None,
    then: Callable[[int, GPUPhaseHooks], Any] = lambda number, timer: None,
    **options: Any,
) -> GPUPhaseHooks:
    """Trains with host delays after the model, whose traces go to a folder."""
    gpu = loop.gpu
    with hooks(loop, trace_slow_steps=folder, **options) as timer:
        for number, x in enumerate(timer.steps(loop.batches(n))):
            gpu.work(0.125)
            loss = work(loop.model(x), gpu, 0.5, 0.25).sum()
            gpu.host_work(late.get(number, 0.0))
            loss.backward()
            loop.update()
            then(number, timer)
    return timer


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_where_slow_steps_recur_the_next_ones_are_traced(
    loop: Loop, tmp_path: Path, lag: int
) -> None:
    seen: list[SlowStep] = []
    late = {**FIRST, 60: 100.0, 65: 80.0, 70: 90.0, 120: 100.0}
    timer = train(loop, late, 130, tmp_path / "traces", on_slow_step=seen.append, lag=lag)
    # Two of a window; then it rests.
    assert files(tmp_path / "traces") == {"step-60.json.gz", "step-70.json.gz"}
    traces = {slow.step: slow.trace for slow in timer.slowest()}
    assert traces == {
        20: None,
        30: None,
        60: str(tmp_path / "traces" / "step-60.json.gz"),
        70: str(tmp_path / "traces" / "step-70.json.gz"),
        120: None,
    }
    assert sorted(slow.step for slow in seen) == sorted(traces)
    assert f"trace of step 60: {traces[60]}" in str(timer.slowest())
    summary = timer.summary()
    assert summary.slow is not None
    assert (summary.slow.n, summary.slow.worst.trace) == (3, None)
    assert summary.slow.traces == (traces[60], traces[70])
    assert f"traces of slow steps: {traces[60]}, {traces[70]}" in str(summary)
    # The 30 steps of the window are in no statistics, nor is the one after it.
    assert summary.steps == 130 - 31
    assert summary.rows["forward"].p50_ms == 4.0
    assert Profile.started == 1


def test_a_trace_has_its_step_alone_with_the_kernels_that_it_launched(
    loop: Loop, tmp_path: Path
) -> None:
    train(loop, {**FIRST, 60: 100.0}, 100, tmp_path)
    with gzip.open(tmp_path / "step-60.json.gz", "rt") as file:
        trace = json.load(file)
    names = [event["name"] for event in trace["traceEvents"]]
    # The window began after step 49 or 50.
    [launch] = [name for name in names if name.startswith("launch")]
    n = launch.split()[1]
    assert names == [
        "process_name",
        "step 60",
        f"aten::mm {n}",
        launch,
        "ac2g",
        "ac2g",
        f"gemm {n}",
        "step 60",
    ]
    assert int(n) in (60 - 51, 60 - 50)
    assert trace["schemaVersion"] == 1


def test_a_trace_without_the_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no range 'lightning_gputime step 7'"):
        cut(trace_of(range(3)), "lightning_gputime step 7", "step 7")


@pytest.mark.parametrize("late", [{}, {20: 100.0}, {20: 100.0, 60: 5.0}])
def test_a_single_slow_step_arms_nothing(
    loop: Loop, tmp_path: Path, late: dict[int, float]
) -> None:
    timer = train(loop, late, 120, tmp_path / "traces")
    assert Profile.started == 0
    assert timer.summary().steps == 120


def test_a_window_without_slow_steps_ends_and_it_rests(loop: Loop, tmp_path: Path) -> None:
    # The rest is twice as long as after a window with a trace: until step 30 or 50 and 600 on.
    late = {**FIRST, **dict.fromkeys(range(300, 620, 40), 100.0)}
    timer = train(loop, late, 620, tmp_path / "traces")
    assert Profile.started == 1
    assert files(tmp_path / "traces") == set()
    assert timer.summary().steps == 620 - 31


def test_it_keeps_five_traces_of_a_run(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "_COOL_DOWN", 50)
    timer = train(loop, dict.fromkeys(range(20, 1000, 10), 100.0), 1000, tmp_path)
    assert len(files(tmp_path)) == 5
    assert Profile.started == 3
    assert timer.summary().steps == 1000 - 3 * 31


def test_a_second_run_overwrites_no_trace(loop: Loop, tmp_path: Path) -> None:
    late = {**FIRST, 60: 100.0}
    for _ in range(2):
        train(loop, late, 100, tmp_path)
    assert files(tmp_path) == {"step-60.json.gz", "step-60-2.json.gz"}


def test_ranks_overwrite_no_trace_of_each_other(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_files, "is_distributed", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    train(loop, {**FIRST, 60: 100.0}, 100, tmp_path, sync_ranks=False)
    assert files(tmp_path) == {"step-60-rank-3.json.gz"}


@pytest.mark.parametrize("limit", ["MOST_READ", "MOST_BYTES"])
def test_a_trace_that_is_too_large_is_not_kept_which_is_said(
    loop: Loop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limit: str,
) -> None:
    monkeypatch.setattr(trace_files, limit, 10)
    timer = train(loop, {**FIRST, 60: 100.0}, 100, tmp_path)
    assert files(tmp_path) == set()
    assert {slow.step for slow in timer.slowest()} == {20, 30}
    [record] = caplog.records
    assert "not kept" in record.getMessage()


def test_a_profiler_that_fails_is_told_once_and_training_goes_on(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> Any:
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(tracer, "_new_profile", fails)
    late = dict.fromkeys(range(20, 900, 10), 100.0)
    train(loop, late, 900, tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        "Slow steps are no longer traced: RuntimeError('no CUPTI')"
    ]


def test_a_folder_that_cannot_be_written_is_told_once_and_training_goes_on(
    loop: Loop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "traces"
    late = {**FIRST, 60: 100.0}
    timer = train(
        loop, late, 100, folder, lambda number, _: number == 40 and folder.write_text("a file")
    )
    assert {slow.step for slow in timer.slowest()} == {20, 30}
    [record] = caplog.records
    said = record.getMessage()
    assert said.startswith(f"Slow steps are no longer traced: [Errno 17] File exists: '{folder}'.")
    assert f"Make room in {folder} and" in said


def test_the_time_of_the_profiler_makes_no_step_slow(loop: Loop, tmp_path: Path) -> None:
    # An export takes half a second: 500 ms, where a step takes 16.
    timer = train(loop, {**FIRST, 60: 100.0}, 150, tmp_path)
    assert {slow.step for slow in timer.slowest()} == {20, 30, 60}
    assert timer.summary().step.max_ms < 120.0
    assert max(timer.history()["step_ms"]) < 120.0


@pytest.mark.parametrize("every", [1, 10, 25, 50])
def test_logs_have_the_same_rows_and_keys(loop: Loop, tmp_path: Path, every: int) -> None:
    def log(folder: Path | None) -> list[tuple[int, dict[str, float]]]:
        logger = Logger()
        train(loop, late, 120, folder, logger=logger, log_every_n_steps=every)
        return logger.calls

    late = {**FIRST, 60: 100.0}
    with_traces, without = log(tmp_path), log(None)
    assert files(tmp_path)
    assert [step for step, _ in with_traces] == [step for step, _ in without]
    assert [[*metrics] for _, metrics in with_traces] == [[*metrics] for _, metrics in without]
    assert with_traces[0] == without[0]


def test_a_pause_ends_the_window(loop: Loop, tmp_path: Path) -> None:
    running = []

    def pause(number: int, timer: GPUPhaseHooks) -> None:
        if number == 65:
            assert Profile.running == 1
            with timer.paused():
                running.append(Profile.running)
                loop.gpu.host_work(1000.0)

    timer = train(loop, {**FIRST, 60: 100.0, 70: 100.0}, 100, tmp_path, pause)
    assert running == [0]
    # What was profiled until then is judged.
    assert files(tmp_path) == {"step-60.json.gz"}
    assert [slow.trace is not None for slow in timer.slowest() if slow.step == 70] == [False]


def test_the_end_of_a_loop_ends_the_window(loop: Loop) -> None:
    with hooks(loop, trace_slow_steps="traces") as timer:
        for number, x in enumerate(timer.steps(loop.batches(60))):
            loop.micro_batch(x)
            loop.gpu.host_work(FIRST.get(number, 0.0))
            loop.update()
        assert Profile.started == 1
        assert Profile.running == 0


def test_an_error_ends_the_window(loop: Loop, tmp_path: Path) -> None:
    def fails(number: int, timer: GPUPhaseHooks) -> None:
        if number == 60:
            assert Profile.running == 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        train(loop, FIRST, 100, tmp_path, fails)
    assert Profile.running == 0


def test_an_error_after_which_the_device_hangs_is_raised_all_the_same(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(number: int, timer: GPUPhaseHooks) -> None:
        if number == 60:
            monkeypatch.setattr(tracer, "_synchronize", lambda device: hangs.wait())
            raise ZeroDivisionError

    hangs = threading.Event()
    loop.gpu.device = torch.device("cuda", 0)
    monkeypatch.setattr(tracer, "_PATIENCE_S", 0.1)
    threads = {*threading.enumerate()}
    with pytest.raises(ZeroDivisionError):
        train(loop, FIRST, 100, tmp_path, fails)
    # To stop it would be to wait for the device.
    assert Profile.running == 1
    Profile.running = 0
    hangs.set()
    for thread in {*threading.enumerate()} - threads:
        thread.join()


def test_ctrl_c_while_a_profiler_starts_leaves_none_behind(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: tracer.Tracer) -> str:
        start(self)
        raise KeyboardInterrupt

    start = tracer.Tracer.start
    monkeypatch.setattr(tracer.Tracer, "start", interrupted)

    def trains() -> None:
        for number, x in enumerate(loop.batches(60)):
            loop.micro_batch(x)
            loop.gpu.host_work(FIRST.get(number, 0.0))
            loop.update()
            timer.step()

    timer = hooks(loop, trace_slow_steps=tmp_path).attach()
    with pytest.raises(KeyboardInterrupt):
        trains()
    assert Profile.running == 1
    timer.remove()
    assert Profile.running == 0


@pytest.mark.parametrize("where", ["start", "stop"])
def test_ctrl_c_inside_of_a_profiler_is_raised_and_leaves_none_behind(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    # Torch's own waits for the device before it stops, and refuses to stop if it has not begun.

    def stop(self: Profile) -> None:
        if not Profile.running:
            raise AssertionError("Profiler must be initialized before stopping trace")
        if (where, interrupts) == ("stop", [1]):
            interrupts.clear()
            raise KeyboardInterrupt
        stops(self)

    def start(self: Profile) -> None:
        if (where, interrupts) == ("start", [1]):
            interrupts.clear()
            raise KeyboardInterrupt
        starts(self)

    interrupts, starts, stops = [1], Profile.start, Profile.stop
    monkeypatch.setattr(Profile, "start", start)
    monkeypatch.setattr(Profile, "stop", stop)
    with pytest.raises(KeyboardInterrupt):
        train(loop, FIRST, 100, tmp_path)
    assert Profile.running == 0


def test_a_profiler_is_stopped_whatever_fails_before(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("no ranges")

    monkeypatch.setattr(tracer, "_end_ranges", fails)
    train(loop, FIRST, 100, tmp_path)
    assert (Profile.started, Profile.running) == (1, 0)
    assert "no ranges" in caplog.records[0].getMessage()


def test_a_pause_inside_the_capture_of_a_graph_does_not_break_it(
    loop: Loop, tmp_path: Path
) -> None:
    gpu, running = loop.gpu, []

    def captures(number: int, timer: GPUPhaseHooks) -> None:
        if number == 60:
            gpu.capturing = True
            with timer.paused():
                running.append(Profile.running)
            gpu.capturing = False

    train(loop, FIRST, 100, tmp_path, captures)
    # To stop a profiler is to wait for the device, which breaks a capture.
    assert running == [1]


def test_remove_and_loss_end_the_window(loop: Loop, tmp_path: Path) -> None:
    for end in ("remove", "lose"):
        timer = hooks(loop, trace_slow_steps=tmp_path).attach()
        for number, x in enumerate(loop.batches(60)):
            loop.micro_batch(x)
            loop.gpu.host_work(FIRST.get(number, 0.0))
            loop.update()
            timer.step()
        assert Profile.running == 1
        if end == "remove":
            timer.remove()
        else:
            del timer
        assert Profile.running == 0
    hooks(loop).attach().remove()  # takes off what was lost


def test_a_user_may_remove_the_timer_while_a_window_is_read(loop: Loop, tmp_path: Path) -> None:
    timer = hooks(loop, trace_slow_steps=tmp_path, on_slow_step=lambda slow: ends(slow))

    def ends(slow: SlowStep) -> None:
        if slow.step == 60:
            timer.remove()

    timer.attach()
    for number, x in enumerate(loop.batches(100)):
        loop.micro_batch(x)
        loop.gpu.host_work({**FIRST, 60: 100.0}.get(number, 0.0))
        loop.update()
        timer.step()
    assert files(tmp_path) == {"step-60.json.gz"}
    assert timer.summary().steps == 50 or timer.summary().steps == 51


def test_no_step_is_traced_while_a_graph_is_captured(loop: Loop, tmp_path: Path) -> None:
    gpu = loop.gpu

    def captures(number: int, timer: GPUPhaseHooks) -> None:
        started.append(Profile.started)
        gpu.capturing = 45 < number < 60

    started: list[int] = []
    train(loop, FIRST, 100, tmp_path, captures)
    assert started[59] == 0
    assert not gpu.capture_broken


def test_a_range_that_is_entered_across_steps_keeps_no_window_shut(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(capture, "_COOL_DOWN", 25)
    across = record_function("across steps")

    def enters(number: int, timer: GPUPhaseHooks) -> None:
        if number == 60:
            across.__enter__()

    train(loop, dict.fromkeys(range(20, 300, 10), 100.0), 300, tmp_path, enters)
    across.__exit__(None, None, None)
    assert Profile.started == 3
    assert not caplog.records


def test_another_thread_that_begins_a_profiler_ends_the_window(loop: Loop, tmp_path: Path) -> None:
    def begins(number: int, timer: GPUPhaseHooks) -> None:
        if number == 60:
            assert Profile.running == 1
            threads.append(threading.Thread(target=profiles))
            threads[0].start()
            while not tracer._running[0].must_stop:
                time.sleep(0.001)
        elif number == 61:
            threads[0].join()

    def profiles() -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            running.append(Profile.running)

    running: list[int] = []
    threads: list[threading.Thread] = []
    train(loop, {**FIRST, 70: 100.0}, 100, tmp_path / "traces", begins)
    assert running == [0]
    assert files(tmp_path / "traces") == set()


def test_a_profiler_is_refused_in_a_thread_that_the_loop_waits_for(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer, "_PATIENCE_S", 0.1)

    def begins(number: int, timer: GPUPhaseHooks) -> None:
        if number == 60:
            thread = threading.Thread(target=profiles)
            thread.start()
            thread.join()

    def profiles() -> None:
        with pytest.raises(RuntimeError, match="does not wait for the thread that does"):
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]).start()
        refused.append(Profile.running)

    refused: list[int] = []
    train(loop, {**FIRST, 70: 100.0}, 100, tmp_path / "traces", begins)
    # What the loop could not do then it does at its next mark.
    assert refused == [1]
    assert files(tmp_path / "traces") == set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_is_forked_off_without_the_profiler(loop: Loop, tmp_path: Path) -> None:
    codes = []

    def forks(number: int, timer: GPUPhaseHooks) -> None:
        if number == 60:
            assert Profile.running == 1
            pid = os.fork()
            if not pid:
                os._exit(Profile.running)
            codes.append(os.waitpid(pid, 0)[1])

    train(loop, FIRST, 100, tmp_path, forks)
    assert codes == [0]


def test_a_folder_that_is_none_is_refused(loop: Loop, tmp_path: Path) -> None:
    for wrong in (True, 3, ""):
        with pytest.raises(TypeError, match="trace_slow_steps must be a folder such as 'traces'"):
            hooks(loop, trace_slow_steps=wrong)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file: name a folder"):
        hooks(loop, trace_slow_steps=tmp_path / "file")
    with pytest.raises(ValueError, match="trace_slow_steps needs every step to be timed alike"):
        hooks(loop, trace_slow_steps="traces", every_n_steps=2)


def test_a_slow_step_says_where_its_trace_is() -> None:
    slow = SlowStep(7, 20.0, 10.0, "loss", (), 10.0, "traces/step-7.json.gz")
    assert slow.to_dict()["trace"] == "traces/step-7.json.gz"
    assert str(slow).endswith("10 ms unexplained; its trace: traces/step-7.json.gz")
    assert pickle.loads(pickle.dumps(slow)) == slow
    assert SlowStep(7, 20.0, 10.0, "loss", (), 10.0).to_dict()["trace"] is None


def test_before_any_step_is_judged_slowest_says_so(loop: Loop) -> None:
    assert "not judged" not in str(train(loop, {}, 60, None).slowest())
    assert str(train(loop, {}, 60, None).slowest()) == "No step was slow."
    timer = train(loop, {}, 9, None)
    assert (
        str(timer.slowest())
        == "No step was judged yet: that takes ten that were timed after the warm-up."
    )


# The longest first.
WAYS = (
    "lightning",
    "scheduled",
    "inside_and_around",
    "compiled",
    "alone",
    "begun_inside",
    "across_steps",
    "beside_threads",
    "in_a_backward",
    "removed_elsewhere",
    "in_threads",
    "workers",
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], object]]:
    """Waits for the process of a way. Two run at a time, ahead of the tests that wait for them."""
    script = Path(__file__).with_name("trace_run.py")

    def run_way(way: str) -> None:
        folder = tmp_path_factory.mktemp(way)
        finish(start_process(script, way, folder, cwd=folder))

    with ThreadPoolExecutor(2) as two:
        runs = {way: two.submit(run_way, way) for way in WAYS}
        yield lambda way: runs[way].result()


@pytest.mark.parametrize("way", WAYS)
def test_with_torchs_own_profiler_beside_that_of_a_user_nothing_breaks(
    way: str, ended: Callable[[str], object]
) -> None:
    ended(way)
