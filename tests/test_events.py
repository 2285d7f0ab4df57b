"""The contract of a clock: the fake clock, the host clock and the clock of a real device."""

import os
import pickle
from pathlib import Path
from threading import Thread
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_gpu import STEP_MS, FakeEvent, FakeGPU, steps
from fake_loop import Loop

from lightning_gputime import GPUPhaseHooks
from lightning_gputime._record.clock import (
    Clock,
    DeviceClock,
    HostClock,
    LoopTime,
    loop_time,
)
from lightning_gputime._record.recorder import Recorder

CLOCKS = ["fake", "host", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=CLOCKS)
def clock(request: pytest.FixtureRequest) -> Clock:
    if request.param == "fake":
        return FakeGPU()
    return HostClock() if request.param == "host" else DeviceClock(torch.device("cuda"))


def keep_busy(clock: Clock) -> float:
    """Keep the device or the host busy, and return for how many ms at least."""
    if isinstance(clock, FakeGPU):
        clock.work(5.0)
        return 5.0
    if isinstance(clock, DeviceClock):
        torch.cuda._sleep(50_000_000)
        return 10.0  # At 5 GHz, which is faster than any device.
    begin = clock.host_ns()
    while clock.host_ns() - begin < 2_000_000:
        pass
    return 2.0


def test_finished_interval_can_be_read_and_events_recorded_again(clock: Clock) -> None:
    start, end = clock.event(), clock.event()
    end.record()
    start.record()
    busy_ms = keep_busy(clock)
    end.record()
    end.synchronize()
    assert start.query()
    assert end.query()
    assert busy_ms <= start.elapsed_time(end) < busy_ms + 200.0


def test_event_that_was_never_recorded_does_not_block_but_cannot_be_read(clock: Clock) -> None:
    never, end = clock.event(), clock.event()
    never.synchronize()
    assert never.query()
    end.record()
    end.synchronize()
    with pytest.raises(ValueError, match="must be recorded"):
        never.elapsed_time(end)


def test_host_clock_advances_while_the_host_waits(clock: Clock) -> None:
    end, begin = clock.event(), clock.host_ns()
    busy_ms = keep_busy(clock)
    end.record()
    end.synchronize()
    assert clock.host_ns() - begin >= busy_ms * 1e6
    assert not clock.is_capturing()


@pytest.mark.parametrize(
    "clock", ["fake", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
def test_unfinished_event_cannot_be_read(clock: Clock) -> None:
    start, end = clock.event(), clock.event()
    start.record()
    keep_busy(clock)
    end.record()
    assert not end.query()
    with pytest.raises(RuntimeError, match="must be completed"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) > 1.0


@pytest.mark.gpu
def test_capture_is_detected_on_any_stream() -> None:
    clock, x = DeviceClock(torch.device("cuda")), torch.zeros(1, device="cuda")
    assert not clock.is_capturing()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert not clock.is_capturing()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        is_capturing = clock.is_capturing()
    assert is_capturing
    assert not clock.is_capturing()


def test_loop_time_stops_while_the_thread_waits_for_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns, ran_ns = 10**9, 10**8
    monkeypatch.setattr("time.perf_counter_ns", lambda: now_ns)
    monkeypatch.setattr("time.clock_gettime_ns", lambda _: ran_ns)
    counts = tmp_path / "schedstat"
    counts.write_text("0 7000 7\n")
    time = LoopTime(os.open(counts, os.O_RDONLY))
    found = list[int]()
    for ms, ran_ms, waited_ms in [
        (0.0, 0.0, 0.0),
        (5.0, 2.0, 3.0),
        (0.06, 0.05, 0.01),
        (0.06, 0.0, 0.06),
        (2.0, 0.0, 2.0),
        (1.0, 1.0, 0.0),
        (9.0, 9.0, 0.0),
    ]:
        now_ns += round(1e6 * ms)
        ran_ns += round(1e6 * ran_ms)
        waited_ns = int(counts.read_text().split()[1]) + round(1e6 * waited_ms)
        counts.write_text(f"0 {waited_ns} 7\n")
        found.append(time() - found[0] if found else time())
    # The waits of 0.01 and 0.06 ms count with the next wait.
    assert found[1:] == [2_000_000, 2_060_000, 2_120_000, 2_120_000, 3_050_000, 12_050_000]
    assert time.waited_ns == 5_070_000


def test_loop_time_stands_still_during_the_time_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial of 0.2 and of 0.4 ms is due every 0.1 s."""
    now_ns, trial_ns = 10**9, 200_000

    def full(*_: object) -> None:
        nonlocal now_ns
        now_ns += trial_ns // 20

    monkeypatch.setattr("time.perf_counter_ns", lambda: now_ns)
    monkeypatch.setattr("numpy.full", full)
    counts = tmp_path / "schedstat"
    counts.write_text("0 7000 7\n")
    time = LoopTime(os.open(counts, os.O_RDONLY))
    start_ns = time()
    for _ in range(2):
        time.time_trial()
    assert (time(), time.trial_ms) == (start_ns, 0.2)
    now_ns += 100_000_000
    trial_ns = 400_000
    time.time_trial()
    assert time() == start_ns + 100_000_000
    assert time.trial_ms == pytest.approx(0.3)
    assert now_ns == 10**9 + 100_600_000


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="not counted here")
def test_loop_on_the_cpu_is_timed_without_waits_for_a_core() -> None:
    time = loop_time()
    assert isinstance(time, LoopTime)
    # The thread may lose its core between any two readings.
    walls_ns, times_ns, waits_ns = [perf_counter_ns()], list[int](), list[int]()
    for _ in range(2):
        times_ns.append(time())
        waits_ns.append(time.waited_ns)
        walls_ns.append(perf_counter_ns())
        threads = [Thread(target=sum, args=(range(10**6),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        walls_ns.append(perf_counter_ns())
    elapsed_ns = times_ns[1] - times_ns[0] + waits_ns[1] - waits_ns[0]
    assert walls_ns[2] - walls_ns[1] - 300_000 <= elapsed_ns <= walls_ns[3] - walls_ns[0] + 300_000
    assert isinstance(pickle.loads(pickle.dumps(time)), LoopTime)


@pytest.mark.parametrize(("stream", "queries"), [(0, 0), (7, 3)])  # 0: the default stream.
def test_marks_look_for_a_capture_unless_on_the_default_stream(stream: int, queries: int) -> None:
    clock: Any = HostClock()
    clock.may_capture = lambda: stream
    clock.is_capturing = Mock(return_value=False)
    recorder = Recorder(clock, lag=1, emit=lambda *_: None)
    recorder.begin()
    recorder.mark("forward")
    recorder.end_step(0)
    assert clock.is_capturing.call_count == queries


@pytest.mark.parametrize("name", ["cuda", "xpu", "privateuseone"])  # NPU is a private backend.
def test_other_accelerator_is_timed_by_the_option_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGPU()
    device_types = []

    def event(device: torch.device, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        device_types.append(device.type)
        return FakeEvent(gpu)

    def device_module(device: torch.device) -> Any:
        assert device.type == name
        return SimpleNamespace(device_count=lambda: 1)

    monkeypatch.setattr(torch, "Event", event)
    monkeypatch.setattr(torch, "get_device_module", device_module)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    if name == "cuda":
        monkeypatch.setattr(
            torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False
        )
    loop = Loop(gpu)
    with GPUPhaseHooks(loop.model, loop.optimizer, device=name, warmup_steps=0) as timer:
        for x in timer.steps(loop.batches(5)):
            loop.train(x)
    assert steps(timer) == [STEP_MS] * 5
    assert set(device_types) == {name}
