"""Measure the time that timing adds to a step, for several tools in Lightning.

All ways of timing alternate in one training loop. Each is attached for some steps per round, in
random order, so that changes of the host's speed affect all ways alike. "no timer" runs twice
per round, and the difference is the noise. The measured steps lie between two examined steps, which
together add at most 0.2 % to a long run.

    python benchmarks/overhead.py --out benchmarks/results/overhead.json
    python benchmarks/overhead.py --plot examples/images/overhead.png   # needs no GPU
"""

import contextlib
import io
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from models import Batch, Repeat, Task, bare_trainer, be_quiet, load
from record import environment, new_parser, save

from lightning_gputime import GPUPhaseTimer

ROUNDS = {"mlp": 30, "gpt12": 8, "resnet50": 5}
NONE, AGAIN = "no timer", "no timer, again"
# Steps to skip at the start of a turn, and steps to time as a block. Steps 77 to 121 are never
# examined.
SETTLE, BLOCK = 90, 30
RESULTS = Path(__file__).parent / "results" / "overhead.json"
# The plot omits the MLP, because it is host-bound and its noise exceeds most bars.
PLOTTED = {"gpt12": ("12-layer GPT", "#0072B2"), "resnet50": ("ResNet-50", "#E69F00")}

Tool = pl.Callback | pl.profilers.Profiler | None
Times = dict[str, list[float]]
"""Milliseconds per step of each way, one value per turn."""


class FourSynchronize(pl.Callback):
    """Timer that reads the host clock after `torch.cuda.synchronize()` at four boundaries."""

    def __init__(self) -> None:
        self.times: list[float] = []

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
}


class Turns(pl.Callback):
    """Callback that alternates ways of timing within a training loop."""

    def __init__(self, ways: Sequence[str]) -> None:
        self._ways = iter(ways)
        self._events: list[torch.Event] = []
        self._callbacks: list[pl.Callback] = []

    def on_train_batch_start(
        self, trainer: Any, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        place = batch_idx % (SETTLE + BLOCK)
        if place == SETTLE:
            self._record()
        elif place == 0:
            if batch_idx:
                self._record()
                self._detach(trainer, pl_module)
            if (way := next(self._ways, None)) is not None:
                self._attach(trainer, pl_module, WAYS[way]())

    def _record(self) -> None:
        self._events.append(torch.Event(device="cuda", enable_timing=True))
        self._events[-1].record()

    def _attach(self, trainer: Any, pl_module: pl.LightningModule, tool: Tool) -> None:
        self._profiler = trainer.profiler
        if isinstance(tool, pl.profilers.Profiler):
            trainer.profiler = tool
        elif tool is not None:
            self._callbacks = [tool]
            tool.setup(trainer, pl_module, "fit")
            tool.on_fit_start(trainer, pl_module)
            tool.on_train_start(trainer, pl_module)
            tool.on_train_epoch_start(trainer, pl_module)
            trainer.callbacks.append(tool)

    def _detach(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        trainer.profiler = self._profiler
        for callback in self._callbacks:
            trainer.callbacks.remove(callback)
            callback.on_train_epoch_end(trainer, pl_module)
            callback.on_train_end(trainer, pl_module)
            callback.on_fit_end(trainer, pl_module)
            callback.teardown(trainer, pl_module, "fit")
        self._callbacks = []

    def step_ms(self) -> list[float]:
        self._events[-1].synchronize()
        starts, ends = self._events[::2], self._events[1::2]
        return [start.elapsed_time(end) / BLOCK for start, end in zip(starts, ends, strict=True)]


def train(task: Task, batch: Batch, ways: Sequence[str]) -> Times:
    """Return the step times of each way in a fit."""
    turns = Turns(ways)
    trainer = bare_trainer(
        accelerator="gpu",
        max_epochs=1,
        logger=pl.loggers.logger.DummyLogger(),
        callbacks=[turns],
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(task, Repeat(batch, len(ways) * (SETTLE + BLOCK) + 1))
    times: Times = {}
    for way, step_ms in zip(ways, turns.step_ms(), strict=True):
        times.setdefault(way, []).append(step_ms)
    return times


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
    return {way: rows[way] for way in WAYS}


def plot(target: Path) -> None:
    """Draw the results as a bar chart."""
    results = json.loads(RESULTS.read_text())
    rows = {model: results["results"][model] for model in PLOTTED}
    ways = [way for way in rows[next(iter(PLOTTED))] if way != NONE]
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
    parser.add_argument("--rounds", type=int, help="measurements of each way")
    parser.add_argument("--plot", type=Path, help="draw the recorded results instead")
    arguments = parser.parse_args()
    if arguments.plot:
        mpl.use("agg")
        plot(arguments.plot)
        return
    be_quiet()
    results: dict[str, Any] = {}
    for model in arguments.models:
        task, batch = load(model, torch.device("cuda"))
        train(task, batch, [NONE])
        rounds = range(arguments.rounds or ROUNDS[model])
        ways = [way for _ in rounds for way in random.sample([*WAYS], len(WAYS))]
        results[model] = summarize(train(task, batch, ways))
        for way, row in results[model].items():
            added, error = (row["ratio"] - 1) * 100, row["error"] * 100
            print(f"{model:9} {way:32} {added:+7.2f} ± {error:.2f} % {row['step_ms']:9.3f} ms")
    header = environment("gpu", "torch", "lightning", "host", "command")
    save(arguments.out, header | {"results": results})


if __name__ == "__main__":
    main()
