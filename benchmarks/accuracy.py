"""Holds the phases against the kernel trace, and against spin kernels of known length.

1. Each phase against torch.profiler: from the start of its first kernel to the end of its last one.
   Beside it, what the host's clock says between four synchronizations.
2. A spin kernel in each phase in turn: that phase must grow by it, and no other.
3. How long the GPU idles in a step, with and without the timer.

In 1 and 2 each step begins with a spin kernel, in `data`, while which the host launches the rest:
then nothing that the profiler does to the host reaches the GPU.

    python benchmarks/accuracy.py --out benchmarks/results/accuracy.json
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import Task, load
from record import command, save
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_gputime import GPUPhaseHooks

MODELS = ("mlp", "gpt4", "gpt12", "resnet50")
PHASES = ("forward", "loss", "backward", "optimizer")
SPIN_MS, FILL_MS, STEPS = 5.0, 60.0, 12


class SpinInBackward(torch.autograd.Function):
    """The identity, whose backward spins."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cycles: int) -> Tensor:
        """Returns `x`."""
        ctx.cycles = cycles
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Spins, and returns the gradient."""
        torch.cuda._sleep(ctx.cycles)
        return grads[0], None


class Step:
    """A training step that is cut by ranges of the profiler, or by synchronizations."""

    def __init__(self, model: str) -> None:
        task, self.batch = load(model, torch.device("cuda"))
        self.task: Task = task
        self.optimizer = task.configure_optimizers()
        self.spins: dict[str, int] = {}
        # In the call of the model, as a part of it would.
        inner = next(module for module in task.net.modules() if not list(module.children()))
        inner.register_forward_hook(self._spin_in_forward)

    def _spin_in_forward(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if "forward" in self.spins:
            torch.cuda._sleep(self.spins["forward"])
        if "backward" in self.spins:
            spinning: Tensor = SpinInBackward.apply(output, self.spins["backward"])  # type: ignore[no-untyped-call]
            return spinning
        return output

    def _spin(self, phase: str) -> None:
        if phase in self.spins:
            torch.cuda._sleep(self.spins[phase])

    def __call__(self, boundary: Callable[[], None] = lambda: None) -> None:
        """Trains one step, and calls `boundary` between its phases."""
        x, y = self.batch
        self._spin("data")
        boundary()
        with record_function("forward"):
            out = self.task.net(x)
        boundary()
        with record_function("loss"):
            self._spin("loss")
            loss = nn.functional.cross_entropy(out.flatten(0, -2), y.flatten())
        boundary()
        self.optimizer.zero_grad()
        with record_function("backward"):
            loss.backward()
        boundary()
        with record_function("optimizer"):
            self._spin("optimizer")
            self.optimizer.step()
        boundary()


def cycles_of(ms: float) -> int:
    """Returns how many cycles `torch.cuda._sleep` needs to take `ms`."""
    cycles: float = 100_000_000 / spin_ms(100_000_000) * ms
    return round(cycles)


def spin_ms(cycles: int) -> float:
    """Returns how long a spin kernel takes (in milliseconds)."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10_000_000)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    ms: float = start.elapsed_time(end)
    return ms


def timed(step: Step, steps: int) -> list[dict[str, float]]:
    """Returns the phases of each step (in milliseconds), the first two left out."""
    found: list[dict[str, float]] = []
    with GPUPhaseHooks(
        step.task.net, step.optimizer, on_step=lambda times: found.append(dict(times.phase_ms))
    ) as timer:
        for _ in range(steps):
            step()
            timer.step()
    return found[2:]


def means(steps: list[dict[str, float]]) -> dict[str, float]:
    """Returns the mean of each phase (in milliseconds)."""
    return {phase: statistics.mean(one[phase] for one in steps) for phase in PHASES}


def in_trace(events: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Returns, for each step but the first two, the phases by their kernels (in milliseconds)."""
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event["args"]
    }
    kernels = [
        (launches[event["args"]["correlation"]], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        and event["args"]["correlation"] in launches
    ]
    found: list[dict[str, float]] = []
    for phase in PHASES:
        ranges = sorted(
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event.get("cat") == "user_annotation" and event["name"] == phase
        )
        for i, (begin, end) in enumerate(ranges):
            own = [(start, stop) for at, start, stop in kernels if begin <= at < end]
            if len(found) <= i:
                found.append({})
            found[i][phase] = (max(b for _, b in own) - min(a for a, _ in own)) / 1000
    return found[2:]


def traced(run: Callable[[], Any], *activities: ProfilerActivity) -> tuple[Any, list[Any]]:
    """Returns what `run` does, and the events of its trace."""
    with profile(activities=activities) as profiler:
        result = run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return result, json.loads(path.read_text())["traceEvents"]


def four_synchronize(step: Step, steps: int) -> dict[str, float]:
    """Returns the phases by the host's clock (in milliseconds), the GPU synchronized at each."""
    times: list[float] = []

    def boundary() -> None:
        torch.cuda.synchronize()
        times.append(time.perf_counter())

    for _ in range(steps):
        step(boundary)
    steps_ms = [times[i : i + 5] for i in range(0, len(times), 5)][2:]
    return {
        phase: statistics.mean((one[i + 1] - one[i]) * 1e3 for one in steps_ms)
        for i, phase in enumerate(PHASES)
    }


def idle_ms(events: list[dict[str, Any]], steps: int) -> float:
    """Returns how long no kernel ran (in milliseconds a step)."""
    kernels = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    idle, until = 0.0, kernels[0][1]
    for start, end in kernels:
        idle += max(start - until, 0.0)
        until = max(until, end)
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
    base = means(timed(step, STEPS))
    grown = {}
    for phase in PHASES:
        step.spins = {"data": fill, phase: spin}
        with_spin = means(timed(step, STEPS))
        grown[phase] = {other: with_spin[other] - base[other] for other in PHASES}
    return {
        "step_ms": step_ms,
        "timer_ms": means(ours),
        "trace_ms": means(in_trace(events)),
        "four_synchronize_ms": by_synchronize,
        "spin_ms": spin_ms(spin),
        "growth_ms": grown,
        "idle_ms": idle,
    }


def main(models: list[str]) -> dict[str, Any]:
    """Measures all models; returns what was found."""
    results = {}
    for model in models:
        found = results[model] = measure(model)
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
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": command(),
        "results": results,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    save(arguments.out, main(arguments.models))
