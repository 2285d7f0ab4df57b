"""The training loops of the benchmarks, and the order in which ways of timing take their turns."""

import logging
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from models import Batch, Task

from lightning_gputime import GPUPhaseHooks

NONE, AGAIN = "no timer", "no timer, again"

Times = dict[str, list[float]]
"""Of each way the time of a step in each of its turns."""


def _nothing(*_: int) -> None:
    pass


@dataclass(frozen=True)
class Way:
    """A way of timing in a plain loop. By default none.

    Args:
        boundary: Is called with 0 at the start of a step, and at the end of each phase.
        end_step: Is called at the end of each step.
        remove: Is called at the end of the loop.
    """

    boundary: Callable[[int], None] = _nothing
    end_step: Callable[[], None] = _nothing
    remove: Callable[[], None] = _nothing


def attached(timer: GPUPhaseHooks) -> Way:
    """Returns the way of a timer of this package, which it attaches."""
    timer.attach()
    return Way(end_step=timer.step, remove=timer.remove)


def train_step(
    task: Task,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    boundary: Callable[[int], None] = _nothing,
) -> None:
    """Trains one step, in a plain loop."""
    x, y = batch
    boundary(0)
    out = task.net(x)
    boundary(1)
    loss = task.loss(out, y)
    boundary(2)
    optimizer.zero_grad()
    loss.backward()
    boundary(3)
    optimizer.step()
    boundary(4)


def train(task: Task, optimizer: torch.optim.Optimizer, batch: Batch, way: Way, steps: int) -> None:
    """Trains some steps, in a plain loop."""
    for _ in range(steps):
        train_step(task, optimizer, batch, way.boundary)
        way.end_step()


def bare_trainer(**options: Any) -> pl.Trainer:
    """Returns a Trainer for one device that does nothing beside training."""
    bare = {
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**(bare | options))


def be_quiet() -> None:
    """Silences what the Trainer says."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def in_rounds(ways: Sequence[str], rounds: int) -> list[str]:
    """Returns `ways` in as many rounds, each in a random order of its own."""
    return [way for _ in range(rounds) for way in random.sample(ways, len(ways))]


def by_way(ways: Sequence[str], times: Sequence[float]) -> Times:
    """Returns the times of each way, in the order of its turns."""
    found: Times = {}
    for way, time in zip(ways, times, strict=True):
        found.setdefault(way, []).append(time)
    return found
