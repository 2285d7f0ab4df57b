"""Runs a script that accelerate ships, with a timer of each loop that the script prepares.

Each rank checks that every update ended a step. Rank 0 prints the number of updates of each loop.
"""

import importlib
import json
import os
import sys
from itertools import product
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.utils.data import DataLoader

from lightning_gputime import GPUPhaseHooks

os.environ["ACCELERATE_USE_CPU"] = "true"
prepare = Accelerator.prepare
timers: list[tuple[GPUPhaseHooks, list[object]]] = []


def prepare_timed(accelerator: Any, *parts: Any, **options: Any) -> Any:
    """Prepare the parts like accelerate. Time the loop of a model, an optimizer and a loader."""
    prepared = prepare(accelerator, *parts, **options)
    found: dict[type, Any] = {}
    for kind in (nn.Module, AcceleratedOptimizer, DataLoader):
        for entry in prepared if isinstance(prepared, tuple) else ():
            if isinstance(entry, kind):
                found[kind] = entry
    if len(found) < 3:
        return prepared
    model, optimizer, loader = found.values()
    updates: list[object] = []
    optimizer.optimizer.register_step_post_hook(lambda *_: updates.append(None))
    timer = GPUPhaseHooks(model, optimizer, every_n_steps=1, warmup_steps=0).attach()
    timers.append((timer, updates))
    return tuple(timer.steps(item) if item is loader else item for item in prepared)


def main(name: str) -> None:
    """Run the script; for `test_sync`, also the loops that it would run only on GPUs."""
    script = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    Accelerator.prepare = prepare_timed
    if name == "test_sync":
        for options in product((False, True), repeat=3):
            script.test_gradient_accumulation_with_opt_and_scheduler(*options)
    script.main()
    for timer, updates in timers:
        timer.remove()
        assert len(timer.history()) == len(updates)
        assert {"forward", "loss", "backward", "backward/comm", "optimizer"} < {
            *timer.summary().rows
        }
    if os.environ["RANK"] == "0":
        print(json.dumps([len(updates) for _, updates in timers]))


if __name__ == "__main__":
    main(sys.argv[1])
