"""Compare phases with the kernel trace, and with spin kernels of known duration.

1. Each phase against torch.profiler: from the start of its first kernel to the end of its last.
2. Phases with a spin kernel in each phase in turn: only that phase may grow, by its duration.

Each step begins with a spin kernel in `data`, during which the host launches the rest of the step.
So the profiler, which slows down the host, does not change the times on the GPU.

    python benchmarks/accuracy.py --models resnet50 gpt12 --out benchmarks/results/accuracy.json
"""

import statistics
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from kernels import Event, cycles_of, end_of, of_categories, spin_in_backward, spin_ms, traced
from models import MODELS, load
from record import environment, new_parser, save
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, record_function

from lightning_gputime import GPUPhaseHooks

PHASES = ("forward", "loss", "backward", "optimizer")
SPIN_MS, FILL_MS, STEPS = 5.0, 60.0, 12
SETTLE = 2  # Number of first steps to skip.
Phases = dict[str, float]
"""Milliseconds per phase."""


class Step:
    """A training step that marks its phases for the profiler, and can spin in each of them."""

    def __init__(self, model: str) -> None:
        self.task, self.batch = load(model, torch.device("cuda"))
        self.optimizer = self.task.configure_optimizers()
        self.spins: dict[str, int] = {}
        self._range = ExitStack()
        # Hook a submodule, so that the spin runs inside the model's forward.
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

    def _begin(self, phase: str) -> None:
        self._range.close()
        self._range.enter_context(record_function(phase))
        if phase in ("loss", "optimizer"):  # In forward and backward, the net spins.
            self._spin(phase)

    def __call__(self) -> None:
        x, y = self.batch
        self._spin("data")
        self._begin("forward")
        out = self.task.net(x)
        self._begin("loss")
        loss = self.task.loss(out, y)
        self._begin("backward")
        self.optimizer.zero_grad()
        loss.backward()
        self._begin("optimizer")
        self.optimizer.step()
        self._range.close()


def timed(step: Step) -> Phases:
    """Return the mean time of each phase, as measured by the timer."""
    steps: list[Phases] = []
    with GPUPhaseHooks(
        step.task.net, step.optimizer, observers=[lambda times: steps.append(dict(times.phase_ms))]
    ) as timer:
        for _ in range(STEPS):
            step()
            timer.step()
    return {phase: statistics.mean(ms[phase] for ms in steps[SETTLE:]) for phase in PHASES}


def in_trace(events: list[Event]) -> Phases:
    """Return the mean time of each phase, as measured by the kernels that it launched."""
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in of_categories(events, "cuda_runtime", "cuda_driver")
        if "correlation" in event["args"]
    }
    kernels = [
        (launches[kernel["args"]["correlation"]], kernel)
        for kernel in of_categories(events, "kernel", "gpu_memcpy", "gpu_memset")
        if kernel["args"]["correlation"] in launches
    ]
    ranges = of_categories(events, "user_annotation")
    return {
        phase: statistics.mean(
            [span_ms(span, kernels) for span in ranges if span["name"] == phase][SETTLE:]
        )
        for phase in PHASES
    }


def span_ms(phase: Event, kernels: list[tuple[float, Event]]) -> float:
    """Return the time from the first to the last kernel of a phase, given each kernel's launch."""
    launched = [kernel for at, kernel in kernels if phase["ts"] <= at < end_of(phase)]
    start: float = min(kernel["ts"] for kernel in launched)
    return (max(map(end_of, launched)) - start) / 1000


def measure(model: str) -> dict[str, Any]:
    step = Step(model)
    timed(step)
    fill, spin = cycles_of(FILL_MS), cycles_of(SPIN_MS)
    step.spins = {"data": fill}
    timer_ms, events = traced(partial(timed, step), ProfilerActivity.CPU, ProfilerActivity.CUDA)
    trace_ms, base_ms = in_trace(events), timed(step)
    results: dict[str, Any] = {
        "timer_ms": rounded(timer_ms),
        "trace_ms": rounded(trace_ms),
        "largest_difference_ms": round(max(abs(timer_ms[p] - trace_ms[p]) for p in PHASES), 4),
        "spin_ms": round(spin_ms(spin), 4),
        "growth_of_spinning_phase_ms": {},
        "largest_change_of_others_ms": {},
    }
    for phase in PHASES:
        step.spins = {"data": fill, phase: spin}
        with_spin = timed(step)
        grown = {other: with_spin[other] - base_ms[other] for other in PHASES}
        results["growth_of_spinning_phase_ms"][phase] = round(grown.pop(phase), 4)
        results["largest_change_of_others_ms"][phase] = round(max(map(abs, grown.values())), 4)
    return results


def rounded(phases: Phases) -> Phases:
    return {phase: round(ms, 4) for phase, ms in phases.items()}


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    arguments = parser.parse_args()
    results = {model: measure(model) for model in arguments.models}
    for model, found in results.items():
        print(model, *found.items(), sep="\n  ")
    save(arguments.out, environment() | {"results": results})
