"""Causes of slow steps outside of the loop: the machine, batches, and the GPU's clock."""

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from fake_gpu import MS, FakeGPU, raw
from fake_lightning import Model, fit, timer_of
from fake_loop import Loop, hooks, run_of, with_facts
from torch import Tensor

from lightning_gputime import GPUPhaseHooks, compare
from lightning_gputime._attribution import (
    OUTSIDE_CODES,
    OutsideCause,
    OutsideSummary,
    advice_on,
    machine,
)
from lightning_gputime._attribution.machine import (
    BLOCKED,
    WAITED,
    GPUProcesses,
    MachineLog,
    MachineSource,
    Pressure,
    Processes,
    Threads,
    VirtualMemory,
    system_sources,
)
from lightning_gputime._attribution.surroundings import BatchLog, Content

STEPS = 300
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Busy(MachineSource):
    """CPU time of a thread that tests let run."""

    kind = "thread"

    def __init__(self) -> None:
        super().__init__()
        self.ran_s = self.blocked_s = self.waited_s = 0.0
        self.sampled: list[MachineLog] = []  # Calls of `sample_often`.
        self.places["thread `save`"] = "train.py:12"

    def read(self) -> dict[str, float]:
        return {"thread `save`": self.ran_s, BLOCKED: self.blocked_s, WAITED: self.waited_s}


def train(
    loop: Loop,
    busy: Busy,
    *,
    delays: bool,
    monkeypatch: pytest.MonkeyPatch,
    host_ms: float = 0.0,
    samples: int = 1,
    slow: range = range(3),
    period: int = 50,
    value: str = "ran_s",
    steps: int = STEPS,
    **options: Any,
) -> GPUPhaseHooks:
    """Train while a thread runs in 3 of 50 steps, which delays the loop or does not.

    In these steps, batches have this number of samples, and `value` of the thread grows.
    """
    # Real sources would be compared with a simulated clock, and a thread would need real time.
    monkeypatch.setattr(machine, "_IN_LOOP", (float("inf"), 0))
    monkeypatch.setattr(MachineLog, "sample_often", lambda log: busy.sampled.append(log))
    timer = hooks(loop, **options)
    with timer:
        session: Any = timer._session
        session._surroundings._sources = {"threads": lambda: busy}
        all_run = (number % period in slow and number > 5 for number in range(steps))
        given = zip(loop.batches(steps), all_run, strict=True)
        batches = ((x.expand(samples if runs else 1, -1), runs) for x, runs in given)
        for number, (x, runs) in enumerate(timer.steps(batches)):
            session._surroundings.look()
            if runs:
                setattr(busy, value, getattr(busy, value) + 0.02)
            loop.gpu.host_work(host_ms)
            if runs if delays else number % 37 == 9:
                loop.gpu.host_work(40.0)
            loop.train(x)
            session._surroundings.look()
    return timer


@pytest.mark.parametrize("every_n_steps", [1, 3])
def test_thread_that_runs_in_slow_steps_is_named_with_its_share(
    loop: Loop, every_n_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = train(loop, Busy(), delays=True, monkeypatch=monkeypatch, every_n_steps=every_n_steps)
    summary = timer.summary()
    outside = summary.measurement.outside
    assert outside is not None
    [cause] = outside.causes
    assert (cause.kind, str(cause)) == ("thread", "thread `save` (train.py:12)")
    assert cause.share > 0.9
    assert cause.low > 0.7
    assert f"with {cause}" in str(summary)
    assert any(text.startswith(f"move the work of {cause} to a process") for text in summary.advice)
    assert pickle.loads(pickle.dumps(timer._results)).measurement().outside is not None


def test_thread_is_sampled_often_before_the_next_timed_step(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled_at, number = list[int](), 0
    monkeypatch.setattr(machine, "_IN_LOOP", (float("inf"), 0))
    monkeypatch.setattr(MachineLog, "sample_often", lambda _: sampled_at.append(number))
    with hooks(loop, every_n_steps=1000) as timer:
        for number, x in enumerate(timer.steps(loop.batches(900))):
            # Without waits for the GPU, a step takes the time of the host.
            loop.gpu.host_work(60.0 if number >= 700 and number % 3 == 0 else 20.0)
            loop.train(x)
    timed = timer.history()["step"]
    assert max(timed) < 700
    assert 700 < sampled_at[0] < 800  # A step takes 33 ms now, so a second has 30 of them.


def test_time_between_loops_moves_no_step(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    ends_ns = list[int]()
    with hooks(loop, every_n_steps=1) as timer:
        surroundings = cast("Any", timer._session)._surroundings
        for _ in range(3):  # The last steps of each loop are read in the next.
            for x in timer.steps(loop.batches(20)):
                loop.train(x)
            loop.gpu.host_work(1000.0)
        timer.flush()
        for _, _, start_ns, end_ns, _ in surroundings._timed:
            ends_ns += [start_ns, end_ns]
    assert ends_ns == sorted(ends_ns)
    assert ends_ns[-1] - ends_ns[0] < 60 * 30 * MS


def test_thread_is_sampled_often_if_only_untimed_steps_are_slow(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, options = Busy(), dict[str, Any](every_n_steps=40, slow=range(3, 6), host_ms=20.0)
    summary = train(loop, busy, delays=True, monkeypatch=monkeypatch, **options).summary()
    assert summary.slow is None
    assert busy.sampled
    outside = summary.measurement.outside
    assert outside is not None
    assert outside.causes[0].share > 0.9


def test_thread_that_runs_for_60_consecutive_steps_is_named(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"every_n_steps": 3, "slow": range(30, 60), "period": 100, "host_ms": 20.0}
    timer = train(loop, Busy(), delays=True, monkeypatch=monkeypatch, **options)
    outside = timer.summary().measurement.outside
    assert outside is not None
    assert outside.n == pytest.approx(90, abs=5)
    assert outside.causes[0].share > 0.9


def test_steps_before_the_first_reading_are_not_searched(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, options = Busy(), dict[str, Any](every_n_steps=3, host_ms=20.0)
    timer = train(loop, busy, delays=True, monkeypatch=monkeypatch, **options)
    del busy.readings[: len(busy.readings) // 3]
    outside = timer.summary().measurement.outside
    assert outside is not None
    assert outside.causes[0].share > 0.9


def test_long_batches_of_a_short_run_are_found_before_the_machine_is_read(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, options = Busy(), dict[str, Any](samples=8, slow=range(7, 8), period=12)
    timer = train(loop, busy, delays=True, monkeypatch=monkeypatch, steps=110, **options)
    del busy.readings[: len(busy.readings) // 2]
    outside = timer.summary().measurement.outside
    assert outside is not None
    assert outside.causes[0].share > 0.9


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("thread", "move the work of it (here) to a process, or shorten it"),
        ("process", "move it (here) to other cores or another machine"),
        ("GPU process", "move it (here) to another GPU"),
        ("batch", "group batches by length"),
        ("core", "run fewer threads, workers and other processes"),
        ("pressure", "find what causes it"),
    ],
)
def test_advice_on_a_cause_depends_on_its_kind(kind: str, how: str) -> None:
    cause = OutsideCause(kind, "it", "here", 0.5, 0.4, 0.6, 0.1)
    [(share, code, text)] = advice_on(OutsideSummary(9, 100, 0.4, (cause,)))
    assert share == pytest.approx(0.2)
    assert code in OUTSIDE_CODES
    assert text.startswith(f"{how}: ")


@pytest.mark.parametrize("every_n_steps", [1, 3])
def test_wait_of_the_loop_for_a_core_is_a_cause(
    loop: Loop, every_n_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"value": "waited_s", "every_n_steps": every_n_steps}
    timer = train(loop, Busy(), delays=True, monkeypatch=monkeypatch, **options)
    outside = timer.summary().measurement.outside
    assert outside is not None
    [cause] = outside.causes
    assert (cause.kind, str(cause)) == ("core", WAITED)
    assert cause.share > 0.9


@pytest.mark.parametrize("every_n_steps", [1, 3])
def test_causes_explain_at_most_all_of_the_excess(
    loop: Loop, every_n_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"samples": 8, "every_n_steps": every_n_steps, "host_ms": 20.0}
    timer = train(loop, Busy(), delays=True, monkeypatch=monkeypatch, **options)
    outside = timer.summary().measurement.outside
    assert outside is not None
    shares = [cause.share for cause in outside.causes]
    assert sum(shares) == pytest.approx(1.0, abs=0.1)
    assert sum(shares) <= 1.0
    assert min(shares) > 0.01


def test_thread_that_runs_in_other_steps_is_not_named(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = train(loop, Busy(), delays=False, monkeypatch=monkeypatch)
    summary = timer.summary()
    assert summary.slow is not None
    assert summary.slow.n >= 5
    assert summary.measurement.outside is None


@pytest.mark.parametrize("every_n_steps", [1, "auto"])
@pytest.mark.parametrize(
    ("blocked_ms", "host_ms", "is_named"),
    # In the last case the device sets the pace: the host is blocked while it waits for the device.
    # In the second and third case, 34 % and 26 % of the time are blocked.
    [(12.0, 20.0, True), (5.3, 20.0, True), (4.1, 20.0, False), (12.0, 0.0, False)],
)
def test_thread_that_always_runs_is_named_if_the_loop_is_blocked(
    loop: Loop,
    blocked_ms: float,
    host_ms: float,
    is_named: bool,
    every_n_steps: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Spinning(Busy):
        def read(self) -> dict[str, float]:
            self.ran_s = loop.gpu.now / 1e9
            self.blocked_s = self.ran_s * blocked_ms / 15.625
            return super().read()

    options = {"host_ms": host_ms, "every_n_steps": every_n_steps}
    timer = train(loop, Spinning(), delays=False, monkeypatch=monkeypatch, **options)
    outside = timer.summary().measurement.outside
    assert (outside is not None) == is_named
    if outside is not None:
        assert outside.blocking is not None
        assert outside.blocking.share == pytest.approx(blocked_ms / 15.625, rel=0.05)
        # It may cost more than the largest entry, so its advice is the first.
        advice = timer.summary().advice[0]
        assert advice.startswith("move the work of thread `save` (train.py:12) to a process")
        assert f"  1. {advice}" in str(timer.summary())
        assert outside.sentences[0] in str(timer.summary())


@pytest.mark.parametrize("waited", [0.22, 0.18])
def test_loop_that_waits_for_a_cpu_core_is_reported(
    loop: Loop, waited: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waiting(Busy):
        def read(self) -> dict[str, float]:
            self.waited_s = waited * loop.gpu.now / 1e9
            return super().read()

    timer = train(loop, Waiting(), delays=False, monkeypatch=monkeypatch)
    outside = timer.summary().measurement.outside
    assert (outside is not None) == (waited >= 0.2)
    if outside is None:
        return
    assert outside.core_wait_share == pytest.approx(waited, rel=0.05)
    assert outside.causes == ()
    [advice] = [text for text in timer.summary().advice if "for a CPU core" in text]
    assert advice.startswith("run fewer threads")


def lengths(n: int) -> Iterator[int]:
    """Yield the lengths of sequences: 1 of 20 batches is long."""
    for number in range(n):
        yield 200 if number % 20 == 7 else 40 + number % 5


def test_long_batches_explain_slow_steps_and_padding_is_reported(loop: Loop) -> None:
    with hooks(loop) as timer:

        def batches() -> Iterator[dict[str, Tensor]]:
            for length, _ in zip(lengths(STEPS), loop.batches(STEPS), strict=True):
                mask = torch.zeros(4, length, dtype=torch.long)
                mask[:, : length // 2] = 1
                yield {"input_ids": torch.zeros_like(mask), "attention_mask": mask}

        for batch in timer.steps(batches()):
            loop.gpu.work(batch["input_ids"].shape[1] / 8)
            loop.train(torch.ones(1, 2))
    outside = timer.summary().measurement.outside
    assert outside is not None
    [cause] = outside.causes
    assert cause.share == pytest.approx(1.0, abs=0.02)
    assert cause.name == "batches with more than 176 tokens"
    assert str(cause) == f"{cause.name} (50 % of the tokens are padding)"
    assert cause.padding == pytest.approx(0.5, abs=0.01)
    assert any("pack sequences" in text for text in timer.summary().advice)


@pytest.mark.parametrize(
    ("batch", "content"),
    [
        (torch.ones(3, 5), Content(elements=15)),
        ({"input_ids": torch.ones(2, 7, dtype=torch.long)}, Content(tokens=14)),
        (torch.ones(2, 7, dtype=torch.long), Content(tokens=14)),
        (torch.ones(2, 3, 4, 4, dtype=torch.uint8), Content(elements=96)),
        ([torch.ones(3, 5), torch.ones(3, dtype=torch.long)], Content(elements=15)),
        ([{"x": (torch.ones(2), torch.ones(2, 4, dtype=torch.int))}], Content(8, 0, 2)),
        ("text", Content()),
        (object(), Content()),
    ],
)
def test_content_of_a_batch_is_read_from_shapes(batch: Any, content: Content) -> None:
    log = BatchLog()
    log.add(batch)
    log.add(batch)
    log.end_step(3)
    twice = Content(*(2 * number for number in content))
    assert [*log.steps] == [(3, twice)]
    assert log.open is None


def test_mean_content_is_of_a_unit_that_all_steps_have() -> None:
    log = BatchLog()
    for number, content in enumerate((Content(tokens=8, used=6), Content(tokens=4))):
        log.open = content
        log.end_step(number)
    assert log.mean_content() == ("tokens", 6.0)


def test_batch_that_raises_has_no_content() -> None:
    class Odd(dict[str, Any]):
        def keys(self) -> Any:
            raise ValueError

    log = BatchLog()
    for batch in (torch.ones(2), Odd(x=1), torch.ones(2)):
        log.add(batch)
    log.end_step(1)
    assert not log.steps
    assert log.open is None
    meta = torch.ones(2, 3, dtype=torch.long, device="meta")
    log.add({"attention_mask": meta})
    assert log.open == Content(tokens=6)  # A mask that is not on the CPU is not read.


def test_clock_that_falls_is_the_reason_of_a_slowdown(gpu: FakeGPU) -> None:
    gpu.mhz = 2000.0
    n, since = 1200, 600

    def slow_down(number: int) -> None:
        if number == 2:
            gpu.mhz = 1200.0  # The first measurement is low.
        elif number == 100:
            gpu.mhz = 2000.0
        if number >= since:
            gpu.mhz = 1600.0
            gpu.work(6.0)

    loop = Loop(gpu)
    with hooks(loop, lines=True, every_n_steps=2) as timer:
        for number, x in enumerate(timer.steps(loop.batches(n))):
            slow_down(number)
            loop.train(x)
    summary = timer.summary()
    assert summary.slowdown is not None
    assert summary.slowdown.reason == (
        "the GPU's clock fell from 2,000 to 1,600 MHz, not your code"
    )
    assert summary.slowdown.reason in str(summary)
    assert summary.measurement.gpu_mhz in (1600.0, 1800.0, 2000.0)


def test_clock_of_a_gpu_that_idles_is_no_reason(gpu: FakeGPU) -> None:
    gpu.mhz = 2000.0
    loop = Loop(gpu)
    with hooks(loop, lines=False, every_n_steps=2) as timer:
        for number, x in enumerate(timer.steps(loop.batches(1200))):
            gpu.host_work(40.0 if number < 600 else 60.0)
            gpu.mhz = 2000.0 if number < 600 else 1600.0
            loop.train(x)
    slowdown = timer.summary().slowdown
    assert slowdown is not None
    assert slowdown.reason == ""


def every_batch(loop: Loop, timer: Any) -> None:
    for x in timer.steps(loop.batches(800)):
        loop.train(x)


def every_second_batch(loop: Loop, timer: Any) -> None:
    for number, x in enumerate(timer.steps(loop.batches(800))):
        if number % 2:
            loop.train(x)


def replays_of_a_graph(loop: Loop, timer: Any) -> None:
    replay: Any = None
    for number, x in enumerate(loop.batches(800)):
        if number < 3:
            loop.train(x)
        elif replay is None:
            with loop.gpu.capture() as replay:
                loop.train(x)
        else:
            replay()
        timer.step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every_n_steps", [1, 4])
@pytest.mark.parametrize("train", [every_batch, every_second_batch, replays_of_a_graph])
def test_measuring_the_clock_counts_in_no_step(
    train: Callable[[Loop, Any], None], every_n_steps: int
) -> None:
    found = []
    for mhz in (None, 2000.0):
        gpu = FakeGPU()
        gpu.mhz = mhz
        loop = Loop(gpu)
        with hooks(loop, lines=False, every_n_steps=every_n_steps) as timer:
            train(loop, timer)
        found.append(timer.summary())
    without, with_clock = found
    assert without.measurement.gpu_mhz is None
    assert with_clock.measurement.gpu_mhz == pytest.approx(2000.0)
    assert with_clock.rows.keys() == without.rows.keys()
    for name, row in with_clock.rows.items():
        expected = without.rows[name]
        assert row.mean_ms == pytest.approx(expected.mean_ms, rel=1e-3)
        assert row.frequency == expected.frequency
    assert with_clock.step.n == without.step.n
    if every_n_steps == 1:
        assert with_clock.step.mean_ms == without.step.mean_ms


def test_clock_is_measured_in_lightning(gpu: FakeGPU) -> None:
    gpu.mhz = 2000.0
    callback = timer_of(gpu, lines=True, every_n_steps=4)
    fit(gpu, Model(gpu), 300, timer=callback)
    assert callback.summary().measurement.gpu_mhz == pytest.approx(2000.0)


@pytest.mark.parametrize(
    ("clocks", "note"),
    [
        ((2000.0, 1600.0), "would differ by -4.0 %"),
        ((2000.0, 1880.0), "would differ by +12.8 %"),
        ((2000.0, 1920.0), ""),  # A measurement is off by up to 5 %.
        ((2000.0, None), ""),
    ],
)
def test_compare_corrects_the_step_for_another_clock(clocks: tuple[Any, Any], note: str) -> None:
    runs = []
    for ms, mhz in zip((10.0, 12.0), clocks, strict=True):
        run = run_of(raw(number, forward=ms) for number in range(40))
        summary = with_facts(run.summary(), gpu_mhz=mhz)
        runs.append(replace(run, _summary=summary))
    found = [text for text in compare(*runs).notes if "clock" in text]
    assert (note in found[0]) if note else not found


# Sources of the system


@ON_LINUX
def test_busy_thread_is_named_by_its_function_and_line() -> None:
    source, stop = Threads(), threading.Event()

    def write_often() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=write_often, name="Thread-7 (write_often)")
    source.read()
    thread.start()
    until = time.monotonic() + 10
    while source.read().get("thread `write_often`", 0.0) < 0.02 and time.monotonic() < until:
        time.sleep(0.01)
    stop.set()
    thread.join()
    assert source.places["thread `write_often`"].startswith("test_attribution.py:")
    ran_s = source.read()["thread `write_often`"]
    assert ran_s == source.read()["thread `write_often`"] >= 0.02  # The thread has ended.


@ON_LINUX
@pytest.mark.parametrize("rescan_s", [0.0, 1e9])  # A child is seen without a search, too.
def test_busy_child_process_is_named_with_its_id(
    rescan_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_RESCAN_S", rescan_s)
    monkeypatch.setattr(machine, "_IN_THREAD", (float("inf"), 0))
    source = Processes()
    source.read()
    child = os.fork()
    if child == 0:
        while True:
            pass
    try:
        until = time.monotonic() + 20
        found: list[str] = []
        while not found and time.monotonic() < until:
            time.sleep(0.1)
            values = source.read()
            found = [name for name, s in values.items() if name.startswith("child") and s > 0.0]
        assert source.places[found[0]] == f"pid {child}"
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


@ON_LINUX
def test_sources_that_the_system_lacks_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MachineLog(time.perf_counter_ns, system_sources(None))
    possible = {Threads, Processes, Pressure, VirtualMemory}
    assert {*map(type, log._sources)} <= possible

    def refuse(*args: Any, **options: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(machine, "_File", refuse)
    monkeypatch.setitem(machine.__dict__, "open", refuse)
    log = MachineLog(time.perf_counter_ns, system_sources(None))
    assert log.missing == ["threads", "other processes", "pressure", "swap"]
    log.read()
    log.sample_often()  # Starts no thread.
    assert log._thread is None
    assert log.candidates(np.zeros(3), np.ones(3)) == []


def test_process_on_the_gpu_is_found_with_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [
        SimpleNamespace(pid=os.getpid(), smUtil=90, timeStamp=5),
        SimpleNamespace(pid=77, smUtil=50, timeStamp=6),
    ]
    running = {"GPU-5": samples}
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: running[handle],
        nvmlDeviceGetProcessUtilization=lambda handle, since_us: samples,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    properties = lambda index: SimpleNamespace(uuid=index + 5)  # noqa: E731
    monkeypatch.setattr("torch.cuda.get_device_properties", properties)
    source = GPUProcesses(0)
    assert source.read()["another process on the GPU"] > 0.0
    assert source.places["another process on the GPU"] == "pid 77"
    running["GPU-5"] = samples[1:]  # In a container, process ids are those of the host.
    log = MachineLog(time.perf_counter_ns, {"other processes": lambda: GPUProcesses(0)})
    assert log.missing == ["other processes"]


def test_sampling_thread_stops_with_its_log() -> None:
    busy = Busy()
    log = MachineLog(time.perf_counter_ns, {"threads": lambda: busy})
    log.sample_often()
    thread: Any = log._thread
    until = time.monotonic() + 10
    while len(busy.readings) < 2 and time.monotonic() < until:
        time.sleep(0.02)
        busy.ran_s += 0.02
    assert len(busy.readings) >= 2
    assert thread.name.startswith("lightning_gputime")  # Such threads are never named as a cause.
    log.stop()
    thread.join(10)
    assert not thread.is_alive()
    log.sample_often()
    thread = log._thread
    del log
    thread.join(10)
    assert not thread.is_alive()
