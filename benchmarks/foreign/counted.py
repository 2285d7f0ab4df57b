"""Python imports this at its start, as `sitecustomize`: take the host's time of what trains.

It knows nothing of the timer that it is compared with. The time inside the outermost calls of
modules with parameters while gradients are recorded is `forward`, that inside of torch.autograd's
engine `backward`, that inside of updates `optimizer`; of what is inside of another the inner one
counts. At its end each process that has updated writes a file into the folder COUNTED.
"""

import atexit
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as hooks
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

total_ns: Counter[str] = Counter()
counts: Counter[str] = Counter()
updates: Counter[int] = Counter()
names: dict[int, str] = {}
open_: list[str] = []
since_ns = 0


def turn(name: str | None) -> None:
    """Begin a part, or end the innermost one."""
    global since_ns
    now_ns = time.perf_counter_ns()
    if open_:
        total_ns[open_[-1]] += now_ns - since_ns
    since_ns = now_ns
    if name is None:
        open_.pop()
    else:
        counts[name] += 1
        open_.append(name)


def is_model(module: Any) -> bool:
    """Return whether a call is to be counted: one inside of another is of the same kind."""
    return torch.is_grad_enabled() and any(True for _ in module.parameters())


called: list[bool] = []


def call_begins(module: Any, *_: Any) -> None:
    """Begin `forward` with the outermost call."""
    called.append("forward" not in open_ and is_model(module))
    if called[-1]:
        turn("forward")


def call_ends(*_: Any) -> None:
    """End `forward` with the call that has begun it."""
    if called.pop():
        turn(None)


def update_begins(optimizer: Any, *_: Any) -> None:
    """Begin `optimizer`."""
    names[id(optimizer)] = type(optimizer).__name__
    updates[id(optimizer)] += 1
    turn("optimizer")


backward = torch.autograd.backward


def timed_backward(*args: Any, **options: Any) -> None:
    """Run the engine as `backward`."""
    turn("backward")
    try:
        backward(*args, **options)
    finally:
        turn(None)


def write() -> None:
    """Write what was found, in a process that has trained."""
    if total_ns:
        found = {
            "rank": os.environ.get("RANK", "0"),
            "updates": [[names[one], n] for one, n in updates.items()],
            "counts": counts,
            "total_ms": {name: ns / 1e6 for name, ns in total_ns.items()},
        }
        Path(os.environ["COUNTED"], f"{os.getpid()}.json").write_text(json.dumps(found))


if "COUNTED" in os.environ:
    hooks.register_module_forward_pre_hook(call_begins)
    hooks.register_module_forward_hook(call_ends, always_call=True)
    register_optimizer_step_pre_hook(update_begins)
    register_optimizer_step_post_hook(lambda *_: turn(None))
    torch.autograd.backward = timed_backward
    atexit.register(write)
