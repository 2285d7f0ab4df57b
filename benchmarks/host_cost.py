"""Measures what timing a step costs the host.

Without `--cuda` the events do nothing, so that what is left is Python's own cost; with it they are
those of the GPU, in a stream that is empty, as it is where training is bound by launches. The floor
is five bare events, recorded in one step and read in the next. The times are those of a step that
does next to nothing, in a warm cache. The counts are exact: how many of Python's instructions, and
of its functions, the package runs in a step.

    python benchmarks/host_cost.py
    python benchmarks/host_cost.py --cuda --out benchmarks/results/host_cost_cuda.json
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from empty_step import EmptyNet, EmptyTask, NoUpdate, new_clock, no_backward, train_empty
from host_counts import count
from loops import NONE, Way, attached, bare_trainer, be_quiet, by_way, in_rounds
from models import Repeat
from peers import FiveEvents
from record import environment, new_parser, save

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer
from lightning_gputime._record.clock import Clock

SETTLE, STEPS = 50, 1000


def hooks(net: EmptyNet, optimizer: NoUpdate, clock: Clock) -> Way:
    """Returns the way of this package."""
    return attached(GPUPhaseHooks(net, optimizer, clock=clock))


IN_PLAIN: dict[str, Callable[[EmptyNet, NoUpdate, Clock], Way]] = {
    NONE: lambda net, optimizer, clock: Way(),
    "floor": lambda net, optimizer, clock: FiveEvents(clock.event).way(),
    "GPUPhaseHooks": hooks,
}
IN_LIGHTNING: dict[str, Callable[[Clock], list[pl.Callback]]] = {
    NONE: lambda clock: [],
    "callback that does nothing": lambda clock: [pl.Callback()],
    "floor": lambda clock: [FiveEvents(clock.event)],
    "GPUPhaseTimer": lambda clock: [GPUPhaseTimer(clock=clock, summary=False)],
    "GPUPhaseTimer(every_n_steps=10)": lambda clock: [
        GPUPhaseTimer(clock=clock, summary=False, every_n_steps=10)
    ],
}


class Stopwatch(pl.Callback):
    """Takes the time of the steps after the first ones."""

    started = ended = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        if args[-1] == SETTLE:
            self.started = time.perf_counter()

    def on_train_end(self, *args: Any) -> None:
        self.ended = time.perf_counter()


def in_lightning(callbacks: list[pl.Callback]) -> float:
    """Returns the time of a step in Lightning (in microseconds)."""
    stopwatch = Stopwatch()
    trainer = bare_trainer(accelerator="cpu", max_epochs=1, callbacks=[stopwatch, *callbacks])
    batch = torch.zeros(1), torch.zeros(1)
    trainer.fit(EmptyTask(), Repeat(batch, SETTLE + STEPS))
    return (stopwatch.ended - stopwatch.started) / STEPS * 1e6


def in_plain_loop(net: EmptyNet, optimizer: NoUpdate, way: Way) -> float:
    """Returns the time of a step in a plain loop (in microseconds)."""
    train_empty(net, optimizer, way, SETTLE)
    start = time.perf_counter()
    train_empty(net, optimizer, way, STEPS)
    us = (time.perf_counter() - start) / STEPS * 1e6
    way.remove()
    return us


def added(ways: Iterable[str], rounds: int, step_us: Callable[[str], float]) -> dict[str, float]:
    """Returns the first quartile of each way less that of none, when they take turns."""
    turns = in_rounds([*ways], rounds)
    found = by_way(turns, [step_us(way) for way in turns])
    quiet = {way: statistics.quantiles(found[way])[0] for way in ways}
    base = quiet.pop(NONE)
    return {way: round(us - base, 2) for way, us in quiet.items()}


def time_hooks(rounds: int, cuda: bool, modules: int = 10) -> dict[str, float]:
    """Returns the added time a step of each way in a plain loop (in microseconds)."""
    net = EmptyNet(modules)
    optimizer = NoUpdate(net)

    def step_us(way: str) -> float:
        return in_plain_loop(net, optimizer, IN_PLAIN[way](net, optimizer, new_clock(cuda)))

    return added(IN_PLAIN, rounds, step_us)


def time_callbacks(rounds: int, cuda: bool) -> dict[str, float]:
    """Returns the added time a step of each way in Lightning (in microseconds)."""
    return added(IN_LIGHTNING, rounds, lambda way: in_lightning(IN_LIGHTNING[way](new_clock(cuda))))


def count_hooks() -> dict[str, float]:
    """Returns what the package runs in a step of a plain loop."""
    net = EmptyNet()
    optimizer = NoUpdate(net)
    way = hooks(net, optimizer, new_clock(cuda=False))
    counts = count(partial(train_empty, net, optimizer, way))
    way.remove()
    return counts


def measure(rounds: int, cuda: bool) -> dict[str, Any]:
    """Measures everything; returns what was found."""
    plain, lightning = time_hooks(rounds, cuda), time_callbacks(rounds, cuda)
    results: dict[str, Any] = {
        "added_us": {"plain": plain, "lightning": lightning},
        "ratio_to_floor": {
            "plain": round(plain["GPUPhaseHooks"] / plain["floor"], 2),
            "lightning": round(lightning["GPUPhaseTimer"] / lightning["floor"], 2),
        },
        "by_modules_us": {
            modules: time_hooks(rounds, cuda, modules)["GPUPhaseHooks"]
            for modules in (10, 100, 1000)
        },
    }
    return results if cuda else results | {"counts": count_hooks()}


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cuda", action="store_true", help="take the events of the GPU")
    arguments = parser.parse_args()
    be_quiet()
    with no_backward():
        results = measure(arguments.rounds, arguments.cuda)
    print(json.dumps(results, indent=2))
    events = environment("gpu")["gpu"] if arguments.cuda else "none"
    header = environment("machine", "python", "torch", "command")
    save(arguments.out, {"events": events, **header, **results})
