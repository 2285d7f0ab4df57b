"""Each detector of causes alone, with exact times, and on real causes where they are cheap."""

import contextlib
import gc
import itertools
import resource
import threading
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import MS, FakeGPU
from fake_lightning import Loader as FakeLoader
from fake_lightning import MemoryLogger, Model, fit, timer_of, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gputime import Cause, GPUPhaseHooks, GPUPhaseTimer, SlowStep
from lightning_gputime._causes import detectors, sampler
from lightning_gputime._causes.analyzer import SlowStepAnalyzer
from lightning_gputime._causes.detectors import (
    Allocator,
    Loader,
    Preemption,
    allocator_of,
    collect_phases,
)
from lightning_gputime._measurement.culprits import CulpritSums
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.slow import SlowLog
from lightning_gputime._phases import StepRecord
from lightning_gputime._record.clock import HostClock

USUAL = {"data": 1.0, "forward": 4.0, "backward": 8.0, "backward/comm": 1.0, "optimizer": 2.0}
"""A usual step, which takes the host as long."""

SLOW = 30


class Bench:
    """Records that are as long as a test says, and the detector that is asked about them."""

    def __init__(self, gpu: FakeGPU, *asked: Any) -> None:
        self.gpu = gpu
        log = SlowLog()
        log.follow()
        self.analyzer = SlowStepAnalyzer(gpu, log, CulpritSums())
        self.analyzer.collectors = [getattr(item, "collect", item) for item in asked]
        for entry in asked:
            name = {Loader: "_loader", Preemption: "_preemption", Allocator: "_allocator"}
            owner = self.analyzer if type(entry) is Loader else self.analyzer.sampler
            setattr(owner, name.get(type(entry), "_"), entry)
        # Ignore garbage collections of the test itself.
        setattr(self.analyzer._spans, "_callbacks", list)  # noqa: B010
        self.analyzer.attach()
        self.analyzer.loop_begins()
        self.found: list[SlowStep] = []

    def step(self, number: int, host_ms: dict[str, float], device_ms: dict[str, float]) -> None:
        """Run a step with an excess over the usual step."""
        begin = self.gpu.now
        on_host = [ms + host_ms.get(name, 0.0) for name, ms in USUAL.items()]
        on_device = tuple(ms + device_ms.get(name, 0.0) for name, ms in USUAL.items())
        self.gpu.host_work(sum(on_host))
        self.analyzer.sampler.end_step(self.gpu.now)
        ends = tuple(accumulate((round(ms * MS) for ms in on_host), initial=begin))
        record = StepRecord(number, tuple(USUAL), on_device, ends, 0.0, 0, False)
        self.analyzer.steps_read(ReadSteps([record], 0, self.gpu.now))
        self.found += self.analyzer.newest

    def usual(self, numbers: range = range(SLOW)) -> None:
        for number in numbers:
            self.step(number, {}, {})

    def slow(self, host_ms: dict[str, float], device_ms: dict[str, float]) -> Sequence[Cause]:
        """Run a slow step after usual steps, and return its causes."""
        self.usual()
        self.step(SLOW, host_ms, device_ms)
        [slow] = self.found
        assert slow.step == SLOW
        return slow.causes


class Scheduler:
    """A scheduler: how long the thread waited in line, or was stopped, and how often."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.gpu = gpu
        self.queued = self.stopped = self.losses = self.waits = self.samples = 0

    def usage(self) -> Any:
        self.samples += 1
        return SimpleNamespace(
            ru_utime=(self.gpu.now - self.queued - self.stopped - 5 * MS) / 1e9,
            ru_stime=5 / 1e3,
            ru_nvcsw=self.waits,
            ru_nivcsw=self.losses,
        )

    def detector(self) -> Preemption:
        return Preemption(self.usage)


def test_time_in_line_for_a_processor_is_preemption_wherever_it_was(gpu: FakeGPU) -> None:
    scheduler = Scheduler(gpu)
    bench = Bench(gpu, scheduler.detector())
    bench.usual()
    scheduler.queued, scheduler.losses = 30 * MS, 8
    bench.step(SLOW, {"data": 40.0}, {"data": 35.0})
    [slow] = bench.found
    assert slow.causes == (Cause("off_cpu", 30.0, 30.0, "other threads had the CPU"),)
    assert slow.unexplained_ms == 5.0


@pytest.mark.parametrize(
    ("phase", "waits", "is_told"),
    [("backward", 1, True), ("data", 1, False), ("backward", 10, False)],
)
def test_stopped_process_is_preemption(gpu: FakeGPU, phase: str, waits: int, is_told: bool) -> None:
    scheduler = Scheduler(gpu)
    bench = Bench(gpu, scheduler.detector())
    bench.usual()
    # In ten waits, as where another thread of Python is at work in between.
    scheduler.stopped, scheduler.waits = 50 * MS, waits
    bench.step(SLOW, {phase: 50.0}, {phase: 50.0})
    [slow] = bench.found
    cause = Cause("off_cpu", 50.0, 50.0, "stopped or blocked")
    assert slow.causes == ((cause,) if is_told else ())


def test_usual_queueing_is_not_a_cause(gpu: FakeGPU) -> None:
    scheduler = Scheduler(gpu)
    bench = Bench(gpu, scheduler.detector())
    for number in range(80):
        # Some of each step, as on a busy machine.
        scheduler.queued, scheduler.losses = scheduler.queued + MS, scheduler.losses + 1
        bench.step(number, {}, {})
    # It waits for a batch.
    scheduler.stopped, scheduler.waits = scheduler.stopped + 40 * MS, scheduler.waits + 1
    bench.step(80, {"data": 40.0}, {"data": 40.0})
    [slow] = bench.found
    assert (slow.step, slow.causes) == (80, ())


def test_scheduler_is_asked_once_a_step_from_the_first_baseline_on(gpu: FakeGPU) -> None:
    scheduler = Scheduler(gpu)
    bench = Bench(gpu, scheduler.detector())
    bench.usual(range(10))
    assert scheduler.samples == 0
    bench.usual(range(10, SLOW))
    assert scheduler.samples == SLOW - 10


def test_slow_step_before_the_first_baseline_has_no_such_cause(gpu: FakeGPU) -> None:
    scheduler = Scheduler(gpu)
    bench = Bench(gpu, scheduler.detector())
    bench.usual(range(5))
    scheduler.queued, scheduler.losses = 30 * MS, 8
    bench.step(5, {"backward": 40.0}, {"backward": 35.0})
    bench.usual(range(6, SLOW))
    [slow] = bench.found
    assert (slow.step, slow.causes, slow.unexplained_ms) == (5, (), 35.0)


def test_scheduler_is_not_asked_for_short_steps(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "_MIN_SAMPLED_MS", 1e3)
    scheduler = Scheduler(gpu)
    bench = Bench(gpu, scheduler.detector())
    bench.usual()
    scheduler.queued, scheduler.losses = 30 * MS, 8
    bench.step(SLOW, {"data": 40.0}, {"data": 35.0})
    assert scheduler.samples == 0
    [slow] = bench.found
    assert (slow.causes, slow.unexplained_ms) == ((), 35.0)


def test_untimed_steps_are_not_preemption(gpu: FakeGPU) -> None:
    scheduler = Scheduler(gpu)
    bench = Bench(gpu, scheduler.detector())
    for number in range(SLOW):
        bench.step(number, {}, {})
        # The thread lost the processor during a complete untimed step.
        scheduler.stopped, scheduler.waits = scheduler.stopped + 200 * MS, scheduler.waits + 1
        gpu.now += 200 * MS
        bench.analyzer.sampler.end_step(gpu.now)
    scheduler.stopped, scheduler.waits = scheduler.stopped + 50 * MS, scheduler.waits + 1
    bench.step(SLOW, {"backward": 50.0}, {"backward": 50.0})
    [slow] = bench.found
    assert slow.causes == (Cause("off_cpu", 50.0, 50.0, "stopped or blocked"),)


def test_system_that_does_not_count_for_a_thread_has_no_such_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(resource, "RUSAGE_THREAD", raising=False)
    assert detectors.thread_usage() is None
    analyzer = SlowStepAnalyzer(HostClock(), SlowLog(), CulpritSums())
    assert analyzer.sampler._preemption.usage is None


def test_linux_counts_for_the_thread_of_the_loop() -> None:
    usage = detectors.thread_usage()
    if usage is None:
        pytest.skip("this system does not count for a thread")
    reads: list[Any] = []

    def loop() -> None:
        for _ in range(2):
            reads.append(usage())
            until = time.thread_time() + 0.05
            while time.thread_time() < until:
                pass
        time.sleep(0.01)
        reads.append(usage())

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    ran_s = [item.ru_utime + item.ru_stime for item in reads]
    assert ran_s[0] < 0.03 < ran_s[1] < ran_s[2]
    assert reads[1].ru_nvcsw < reads[2].ru_nvcsw


def test_wait_for_other_ranks_is_a_cause(gpu: FakeGPU) -> None:
    causes = Bench(gpu, collect_phases).slow({}, {"backward/comm": 20.0})
    assert causes == (Cause("ranks", 0.0, 20.0, "in backward/comm"),)


def test_fetch_names_the_workers(gpu: FakeGPU) -> None:
    class Loads:
        num_workers = 4

    loader = Loader()
    loader.set_loader(Loads(), in_data=True)
    bench = Bench(gpu, loader)
    detail = "none of its 4 workers had a batch ready"
    assert bench.slow({"data": 20.0}, {"data": 10.0}) == (Cause("dataloader", 20.0, 10.0, detail),)


@pytest.mark.parametrize("items", [range(9), itertools.count(1), itertools.repeat(1), [1], (1,)])
def test_iterable_without_loading_is_not_a_cause(items: object, gpu: FakeGPU) -> None:
    loader = Loader()
    loader.set_loader(items, in_data=True)
    assert Bench(gpu, loader).slow({"data": 20.0}, {"data": 10.0}) == ()
    loader.set_loader(iter([1]), in_data=True)
    [cause] = Bench(gpu, loader).slow({"data": 20.0}, {"data": 10.0})
    assert cause.detail == "it loads in the loop's own process"


def test_first_fetch_of_an_epoch_starts_workers(gpu: FakeGPU) -> None:
    class Loads:
        num_workers = 4

    loader = Loader()
    loader.set_loader(Loads(), in_data=True)
    bench = Bench(gpu, loader)
    bench.usual()
    bench.analyzer.loop_begins()
    bench.step(SLOW, {"data": 20.0}, {"data": 20.0})
    [cause] = bench.found[0].causes
    assert cause.detail == "its first batch, for which its workers start"


def test_data_without_a_loader_is_not_a_cause(gpu: FakeGPU) -> None:
    assert Bench(gpu, Loader()).slow({"data": 20.0}, {"data": 20.0}) == ()


class Memory:
    """The counters of an allocator, and how often they were read."""

    def __init__(self) -> None:
        self.counts = [0, 100, 0, 0]
        self.reads = 0

    def __call__(self) -> tuple[int, ...]:
        self.reads += 1
        return tuple(self.counts)


def test_allocator_is_read_in_batches_and_after_a_long_step(gpu: FakeGPU) -> None:
    memory = Memory()
    bench = Bench(gpu, Allocator(memory))
    bench.usual()
    # At the start of the loop, and after 10 steps.
    assert memory.reads == 2
    memory.counts = [1, 103, 7, 2]
    bench.step(SLOW, {"forward": 30.0}, {"forward": 28.0})
    assert memory.reads == 3
    [slow] = bench.found
    detail = "retries 1, device allocations 3, device frees 7, waits for all streams 2"
    assert slow.causes == (Cause("allocator", 30.0, 28.0, detail),)


def test_unchanged_allocator_is_not_a_cause(gpu: FakeGPU) -> None:
    causes = Bench(gpu, Allocator(Memory())).slow({"forward": 30.0}, {"forward": 30.0})
    assert causes == ()


def test_allocator_without_counters_is_asked_no_more(gpu: FakeGPU) -> None:
    def fails() -> tuple[int, ...]:
        raise RuntimeError("cudaMallocAsync")

    bench = Bench(gpu, Allocator(fails))
    assert bench.slow({"forward": 30.0}, {"forward": 30.0}) == ()
    assert allocator_of(None) is allocator_of(torch.device("cpu")) is None


def test_small_causes_stay_unexplained(gpu: FakeGPU) -> None:
    causes = Bench(gpu, collect_phases).slow({}, {"forward": 40.0, "backward/comm": 2.0})
    assert causes == ()


class Slow(pl.Callback):
    """A callback that is slow once, on a fake GPU's host."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.gpu = gpu

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] == SLOW:
            self.gpu.host_work(40.0)


def test_slow_callback_under_lightning_is_a_cause(gpu: FakeGPU) -> None:
    told: list[SlowStep] = []
    timer = GPUPhaseTimer(
        _clock=gpu,
        print_summary=False,
        warmup_steps=0,
        observers=[SimpleNamespace(on_slow_step=told.append)],
    )
    fit(gpu, Model(gpu), 60, timer=timer, callbacks=[Slow(gpu)])
    [slow] = told
    # It follows the end of its batch, and so it is part of the next step.
    assert (slow.step, slow.phase) == (SLOW + 1, "callbacks")
    name = "Slow.on_train_batch_end"
    assert slow.causes == (Cause("callback", 40.0, 40.0 - 15.625, name),)
    assert slow.unexplained_ms == 0.0


def test_slow_log_under_lightning_is_a_cause(gpu: FakeGPU) -> None:
    class Remote(MemoryLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            gpu.host_work(40.0 if "loss" in metrics else 0.0)

    timer = fit(gpu, Model(gpu), 60, logger=Remote(), log_every_n_steps=40)
    [slow] = timer.slow_steps()
    assert [(cause.kind, cause.detail, cause.host_ms) for cause in slow.causes] == [
        ("callback", "other callbacks", 40.0)
    ]
    assert slow.unexplained_ms == 0.0


def test_slow_loader_under_lightning_is_a_cause(gpu: FakeGPU) -> None:
    class Late(FakeLoader):
        def __iter__(self) -> Any:
            for number, x in enumerate(super().__iter__()):
                gpu.host_work(40.0 if number == SLOW else 0.0)
                yield x

    timer = timer_of(gpu)
    trainer(timer).fit(Model(gpu), Late(gpu, 60))
    [slow] = timer.slow_steps()
    assert [(cause.kind, cause.host_ms) for cause in slow.causes] == [("dataloader", 40.0)]
    assert slow.phase == "data/fetch"


def trained_on_the_cpu(late: Callable[[nn.Module, int], None], **options: Any) -> list[SlowStep]:
    """Trains a small net; something is late after the model in some steps."""
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(60, 64)), batch_size=1)
    with GPUPhaseHooks(net, optimizer, warmup_steps=5, **options) as timer:
        for number, (x,) in enumerate(timer.steps(loader)):
            loss = net(x).sum()
            late(net, number)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [*timer.slow_steps()]


def test_real_collection_is_found_and_all_of_it_reached(gpu: FakeGPU) -> None:
    def takes_time(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            gpu.host_work(20.0)

    def late(net: nn.Module, number: int) -> None:
        gpu.host_work(1.0)
        if number == SLOW:
            # After the timer's callback, which gets the start before time passes.
            gc.callbacks.append(takes_time)
            gc.collect()
            gc.callbacks.remove(takes_time)

    [slow] = trained_on_the_cpu(late, _clock=gpu)
    assert (slow.step, slow.unexplained_ms) == (SLOW, 0.0)
    assert slow.causes == (Cause("garbage_collection", 20.0, 20.0, "generation 2"),)


@pytest.mark.filterwarnings("ignore:The model is on the CPU")
def test_real_compilation_is_found() -> None:
    with contextlib.suppress(AttributeError):
        torch._dynamo.reset()
    compiled = torch.compile(lambda x: (x * 2).sum(), backend="eager", dynamic=False)

    def late(net: nn.Module, number: int) -> None:
        compiled(torch.ones(3 if number < SLOW else 4))

    found = {slow.step: slow for slow in trained_on_the_cpu(late)}
    assert "compilation" in [cause.kind for cause in found[SLOW].causes]
