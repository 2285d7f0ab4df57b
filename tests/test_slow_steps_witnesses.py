"""Each witness of slow steps alone, with exact times, and on real causes where they are cheap."""

import contextlib
import gc
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import MS, FakeGPU
from fake_lightning import Loader as FakeLoader
from fake_lightning import MemoryLogger, Model, fit
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gputime import Cause, GPUPhaseHooks, GPUPhaseTimer, SlowStep
from lightning_gputime._causes import preemption
from lightning_gputime._causes.device import Allocator, Clocks, clocks_of, counters_of
from lightning_gputime._causes.inquiry import Inquiry
from lightning_gputime._causes.places import Callbacks, Loader, Ranks
from lightning_gputime._causes.preemption import Preemption
from lightning_gputime._causes.witness import Witness
from lightning_gputime._record.steps import StepRecord

USUAL = {"data": 1.0, "forward": 4.0, "backward": 8.0, "backward/comm": 1.0, "optimizer": 2.0}
"""A usual step, which takes the host as long."""

SLOW = 30


class Bench:
    """Records that are as long as a test says, and the witness that is asked about them."""

    def __init__(self, gpu: FakeGPU, *witnesses: Witness) -> None:
        self.gpu = gpu
        self.inquiry = Inquiry(gpu)
        self.inquiry.witnesses = [*witnesses]
        self.loaders = [one for one in witnesses if isinstance(one, Loader)]
        self.inquiry.attach()
        self.inquiry.loop_begins()
        self.found: list[SlowStep] = []

    def step(self, number: int, host_ms: dict[str, float], device_ms: dict[str, float]) -> None:
        """Runs a step: what it takes longer than the usual one."""
        begin = self.gpu.now
        for loader in self.loaders:
            loader.is_asked()
        on_host = [ms + host_ms.get(name, 0.0) for name, ms in USUAL.items()]
        on_device = tuple(ms + device_ms.get(name, 0.0) for name, ms in USUAL.items())
        self.gpu.host_work(sum(on_host))
        self.inquiry.step_ends()
        ends = tuple(accumulate((round(ms * MS) for ms in on_host), initial=begin))
        record = StepRecord(number, tuple(USUAL), on_device, ends, 0.0, 0, False)
        self.found += self.inquiry.take([record], [sum(on_device)])

    def usual(self, numbers: range = range(SLOW)) -> None:
        for number in numbers:
            self.step(number, {}, {})

    def slow(self, host_ms: dict[str, float], device_ms: dict[str, float]) -> Sequence[Cause]:
        """Runs a slow step after usual ones, and tells its causes."""
        self.usual()
        self.step(SLOW, host_ms, device_ms)
        [slow] = self.found
        assert slow.step == SLOW
        return slow.causes


class Scheduler:
    """The counters of a scheduler: what ran, what waited in line, and how often it was let in."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.gpu = gpu
        self.queued = self.stopped = self.slices = 0

    def __call__(self, *_: int) -> bytes:
        ran = self.gpu.now - self.queued - self.stopped
        return b"%d %d %d\n" % (ran, self.queued, self.slices)


def test_time_in_line_for_a_processor_is_preemption_wherever_it_was(gpu: FakeGPU) -> None:
    scheduler = Scheduler(gpu)
    bench = Bench(gpu, Preemption(gpu.host_ns, scheduler))
    bench.usual()
    scheduler.queued, scheduler.slices = 30 * MS, 8
    bench.step(SLOW, {"data": 40.0}, {"data": 35.0})
    [slow] = bench.found
    assert slow.causes == (Cause("preemption", 30.0, 30.0, "others had the processor"),)
    assert slow.unexplained_ms == 5.0


@pytest.mark.parametrize(
    ("phase", "slices", "is_told"),
    [("backward", 1, True), ("data", 1, False), ("backward", 10, False)],
)
def test_a_stop_is_preemption_where_the_host_has_nothing_to_wait_for(
    gpu: FakeGPU, phase: str, slices: int, is_told: bool
) -> None:
    scheduler = Scheduler(gpu)
    bench = Bench(gpu, Preemption(gpu.host_ns, scheduler))
    bench.usual()
    # In ten slices, as where another thread of Python is at work in between.
    scheduler.stopped, scheduler.slices = 50 * MS, slices
    bench.step(SLOW, {phase: 50.0}, {phase: 50.0})
    [slow] = bench.found
    cause = Cause("preemption", 50.0, 50.0, "stopped, or blocked")
    assert slow.causes == ((cause,) if is_told else ())


def test_where_steps_are_too_short_for_it_nobody_asks_the_scheduler(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preemption, "_WORTH_MS", 1e3)
    scheduler = Scheduler(gpu)
    asked: list[int] = []

    def ask(*_: int) -> bytes:
        asked.append(gpu.now)
        return scheduler()

    bench = Bench(gpu, Preemption(gpu.host_ns, ask))
    bench.usual()
    n = len(asked)
    assert 0 < n < SLOW
    scheduler.queued, scheduler.slices = 30 * MS, 8
    bench.step(SLOW, {"data": 40.0}, {"data": 35.0})
    assert len(asked) == n
    [slow] = bench.found
    assert (slow.causes, slow.unexplained_ms) == ((), 35.0)


def test_a_slow_step_in_which_the_scheduler_is_asked_no_more_ends_no_search_for_causes(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    witness, loader = Preemption(gpu.host_ns, Scheduler(gpu)), Loader(gpu.host_ns)
    bench = Bench(gpu, witness, loader)
    bench.usual()
    monkeypatch.setattr(preemption, "_WORTH_MS", 1e3)

    def is_asked() -> None:
        # The steps before are read while it is open.
        gpu.now += 1
        witness.steps_were_read(bench.inquiry._usual)

    monkeypatch.setattr(loader, "is_asked", is_asked)
    bench.step(SLOW, {"backward": 50.0}, {"backward": 50.0})
    [slow] = bench.found
    assert (slow.causes, slow.unexplained_ms) == ((), 50.0)
    assert bench.inquiry.witnesses
    assert not caplog.text


def test_steps_that_are_not_timed_are_no_long_turn_of_the_scheduler(gpu: FakeGPU) -> None:
    scheduler = Scheduler(gpu)
    bench = Bench(gpu, Preemption(gpu.host_ns, scheduler))
    for number in range(SLOW):
        bench.step(number, {}, {})
        bench.inquiry.steps_pass()
        # Nobody asks what the thread did in them: all of it away from the processor, in one turn.
        scheduler.stopped, scheduler.slices = scheduler.stopped + 200 * MS, scheduler.slices + 1
        gpu.now += 200 * MS
        bench.inquiry.step_ends()
    scheduler.stopped, scheduler.slices = scheduler.stopped + 50 * MS, scheduler.slices + 1
    bench.step(SLOW, {"backward": 50.0}, {"backward": 50.0})
    [slow] = bench.found
    assert slow.causes == (Cause("preemption", 50.0, 50.0, "stopped, or blocked"),)


def test_linux_counts_for_the_thread_of_the_loop() -> None:
    preemption = Preemption(lambda: 0)
    preemption.step_ends()
    assert not preemption._newest
    read: list[tuple[int, bytes]] = []

    def loop() -> None:
        preemption.loop_begins()
        preemption.step_ends()
        read.extend(preemption._newest)
        preemption.remove()
        preemption.remove()

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    # Elsewhere than on Linux it sees nothing.
    assert len(read) in (0, 2)
    assert all(len(sample.split()) == 3 for _, sample in read)


def test_a_wait_for_other_ranks_is_told_whatever_the_host_did(gpu: FakeGPU) -> None:
    causes = Bench(gpu, Ranks()).slow({}, {"backward/comm": 20.0})
    assert causes == (Cause("ranks", 0.0, 20.0, "in backward/comm"),)


def test_a_fetch_names_the_workers(gpu: FakeGPU) -> None:
    class Loads:
        num_workers = 4

    loader = Loader(gpu.host_ns)
    loader.loads(Loads(), in_data=True)
    bench = Bench(gpu, loader)
    detail = "none of its 4 workers had a batch ready"
    assert bench.slow({"data": 20.0}, {"data": 10.0}) == (Cause("loader", 20.0, 10.0, detail),)


def test_the_first_fetch_of_an_epoch_starts_workers(gpu: FakeGPU) -> None:
    class Loads:
        num_workers = 4

    loader = Loader(gpu.host_ns)
    loader.loads(Loads(), in_data=True)
    bench = Bench(gpu, loader)
    bench.usual()
    bench.inquiry.loop_begins()
    bench.step(SLOW, {"data": 20.0}, {"data": 20.0})
    [cause] = bench.found[0].causes
    assert cause.detail == "its first batch, for which its workers start"


def test_data_is_no_fetch_where_nobody_says_so(gpu: FakeGPU) -> None:
    assert Bench(gpu, Loader(gpu.host_ns)).slow({"data": 20.0}, {"data": 20.0}) == ()


class Memory:
    """The counters of an allocator, and how often they were read."""

    def __init__(self) -> None:
        self.counts = [0, 100, 0, 0]
        self.reads = 0

    def __call__(self) -> tuple[int, ...]:
        self.reads += 1
        return tuple(self.counts)


def test_the_allocator_is_read_in_batches_and_after_a_long_step(gpu: FakeGPU) -> None:
    memory = Memory()
    bench = Bench(gpu, Allocator(gpu.host_ns, memory))
    bench.usual()
    # When it was attached, and after 10 steps.
    assert memory.reads == 2
    memory.counts = [1, 103, 7, 2]
    bench.step(SLOW, {"forward": 30.0}, {"forward": 28.0})
    assert memory.reads == 3
    [slow] = bench.found
    detail = "retries 1, device allocations 3, device frees 7, waits for all streams 2"
    assert slow.causes == (Cause("allocator", 30.0, 28.0, detail),)


def test_a_long_step_without_the_allocator_is_not_its_fault(gpu: FakeGPU) -> None:
    causes = Bench(gpu, Allocator(gpu.host_ns, Memory())).slow({"forward": 30.0}, {"forward": 30.0})
    assert causes == ()


def test_an_allocator_without_counters_is_asked_no_more(gpu: FakeGPU) -> None:
    def fails() -> tuple[int, ...]:
        raise RuntimeError("cudaMallocAsync")

    bench = Bench(gpu, Allocator(gpu.host_ns, fails))
    assert bench.slow({"forward": 30.0}, {"forward": 30.0}) == ()
    assert counters_of(None) is counters_of(torch.device("cpu")) is None


def test_lower_clocks_stretch_all_phases_alike(gpu: FakeGPU) -> None:
    stretched = {name: ms / 2 for name, ms in USUAL.items()}
    detail = "990 of 1980 MHz: heat"
    assert Bench(gpu, Clocks(lambda: detail)).slow({}, stretched) == (
        Cause("clocks", 0.0, 8.0, detail),
    )


@pytest.mark.parametrize("longer", [{"forward": 8.0}, {"forward": 4.0, "backward": 4.0}])
def test_one_long_phase_is_not_the_clocks_fault(gpu: FakeGPU, longer: dict[str, float]) -> None:
    assert Bench(gpu, Clocks(lambda: "heat")).slow({}, longer) == ()


def test_full_clocks_explain_nothing(gpu: FakeGPU) -> None:
    stretched = {name: ms / 2 for name, ms in USUAL.items()}
    assert Bench(gpu, Clocks(lambda: "")).slow({}, stretched) == ()
    assert clocks_of(torch.device("cpu")) is None


def test_small_causes_stay_unexplained(gpu: FakeGPU) -> None:
    causes = Bench(gpu, Callbacks(), Ranks()).slow({}, {"forward": 40.0, "backward/comm": 2.0})
    assert causes == ()


class Slow(pl.Callback):
    """A callback that is slow once, on a fake GPU's host."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.gpu = gpu

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] == SLOW:
            self.gpu.host_work(40.0)


def test_lightnings_callbacks_are_named(gpu: FakeGPU) -> None:
    told: list[SlowStep] = []
    timer = GPUPhaseTimer(clock=gpu, summary=False, warmup_steps=0, on_slow_step=told.append)
    fit(gpu, Model(gpu), 60, timer=timer, callbacks=[Slow(gpu)])
    [slow] = told
    # It follows the end of its batch, and so it is part of the next step.
    assert (slow.step, slow.phase) == (SLOW + 1, "data/callbacks")
    name = "Slow.on_train_batch_end"
    assert slow.causes == (Cause("callback", 40.0, 40.0 - 15.625, name),)
    assert slow.unexplained_ms == 0.0


def test_lightnings_loggers_are_named(gpu: FakeGPU) -> None:
    class Remote(MemoryLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            gpu.host_work(40.0 if "loss" in metrics else 0.0)

    timer = fit(gpu, Model(gpu), 60, logger=Remote(), log_every_n_steps=40)
    [slow] = timer.slowest()
    assert [(one.kind, one.detail, one.host_ms) for one in slow.causes] == [
        ("callback", "Remote.log_metrics", 40.0)
    ]
    assert slow.unexplained_ms == 0.0


def test_lightnings_loader_is_told(gpu: FakeGPU) -> None:
    class Late(FakeLoader):
        def __iter__(self) -> Any:
            for number, x in enumerate(super().__iter__()):
                gpu.host_work(40.0 if number == SLOW else 0.0)
                yield x

    timer = GPUPhaseTimer(clock=gpu, summary=False, warmup_steps=0)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[timer],
    )
    trainer.fit(Model(gpu), Late(gpu, 60))
    [slow] = timer.slowest()
    assert [(one.kind, one.host_ms) for one in slow.causes] == [("loader", 40.0)]
    assert slow.phase == "data/fetch"


def on_the_host_clock(late: Callable[[nn.Module, int], None]) -> list[SlowStep]:
    """Trains a small net on the CPU; something is late after the model in some steps."""
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(60, 64)), batch_size=1)
    with GPUPhaseHooks(net, optimizer, warmup_steps=5) as timer:
        for number, (x,) in enumerate(timer.steps(loader)):
            loss = net(x).sum()
            late(net, number)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [*timer.slowest()]


@pytest.mark.filterwarnings("ignore:The model is on the CPU")
def test_a_real_collection_is_found_and_all_of_it_reached() -> None:
    ballast: list[list[int]] = []

    def late(net: nn.Module, number: int) -> None:
        if number == 5:
            ballast.extend([[] for _ in range(400_000)])
        if number == SLOW:
            gc.collect()

    found = {slow.step: slow for slow in on_the_host_clock(late)}
    [cause] = [one for one in found[SLOW].causes if one.kind == "garbage"]
    # How long it took no test can say, and the machine may have been busy beside it.
    assert cause.detail == "generation 2"
    assert 0.0 < cause.reached_ms <= cause.host_ms


@pytest.mark.filterwarnings("ignore:The model is on the CPU")
def test_a_real_compilation_is_found() -> None:
    with contextlib.suppress(AttributeError):
        torch._dynamo.reset()
    compiled = torch.compile(lambda x: (x * 2).sum(), backend="eager", dynamic=False)

    def late(net: nn.Module, number: int) -> None:
        compiled(torch.ones(3 if number < SLOW else 4))

    found = {slow.step: slow for slow in on_the_host_clock(late)}
    assert "compilation" in [one.kind for one in found[SLOW].causes]
