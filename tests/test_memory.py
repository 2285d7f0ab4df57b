"""Peak memory of a run: read at logs and at the end, kept as a value, and considered by advice."""

import pickle
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from fake_loop import Loop, hooks, train

from lightning_gputime import MemorySummary
from lightning_gputime._diagnosis.advice import advise_on_launches
from lightning_gputime._measurement.measurement import Measurement, TrainingSetup
from lightning_gputime._measurement.memory import MemoryWatch
from lightning_gputime._record.clock import DeviceClock

MIB = 2**20


def test_peak_memory_is_read_when_the_run_ends(loop: Loop) -> None:
    loop.gpu.memory = (10 * MIB, 12 * MIB, 80 * MIB)
    with hooks(loop) as timer:
        for x in timer.steps(loop.batches(3)):
            loop.train(x)
        loop.gpu.memory = (40 * MIB, 50 * MIB, 80 * MIB)
    loop.gpu.memory = (70 * MIB, 70 * MIB, 80 * MIB)
    summary = timer.summary()
    assert summary.memory == MemorySummary(40.0, 50.0, 80.0)
    assert "peak memory: 40 of 80 MiB allocated (50 %), 50 MiB reserved" in str(summary)
    assert summary.to_dict()["memory"] == asdict(summary.memory)


def test_peak_memory_survives_a_reset_of_the_counters(loop: Loop) -> None:
    loop.gpu.memory = (10 * MIB, 60 * MIB, 80 * MIB)
    with hooks(loop) as timer:
        for i, x in enumerate(timer.steps(loop.batches(120))):
            loop.train(x)
            if i == 110:
                loop.gpu.memory = (20 * MIB, 20 * MIB, 80 * MIB)
    assert timer.summary().memory == MemorySummary(20.0, 60.0, 80.0)


def test_device_without_counters_has_no_peak_memory(loop: Loop) -> None:
    summary = train(loop, 3).summary()
    assert summary.memory is None
    assert "memory:" not in str(summary)


def test_error_of_the_memory_counters_ends_the_reading() -> None:
    calls = []

    def read() -> None:
        calls.append(1)
        raise RuntimeError("not counted")

    watch = MemoryWatch(read)
    watch.read()
    watch.read()
    assert (len(calls), watch.summary()) == (1, None)


def test_pickled_memory_watch_keeps_its_peaks_and_reads_no_more() -> None:
    watch = MemoryWatch(lambda: (MIB, MIB, 2 * MIB))
    watch.read()
    copy = pickle.loads(pickle.dumps(watch))
    copy.read()
    assert copy.summary() == watch.summary()


@pytest.mark.parametrize(("peak_mib", "is_advised"), [(0.0, True), (80.0, True), (81.0, False)])
def test_larger_batch_is_advised_if_memory_is_left(peak_mib: float, is_advised: bool) -> None:
    launch_bound = Measurement(memory=MemorySummary(peak_mib, peak_mib, 100.0))
    codes = [advice.code for advice in advise_on_launches(launch_bound, TrainingSetup())]
    assert codes == ["batch_size", "compile", "cuda_graphs"][not is_advised :]


def test_memory_counters_of_torch_are_read_if_a_device_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks = {"allocated_bytes": {"all": {"peak": 3}}, "reserved_bytes": {"all": {"peak": 5}}}
    counts = SimpleNamespace(
        memory_stats_as_nested_dict=lambda device: peaks,
        get_device_properties=lambda device: SimpleNamespace(total_memory=9),
    )
    clock = object.__new__(DeviceClock)
    clock.device = None  # type: ignore[assignment]
    monkeypatch.setattr("torch.get_device_module", lambda device: counts)
    assert clock.peak_memory() == (3, 5, 9)
    monkeypatch.setattr("torch.get_device_module", lambda device: object)
    assert clock.peak_memory() is None
