"""Holds the phases against the kernel trace, and against spin kernels of known length.

1. Each phase against torch.profiler: from the start of its first kernel to the end of its last one.
   Beside it, what the host's clock says between four synchronizations.
2. A spin kernel in each phase in turn: that phase must grow by it, and no other.
3. How long the GPU idles in a step, with and without the timer.

In 1 and 2 each step begins with a spin kernel, in `data`, while which the host launches the rest:
then nothing that the profiler does to the host reaches the GPU.

    python benchmarks/accuracy.py --out benchmarks/results/accuracy.json
"""

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from kernels import Event, cycles_of, end_of, of_categories, spin_in_backward, spin_ms, traced
from loops import train_step
from models import load
from record import environment, new_parser, save
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, record_function

from lightning_gputime import GPUPhaseHooks

MODELS = ("mlp", "gpt4", "gpt12", "resnet50")
PHASES = ("forward", "loss", "backward", "optimizer")
SPIN_MS, FILL_MS, STEPS = 5.0, 60.0, 12
SETTLE = 2  # steps that are left out

Phases = dict[str, float]
"""The time of each phase (in milliseconds)."""


class Step:
    """A training step that is cut by ranges of the profiler, and can spin in each phase."""

    def __init__(self, model: str) -> None:
        self.task, self.batch = load(model, torch.device("cuda"))
        self.optimizer = self.task.configure_optimizers()
        self.spins: dict[str, int] = {}
        self._range = ExitStack()
        # In the call of the model, as a part of it would.
        inner = next(module for module in self.task.net.modules() if not list(module.children()))
        inner.register_forward_hook(self._spin_in_net)

    def _spin_in_net(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self._spin("forward")
        if "backward" in self.spins:
            return spin_in_backward(output, partial(self._spin, "backward"))
        return output

    def _spin(self, phase: str) -> None:
        if phase in self.spins:
            torch.cuda._sleep(self.spins[phase])

    def __call__(self, boundary: Callable[[], None] = lambda: None) -> None:
        """Trains one step, and calls `boundary` between its phases."""

        def cut(i: int) -> None:
            self._range.close()
            boundary()
            if i < len(PHASES):
                self._begin(PHASES[i])

        self._spin("data")
        train_step(self.task, self.optimizer, self.batch, cut)

    def _begin(self, phase: str) -> None:
        self._range.enter_context(record_function(phase))
        if phase in ("loss", "optimizer"):  # In the others the net spins.
            self._spin(phase)


def timed(step: Step, steps: int) -> list[Phases]:
    """Returns the phases of each step, by the timer."""
    found: list[Phases] = []
    with GPUPhaseHooks(
        step.task.net, step.optimizer, observers=[lambda times: found.append(dict(times.phase_ms))]
    ) as timer:
        for _ in range(steps):
            step()
            timer.step()
    return found[SETTLE:]


def means(steps: list[Phases]) -> Phases:
    """Returns the mean of each phase."""
    return {phase: statistics.mean(one[phase] for one in steps) for phase in PHASES}


def kernels_in(events: list[Event]) -> list[Event]:
    """Returns what the GPU did."""
    return of_categories(events, "kernel", "gpu_memcpy", "gpu_memset")


def in_trace(events: list[Event]) -> list[Phases]:
    """Returns the phases of each step, by their kernels."""
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in of_categories(events, "cuda_runtime", "cuda_driver")
        if "correlation" in event["args"]
    }
    kernels = [
        (launches[kernel["args"]["correlation"]], kernel)
        for kernel in kernels_in(events)
        if kernel["args"]["correlation"] in launches
    ]
    ranges = of_categories(events, "user_annotation")
    columns = [
        [span_ms(one, kernels) for one in ranges if one["name"] == phase] for phase in PHASES
    ]
    rows = zip(*columns, strict=True)
    return [dict(zip(PHASES, row, strict=True)) for row in rows][SETTLE:]


def span_ms(phase: Event, kernels: list[tuple[float, Event]]) -> float:
    """Returns how long the kernels took that a phase launched, from the first to the last.

    Args:
        phase: A range of the host.
        kernels: Each with its launch.
    """
    own = [kernel for at, kernel in kernels if phase["ts"] <= at < end_of(phase)]
    start: float = min(kernel["ts"] for kernel in own)
    return (max(map(end_of, own)) - start) / 1000


def four_synchronize(step: Step, steps: int) -> Phases:
    """Returns the phases by the host's clock, the GPU synchronized at each."""
    times: list[float] = []

    def boundary() -> None:
        torch.cuda.synchronize()
        times.append(time.perf_counter())

    for _ in range(steps):
        step(boundary)
    n = len(PHASES) + 1
    rows = [pairwise(times[i : i + n]) for i in range(SETTLE * n, len(times), n)]
    return means(
        [
            {phase: (end - start) * 1e3 for phase, (start, end) in zip(PHASES, row, strict=True)}
            for row in rows
        ]
    )


def idle_ms(events: list[Event], steps: int) -> float:
    """Returns how long no kernel ran (in milliseconds a step)."""
    kernels = kernels_in(events)
    idle, until = 0.0, end_of(kernels[0])
    for kernel in kernels:
        idle += max(kernel["ts"] - until, 0.0)
        until = max(until, end_of(kernel))
    return idle / 1000 / steps


def measure_idle(step: Step, rounds: int = 3, steps: int = 40) -> dict[str, float]:
    """Returns the idle time a step without and with the timer, medians (in milliseconds)."""
    found: dict[str, list[float]] = {"without": [], "with": []}

    def without() -> None:
        for _ in range(steps):
            step()

    for _ in range(rounds):
        for name, run in (("without", without), ("with", lambda: timed(step, steps))):
            run()
            _, events = traced(run, ProfilerActivity.CUDA)
            found[name].append(idle_ms(events, steps))
    return {name: statistics.median(ms) for name, ms in found.items()}


def measure_growth(step: Step, fill: int, spin: int) -> dict[str, Phases]:
    """Returns by how much each phase grows when one of them spins."""
    base, grown = means(timed(step, STEPS)), {}
    for phase in PHASES:
        step.spins = {"data": fill, phase: spin}
        with_spin = means(timed(step, STEPS))
        grown[phase] = {other: with_spin[other] - base[other] for other in PHASES}
    return grown


def measure(model: str) -> dict[str, Any]:
    """Returns what was found on one model."""
    step = Step(model)
    timed(step, 10)
    fill, spin = cycles_of(FILL_MS), cycles_of(SPIN_MS)
    idle = measure_idle(step) if model in ("gpt12", "resnet50") else None
    step_ms = statistics.median(sum(one.values()) for one in timed(step, 30))
    by_synchronize = four_synchronize(step, STEPS)
    step.spins = {"data": fill}
    ours, events = traced(lambda: timed(step, STEPS), ProfilerActivity.CPU, ProfilerActivity.CUDA)
    grown = measure_growth(step, fill, spin)
    return {
        "step_ms": step_ms,
        "timer_ms": means(ours),
        "trace_ms": means(in_trace(events)),
        "four_synchronize_ms": by_synchronize,
        "spin_ms": spin_ms(spin),
        "growth_ms": grown,
        "idle_ms": idle,
    }


def show(model: str, found: dict[str, Any]) -> None:
    """Prints what was found on one model."""
    for phase in PHASES:
        ours, trace, four = (
            found[key][phase] for key in ("timer_ms", "trace_ms", "four_synchronize_ms")
        )
        grown = found["growth_ms"][phase]
        others = max(abs(ms) for other, ms in grown.items() if other != phase)
        print(
            f"{model:9} {phase:9} timer {ours:8.4f} trace {trace:8.4f}"
            f" ({(ours - trace) * 1e3:+6.1f} us) four synchronize {four:8.4f};"
            f" spin {found['spin_ms']:.4f}: grew {grown[phase]:.4f}, others {others:.4f}",
            flush=True,
        )
    if found["idle_ms"]:
        print(f"{model:9} step {found['step_ms']:.3f} ms, idle {found['idle_ms']}", flush=True)


def main(models: list[str]) -> dict[str, Any]:
    """Measures all models; returns what was found."""
    results = {}
    for model in models:
        results[model] = measure(model)
        show(model, results[model])
    return results


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    save(arguments.out, environment() | {"results": main(arguments.models)})
