"""Measures what timing a step costs: added time per step, against no timer at all.

All ways of timing run in one process, interleaved in random order over several rounds, in a
Lightning loop and in a plain one. "no timer" runs twice; the difference of the two is the noise.
Packages that are not installed are reported as absent.

What leaves something in the process when it ends (patches, threads, CUPTI) would slow whatever runs
after it: with `--alone` each of these runs in a process of its own, after runs without a timer.

    python benchmarks/overhead.py --out benchmarks/results/overhead.json
    python benchmarks/overhead.py --alone --out benchmarks/results/overhead_alone.json
"""

import argparse
import contextlib
import io
import logging
import multiprocessing
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import peers
import torch
from models import Batch, Repeat, Task, load
from record import command, save
from torch import nn

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer

STEPS = {"mlp": 200, "gpt4": 100, "gpt12": 75, "resnet50": 50, "gpt12 compiled": 50}
WARMUP = 10
# Steps that are timed together: ours reads the finished steps 25 at a time.
BLOCK = 25

NONE, AGAIN = "no timer", "no timer, again"


def _timer(**options: Any) -> dict[str, Any]:
    return {"callbacks": [GPUPhaseTimer(summary=False, **options)]}


# What each way passes to the Trainer.
IN_LIGHTNING: dict[str, Callable[[], dict[str, Any]]] = {
    NONE: dict,
    AGAIN: dict,
    "callback that does nothing": lambda: {"callbacks": [pl.Callback()]},
    "five events": lambda: {"callbacks": [peers.FiveEvents()]},
    "GPUPhaseTimer()": _timer,
    "GPUPhaseTimer(lag=0)": lambda: _timer(lag=0),
    "GPUPhaseTimer(every_n_steps=10)": lambda: _timer(every_n_steps=10),
    "four synchronize": lambda: {"callbacks": [peers.FourSynchronize()]},
    "Lightning SimpleProfiler": lambda: {"profiler": "simple"},
    "Lightning ThroughputMonitor": lambda: {
        "callbacks": [peers.throughput_monitor()],
        "logger": pl.loggers.logger.DummyLogger(),
    },
    "TorchTNT Timer(cuda_sync=True)": lambda: {"callbacks": [peers.TorchTNT()]},
    "DeepSpeed timers": lambda: {"callbacks": [peers.DeepSpeed()]},
}
ALONE: dict[str, Callable[[], dict[str, Any]]] = {
    "Lightning PyTorchProfiler": lambda: {"profiler": "pytorch"},
    "TraceML": lambda: {"callbacks": [peers.traceml()]},
    "Alloc": lambda: {"callbacks": [peers.alloc()]},
}
PEERS = (
    "Lightning SimpleProfiler",
    "Lightning ThroughputMonitor",
    "TorchTNT Timer(cuda_sync=True)",
    "DeepSpeed timers",
)


class Blocks:
    """Times blocks of steps: an event before each, which every way of timing gets alike."""

    def __init__(self) -> None:
        self._events: list[torch.Event] = []

    def start_step(self, step: int) -> None:
        """Is called at the start of each step."""
        if step >= WARMUP and (step - WARMUP) % BLOCK == 0:
            self._events.append(torch.Event(device="cuda", enable_timing=True))
            self._events[-1].record()

    def times(self) -> list[float]:
        """Returns the time of a step in each block (in milliseconds)."""
        self._events[-1].synchronize()
        return [start.elapsed_time(end) / BLOCK for start, end in pairwise(self._events)]


class Stopwatch(pl.Callback):
    """Times blocks of steps in Lightning."""

    def __init__(self) -> None:
        self.blocks = Blocks()

    def on_train_batch_start(self, *args: Any) -> None:
        self.blocks.start_step(args[-1])


def fit(task: Task, batch: Batch, options: dict[str, Any], steps: int) -> list[float]:
    """Returns the time of a step in Lightning, in each block of steps (in milliseconds)."""
    stopwatch = Stopwatch()
    callbacks = [stopwatch, *options.pop("callbacks", [])]
    trainer = pl.Trainer(
        **{
            "accelerator": "gpu",
            "devices": 1,
            "precision": "bf16-mixed",
            "max_epochs": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_checkpointing": False,
            "enable_model_summary": False,
            "callbacks": callbacks,
            **options,
        }
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(task, Repeat(batch, WARMUP + steps + 1))
    return stopwatch.blocks.times()


def plain(task: Task, batch: Batch, way: str, steps: int) -> list[float]:
    """Returns the time of a step in a plain loop, in each block of steps (in milliseconds)."""
    task.cuda()  # A Trainer takes the model back to the CPU when it ends.
    optimizer = task.configure_optimizers()
    x, y = batch
    boundary: Callable[[int], None] = lambda i: None  # noqa: E731
    end_step: Callable[[], None] = lambda: None  # noqa: E731
    timer = None
    if way == "five events":
        floor = peers.FiveEvents()
        boundary = floor.record

        def end_step() -> None:
            floor.record(4)
            floor.read()

    elif way == "four synchronize":
        four = peers.FourSynchronize()

        def boundary(i: int) -> None:
            four.synchronize() if i else four.on_train_batch_start()

        end_step = four.synchronize
    elif way.startswith("GPUPhaseHooks"):
        timer = GPUPhaseHooks(task.net, optimizer, lag=0 if "lag=0" in way else 1).attach()
        end_step = timer.step
    blocks = Blocks()
    for step in range(WARMUP + steps + 1):
        blocks.start_step(step)
        boundary(0)
        with torch.autocast("cuda", torch.bfloat16):
            out = task.net(x)
            boundary(1)
            loss = nn.functional.cross_entropy(out.flatten(0, -2), y.flatten())
        boundary(2)
        optimizer.zero_grad()
        loss.backward()
        boundary(3)
        optimizer.step()
        end_step()
    if timer is not None:
        timer.remove()
    return blocks.times()


IN_PLAIN = (
    NONE,
    AGAIN,
    "five events",
    "GPUPhaseHooks()",
    "GPUPhaseHooks(lag=0)",
    "four synchronize",
)


Times = dict[str, list[float]]
Results = dict[str, dict[str, Any]]


def prepared(model: str) -> tuple[Task, Batch]:
    """Returns a model, compiled if its name says so, and its batch."""
    name, _, compiled = model.partition(" ")
    task, batch = load(name, torch.device("cuda"))
    if compiled:
        task.net.compile()
    fit(task, batch, {}, STEPS[model])
    return task, batch


def measure(
    model: str, task: Task, batch: Batch, runs: list[tuple[str, str]], rounds: int
) -> dict[str, Times]:
    """Returns the time per step in each block of all rounds (in milliseconds), for both loops."""
    steps = STEPS[model]
    found: dict[str, Times] = {}
    for i in range(rounds):
        for loop, way in random.sample(runs, len(runs)):
            times = found.setdefault(loop, {}).setdefault(way, [])
            if loop == "plain":
                times += plain(task, batch, way, steps)
                continue
            try:
                options = {**IN_LIGHTNING, **ALONE}[way]()
            except ImportError as error:
                print(f"{way} is absent: {error}", flush=True)
                continue
            times += fit(task, batch, options, steps)
        print(f"{model}: round {i + 1} of {rounds}", flush=True)
    return found


def summarize(times: dict[str, list[float]]) -> dict[str, Any]:
    """Returns quartiles of each way, and the ratio of its first one to that without a timer.

    A shared host slows whole blocks at random. The first quartile is that of the quiet blocks.
    """
    rows: dict[str, Any] = {}
    for way, blocks in times.items():
        if not blocks:
            rows[way] = "absent"
            continue
        base = times[NONE] if way == AGAIN else times[NONE] + times[AGAIN]
        quartiles = statistics.quantiles(blocks)
        rows[way] = {
            "quartiles_ms": [round(ms, 5) for ms in quartiles],
            "ratio": round(quartiles[0] / statistics.quantiles(base)[0], 6),
        }
    return rows


def together(models: list[str], rounds: int, with_peers: bool) -> Iterator[Results]:
    """Measures the ways that leave nothing behind; yields what was found after each model."""
    tasks = {model: prepared(model) for model in models}
    runs = [("plain", way) for way in IN_PLAIN]
    runs += [("lightning", way) for way in IN_LIGHTNING if with_peers or way not in PEERS]
    results: Results = {}
    for model, (task, batch) in tasks.items():
        found = measure(model, task, batch, runs, rounds)
        results[model] = {loop: summarize(times) for loop, times in found.items()}
        yield results


def each_alone(models: list[str], rounds: int) -> Iterator[Results]:
    """Measures each of the others in a process of its own; yields what was found after each."""
    context = multiprocessing.get_context("spawn")
    results: Results = {model: {} for model in models}
    for way in ALONE:
        with ProcessPoolExecutor(1, context) as executor:
            rows = executor.submit(alone, way, models, rounds).result()
        for model in models:
            results[model][f"lightning, {way}"] = rows[model]
        yield results


def alone(way: str, models: list[str], rounds: int) -> dict[str, Any]:
    """Measures one way on every model, after runs without a timer on all of them."""
    be_quiet()
    tasks = {model: prepared(model) for model in models}
    found: dict[str, Times] = {}
    for ways in ((NONE, AGAIN), (way,)):
        runs = [("lightning", one) for one in ways]
        for model, (task, batch) in tasks.items():
            times = measure(model, task, batch, runs, rounds)
            found.setdefault(model, {}).update(times["lightning"])
    return {model: summarize(times) for model, times in found.items()}


def be_quiet() -> None:
    """Silences what the Trainer says."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def print_table(results: Results) -> None:
    """Prints the ratio and the quartiles of each way."""
    for model, loops in results.items():
        for loop, rows in loops.items():
            for way, row in sorted(rows.items()):
                text = row
                if row != "absent":
                    first, second, third = row["quartiles_ms"]
                    text = (
                        f"{(row['ratio'] - 1) * 100:+7.2f} % {first:9.3f} {second:.3f} {third:.3f}"
                    )
                print(f"{model:15} {loop:9} {way:32} {text}", flush=True)


def host() -> str:
    """Returns the name of the processor: it decides where steps are bound by launches."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")


def described(results: Results, rounds: int, start: float) -> dict[str, Any]:
    """Returns what was found, and on what."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "host": host(),
        "command": command(),
        "rounds": rounds,
        "steps": {model: STEPS[model] for model in results},
        "seconds": round(time.monotonic() - start),
        "results": results,
    }


def main() -> None:
    """Measures, saves after each model, and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peers", action="store_true", help="leave other packages out")
    parser.add_argument("--alone", action="store_true", help="measure those that leave something")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    be_quiet()
    models, rounds, start = arguments.models, arguments.rounds, time.monotonic()
    results: Results = {}
    for results in (
        each_alone(models, rounds)
        if arguments.alone
        else together(models, rounds, not arguments.no_peers)
    ):
        save(arguments.out, described(results, rounds, start))
    print_table(results)


if __name__ == "__main__":
    main()
