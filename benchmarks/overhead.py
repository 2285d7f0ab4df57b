"""Measure the time that timing adds to a step in Lightning, for several tools.

Each tool trains in a process of its own. The processes take turns of 50 steps in random order, and
all wait while one trains, so that changes of the machine's speed affect all tools alike. Two
processes train without a timer; the difference between them is the noise. A tool that is not
installed is left out.

    python benchmarks/overhead.py --out benchmarks/results/overhead.json
    python benchmarks/overhead.py --plot examples/images/overhead.png   # needs no GPU
"""

import importlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from models import bare_trainer, be_quiet, load
from record import environment, new_parser, save

from lightning_gputime import GPUPhaseTimer

ROUNDS = {"gpt12": 12, "resnet50": 8}
STEPS, WARMUP = 50, 6  # Steps per turn, and turns before the measurement.
NONE, AGAIN, TRACEML = "no timer", "no timer, again", "TraceML"
RESULTS = Path(__file__).parent / "results" / "overhead.json"
PLOTTED = {"gpt12": ("12-layer GPT", "#0072B2"), "resnet50": ("ResNet-50", "#E69F00")}

Tool = pl.Callback | pl.profilers.Profiler | None
Times = dict[str, list[float]]
"""Milliseconds per step of each way, one value per turn."""


class FourSynchronize(pl.Callback):
    """Timer that reads the host clock after `torch.cuda.synchronize()` at four boundaries."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.times = [time.perf_counter()]

    def _wait(self) -> None:
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def on_before_zero_grad(self, *_: Any) -> None:
        self._wait()

    def on_before_backward(self, *_: Any) -> None:
        self._wait()

    def on_after_backward(self, *_: Any) -> None:
        self._wait()

    def on_train_batch_end(self, *_: Any) -> None:
        self._wait()


def gpuprof() -> Tool:
    integration = importlib.import_module("gpuprof.integrations.lightning")
    both = type("GpuprofCallback", (integration.GpuProfilerCallback, pl.Callback), {})
    callback: Tool = both(run_name="overhead", cuda=True)
    return callback


WAYS: dict[str, Callable[[], Tool]] = {
    NONE: lambda: None,
    AGAIN: lambda: None,
    "GPUPhaseTimer()": partial(GPUPhaseTimer, print_summary=False),
    "GPUPhaseTimer(every_n_steps=10)": partial(
        GPUPhaseTimer, print_summary=False, every_n_steps=10
    ),
    "Lightning SimpleProfiler": pl.profilers.SimpleProfiler,
    "Lightning ThroughputMonitor": lambda: pl.callbacks.ThroughputMonitor(
        batch_size_fn=lambda batch: len(batch[0])
    ),
    "four synchronize": FourSynchronize,
    TRACEML: lambda: None,  # `traceml run` attaches it.
    "gpuprof": gpuprof,
}


# The process of a tool


class Turns:
    """Loader of a batch. Before each `STEPS` batches it waits for its turn.

    It sends the seconds of each turn, until the device has finished the last step.
    """

    def __init__(self, batch: Any, connection: Connection, tool: Tool) -> None:
        self._batch, self._connection, self._tool = batch, connection, tool

    def __iter__(self) -> Iterator[Any]:
        while True:
            tool = self._tool
            with tool.paused() if isinstance(tool, GPUPhaseTimer) else nullcontext():
                torch.cuda.synchronize()
                self._connection.recv()
                start = time.perf_counter()
            for _ in range(STEPS):
                yield self._batch
            torch.cuda.synchronize()
            self._connection.send(time.perf_counter() - start)


def train(model: str, way: str, address: str) -> None:
    """Train until this process is killed."""
    be_quiet()
    torch.set_num_threads(1)
    task, batch = load(model, torch.device("cuda"))
    tool = WAYS[way]()
    profiler = tool if isinstance(tool, pl.profilers.Profiler) else None
    trainer = bare_trainer(
        accelerator="gpu",
        max_epochs=1,
        logger=pl.loggers.logger.DummyLogger(),
        callbacks=[tool] if isinstance(tool, pl.Callback) else [],
        profiler=profiler,
    )
    with Client(address) as connection:
        connection.send(way)
        trainer.fit(task, Turns(batch, connection, tool))


# The process that gives the turns


def measure(model: str, rounds: int) -> Times:
    times: Times = {way: [] for way in WAYS}
    with TemporaryDirectory() as folder, Listener(f"{folder}/turns") as listener:
        processes: list[subprocess.Popen[bytes]] = []
        for way in WAYS:
            arguments = ["--way", way, model, f"{folder}/turns"]
            command = [sys.executable, __file__, *arguments]
            if way == TRACEML:
                launcher = ["-m", "traceml_ai.launcher.cli", "run", __file__, "--args"]
                command[1:2] = launcher
            output = (Path(folder) / f"{len(processes)}.log").open("w")
            processes.append(
                subprocess.Popen(
                    command, cwd=folder, stdout=output, stderr=output, start_new_session=True
                )
            )
        connections: dict[str, Connection] = {}
        deadline = time.monotonic() + 120
        while len(connections) < len(WAYS) and time.monotonic() < deadline:
            signal.alarm(60)  # A tool that is not installed never connects.
            with suppress(TimeoutError):
                connection = listener.accept()
                connections[connection.recv()] = connection
            signal.alarm(0)
        for _ in range(WARMUP + rounds):
            for way in random.sample([*connections], len(connections)):
                connections[way].send(True)
                times[way].append(connections[way].recv() / STEPS * 1000)
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return {way: each[WARMUP:] for way, each in times.items() if each}


def _stop_waiting(*_: object) -> None:
    raise TimeoutError


def summarize(times: Times) -> dict[str, dict[str, float]]:
    """Return the median ratio of each way to no timer in the same round, and its standard error."""
    rows = {}
    without = [statistics.mean(pair) for pair in zip(times[NONE], times[AGAIN], strict=True)]
    for way, steps_ms in times.items():
        base = times[NONE] if way == AGAIN else without
        ratios = [ms / base_ms for ms, base_ms in zip(steps_ms, base, strict=True)]
        first, ratio, third = statistics.quantiles(ratios, method="inclusive")
        rows[way] = {
            "step_ms": round(statistics.median(steps_ms), 5),
            "ratio": round(ratio, 6),
            # Estimate it from the quartiles, assuming a normal distribution.
            "error": round(0.93 * (third - first) / len(ratios) ** 0.5, 6),
        }
    return rows


def plot(target: Path) -> None:
    """Draw the results as a bar chart."""
    results = json.loads(RESULTS.read_text())
    rows = {model: results["results"][model] for model in PLOTTED}
    ways = [way for way in rows["gpt12"] if way != NONE]
    ways.sort(key=lambda way: max(rows[model][way]["ratio"] for model in PLOTTED))
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    ax = figure.add_subplot()
    for i, (model, (label, colour)) in enumerate(PLOTTED.items()):
        percent = [(rows[model][way]["ratio"] - 1) * 100 for way in ways]
        bars = ax.barh(
            [y + 0.2 - 0.4 * i for y in range(len(ways))],
            percent,
            0.38,
            xerr=[rows[model][way]["error"] * 100 for way in ways],
            error_kw={"lw": 0.8, "ecolor": "0.4"},
            color=colour,
            label=f"{label}, {rows[model][NONE]['step_ms']:.1f} ms",
        )
        ax.bar_label(bars, [f"{value:+.2f} %" for value in percent], padding=3, fontsize=8)
    ax.set_yticks(range(len(ways)), ways)
    for place, way in enumerate(ways):
        if way.startswith("GPUPhaseTimer"):
            ax.axhspan(place - 0.45, place + 0.45, color="#009E73", alpha=0.15, lw=0)
    ax.margins(x=0.12)
    ax.set(xlabel="added time per step (%)", title=f"Cost of timing a step on an {results['gpu']}")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="lower right")
    figure.savefig(target, dpi=120)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=[*ROUNDS], choices=[*ROUNDS])
    parser.add_argument("--rounds", type=int, help="turns of each tool")
    parser.add_argument("--plot", type=Path, help="draw the recorded results instead")
    arguments = parser.parse_args()
    if arguments.plot:
        mpl.use("agg")
        plot(arguments.plot)
        return
    signal.signal(signal.SIGALRM, _stop_waiting)
    results: dict[str, Any] = {}
    for model in arguments.models:
        results[model] = summarize(measure(model, arguments.rounds or ROUNDS[model]))
        for way, row in results[model].items():
            added, error = (row["ratio"] - 1) * 100, row["error"] * 100
            line = f"{model:9} {way:32} {added:+7.2f} ± {error:.2f} % {row['step_ms']:9.3f} ms"
            print(line, flush=True)
    header = environment("gpu", "torch", "lightning", "host", "command")
    save(arguments.out, header | {"results": results})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--way"]:
        way, model, address = sys.argv[2:]
        train(model, way, address)
    else:
        main()
