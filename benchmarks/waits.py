"""Counts the host's waits in a profiler trace, with and without the timer.

The claim: at most one `cudaEventSynchronize` a step, and no other synchronization that is not there
without the timer. The model must keep the GPU busy although the profiler slows the host down, or
no wait is ever due.

    python benchmarks/waits.py --out benchmarks/results/waits.json
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
from models import Repeat, load
from record import save
from torch import nn

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer

SYNCHRONIZE = ("cudaEventSynchronize", "cudaDeviceSynchronize", "cudaStreamSynchronize")
WARMUP = 20


def lightning_loop(model: str, timer: GPUPhaseTimer | None, steps: int) -> Counter[str]:
    """Returns the calls of the runtime in `steps` steps of a Trainer."""
    device = torch.device("cuda")
    task, batch = load(model, device)
    profile = _Profile(steps)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        max_steps=WARMUP + steps + 2,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[*([timer] if timer else []), profile],
    )
    trainer.fit(task, Repeat(batch, WARMUP + steps + 2))
    return profile.calls


class _Profile(pl.Callback):
    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._profiler = _profiler()
        self.calls: Counter[str] = Counter()

    def on_train_batch_end(self, *args: Any) -> None:
        batch_idx = args[-1]
        if batch_idx == WARMUP:
            self._profiler.start()
        if batch_idx == WARMUP + self._steps:
            self._profiler.stop()
            self.calls = _count(self._profiler)


def plain_loop(model: str, timed: bool, steps: int, lag: int = 1) -> Counter[str]:
    """Returns the calls of the runtime in `steps` steps of a plain loop."""
    device = torch.device("cuda")
    task, (x, y) = load(model, device)
    optimizer = task.configure_optimizers()
    timer = GPUPhaseHooks(task.net, optimizer, lag=lag)
    end_step: Callable[[], None] = timer.attach().step if timed else lambda: None
    profiler = _profiler()
    for step in range(WARMUP + steps):
        if step == WARMUP:
            profiler.start()
        loss = nn.functional.cross_entropy(task.net(x).flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end_step()
    profiler.stop()
    timer.remove()
    return _count(profiler)


def _profiler() -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    return torch.profiler.profile(activities=activities, acc_events=True)


def _count(profiler: torch.profiler.profile) -> Counter[str]:
    events = profiler.events()
    assert events is not None
    return Counter(event.name for event in events if event.name in SYNCHRONIZE)


def main(model: str, steps: int) -> dict[str, Any]:
    """Counts in every kind of loop; returns what was found."""
    counted = {
        "lightning, no timer": lightning_loop(model, None, steps),
        "lightning, GPUPhaseTimer()": lightning_loop(model, GPUPhaseTimer(summary=False), steps),
        "lightning, GPUPhaseTimer(lag=0)": lightning_loop(
            model, GPUPhaseTimer(lag=0, summary=False), steps
        ),
        "plain, no timer": plain_loop(model, timed=False, steps=steps),
        "plain, GPUPhaseHooks()": plain_loop(model, timed=True, steps=steps),
        "plain, GPUPhaseHooks(lag=0)": plain_loop(model, timed=True, steps=steps, lag=0),
    }
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "command": f"python benchmarks/waits.py --model {model} --steps {steps}",
        "model": model,
        "steps": steps,
        "calls": {
            name: {call: calls[call] for call in SYNCHRONIZE} for name, calls in counted.items()
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = main(arguments.model, arguments.steps)
    print(json.dumps(found, indent=2))
    save(arguments.out, found)
