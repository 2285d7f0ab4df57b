"""Environment and setup of a training run, read at its start without importing Lightning."""

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
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_gputime._compat.torch_ import is_compiled
from lightning_gputime._instrumentation.comm import is_distributed
from lightning_gputime._instrumentation.loaders import attribute, dataset_of, loaders_in
from lightning_gputime._instrumentation.loop import Loop
from lightning_gputime._instrumentation.peaks import device_name
from lightning_gputime._measurement.setup import TrainingSetup
from lightning_gputime._messages import messages
from lightning_gputime._options import Options, TimerOptions

# torch optimizers that are 2 to 7 times faster on a CPU if fused. Fusing SGD makes no difference.
_FASTER_ON_CPU = ("Adam", "AdamW", "Adagrad")
_LOADER_OPTIONS = (
    "num_workers",
    "prefetch_factor",
    "batch_size",
    "pin_memory",
    "persistent_workers",
)


@dataclass(frozen=True, slots=True)
class Environment:
    """Environment of a run. Unknown values are empty or None.

    Attributes:
        device: Name of the GPU; without a GPU, of the CPU.
        device_type: Type of the device, such as "cuda" or "cpu".
        cuda: Version of CUDA that torch was built with.
        torch: Version of torch.
        lightning: Version of Lightning.
        package: Version of lightning_gputime.
        world_size: Number of processes that train together.
        rank: Rank of this process.
        precision: Precision of the trainer; in a plain loop, dtype of the parameters.
        compiled: True if torch compiles at least a part of the model.
        parameters: Number of parameters of the model.
        batch_size: Batch size of the loader.
        accumulate_grad_batches: Number of batches per step.
        commit: Git commit of the program.
        started: Start of the measurement (UTC, ISO 8601).
        options: Options of the timer that differ from their defaults, if JSON can store them.
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
    """Return the environment of a measurement.

    If the lookup fails, warn, and return only the known fields.

    Args:
        loop: Loop to measure, with its model.
        options: Options of the timer.
        known: Fields that the front end knows. They override the lookup, unless they are None.
    """
    try:
        found = _look_up(loop, options)
    except Exception as error:
        messages.warning("Cannot describe the environment of the run: %r", error)
        found = {}
    # Front ends replace accumulate_grad_batches="auto" by `sys.maxsize`: the number is unknown.
    given = {key: value for key, value in known.items() if value not in (None, sys.maxsize)}
    return Environment(**{**found, **given})


def _look_up(loop: Loop, options: Options) -> dict[str, Any]:
    """Return the fields of the environment that do not depend on the front end."""
    parameters = list(nn.Module.parameters(loop.model))
    device = parameters[0].device if parameters else torch.device("cpu")
    has_ranks = is_distributed()
    return {
        "device": _processor() if device.type == "cpu" else device_name(device),
        "device_type": device.type,
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "lightning": version("lightning"),
        "package": sys.modules["lightning_gputime"].__version__,
        "world_size": torch.distributed.get_world_size() if has_ranks else 1,
        "rank": torch.distributed.get_rank() if has_ranks else 0,
        "precision": str(parameters[0].dtype).removeprefix("torch.") if parameters else "",
        "compiled": loop.compiled_step or any(map(is_compiled, nn.Module.modules(loop.model))),
        # Lazy parameters have no shape yet.
        "parameters": sum(weight.numel() for weight in parameters if not is_lazy(weight)),
        "commit": _commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": _options_to_save(options),
    }


def _options_to_save(options: Options) -> dict[str, Any]:
    """Return the options that differ from their defaults, if JSON can store them."""
    changed: dict[str, Any] = {}
    defaults = Options()
    for name in TimerOptions.__annotations__:
        value = getattr(options, name)
        if value != getattr(defaults, name):
            is_collection = isinstance(value, Mapping | Sequence) and not isinstance(value, str)
            # A mapping, such as modules by name, is saved as its keys.
            content = [*value] if is_collection else value
            with suppress(TypeError):
                changed[name] = json.loads(json.dumps(content))
    return changed


@lru_cache
def _processor() -> str:
    """Return the name of the CPU."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        if found := re.search(r"^model name\s*: (.+)$", text, re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()


# Cached, because a process keeps running the code of the commit at which it started.
@lru_cache
def _commit() -> str:
    """Return the commit of the running program; empty if unknown."""
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    with suppress(OSError, ValueError):
        return head_of(Path(program).resolve().parent if program else Path.cwd())
    return ""


def head_of(folder: Path) -> str:
    """Return the git commit that is checked out in a folder; empty without a repository.

    Read the files in `.git` directly, because starting `git` can take seconds.
    """
    candidates = (parent / ".git" for parent in (folder, *folder.parents))
    git = next((candidate for candidate in candidates if candidate.exists()), None)
    if git is None:
        return ""
    if git.is_file():  # In a worktree or a submodule, `.git` is a file with the path of the folder.
        git = git.parent / git.read_text().removeprefix("gitdir:").strip()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head
    ref = head.removeprefix("ref:").strip()
    # Worktrees share the branches of the main repository, whose path is in `commondir`.
    common = git / "commondir"
    shared = git / common.read_text().strip() if common.is_file() else git
    if (shared / ref).is_file():
        return (shared / ref).read_text().strip()
    with (shared / "packed-refs").open() as packed:
        return next((line.split()[0] for line in packed if line.rstrip().endswith(f" {ref}")), "")


def setup_of(environment: Environment, loop: Loop, has_precision: bool) -> TrainingSetup:
    """Return the training setup, without the fields of its loader.

    Args:
        environment: Environment of the run.
        loop: Loop to measure, with its model and optimizers.
        has_precision: True if the trainer reports its precision. Otherwise the precision is
            unknown, because the dtype of the parameters does not reveal autocast.
    """
    is_cuda = environment.device_type == "cuda"
    return TrainingSetup(
        cores=cores_of_rank(environment.world_size),
        precision=environment.precision if has_precision else "",
        has_bf16=is_cuda and torch.cuda.get_device_capability() >= (8, 0),
        compiled=environment.compiled,
        unfused=_unfused(loop.optimizers, environment.device_type),
    )


def loader_settings(loader: object) -> dict[str, Any]:
    """Return the `TrainingSetup` fields of a loader: any iterable, or a collection of loaders."""
    loaders = loaders_in(loader)
    datasets = [*map(dataset_of, loaders)]
    return {
        "has_loader": True,
        "foreign_loader": next(filter(None, map(_foreign_class, loaders)), ""),
        "is_iterable": any(isinstance(dataset, IterableDataset) for dataset in datasets),
        "is_in_memory": all(isinstance(dataset, TensorDataset) for dataset in datasets),
        **{name: _common_value(loaders, name) for name in _LOADER_OPTIONS},
    }


def _foreign_class(loader: object) -> str:
    """Return the class of a loader that is not a DataLoader of torch, else an empty string."""
    # A loader of accelerate has the loader that it wraps in `base_dataloader`.
    is_torch = isinstance(attribute(loader, "base_dataloader") or loader, DataLoader)
    return "" if is_torch else type(loader).__name__


def _common_value(loaders: Sequence[object], name: str) -> Any:
    """Return an integer or boolean attribute on which all loaders agree; None if they differ."""
    first, *others = [attribute(loader, name) for loader in loaders]
    return first if isinstance(first, int) and all(other == first for other in others) else None


def cores_of_rank(world_size: int) -> int | None:
    """Return the number of CPU cores per rank on this host; None if unknown."""
    cores = os.cpu_count() or 0
    with suppress(AttributeError, OSError):
        cores = len(os.sched_getaffinity(0))
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local_world_size.isdigit():
        ranks = int(local_world_size)
    else:  # The launcher does not set it: assume one rank per device.
        ranks = min(world_size, torch.accelerator.device_count() or world_size)
    return max(cores // max(ranks, 1), 1) if cores else None


def _unfused(optimizers: Sequence[Any], device_type: str) -> str:
    """Return the class of the first optimizer that would be faster if fused; empty if none."""
    for optimizer in optimizers:
        groups, name = attribute(optimizer, "param_groups"), type(optimizer).__name__
        is_faster = device_type == "cuda" or (device_type == "cpu" and name in _FASTER_ON_CPU)
        if is_faster and isinstance(groups, list) and groups and all(map(_is_unfused, groups)):
            return name
    return ""


def _is_unfused(group: object) -> bool:
    """Return True if a parameter group has an option `fused` that is off."""
    return isinstance(group, dict) and not group.get("fused", True)
