"""What a run runs on, and how its training is set up: found without Lightning, at its start."""

import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import IterableDataset, TensorDataset

from lightning_gputime._compat.torch_ import is_compiled
from lightning_gputime._instrumentation.comm import is_distributed
from lightning_gputime._instrumentation.loaders import attribute, dataset_of, loaders_in
from lightning_gputime._instrumentation.loop import Loop
from lightning_gputime._instrumentation.peaks import device_name
from lightning_gputime._measurement.setup import TrainingSetup
from lightning_gputime._messages import messages
from lightning_gputime._options import Options, TimerOptions

_OF_LOADERS = ("num_workers", "prefetch_factor", "batch_size", "pin_memory", "persistent_workers")


@dataclass(frozen=True, slots=True)
class Environment:
    """What a run ran on. What is not known is empty, or None.

    Attributes:
        device: The name of the GPU, or of the CPU that took its place.
        device_type: Such as "cuda" or "cpu".
        cuda: The version of CUDA that torch was built with.
        torch: The version of torch.
        lightning: The version of Lightning.
        package: The version of lightning_gputime.
        world_size: How many processes train together.
        rank: Which of them this one is.
        precision: That of the trainer; in a plain loop that of the parameters.
        compiled: Whether anything of the model is compiled by torch.
        parameters: How many parameters the model has.
        batch_size: How many items a batch of the loader has, where that says it.
        accumulate_grad_batches: How many batches make a step, where that is known.
        commit: The commit of git in which the program lies, where there is one.
        started: When the measurement began (UTC, ISO 8601).
        options: Those of the timer that are no defaults, if numbers, strings or switches.
    """

    device: str = ""
    device_type: str = ""
    cuda: str = ""
    torch: str = ""
    lightning: str = ""
    package: str = ""
    world_size: int = 1
    rank: int = 0
    precision: str = ""
    compiled: bool = False
    parameters: int = 0
    batch_size: int | None = None
    accumulate_grad_batches: int | None = None
    commit: str = ""
    started: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def environment_of(loop: Loop, options: Options, **known: Any) -> Environment:
    """Return what a measurement begins on; an empty one, with a warning, if that fails.

    `known` has fields that the front end knows better; None if it does not.
    """
    try:
        found = _found(loop, options)
    except Exception as error:
        messages.warning("Cannot describe the environment of the run: %r", error)
        found = {}
    # No loop has so many micro-batches: an update ends a step there, after any number of them.
    told = {key: one for key, one in known.items() if one not in (None, sys.maxsize)}
    return Environment(**{**found, **told})


def _found(loop: Loop, options: Options) -> dict[str, Any]:
    parameters = list(nn.Module.parameters(loop.model))
    device = parameters[0].device if parameters else torch.device("cpu")
    shared = is_distributed()
    return {
        "device": _processor() if device.type == "cpu" else device_name(device),
        "device_type": device.type,
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "lightning": version("lightning"),
        "package": sys.modules["lightning_gputime"].__version__,
        "world_size": torch.distributed.get_world_size() if shared else 1,
        "rank": torch.distributed.get_rank() if shared else 0,
        "precision": str(parameters[0].dtype).removeprefix("torch.") if parameters else "",
        "compiled": loop.compiled_step or any(map(is_compiled, nn.Module.modules(loop.model))),
        # One that is lazy has no shape yet.
        "parameters": sum(one.numel() for one in parameters if not is_lazy(one)),
        "commit": _commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": _options_to_save(options),
    }


def _options_to_save(options: Options) -> dict[str, Any]:
    """Return the options that are no defaults, if JSON has a type for them."""
    found, defaults = {}, Options()
    for name in TimerOptions.__annotations__:
        value = getattr(options, name)
        if value != getattr(defaults, name):
            is_several = isinstance(value, Mapping | Sequence) and not isinstance(value, str)
            named = [*value] if is_several else value
            with suppress(TypeError):
                found[name] = json.loads(json.dumps(named))
    return found


@lru_cache
def _processor() -> str:
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        if found := re.search(r"^model name\s*: (.+)$", text, re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()


# Cached: a process runs the code of the commit at which it started.
@lru_cache
def _commit() -> str:
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    with suppress(OSError, ValueError):
        return head_of(Path(program).resolve().parent if program else Path.cwd())
    return ""


def head_of(folder: Path) -> str:
    """Return the commit that git has checked out in a folder; empty where there is none.

    It reads git's files: starting `git` would take up to seconds at the start of a training.
    """
    places = (parent / ".git" for parent in (folder, *folder.parents))
    git = next((place for place in places if place.exists()), None)
    if git is None:
        return ""
    if git.is_file():  # A worktree or a submodule.
        git = git.parent / git.read_text().removeprefix("gitdir:").strip()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head
    ref = head.removeprefix("ref:").strip()
    # Worktrees share their branches.
    common = git / "commondir"
    shared = git / common.read_text().strip() if common.is_file() else git
    if (shared / ref).is_file():
        return (shared / ref).read_text().strip()
    with (shared / "packed-refs").open() as packed:
        return next((line.split()[0] for line in packed if line.rstrip().endswith(f" {ref}")), "")


def setup_of(environment: Environment, loop: Loop, told_precision: bool) -> TrainingSetup:
    """Return what advice needs, as far as it is known before a loader is seen.

    The precision counts only if a trainer shows it: that of the parameters shows no autocast.
    """
    is_cuda = environment.device_type == "cuda"
    return TrainingSetup(
        cores=cores_of_rank(environment.world_size),
        precision=environment.precision if told_precision else "",
        has_bf16=is_cuda and torch.cuda.get_device_capability() >= (8, 0),
        compiled=environment.compiled,
        unfused=_unfused(loop.optimizers) if is_cuda else "",
        has_parts=any(True for _ in nn.Module.children(loop.model)),
        classes={name: type(one).__name__ for name, one in loop.submodules.items()},
    )


def known_of_loader(loader: object) -> dict[str, Any]:
    """Return the fields of a `TrainingSetup` that a loader shows: any iterable, or several."""
    loaders = loaders_in(loader)
    datasets = [dataset_of(known) for known in loaders]
    return {
        "has_loader": True,
        "is_iterable": any(isinstance(dataset, IterableDataset) for dataset in datasets),
        "is_in_memory": any(isinstance(dataset, TensorDataset) for dataset in datasets),
        **{name: _common(loaders, name) for name in _OF_LOADERS},
    }


def _common(loaders: Sequence[object], name: str) -> Any:
    """Return the number or switch that all loaders agree on; else None."""
    first, *others = [attribute(one, name) for one in loaders]
    return first if isinstance(first, int) and all(one == first for one in others) else None


def cores_of_rank(world_size: int) -> int | None:
    """Return the number of CPU cores for each rank of this host."""
    cores = os.cpu_count() or 0
    with suppress(AttributeError, OSError):
        cores = len(os.sched_getaffinity(0))
    # Not all launchers tell: Lightning's own does not. A host has a rank for each device.
    ranks = min(world_size, torch.accelerator.device_count() or world_size)
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(told) if told.isdigit() else ranks
    return max(cores // max(ranks, 1), 1) if cores else None


def _unfused(optimizers: Sequence[Any]) -> str:
    """Return the class of the first optimizer that could be fused, and is not."""
    for one in optimizers:
        groups = attribute(one, "param_groups")
        if isinstance(groups, list) and groups and all(map(_is_unfused, groups)):
            return type(one).__name__
    return ""


def _is_unfused(group: object) -> bool:
    return isinstance(group, dict) and not group.get("fused", True)
