"""Measures what timing adds by default (`every_n_steps="auto"`) where the host sets the pace.

Each turn is a run of its own, long enough for the timer to have found how many steps it may time,
and only then measured; no longer, so that many turns meet the same moods of the host. "no timer"
has two turns in each round, in random order; the difference of the two is the noise.

    python benchmarks/budget.py --out benchmarks/results/budget.json
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from host_ways import Meter, Metered
from loops import AGAIN, NONE, Way, attached, bare_trainer, be_quiet, by_way, in_rounds, train
from models import Batch, Task, load
from overhead import print_table, summarize
from record import environment, new_parser, save

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer

# How many steps are timed is decided after 100 steps, and anew after 200 and 400.
SETTLE, STEPS = 500, 200

OPTIONS: dict[str, dict[str, Any]] = {
    "every_n_steps=1": {"every_n_steps": 1},
    "every_n_steps=10": {"every_n_steps": 10},
    "": {},
}
WAYS = [NONE, AGAIN, *(f"timer({options})" for options in OPTIONS)]

Timer = GPUPhaseHooks | GPUPhaseTimer


class Stopwatch:
    """Takes the time of steps, until the device has finished them (in milliseconds a step)."""

    ms = 0.0

    def begin(self) -> None:
        self.ms = -self._now_ms()

    def end(self) -> None:
        self.ms += self._now_ms()
        self.ms /= STEPS

    def _now_ms(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() * 1e3


def options_of(way: str) -> dict[str, Any] | None:
    """Returns the options of a way's timer; None if it has none."""
    return OPTIONS.get(way[len("timer(") : -1]) if way.startswith("timer(") else None


def in_plain_loop(task: Task, batch: Batch, way: str, meter: Meter) -> Timer | None:
    """Trains in a plain loop. Returns the timer."""
    optimizer, options = task.configure_optimizers(), options_of(way)
    timer = None if options is None else GPUPhaseHooks(task.net, optimizer, **options)
    timed = Way() if timer is None else attached(timer)
    train(task, optimizer, batch, timed, SETTLE)
    meter.begin()
    train(task, optimizer, batch, timed, STEPS)
    meter.end()
    timed.remove()
    return timer


def in_lightning(task: Task, batch: Batch, way: str, meter: Meter) -> Timer | None:
    """Trains in Lightning. Returns the timer."""
    options = options_of(way)
    timer = None if options is None else GPUPhaseTimer(summary=False, **options)
    callbacks: list[pl.Callback] = [] if timer is None else [timer]
    bare_trainer(max_epochs=1, callbacks=callbacks).fit(task, Metered(batch, meter, SETTLE, STEPS))
    return timer


def measure(run: Callable[[str, Meter], Timer | None], rounds: int) -> dict[str, Any]:
    """Lets all ways take turns; returns what was found of each."""
    turns, times = in_rounds(WAYS, rounds), []
    timed_every_n_steps: dict[str, list[int]] = {}
    for way in turns:
        watch = Stopwatch()
        timer = run(way, watch)
        times.append(watch.ms)
        if timer is not None:
            timed_every_n_steps.setdefault(way, []).append(timer.summary().timed_every_n_steps)
    rows = summarize(by_way(turns, times))
    for way, found in timed_every_n_steps.items():
        rows[way]["timed_every_n_steps"] = found
    return rows


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    be_quiet()
    cuda = torch.cuda.is_available()
    task, batch = load("mlp", torch.device("cuda" if cuda else "cpu"))
    results = {
        "mlp": {
            "plain": measure(partial(in_plain_loop, task, batch), arguments.rounds),
            "lightning": measure(partial(in_lightning, task, batch), arguments.rounds),
        }
    }
    print_table(results)
    print({loop: rows[WAYS[-1]]["timed_every_n_steps"] for loop, rows in results["mlp"].items()})
    header = environment(*(["gpu"] if cuda else []), "torch", "lightning", "host", "command")
    save(arguments.out, header | {"results": results})
