"""Measures what timing a step costs: added time per step, against no timer at all.

All ways of timing take turns in one Lightning loop, and in a plain one: each joins for some steps,
in an order that is drawn anew in every round, so that all meet the same moods of the host. "no
timer" has two turns in each round; the difference of the two is the noise. Packages that are not
installed are reported as absent.

What leaves something in the process when it ends (patches, threads, CUPTI) would slow whatever runs
after it: with `--alone` each of these runs in a process of its own, after runs without a timer.

    python benchmarks/overhead.py --out benchmarks/results/overhead.json
    python benchmarks/overhead.py --alone --out benchmarks/results/overhead_alone.json
"""

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import turns
from loops import AGAIN, NONE, Times, be_quiet, in_rounds
from models import Batch, Task, load
from record import environment, new_parser, save
from turns import in_lightning

ROUNDS = {"mlp": 30, "gpt4": 20, "gpt12": 8, "resnet50": 5, "gpt12 compiled": 8}

Results = dict[str, dict[str, Any]]


def prepared(model: str) -> tuple[Task, Batch]:
    """Returns a model, compiled if its name says so, and its batch."""
    name, _, compiled = model.partition(" ")
    task, batch = load(name, torch.device("cuda"))
    if compiled:
        task.net.compile()
    in_lightning(task, batch, [NONE])
    return task, batch


def summarize(times: Times) -> dict[str, Any]:
    """Returns the times of each way, and what it adds.

    A way's time is compared with that of no timer in the same round, and of these ratios the median
    is taken; `error` is its standard error, from the quartiles of the ratios.
    """
    rows: dict[str, Any] = {}
    without = [statistics.mean(both) for both in zip(times[NONE], times[AGAIN], strict=True)]
    for way, steps_ms in times.items():
        base = times[NONE] if way == AGAIN else without
        ratios = [ms / base_ms for ms, base_ms in zip(steps_ms, base, strict=True)]
        first, ratio, third = statistics.quantiles(ratios, method="inclusive")
        quartiles_ms = statistics.quantiles(steps_ms, method="inclusive")
        rows[way] = {
            "turns": len(steps_ms),
            "quartiles_ms": [round(ms, 5) for ms in quartiles_ms],
            "ratio": round(ratio, 6),
            # As for a normal distribution.
            "error": round(0.93 * (third - first) / len(ratios) ** 0.5, 6),
        }
    return rows


def together(models: list[str], rounds: int | None, with_peers: bool) -> Iterator[Results]:
    """Measures the ways that leave nothing behind; yields what was found after each model."""
    ways = [*turns.IN_LIGHTNING, *(turns.PEERS if with_peers else ())]
    present = [way for way in ways if turns.is_present(way)]
    results: Results = {}
    for model in models:
        n, (task, batch) = rounds or ROUNDS[model], prepared(model)
        absent = {way: "absent" for way in ways if way not in present}
        results[model] = {
            "plain": summarize(turns.in_plain_loop(task, batch, in_rounds([*turns.IN_PLAIN], n))),
            "lightning": summarize(in_lightning(task, batch, in_rounds(present, n))) | absent,
        }
        print(f"{model} is measured", flush=True)
        yield results


def each_alone(models: list[str], rounds: int) -> Iterator[Results]:
    """Measures each of the others in a process of its own; yields what was found after each."""
    context = multiprocessing.get_context("spawn")
    results: Results = {model: {} for model in models}
    for way in turns.ALONE:
        with ProcessPoolExecutor(1, context) as executor:
            rows = executor.submit(alone, way, models, rounds).result()
        for model in models:
            results[model][f"lightning, {way}"] = rows[model]
        yield results


def alone(way: str, models: list[str], rounds: int) -> dict[str, Any]:
    """Measures one way on every model, after runs without a timer on all of them."""
    be_quiet()
    tasks = {model: prepared(model) for model in models}
    found = {
        model: in_lightning(*task, [way for _ in range(rounds) for way in (NONE, AGAIN)])
        for model, task in tasks.items()
    }
    for model, task in tasks.items():
        try:
            # All turns are its own.
            found[model][way] = in_lightning(*task, [NONE] * rounds, turns.new_tool(way))[NONE]
        except ImportError as error:
            print(f"{way} is absent: {error}", flush=True)
    return {model: summarize(times) for model, times in found.items()}


def print_table(results: Results) -> None:
    """Prints what each way adds, and its median."""
    for model, loops in results.items():
        for loop, rows in loops.items():
            for way, row in sorted(rows.items()):
                text = row
                if row != "absent":
                    added, error = (row["ratio"] - 1) * 100, row["error"] * 100
                    text = f"{added:+7.2f} ± {error:.2f} % {row['quartiles_ms'][1]:9.3f} ms"
                print(f"{model:15} {loop:9} {way:32} {text}", flush=True)


def main(
    models: list[str], rounds: int | None, no_peers: bool, alone: bool, out: Path | None
) -> None:
    """Measures, saves after each model, and prints what was found."""
    start = time.monotonic()
    results: Results = {}
    for results in (
        each_alone(models, rounds or 4) if alone else together(models, rounds, not no_peers)
    ):
        header = environment("gpu", "torch", "lightning", "host", "command")
        seconds = round(time.monotonic() - start)
        save(out, header | {"seconds": seconds, "results": results})
    print_table(results)


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(ROUNDS), choices=list(ROUNDS))
    parser.add_argument("--rounds", type=int, help="how many turns each way has")
    parser.add_argument("--no-peers", action="store_true", help="leave other packages out")
    parser.add_argument("--alone", action="store_true", help="measure those that leave something")
    be_quiet()
    main(**vars(parser.parse_args()))
