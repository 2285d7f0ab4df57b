"""Measures what timing a step costs the host.

Without `--cuda` the events do nothing, so that what is left is Python's own cost; with it they are
those of the GPU, in a stream that is empty, as it is where training is bound by launches. The floor
is five bare events, recorded in one step and read in the next. The times are those of a step that
does next to nothing, in a warm cache. The counts are exact: how many functions of the package a
step calls.

    python benchmarks/host_cost.py
    python benchmarks/host_cost.py --callgrind        # the processor's instructions, too
    python benchmarks/host_cost.py --cuda --out benchmarks/results/host_cost_cuda.json
    python benchmarks/host_cost.py --cuda --against ../before   # two source trees, in turns
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from callgrind import count_instructions
from empty_step import new_clock, no_backward
from host_counts import count_all
from host_ways import (
    FLOOR,
    HOOKS,
    IN_LIGHTNING,
    IN_PLAIN,
    TIMER,
    Stopwatch,
    in_lightning,
    in_plain_loop,
)
from loops import NONE, be_quiet, by_way, in_rounds
from record import environment, new_parser, save

STEPS = 1000


def added(ways: Iterable[str], rounds: int, step_us: Callable[[str], float]) -> dict[str, float]:
    """Returns the first quartile of each way less that of none, when they take turns."""
    turns = in_rounds([*ways], rounds)
    found = by_way(turns, [step_us(way) for way in turns])
    quiet = {way: statistics.quantiles(found[way])[0] for way in ways}
    base = quiet.pop(NONE)
    return {way: round(us - base, 2) for way, us in quiet.items()}


def time_hooks(
    rounds: int, cuda: bool, modules: int = 10, ways: Iterable[str] = IN_PLAIN
) -> dict[str, float]:
    """Returns the added time a step of each way in a plain loop (in microseconds)."""

    def step_us(way: str) -> float:
        watch = Stopwatch()
        in_plain_loop(way, new_clock(cuda), watch, STEPS, modules)
        return watch.seconds / STEPS * 1e6

    return added(ways, rounds, step_us)


def time_callbacks(rounds: int, cuda: bool) -> dict[str, float]:
    """Returns the added time a step of each way in Lightning (in microseconds)."""

    def step_us(way: str) -> float:
        watch = Stopwatch()
        in_lightning(way, new_clock(cuda), watch, STEPS)
        return watch.seconds / STEPS * 1e6

    return added(IN_LIGHTNING, rounds, step_us)


def time_both(rounds: int, cuda: bool) -> dict[str, dict[str, float]]:
    """Returns the added times of both front ends (in microseconds)."""
    return {"plain": time_hooks(rounds, cuda), "lightning": time_callbacks(rounds, cuda)}


def measure(rounds: int, cuda: bool, callgrind: bool) -> dict[str, Any]:
    """Measures everything; returns what was found."""
    both = time_both(rounds, cuda)
    plain, lightning = both["plain"], both["lightning"]
    results: dict[str, Any] = {
        "added_us": both,
        "ratio_to_floor": {
            "plain": round(plain[HOOKS] / plain[FLOOR], 2),
            "lightning": round(lightning[TIMER] / lightning[FLOOR], 2),
        },
        "by_modules_us": {
            modules: time_hooks(rounds, cuda, modules, [NONE, HOOKS])[HOOKS]
            for modules in (10, 100, 1000)
        },
    }
    if not cuda:
        results["counts"] = count_all()
    if callgrind:
        results["added_native_instructions"] = count_instructions()
    return results


def compare_trees(other: Path, rounds: int, turns: int, cuda: bool) -> dict[str, Any]:
    """Measures this source tree and another one in turns, each in processes of its own.

    Args:
        other: The root of the other tree, which has its `lightning_gputime`.
        rounds: How many rounds a process measures.
        turns: How many processes there are of each tree.
        cuda: Whether to take the events of the GPU.

    Returns:
        Of each tree what each process found.
    """
    trees = {"this": Path(__file__).parent.parent, "other": other.resolve()}
    found: dict[str, list[Any]] = {name: [] for name in trees}
    for turn in range(turns):
        # ABBA: so a drift of the machine falls on both.
        for name in sorted(trees, reverse=turn % 2 == 1):
            command = [sys.executable, __file__, "--only-times", "--rounds", str(rounds)]
            command += ["--cuda"] * cuda
            # Before what is installed: each process imports the tree that it measures.
            path = {"PYTHONPATH": str(trees[name])}
            ran = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | path
            )
            found[name].append(json.loads(ran.stdout))
    return found


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cuda", action="store_true", help="take the events of the GPU")
    parser.add_argument("--callgrind", action="store_true", help="count the processor's, too")
    parser.add_argument("--only-times", action="store_true", help="measure the added times alone")
    parser.add_argument("--against", type=Path, help="another source tree, measured in turns")
    parser.add_argument("--turns", type=int, default=2, help="processes of each tree")
    arguments = parser.parse_args()
    be_quiet()
    rounds, cuda = arguments.rounds, arguments.cuda
    if arguments.against is not None:
        results = compare_trees(arguments.against, rounds, arguments.turns, cuda)
    elif arguments.only_times:
        with no_backward():
            results = time_both(rounds, cuda)
    else:
        with no_backward():
            results = measure(rounds, cuda, arguments.callgrind)
    print(json.dumps(results, indent=2))
    events = environment("gpu")["gpu"] if cuda else "none"
    header = environment("machine", "python", "torch", "command")
    save(arguments.out, {"events": events, **header, **results})
