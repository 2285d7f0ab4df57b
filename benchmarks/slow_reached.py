"""Measures, on a GPU, how much of a host's delay reaches it, and holds what is said against that.

A small net is trained in a plain loop, as it is, so that the host is never ahead of the GPU, and
with 30 ms more of work for the GPU in each step, of which the host is ahead. In steps drawn by
chance a garbage collection holds up the host for 1, 5, 20 or 60 ms, between forward and loss. Two
events, one just before and one just after, tell how long the GPU really had nothing to do
meanwhile. Then 4 GiB of the device's memory are taken and given back in some steps of the small
net, which the allocator's detector should see. Last, what looking costs a step: with and without
it, in turns, under the events of an empty stream.

    python benchmarks/slow_reached.py --out benchmarks/results/slow_reached.json
"""

import gc
import json
import logging
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from empty_step import EmptyNet, NoUpdate, new_clock, no_backward, train_empty
from host_ways import SETTLE
from loops import attached, by_way, in_rounds
from models import load
from record import environment, new_parser, save
from slow_judged import main_kind

from lightning_gputime import GPUPhaseHooks, SlowStep

DELAYS_MS = (1.0, 5.0, 20.0, 60.0)
CYCLES_PER_MS = 1_900_000
"""How fast the GPU counts, about."""

GAP = (8, 12)
"""The fewest and the most steps from one delay to the next."""

STEPS = 1000
"""So many steps tell what looking costs."""

Found = dict[int, SlowStep]


class Ballast:
    """Takes a collection so long to delete, and cannot be deleted without one."""

    def __init__(self, ms: float) -> None:
        self._ms, self._own = ms, self

    def __del__(self) -> None:
        end = time.perf_counter() + self._ms / 1e3
        while time.perf_counter() < end:
            pass


def train(spin_ms: float, disturb: Callable[[int], None], n: int) -> Found:
    """Trains for some steps, with so much more work for the GPU; returns the slow ones."""
    task, (x, y) = load("mlp", torch.device("cuda"))
    optimizer = task.configure_optimizers()
    found: list[SlowStep] = []
    gc.collect()
    gc.disable()
    with GPUPhaseHooks(
        task.net, optimizer, observers=[SimpleNamespace(on_slow_step=found.append)]
    ) as timer:
        for number in timer.steps(range(n)):
            if spin_ms:
                torch.cuda._sleep(round(spin_ms * CYCLES_PER_MS))
            out = task.net(x)
            disturb(number)
            loss = task.loss(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    gc.enable()
    return {slow.step: slow for slow in found}


def draw(each: int, what: tuple[Any, ...]) -> dict[int, Any]:
    """Draws the steps in which something happens, and what."""
    number, steps = 60, {}
    for one in random.sample(what * each, len(what) * each):
        number += random.randint(*GAP)
        steps[number] = one
    return steps


def elsewhere(found: Found, steps: dict[int, Any]) -> dict[str, int]:
    """Returns how many other steps were slow, by their largest cause."""
    return dict(Counter(main_kind(slow) for number, slow in found.items() if number not in steps))


def collections(spin_ms: float, each: int) -> dict[str, Any]:
    """Holds up the host by collections; returns what was said, and what was so."""
    steps = draw(each, DELAYS_MS)
    true: dict[int, tuple[float, Any, Any]] = {}

    def disturb(number: int) -> None:
        if number in steps:
            before, after = (torch.Event(device="cuda", enable_timing=True) for _ in range(2))
            before.record()
            Ballast(steps[number])
            begin = time.perf_counter()
            gc.collect(0)
            host_ms = (time.perf_counter() - begin) * 1e3
            after.record()
            true[number] = host_ms, before, after

    found = train(spin_ms, disturb, max(steps) + 20)
    torch.cuda.synchronize()
    rows = {}
    for delay in DELAYS_MS:
        host, idle, said, named = [], [], [], 0
        for number in (number for number, one in steps.items() if one == delay):
            host_ms, before, after = true[number]
            host.append(host_ms)
            idle.append(before.elapsed_time(after))
            causes = found[number].causes if number in found else ()
            said.append(
                sum(cause.exposed_ms for cause in causes if cause.kind == "garbage_collection")
            )
            named += number in found
        errors = [abs(a - b) for a, b in zip(idle, said, strict=True)]
        rows[f"{delay:g} ms"] = {
            "n": len(host),
            "slow": named,
            "host_ms": round(statistics.median(host), 3),
            "idle_ms": round(statistics.median(idle), 3),
            "exposed_ms": round(statistics.median(said), 3),
            "error_ms": {
                "median": round(statistics.median(errors), 3),
                "p95": round(statistics.quantiles(errors, n=20)[-1], 3),
                "most": round(max(errors), 3),
            },
        }
    usual = statistics.median(slow.baseline_ms for slow in found.values())
    return {"baseline_ms": round(usual, 2), "delays": rows, "elsewhere": elsewhere(found, steps)}


def memory(spin_ms: float, each: int) -> dict[str, Any]:
    """Gives memory back in some steps, and takes it again; returns what was said of these."""
    steps = draw(each, ("empty_cache",))

    def disturb(number: int) -> None:
        if number in steps:
            spare = torch.empty(2**32, dtype=torch.uint8, device="cuda")
            del spare
            torch.cuda.empty_cache()

    found = train(spin_ms, disturb, max(steps) + 20)
    said = [main_kind(found[number]) if number in found else "not slow" for number in steps]
    details = {cause.detail for slow in found.values() for cause in slow.causes}
    return {
        "n": each,
        "largest cause": {kind: said.count(kind) for kind in sorted({*said})},
        "details": sorted(details)[:5],
        "elsewhere": elsewhere(found, steps),
    }


def look_away(timer: GPUPhaseHooks) -> None:
    """Lets a timer not ask why steps are slow."""
    analyzer: Any = timer._session.analyzer
    analyzer.remove()
    analyzer.steps_read = lambda *_: []


def cost_us(rounds: int) -> dict[str, float]:
    """Returns what a step adds, in which nothing happens (in microseconds)."""
    slow = [0]

    def step_us(way: str) -> float:
        net = EmptyNet()
        optimizer = NoUpdate(net)
        timer = GPUPhaseHooks(net, optimizer, _clock=new_clock(cuda=True))
        tool = attached(timer)
        if way == "looks away":
            look_away(timer)
        train_empty(net, optimizer, tool, SETTLE)
        begin = time.perf_counter()
        train_empty(net, optimizer, tool, STEPS)
        us = (time.perf_counter() - begin) / STEPS * 1e6
        tool.remove()
        slow.append(len(timer.slow_steps(1_000)))
        return us

    with no_backward():
        turns = in_rounds(["looks", "looks away"], rounds)
        times = by_way(turns, [step_us(way) for way in turns])
    differences = [a - b for a, b in zip(times["looks"], times["looks away"], strict=True)]
    return {
        "looks": round(statistics.median(times["looks"]), 2),
        "looks away": round(statistics.median(times["looks away"]), 2),
        "difference": round(statistics.median(differences), 2),
        "error": round(statistics.stdev(differences) / len(differences) ** 0.5, 2),
        "slow steps in 1000": round(sum(slow) / rounds, 1),
    }


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--each", type=int, default=50, help="delays of each length")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    random.seed(0)
    logging.getLogger("lightning_gputime").setLevel(
        logging.ERROR
    )  # The empty step has no backward.
    results = {
        "collections": {
            name: collections(spin_ms, arguments.each)
            for name, spin_ms in (("never ahead", 0.0), ("30 ms of work more", 30.0))
        },
        "memory taken and given back": memory(0.0, arguments.each),
        "cost_us": cost_us(arguments.rounds),
    }
    print(json.dumps(results, indent=2))
    save(arguments.out, {**environment(), **results})
