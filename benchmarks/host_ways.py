"""The ways of timing whose cost to the host is measured, and how: in steps that are nearly empty.

A `Meter` is told where the steps begin that count, and where they end. What it says less what it
says without a timer is what the way costs.
"""

import time
from collections.abc import Callable, Iterator
from typing import Protocol

import lightning.pytorch as pl
import torch
from empty_step import EmptyNet, EmptyTask, NoUpdate, train_empty
from loops import NONE, Way, attached, bare_trainer
from models import Batch
from peers import FiveEvents

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer
from lightning_gputime._record.clock import Clock

SETTLE = 60
"""So many steps come before those that count."""

# No step of a run is the last of so many: all are quiet.
_NEVER = 10**9

FLOOR, HOOKS, TIMER = "floor", "GPUPhaseHooks", "GPUPhaseTimer"
TENTH, QUIET = "(every_n_steps=10)", ", a step that is not timed"


class Meter(Protocol):
    """What is measured of the steps between two moments."""

    def begin(self) -> None:
        """Is called where they begin."""

    def end(self) -> None:
        """Is called where they end."""


class Stopwatch:
    """Takes the host's time (in seconds)."""

    seconds = 0.0

    def begin(self) -> None:
        self.seconds = -time.perf_counter()

    def end(self) -> None:
        self.seconds += time.perf_counter()


def _hooks(net: EmptyNet, optimizer: NoUpdate, clock: Clock, every_n_steps: int = 1) -> Way:
    return attached(GPUPhaseHooks(net, optimizer, _clock=clock, every_n_steps=every_n_steps))


def _timer(clock: Clock, every_n_steps: int = 1) -> list[pl.Callback]:
    return [GPUPhaseTimer(_clock=clock, print_summary=False, every_n_steps=every_n_steps)]


IN_PLAIN: dict[str, Callable[[EmptyNet, NoUpdate, Clock], Way]] = {
    NONE: lambda net, optimizer, clock: Way(),
    FLOOR: lambda net, optimizer, clock: FiveEvents(clock.event).way(),
    HOOKS: _hooks,
    HOOKS + TENTH: lambda net, optimizer, clock: _hooks(net, optimizer, clock, 10),
    HOOKS + QUIET: lambda net, optimizer, clock: _hooks(net, optimizer, clock, _NEVER),
}
IN_LIGHTNING: dict[str, Callable[[Clock], list[pl.Callback]]] = {
    NONE: lambda clock: [],
    "callback that does nothing": lambda clock: [pl.Callback()],
    FLOOR: lambda clock: [FiveEvents(clock.event)],
    TIMER: _timer,
    TIMER + TENTH: lambda clock: _timer(clock, 10),
    TIMER + QUIET: lambda clock: _timer(clock, _NEVER),
}


def in_plain_loop(way: str, clock: Clock, meter: Meter, steps: int, modules: int = 10) -> None:
    """Trains in a plain loop, on a net of so many modules."""
    net = EmptyNet(modules)
    optimizer = NoUpdate(net)
    timed = IN_PLAIN[way](net, optimizer, clock)
    train_empty(net, optimizer, timed, SETTLE)
    meter.begin()
    train_empty(net, optimizer, timed, steps)
    meter.end()
    timed.remove()


def in_lightning(way: str, clock: Clock, meter: Meter, steps: int) -> None:
    """Trains in Lightning."""
    trainer = bare_trainer(accelerator="cpu", max_epochs=1, callbacks=IN_LIGHTNING[way](clock))
    batch = torch.zeros(1), torch.zeros(1)
    trainer.fit(EmptyTask(), Metered(batch, meter, SETTLE, steps))


class Metered:
    """Loads a batch, and tells a meter where the steps begin that count, and where they end.

    No callback does it: the timer would tell its time apart, and the floor would not.
    """

    def __init__(self, batch: Batch, meter: Meter, settle: int, steps: int) -> None:
        self._batch, self._meter = batch, meter
        self._settle, self._steps = settle, steps

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self)):
            if number == self._settle:
                self._meter.begin()
            elif number == self._settle + self._steps:
                self._meter.end()
            yield self._batch

    def __len__(self) -> int:
        # One more, before which the meter ends.
        return self._settle + self._steps + 1
