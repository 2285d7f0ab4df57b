"""Counts the host's waits in a profiler trace, with and without the timer.

The claim: at most one `cudaEventSynchronize` a step, and no other synchronization that is not there
without the timer. The model must keep the GPU busy although the profiler slows the host down, or
no wait is ever due.

    python benchmarks/waits.py --out benchmarks/results/waits.json
"""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from loops import Way, attached, bare_trainer, train
from models import Repeat, load
from record import environment, new_parser, save
from torch.profiler import ProfilerActivity, profile

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer

SYNCHRONIZE = ("cudaEventSynchronize", "cudaDeviceSynchronize", "cudaStreamSynchronize")
WARMUP = 20

Calls = dict[str, int]
"""How often each function of the runtime was called."""


class Profile(pl.Callback):
    """Traces the steps after the warm-up."""

    def __init__(self, steps: int) -> None:
        self.profiler = new_profiler()
        self._last = WARMUP + steps

    def on_train_batch_end(self, *args: Any) -> None:
        batch_idx = args[-1]
        if batch_idx == WARMUP:
            self.profiler.start()
        if batch_idx == self._last:
            self.profiler.stop()


def new_profiler() -> profile:
    """Returns a profiler that sees the calls of the runtime."""
    return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)


def count(profiler: profile) -> Calls:
    """Returns how often each function was called."""
    events = profiler.events()
    assert events is not None
    names = [event.name for event in events]
    return {call: names.count(call) for call in SYNCHRONIZE}


def lightning_loop(model: str, steps: int, lag: int | None) -> Calls:
    """Counts in `steps` steps of a Trainer, without a timer if `lag` is None."""
    task, batch = load(model, torch.device("cuda"))
    timers = [] if lag is None else [GPUPhaseTimer(_lag=lag, print_summary=False)]
    traced, n = Profile(steps), WARMUP + steps + 2
    trainer = bare_trainer(accelerator="gpu", max_steps=n, callbacks=[*timers, traced])
    trainer.fit(task, Repeat(batch, n))
    return count(traced.profiler)


def plain_loop(model: str, steps: int, lag: int | None) -> Calls:
    """As `lightning_loop`, in a plain loop."""
    task, batch = load(model, torch.device("cuda"))
    optimizer = task.configure_optimizers()
    way = Way() if lag is None else attached(GPUPhaseHooks(task.net, optimizer, _lag=lag))
    profiler = new_profiler()
    train(task, optimizer, batch, way, WARMUP)
    profiler.start()
    train(task, optimizer, batch, way, steps)
    profiler.stop()
    way.remove()
    return count(profiler)


def measure(model: str, steps: int) -> dict[str, Calls]:
    """Counts in every kind of loop."""
    return {
        "lightning, no timer": lightning_loop(model, steps, lag=None),
        "lightning, GPUPhaseTimer()": lightning_loop(model, steps, lag=1),
        "lightning, GPUPhaseTimer(lag=0)": lightning_loop(model, steps, lag=0),
        "plain, no timer": plain_loop(model, steps, lag=None),
        "plain, GPUPhaseHooks()": plain_loop(model, steps, lag=1),
        "plain, GPUPhaseHooks(lag=0)": plain_loop(model, steps, lag=0),
    }


def main(model: str, steps: int, out: Path | None) -> None:
    """Counts, prints and saves."""
    found = environment("gpu", "torch", "lightning") | {
        "command": f"python benchmarks/waits.py --model {model} --steps {steps}",
        "model": model,
        "steps": steps,
        "calls": measure(model, steps),
    }
    print(json.dumps(found, indent=2))
    save(out, found)


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--steps", type=int, default=100)
    main(**vars(parser.parse_args()))
