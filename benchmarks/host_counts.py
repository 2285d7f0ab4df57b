"""Counts the calls of Python functions that this package makes in a step.

The host's clock is a fake one, which stands still but where a step moves it. So the counts are the
same on every machine, as long as Python and Lightning are of the same versions.

    python benchmarks/host_counts.py
    python benchmarks/host_counts.py --each     # by function
    python benchmarks/host_counts.py --record   # the bounds that no step may exceed

`host_bounds.json` has how many calls a step may take; `tests/test_host_cost.py` asserts it.
"""

import argparse
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from loops import bare_trainer, be_quiet
from torch import Tensor, nn

import lightning_gputime
from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer

PACKAGE = os.path.dirname(lightning_gputime.__file__)
BOUNDS = Path(__file__).parent / "host_bounds.json"

SETTLE, STEPS = 60, 400
"""Of each run this many steps are not counted, and then this many are."""

NEVER = 10**9
"""No step of a run is the last of so many: with this `every_n_steps` none is timed."""


class Calls:
    """Counts calls of the package's functions, events of its host clock included."""

    def __init__(self) -> None:
        self.of = Counter[str]()

    def begin(self) -> None:
        # Where a collection falls depends on what else has run in this process.
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


SLOW_EVERY = 4
"""On a noisy host 1 of this many steps is slow."""


class HostTime:
    """The host's time, which stands still but where it is told to move."""

    def __init__(self, *, is_noisy: bool = False) -> None:
        self.ns = self._forwards = 0
        self._is_noisy = is_noisy

    def pass_forward(self) -> None:
        """Let a forward pass take 1 ms, or 3 ms in the slow steps of a noisy host."""
        self._forwards += 1
        is_slow = self._is_noisy and self._forwards % SLOW_EVERY == 0
        self.ns += 3_000_000 if is_slow else 1_000_000

    def read(self) -> int:
        return self.ns


class Net(nn.Module):
    """A small net, in whose forward pass a millisecond passes."""

    def __init__(self, time: HostTime) -> None:
        super().__init__()
        self.linear, self._time = nn.Linear(2, 2), time

    def forward(self, x: Tensor) -> Tensor:
        self._time.pass_forward()
        result: Tensor = self.linear(x)
        return result


class Task(pl.LightningModule):
    """Its training in Lightning."""

    def __init__(self, time: HostTime) -> None:
        super().__init__()
        self.net = Net(time)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Batches:
    """The loader, which begins and ends the counting."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __len__(self) -> int:
        # One more, before which the counting ends.
        return SETTLE + STEPS + 1

    def __iter__(self) -> Iterator[Tensor]:
        x = torch.ones(2, 2)
        for number in range(len(self)):
            if number == SETTLE:
                self._calls.begin()
            elif number == SETTLE + STEPS:
                self._calls.end()
            yield x


def in_steps(time: HostTime, calls: Calls, every_n_steps: int) -> None:
    """Trains in a plain loop over `steps()`."""
    net = Net(time)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with GPUPhaseHooks(net, optimizer, every_n_steps=every_n_steps) as timer:
        for x in timer.steps(Batches(calls)):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()


def in_step(time: HostTime, calls: Calls, every_n_steps: int) -> None:
    """Trains in a plain loop that calls `step()`."""
    net = Net(time)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with GPUPhaseHooks(net, optimizer, every_n_steps=every_n_steps) as timer:
        for x in Batches(calls):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            timer.step()


def in_lightning(time: HostTime, calls: Calls, every_n_steps: int) -> None:
    """Trains in Lightning, without other callbacks."""
    timer = GPUPhaseTimer(print_summary=False, every_n_steps=every_n_steps)
    trainer = bare_trainer(accelerator="cpu", max_epochs=1, callbacks=[timer])
    trainer.fit(Task(time), Batches(calls))


WAYS: dict[str, Callable[[HostTime, Calls, int], None]] = {
    "GPUPhaseHooks.steps": in_steps,
    "GPUPhaseHooks.step": in_step,
    "GPUPhaseTimer": in_lightning,
}


@contextmanager
def standing_still(*, is_noisy: bool = False) -> Iterator[HostTime]:
    """Puts a fake clock in the place of the host's."""
    time = HostTime(is_noisy=is_noisy)
    with patch("time.perf_counter_ns", time.read):
        yield time


def count(way: str, every_n_steps: int = 1, *, is_noisy: bool = False) -> Calls:
    """Returns the calls in the steps of one way to train."""
    calls = Calls()
    with standing_still(is_noisy=is_noisy) as time:
        try:
            WAYS[way](time, calls, every_n_steps)
        finally:
            calls.end()
    return calls


def count_all() -> dict[str, dict[str, float]]:
    """Returns how many calls a step takes in each way to train.

    "noisy" is a timed step on a host where a quarter of the steps is slow.
    """
    return {
        way: {
            "timed": count(way).each_step(),
            "noisy": count(way, is_noisy=True).each_step(),
            "untimed": count(way, NEVER).each_step(),
        }
        for way in WAYS
    }


def print_each() -> None:
    """Prints how often each function is called in a step."""
    for way in WAYS:
        for title, calls in (
            ("timed", count(way)),
            ("noisy", count(way, is_noisy=True)),
            ("untimed", count(way, NEVER)),
        ):
            print(f"\n{way}, {title}: {calls.each_step()}")
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
        found = count_all()
        print(json.dumps(found, indent=2))
        if arguments.record:
            BOUNDS.write_text(json.dumps(found, indent=2) + "\n")
