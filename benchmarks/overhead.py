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

import argparse
import contextlib
import io
import logging
import multiprocessing
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
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

ROUNDS = {"mlp": 30, "gpt4": 20, "gpt12": 8, "resnet50": 5, "gpt12 compiled": 8}
# In each turn, steps that are not timed, and steps that are timed together: about one read of 25
# finished steps falls into each.
SETTLE, BLOCK = 10, 25

NONE, AGAIN = "no timer", "no timer, again"


def _timer(**options: Any) -> dict[str, Any]:
    return {"callbacks": [GPUPhaseTimer(summary=False, **options)]}


# What each way gives to the Trainer.
IN_LIGHTNING: dict[str, Callable[[], dict[str, Any]]] = {
    NONE: dict,
    AGAIN: dict,
    "callback that does nothing": lambda: {"callbacks": [pl.Callback()]},
    "five events": lambda: {"callbacks": [peers.FiveEvents()]},
    "GPUPhaseTimer()": _timer,
    "GPUPhaseTimer(lag=0)": lambda: _timer(lag=0),
    "GPUPhaseTimer(every_n_steps=10)": lambda: _timer(every_n_steps=10),
    "four synchronize": lambda: {"callbacks": [peers.FourSynchronize()]},
    "Lightning SimpleProfiler": lambda: {"profiler": pl.profilers.SimpleProfiler()},
    "Lightning ThroughputMonitor": lambda: {"callbacks": [peers.throughput_monitor()]},
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


Times = dict[str, list[float]]
"""Of each way the time of a step in each of its turns (in milliseconds)."""

Results = dict[str, dict[str, Any]]


class Stopwatch:
    """Times blocks of steps on the device, which every way of timing gets alike."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._events: list[torch.Event] = []

    def press(self) -> None:
        """Starts a block, or ends it."""
        self._events.append(torch.Event(device="cuda", enable_timing=True))
        self._events[-1].record()
        done, is_open = divmod(len(self._events), 2)
        if not is_open:
            print(f"\r{done} of {self._blocks} turns ", end="", file=sys.stderr, flush=True)

    def times(self) -> list[float]:
        """Returns the time of a step in each block (in milliseconds)."""
        self._events[-1].synchronize()
        starts, ends = self._events[::2], self._events[1::2]
        return [start.elapsed_time(end) / BLOCK for start, end in zip(starts, ends, strict=True)]


class Turns(pl.Callback):
    """Lets ways of timing take turns in one Lightning loop."""

    def __init__(self, ways: Sequence[str]) -> None:
        self.stopwatch = Stopwatch(len(ways))
        self._ways = iter(ways)
        self._callbacks: list[pl.Callback] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        place = batch_idx % (SETTLE + BLOCK)
        if place == SETTLE:
            self.stopwatch.press()
        elif place == 0:
            if batch_idx > 0:
                self.stopwatch.press()
                self._leave(trainer, pl_module)
            way = next(self._ways, None)
            if way is not None:
                self._join(trainer, pl_module, **IN_LIGHTNING[way]())

    # Any: `callbacks` and `profiler` of a Trainer have no hint.
    def _join(
        self,
        trainer: Any,
        pl_module: pl.LightningModule,
        callbacks: Sequence[pl.Callback] = (),
        profiler: pl.profilers.Profiler | None = None,
    ) -> None:
        self._profiler = trainer.profiler
        trainer.profiler = profiler or trainer.profiler
        self._callbacks = [*callbacks]
        for callback in callbacks:
            callback.setup(trainer, pl_module, "fit")
            callback.on_fit_start(trainer, pl_module)
            callback.on_train_start(trainer, pl_module)
            callback.on_train_epoch_start(trainer, pl_module)
            trainer.callbacks.append(callback)

    def _leave(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        trainer.profiler = self._profiler
        for callback in self._callbacks:
            trainer.callbacks.remove(callback)
            callback.on_train_epoch_end(trainer, pl_module)
            callback.on_train_end(trainer, pl_module)
            callback.on_fit_end(trainer, pl_module)
            callback.teardown(trainer, pl_module, "fit")


def in_lightning(
    task: Task,
    batch: Batch,
    ways: Sequence[str],
    callbacks: Sequence[pl.Callback] = (),
    **options: Any,
) -> Times:
    """Lets ways take their turns in a loop; returns the time of a step in each turn.

    Args:
        task: What is trained.
        batch: With what.
        ways: The turns.
        callbacks: Are there in all turns.
        options: Those of the Trainer.
    """
    turns = Turns(ways)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        logger=pl.loggers.logger.DummyLogger(),
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[turns, *callbacks],
        **options,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(task, Repeat(batch, len(ways) * (SETTLE + BLOCK) + 1))
    return by_way(ways, turns.stopwatch.times())


def in_plain_loop(task: Task, batch: Batch, ways: Sequence[str]) -> Times:
    """As `in_lightning`, in a plain loop."""
    task.cuda()  # A Trainer takes the model back to the CPU when it ends.
    stopwatch = Stopwatch(len(ways))
    for way in ways:
        take_turn(task, batch, way, stopwatch)
    return by_way(ways, stopwatch.times())


def take_turn(task: Task, batch: Batch, way: str, stopwatch: Stopwatch) -> None:
    """Lets one way take its turn in a plain loop."""
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
    for step in range(SETTLE + BLOCK):
        if step == SETTLE:
            stopwatch.press()
        boundary(0)
        out = task.net(x)
        boundary(1)
        loss = nn.functional.cross_entropy(out.flatten(0, -2), y.flatten())
        boundary(2)
        optimizer.zero_grad()
        loss.backward()
        boundary(3)
        optimizer.step()
        end_step()
    stopwatch.press()
    if timer is not None:
        timer.remove()


IN_PLAIN = (
    NONE,
    AGAIN,
    "five events",
    "GPUPhaseHooks()",
    "GPUPhaseHooks(lag=0)",
    "four synchronize",
)


def by_way(ways: Sequence[str], times_ms: Sequence[float]) -> Times:
    """Returns the times of each way, in the order of its turns."""
    found: Times = {}
    for way, ms in zip(ways, times_ms, strict=True):
        found.setdefault(way, []).append(ms)
    return found


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


def is_present(way: str) -> bool:
    """Tells whether the package of a way is installed."""
    try:
        IN_LIGHTNING[way]()
    except ImportError as error:
        print(f"{way} is absent: {error}", flush=True)
        return False
    return True


def together(models: list[str], rounds: int | None, with_peers: bool) -> Iterator[Results]:
    """Measures the ways that leave nothing behind; yields what was found after each model."""
    ways = [way for way in IN_LIGHTNING if with_peers or way not in PEERS]
    present = [way for way in ways if is_present(way)]
    results: Results = {}
    for model in models:
        n, (task, batch) = rounds or ROUNDS[model], prepared(model)
        absent = {way: "absent" for way in ways if way not in present}
        results[model] = {
            "plain": summarize(in_plain_loop(task, batch, in_rounds(IN_PLAIN, n))),
            "lightning": summarize(in_lightning(task, batch, in_rounds(present, n))) | absent,
        }
        print(f"{model} is measured", flush=True)
        yield results


def in_rounds(ways: Sequence[str], rounds: int) -> list[str]:
    """Returns `ways` in as many rounds, each in a random order of its own."""
    return [way for _ in range(rounds) for way in random.sample(ways, len(ways))]


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
    found = {
        model: in_lightning(*task, [way for _ in range(rounds) for way in (NONE, AGAIN)])
        for model, task in tasks.items()
    }
    for model, task in tasks.items():
        try:
            # All turns are its own.
            found[model][way] = in_lightning(*task, [NONE] * rounds, **ALONE[way]())[NONE]
        except ImportError as error:
            print(f"{way} is absent: {error}", flush=True)
    return {model: summarize(times) for model, times in found.items()}


def be_quiet() -> None:
    """Silences what the Trainer says."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


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


def host() -> str:
    """Returns the name of the processor: it decides where steps are bound by launches."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")


def described(results: Results, start: float) -> dict[str, Any]:
    """Returns what was found, and on what."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "host": host(),
        "command": command(),
        "seconds": round(time.monotonic() - start),
        "results": results,
    }


def main() -> None:
    """Measures, saves after each model, and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(ROUNDS), choices=list(ROUNDS))
    parser.add_argument("--rounds", type=int, help="how many turns each way has")
    parser.add_argument("--no-peers", action="store_true", help="leave other packages out")
    parser.add_argument("--alone", action="store_true", help="measure those that leave something")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    be_quiet()
    models, rounds, start = arguments.models, arguments.rounds, time.monotonic()
    results: Results = {}
    for results in (
        each_alone(models, rounds or 4)
        if arguments.alone
        else together(models, rounds, not arguments.no_peers)
    ):
        save(arguments.out, described(results, start))
    print_table(results)


if __name__ == "__main__":
    main()
