"""Detectors of causes of slow steps, each alone and with exact times, and on cheap real causes."""

import gc
import itertools
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from fake_gpu import MS, FakeGPU, raw
from fake_lightning import Model, fit, timer_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gputime import Cause, GPUPhaseHooks, SlowStep
from lightning_gputime._causes import SlowStepAnalyzer, allocator_counters
from lightning_gputime._loader import CulpritSums, of_entry
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.slow import SlowLog

USUAL = {"data": 1.0, "forward": 4.0, "backward": 8.0, "backward/comm": 1.0, "optimizer": 2.0}
"""Ms of a usual step, on the host and on the device."""

SLOW = 30


class Bench:
    """Steps of any length, and an analyzer with only some collectors of evidence.

    Args:
        collector: Name of a collector, such as "phases".
        counters: Replaces the counters of torch's allocator.
    """

    def __init__(self, gpu: FakeGPU, collector: str, *, counters: Any = None) -> None:
        self.gpu = gpu
        log = SlowLog()
        log.follow()
        self.analyzer = analyzer = SlowStepAnalyzer(gpu, log, CulpritSums())
        analyzer.allocator._counters = counters
        [collect] = [item for item in analyzer.collectors if item.__name__.endswith(collector)]
        analyzer.collectors = [collect]
        # Ignore garbage collections of the test itself.
        setattr(analyzer._spans, "_callbacks", list)  # noqa: B010
        analyzer.attach()
        analyzer.loop_begins()
        self.found: list[SlowStep] = []

    @property
    def only(self) -> SlowStep:
        [slow] = self.found
        return slow

    def step(self, number: int, host_ms: dict[str, float], device_ms: dict[str, float]) -> None:
        """Run a step that exceeds the usual step by these times."""
        begin = self.gpu.now
        on_host = [ms + host_ms.get(name, 0.0) for name, ms in USUAL.items()]
        on_device = tuple(ms + device_ms.get(name, 0.0) for name, ms in USUAL.items())
        self.gpu.host_work(sum(on_host))
        self.analyzer.allocator.end_step(self.gpu.now)
        ends = tuple(accumulate((round(ms * MS) for ms in on_host), initial=begin))
        record = raw(number, **USUAL)._replace(device_ms=on_device, host_ns=ends)
        self.analyzer.steps_read(ReadSteps([record], warmup=0, since_ns=self.gpu.now))
        self.found += self.analyzer.newest

    def usual(self, numbers: range = range(SLOW)) -> None:
        for number in numbers:
            self.step(number, {}, {})

    def slow(self, host_ms: dict[str, float], device_ms: dict[str, float]) -> Sequence[Cause]:
        """Run a slow step after usual steps, and return its causes."""
        self.usual()
        self.step(SLOW, host_ms, device_ms)
        assert self.only.step == SLOW
        return self.only.causes


def test_slow_step_before_the_first_baseline_has_no_cause(gpu: FakeGPU) -> None:
    bench = Bench(gpu, "phases")
    bench.usual(range(5))
    bench.step(5, {"backward": 40.0}, {"backward": 35.0})
    bench.usual(range(6, SLOW))
    slow = bench.only
    assert (slow.step, slow.causes, slow.unexplained_ms) == (5, (), 35.0)


WORKERS = SimpleNamespace(num_workers=4)
NOT_LOADING: tuple[Any, ...] = (range(9), itertools.count(1), itertools.repeat(1), [1], (1,), None)
OF_WORKERS, OF_MAIN = "its 4 workers had no batch ready", "it loads in the main process"
WITH_WAIT = {"forward": 40.0, "backward/comm": 2.0}
ALLOCATORS = (Mock(return_value=(0,) * 4), Mock(side_effect=RuntimeError))


def iterating(gpu: FakeGPU, items: object) -> Bench:
    """Return a bench of a loop that iterates over items, or whose loader is unknown (None)."""
    bench = Bench(gpu, "fetches")
    if items is not None:
        bench.analyzer.set_loader(items, in_data=True)
    return bench


@pytest.mark.parametrize(
    ("items", "causes"),
    [
        (WORKERS, (Cause("dataloader", 20.0, 10.0, OF_WORKERS),)),
        (iter([1]), (Cause("dataloader", 20.0, 10.0, OF_MAIN),)),
        *((items, ()) for items in NOT_LOADING),
    ],
)
def test_slow_fetch_is_a_cause(items: object, causes: tuple[Cause, ...], gpu: FakeGPU) -> None:
    assert iterating(gpu, items).slow({"data": 20.0}, {"data": 10.0}) == causes


@pytest.mark.parametrize(
    ("collector", "counters", "device_ms", "causes"),
    [
        ("phases", None, {"backward/comm": 20.0}, (Cause("ranks", 0.0, 20.0, "in backward/comm"),)),
        ("phases", None, WITH_WAIT, ()),  # Small causes stay unexplained.
        *(("counters", counters, {"forward": 30.0}, ()) for counters in ALLOCATORS),
    ],
)
def test_long_wait_is_a_cause_and_an_unchanged_or_failing_allocator_is_not(
    gpu: FakeGPU, collector: str, counters: Any, device_ms: dict[str, float], causes: Any
) -> None:
    host_ms = {"forward": 30.0} if counters else {}
    assert Bench(gpu, collector, counters=counters).slow(host_ms, device_ms) == causes


def test_slow_first_fetch_of_an_epoch_is_the_start_of_workers(gpu: FakeGPU) -> None:
    bench = iterating(gpu, WORKERS)
    bench.usual()
    bench.analyzer.loop_begins()
    bench.step(SLOW, {"data": 20.0}, {"data": 20.0})
    [cause] = bench.only.causes
    assert cause.detail == "starting its workers for the first batch"


def test_allocator_is_read_every_10_steps_and_after_a_long_step(gpu: FakeGPU) -> None:
    memory = Mock(return_value=(0, 100, 0, 0))
    bench = Bench(gpu, "counters", counters=memory)
    bench.usual()
    # At the start of the loop, and after 10 steps.
    assert memory.call_count == 2
    memory.return_value = (1, 103, 7, 2)
    bench.step(SLOW, {"forward": 30.0}, {"forward": 28.0})
    assert memory.call_count == 3
    detail = "retries 1, device allocations 3, device frees 7, waits for all streams 2"
    assert bench.only.causes == (Cause("allocator", 30.0, 28.0, detail),)


def test_device_without_an_allocator_has_no_counters() -> None:
    assert allocator_counters(None) is allocator_counters(torch.device("cpu")) is None


def test_slow_callback_under_lightning_is_a_cause(gpu: FakeGPU) -> None:
    class Slow(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            gpu.host_work(40.0 if args[-1] == SLOW else 0.0)

    notified: list[SlowStep] = []
    timer = timer_of(gpu, observers=[SimpleNamespace(on_slow_step=notified.append)])
    fit(gpu, Model(gpu), 60, timer=timer, callbacks=[Slow()])
    [slow] = notified
    # The hook runs after its step has ended, so it is part of the next step.
    assert (slow.step, slow.phase) == (SLOW + 1, "callbacks")
    name = "Slow.on_train_batch_end"
    assert slow.causes == (Cause("callback", 40.0, 40.0 - 15.625, name),)
    assert slow.unexplained_ms == 0.0


def create_lists() -> None:
    """Create enough objects for an automatic collection of the oldest generation."""
    [[number] for number in range(100_000)]


@pytest.mark.parametrize(("collect", "name"), [(gc.collect, "gc.collect"), (create_lists, "")])
def test_real_garbage_collection_is_a_cause(
    gpu: FakeGPU, collect: Callable[[], object], name: str
) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(60, 64)), batch_size=1)
    collections: list[dict[str, int]] = []

    def take_time(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2 and not collections:
            collections.append(info)
            gpu.host_work(20.0)

    gc.freeze()  # Otherwise, Python collects only if a quarter of all objects is new.
    gc.collect()
    with GPUPhaseHooks(net, optimizer, warmup_steps=5, lines=False, _clock=gpu) as timer:
        for number, (x,) in enumerate(timer.steps(loader)):
            loss = net(x).sum()
            gpu.host_work(1.0)
            if number == SLOW:
                # Append it after the timer's callback, which must see the start before time passes.
                gc.callbacks.append(take_time)
                collect()
                gc.callbacks.remove(take_time)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    gc.unfreeze()
    [slow] = timer.slow_steps()
    assert (slow.step, slow.unexplained_ms) == (SLOW, 0.0)
    assert slow.causes == (Cause("garbage_collection", 20.0, 20.0, "generation 2"),)
    summary = timer.summary()
    assert "slow steps: garbage collection" in (summary.time_breakdown or ())
    [culprit] = of_entry(summary.measurement.culprits, "slow steps: garbage collection")
    assert culprit.name == name
