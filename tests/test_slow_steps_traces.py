"""Traces of slow steps, with a profiler that only writes a file, and once with the real one."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import FakeGPU, work
from fake_loop import Loop, hooks

from lightning_gputime import GPUPhaseHooks
from lightning_gputime._causes import capture


class Profiler:
    """A profiler that costs the host 2 ms a step."""

    running = 0

    def __init__(self, gpu: FakeGPU, size: int = 10) -> None:
        self.gpu, self.size = gpu, size

    def start(self) -> None:
        Profiler.running += 1

    def stop(self) -> None:
        Profiler.running -= 1
        self.gpu.host_work(2.0)

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_bytes(b"x" * self.size)


def train(loop: Loop, late: dict[int, float], n: int, folder: Path, **options: Any) -> Any:
    """Trains with host delays, whose traces go to a folder."""
    gpu = loop.gpu
    with hooks(loop, trace_slow_steps=folder, **options) as timer:
        for number, x in enumerate(timer.steps(loop.batches(n))):
            gpu.work(0.125)
            loss = work(loop.model(x), gpu, 0.5, 0.25).sum()
            gpu.host_work(late.get(number, 0.0))
            loss.backward()
            loop.update()
    assert Profiler.running == 0
    return timer


@pytest.fixture
def fake_profiler(monkeypatch: pytest.MonkeyPatch, gpu: FakeGPU) -> None:
    monkeypatch.setattr(capture, "_new_profiler", lambda: Profiler(gpu))


@pytest.mark.usefixtures("fake_profiler")
def test_where_slow_steps_recur_the_next_ones_are_traced(loop: Loop, tmp_path: Path) -> None:
    late = {20: 100.0, 30: 100.0, 70: 100.0, 80: 100.0, 90: 100.0}
    timer = train(loop, late, 200, tmp_path / "traces")
    # The first two are read with the 50th step; then two are caught, and it rests.
    files = {path.name for path in (tmp_path / "traces").iterdir()}
    assert files == {"step_70.json.gz", "step_80.json.gz"}
    traces = {slow.step: slow.trace for slow in timer.slowest()}
    assert {*traces} == {20, 30, 70, 80, 90}
    assert {step for step, trace in traces.items() if trace} == {70, 80}
    assert f"trace of step 70: {traces[70]}" in str(timer.slowest())
    # Steps with the profiler are in no statistics.
    assert timer.summary().steps == 200 - 30
    assert timer.summary().rows["forward"].p50_ms == 4.0


@pytest.mark.usefixtures("fake_profiler")
@pytest.mark.parametrize("late", [{}, {20: 100.0}, {20: 100.0, 60: 5.0}])
def test_a_single_slow_step_arms_nothing(
    loop: Loop, tmp_path: Path, late: dict[int, float]
) -> None:
    timer = train(loop, late, 120, tmp_path / "traces")
    assert not (tmp_path / "traces").exists()
    assert timer.summary().steps == 120


@pytest.mark.usefixtures("fake_profiler")
def test_a_window_without_slow_steps_ends(loop: Loop, tmp_path: Path) -> None:
    timer = train(loop, {20: 100.0, 30: 100.0}, 200, tmp_path / "traces")
    assert not (tmp_path / "traces").exists()
    assert timer.summary().steps == 200 - 50


def test_a_trace_that_is_too_large_is_not_kept(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "_new_profiler", lambda: Profiler(loop.gpu, size=11))
    monkeypatch.setattr(capture, "_MOST_BYTES", 10)
    timer = train(loop, {20: 100.0, 30: 100.0, 70: 100.0}, 120, tmp_path / "traces")
    assert [*(tmp_path / "traces").iterdir()] == []
    assert not any(slow.trace for slow in timer.slowest())


def test_a_profiler_that_fails_is_told_once_and_training_goes_on(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> Any:
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(capture, "_new_profiler", fails)
    timer = train(loop, {20: 100.0, 30: 100.0, 70: 100.0}, 120, tmp_path)
    assert timer.summary().steps == 120
    assert [record.getMessage() for record in caplog.records] == [
        "Slow steps are no longer traced: RuntimeError('no CUPTI')"
    ]


@pytest.mark.usefixtures("fake_profiler")
def test_no_step_is_traced_while_another_profiler_runs(loop: Loop, tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        timer = train(loop, {20: 100.0, 30: 100.0, 70: 100.0}, 120, tmp_path / "traces")
    assert not (tmp_path / "traces").exists()
    assert timer.summary().steps == 120


def test_the_real_profiler_writes_a_trace(loop: Loop, tmp_path: Path) -> None:
    late = {20: 10_000.0, 30: 10_000.0, 70: 10_000.0}
    timer: GPUPhaseHooks = train(loop, late, 120, tmp_path)
    [slow] = [slow for slow in timer.slowest() if slow.step == 70]
    with gzip.open(slow.trace) as file:
        assert "traceEvents" in json.load(file)


def test_a_folder_that_is_none_is_refused(loop: Loop) -> None:
    with pytest.raises(TypeError, match="trace_slow_steps must be a folder such as 'traces'"):
        hooks(loop, trace_slow_steps=True)
    with pytest.raises(ValueError, match="trace_slow_steps needs every step to be timed alike"):
        hooks(loop, trace_slow_steps="traces", every_n_steps=2)
