"""How a training is set up, as far as advice on it needs to know."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._causes.places import attribute
from lightning_gputime._messages import messages
from lightning_gputime._results.advice import Setup
from lightning_gputime._runs.environment import Environment


def setup_of(environment: Environment, loop: Loop, told_precision: bool) -> Setup:
    """Returns what is known before a loader is seen.

    Args:
        environment: What the run runs on.
        loop: What is timed.
        told_precision: Whether a trainer has told the precision. That of the parameters says
            nothing about autocast.
    """
    is_cuda = environment.device_type == "cuda"
    try:
        return Setup(
            cores=_cores(),
            precision=environment.precision if told_precision else "",
            has_bf16=is_cuda and torch.cuda.get_device_capability() >= (8, 0),
            compiled=environment.compiled,
            unfused=_unfused(loop.optimizers) if is_cuda else "",
        )
    except Exception as error:
        messages.warning("How the training is set up could not be found: %r", error)
        return Setup()


def known_of_loader(loader: object) -> dict[str, Any]:
    """Returns the fields of a `Setup` that a loader tells, which may be any iterable."""
    workers, prefetch = attribute(loader, "num_workers"), attribute(loader, "prefetch_factor")
    size = attribute(loader, "batch_size")
    pinned, persistent = attribute(loader, "pin_memory"), attribute(loader, "persistent_workers")
    return {
        "has_loader": True,
        "num_workers": workers if type(workers) is int else None,
        "pin_memory": pinned if type(pinned) is bool else None,
        "persistent_workers": persistent if type(persistent) is bool else None,
        "prefetch_factor": prefetch if type(prefetch) is int else None,
        "batch_size": size if type(size) is int else None,
    }


def _cores() -> int | None:
    """Returns how many cores there are for each rank of this host."""
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        cores = os.cpu_count() or 0
    try:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    except ValueError:
        ranks = 1
    return max(cores // max(ranks, 1), 1) if cores else None


def _unfused(optimizers: Sequence[Any]) -> str:
    """Returns the class of the first optimizer that could be fused, and is not."""
    for one in optimizers:
        groups = attribute(one, "param_groups") or ()
        if groups and all("fused" in group and not group["fused"] for group in groups):
            return type(one).__name__
    return ""
