"""Count the calls of this package's Python functions per step.

The host clock is simulated and advances only in forward, so the counts are the same on every
machine with the same versions of Python and Lightning. `host_bounds.json` has the maximum per
step; `tests/test_host_cost.py` asserts it.

    python benchmarks/host_counts.py
    python benchmarks/host_counts.py --each     # by function
    python benchmarks/host_counts.py --record   # write host_bounds.json
"""

import argparse
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from models import bare_trainer, be_quiet
from torch import Tensor, nn

import lightning_gputime
from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer

PACKAGE = os.path.dirname(lightning_gputime.__file__)
BOUNDS = Path(__file__).parent / "host_bounds.json"
SETTLE, STEPS = 60, 400  # Steps before the measurement, and in it.
NEVER = 10**9  # With this `every_n_steps` no step is timed.
SLOW_EVERY = 4  # On a noisy host, 1 of every n steps is slow.


class Calls:
    """Counter of calls of the package's functions."""

    def __init__(self) -> None:
        self.of = Counter[str]()

    def begin(self) -> None:
        # Collections would depend on what else has run in this process.
        gc.disable()
        sys.setprofile(self._count)

    def end(self) -> None:
        sys.setprofile(None)
        gc.enable()

    def _count(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.of[frame.f_code.co_qualname] += 1

    def each_step(self) -> float:
        return self.of.total() / STEPS


class HostTime:
    """A simulated host clock. Forward takes 1 ms, or 3 ms in the slow steps of a noisy host."""

    def __init__(self, *, is_noisy: bool = False) -> None:
        self.ns = self._forwards = 0
        self._is_noisy = is_noisy

    def pass_forward(self) -> None:
        self._forwards += 1
        is_slow = self._is_noisy and self._forwards % SLOW_EVERY == 0
        self.ns += 3_000_000 if is_slow else 1_000_000

    def read(self) -> int:
        return self.ns


class Net(nn.Module):
    def __init__(self, time: HostTime) -> None:
        super().__init__()
        self.linear, self._time = nn.Linear(2, 2), time

    def forward(self, x: Tensor) -> Tensor:
        self._time.pass_forward()
        result: Tensor = self.linear(x)
        return result


class Task(pl.LightningModule):
    def __init__(self, time: HostTime) -> None:
        super().__init__()
        self.net = Net(time)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Batches:
    """Loader that begins and ends a measurement."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __len__(self) -> int:
        return SETTLE + STEPS + 1  # The measurement ends before the last batch.

    def __iter__(self) -> Iterator[Tensor]:
        x = torch.ones(2, 2)
        for number in range(len(self)):
            if number == SETTLE:
                self._calls.begin()
            elif number == SETTLE + STEPS:
                self._calls.end()
            yield x


def in_plain_loop(
    time: HostTime, calls: Calls, every_n_steps: int, *, with_steps: bool = False
) -> None:
    """Train in a plain loop over `steps()`, or in one that calls `step()`."""
    net = Net(time)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with GPUPhaseHooks(net, optimizer, every_n_steps=every_n_steps) as timer:
        batches = Batches(calls)
        for x in timer.steps(batches) if with_steps else batches:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            if not with_steps:
                timer.step()


def in_lightning(time: HostTime, calls: Calls, every_n_steps: int) -> None:
    timer = GPUPhaseTimer(print_summary=False, every_n_steps=every_n_steps)
    trainer = bare_trainer(accelerator="cpu", max_epochs=1, callbacks=[timer])
    trainer.fit(Task(time), Batches(calls))


WAYS: dict[str, Callable[[HostTime, Calls, int], None]] = {
    "GPUPhaseHooks.steps": partial(in_plain_loop, with_steps=True),
    "GPUPhaseHooks.step": in_plain_loop,
    "GPUPhaseTimer": in_lightning,
}


def count(way: str, every_n_steps: int = 1, *, is_noisy: bool = False) -> Calls:
    calls, time = Calls(), HostTime(is_noisy=is_noisy)
    with (
        # The host's clock of a training on a GPU.
        patch("lightning_gputime._timer.loop_time", lambda: time.read),
        patch("time.perf_counter_ns", time.read),
        # Examine steps only while settling: `lines` has its own benchmark, `cold_cost.py`.
        patch("lightning_gputime._ledger.examiner._GROWTH", NEVER),
    ):
        try:
            WAYS[way](time, calls, every_n_steps)
        finally:
            calls.end()
    return calls


def count_each(way: str) -> dict[str, Calls]:
    """Return the calls of timed steps, of timed steps on a noisy host, and of untimed steps."""
    return {"timed": count(way), "noisy": count(way, is_noisy=True), "untimed": count(way, NEVER)}


def count_all() -> dict[str, dict[str, float]]:
    """Return the calls per step, for each kind of loop."""
    return {
        way: {kind: calls.each_step() for kind, calls in count_each(way).items()} for way in WAYS
    }


def print_each() -> None:
    for way in WAYS:
        for kind, calls in count_each(way).items():
            print(f"\n{way}, {kind}: {calls.each_step()}")
            for name, times in calls.of.most_common():
                print(f"{times / STEPS:8.4g}  {name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", action="store_true", help="print the calls of each function")
    parser.add_argument("--record", action="store_true", help="write them to host_bounds.json")
    be_quiet()
    arguments = parser.parse_args()
    if arguments.each:
        print_each()
    else:
        counts = count_all()
        print(json.dumps(counts, indent=2))
        if arguments.record:
            BOUNDS.write_text(json.dumps(counts, indent=2) + "\n")
