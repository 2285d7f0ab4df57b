"""How a training is set up, as far as advice on it needs to know."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset

from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._causes.places import attribute
from lightning_gputime._messages import messages
from lightning_gputime._results.advice import Setup
from lightning_gputime._runs.environment import Environment

_MOST_LOADERS = 10
"""More side by side are no loaders, but the batches themselves."""

_MOST_LAYERS = 5
"""No dataset is wrapped more often."""


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
            cores=cores_of_rank(environment.world_size),
            precision=environment.precision if told_precision else "",
            has_bf16=is_cuda and torch.cuda.get_device_capability() >= (8, 0),
            compiled=environment.compiled,
            unfused=_unfused(loop.optimizers) if is_cuda else "",
            has_parts=any(True for _ in loop.model.children()),
        )
    except Exception as error:
        messages.warning("How the training is set up could not be found: %r", error)
        return Setup()


def known_of_loader(loader: object) -> dict[str, Any]:
    """Returns the fields of a `Setup` that a loader tells: any iterable, or several."""
    loaders = _several(loader)
    kinds = {
        "num_workers": int,
        "pin_memory": bool,
        "persistent_workers": bool,
        "prefetch_factor": int,
        "batch_size": int,
    }
    told = {name: _alike([attribute(one, name) for one in loaders], kinds[name]) for name in kinds}
    datasets = [_dataset(one) for one in loaders]
    return {
        "has_loader": True,
        "is_iterable": any(isinstance(one, IterableDataset) for one in datasets),
        "is_on_device": any(map(_is_on_device, datasets)),
        **told,
    }


def _dataset(loader: object) -> object:
    """Returns what a loader loads from: of a part of a dataset, the whole."""
    dataset = attribute(loader, "dataset")
    for _ in range(_MOST_LAYERS):
        inner = attribute(dataset, "dataset")
        if inner is None:
            break
        dataset = inner
    return dataset


def _is_on_device(dataset: object) -> bool:
    """Tells whether a dataset, such as a `TensorDataset`, has tensors that are not on the CPU."""
    tensors = attribute(dataset, "tensors")
    several = tensors if isinstance(tensors, list | tuple) else ()
    return any(isinstance(one, torch.Tensor) and one.device.type != "cpu" for one in several)


def _several(loader: object) -> list[object]:
    """Returns the loaders of a trainer that has some side by side; else the one."""
    inside = [*loader.values()] if isinstance(loader, dict) else loader
    if isinstance(inside, list | tuple) and 0 < len(inside) <= _MOST_LOADERS:
        return [*inside]
    return [loader]


def _alike(values: Sequence[Any], kind: type) -> Any:
    """Returns the value that all have, if it is of this kind; else None."""
    first = values[0]
    return first if all(type(one) is kind and one == first for one in values) else None


def cores_of_rank(world_size: int) -> int | None:
    """Returns how many cores of the CPU there are for each rank of this host.

    Args:
        world_size: How many ranks there are, on all hosts.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        cores = os.cpu_count() or 0
    try:
        ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        # Not all launchers tell: Lightning's own does not. A host has a rank for each device.
        ranks = min(world_size, torch.accelerator.device_count() or world_size)
    return max(cores // max(ranks, 1), 1) if cores else None


def _unfused(optimizers: Sequence[Any]) -> str:
    """Returns the class of the first optimizer that could be fused, and is not."""
    for one in optimizers:
        groups = attribute(one, "param_groups") or ()
        if groups and all("fused" in group and not group["fused"] for group in groups):
            return type(one).__name__
    return ""
