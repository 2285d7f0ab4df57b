"""Environment, setup and costly settings of a training run, read without importing Lightning."""

import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_gputime._compat.torch_ import is_compiled
from lightning_gputime._instrumentation.loop import (
    Loop,
    attribute_of,
    dataset_of,
    is_distributed,
    loaders_in,
)
from lightning_gputime._instrumentation.work import device_name
from lightning_gputime._measurement.measurement import CostlySetting, Environment, TrainingSetup
from lightning_gputime._messages import messages
from lightning_gputime._options import Options, TimerOptions
from lightning_gputime._phases import BACKWARD, CALLBACKS

_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_FLOAT32 = ("float32", "32-true")  # Precisions without autocast, as far as the timer can tell.
_AMPERE = (8, 0)  # The first compute capability of CUDA with TF32 and fast bfloat16.
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_MAX_NAMES = 3  # Number of modules to name.


def environment_of(loop: Loop, options: Options, **known: Any) -> Environment:
    """Return the environment of a measurement.

    If the lookup fails, warn, and return only the fields that the front end knows. They override
    the lookup, unless they are None.
    """
    try:
        parameters = list(nn.Module.parameters(loop.model))
        device = parameters[0].device if parameters else torch.device("cpu")
        has_ranks = is_distributed()
        defaults, changed = Options(), dict[str, Any]()
        for name in TimerOptions.__annotations__:
            value = getattr(options, name)
            if value != getattr(defaults, name):
                with suppress(TypeError):  # JSON cannot store functions and observers.
                    changed[name] = json.loads(json.dumps(value))
        found = {
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
            "options": changed,
        }
    except Exception as error:
        messages.warning("Cannot describe the environment of the run: %r", error)
        found = {}
    # Front ends replace accumulate_grad_batches="auto" by `sys.maxsize`: the number is unknown.
    given = {key: value for key, value in known.items() if value not in (None, sys.maxsize)}
    return Environment(**{**found, **given})


@lru_cache
def _processor() -> str:
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

    Unless the trainer reports its precision, it is unknown: the dtype of the parameters does not
    reveal autocast.
    """
    is_cuda = environment.device_type == "cuda"
    return TrainingSetup(
        cores=cores_of_rank(environment.world_size),
        precision=environment.precision if has_precision else "",
        has_bf16=is_cuda and torch.cuda.get_device_capability() >= _AMPERE,
        compiled=environment.compiled,
        unfused=_unfused(loop.optimizers, environment.device_type),
    )


def loader_settings(loader: object) -> dict[str, Any]:
    """Return the `TrainingSetup` fields of a loader: any iterable, or a collection of loaders."""
    loaders = loaders_in(loader)
    datasets = [*map(dataset_of, loaders)]
    found: dict[str, Any] = {
        "has_loader": True,
        "foreign_loader": "",
        "is_iterable": any(isinstance(dataset, IterableDataset) for dataset in datasets),
        "is_in_memory": all(isinstance(dataset, TensorDataset) for dataset in datasets),
    }
    for candidate in loaders:
        # A loader of accelerate has the loader that it wraps in `base_dataloader`.
        wrapped = attribute_of(candidate, "base_dataloader") or candidate
        if not isinstance(wrapped, DataLoader):
            found["foreign_loader"] = found["foreign_loader"] or type(candidate).__name__
    # Attributes of a DataLoader that are fields of `TrainingSetup`.
    copied = ("num_workers", "prefetch_factor", "batch_size", "pin_memory", "persistent_workers")
    for name in copied:
        first, *others = [attribute_of(loader, name) for loader in loaders]
        is_common = isinstance(first, int) and all(other == first for other in others)
        found[name] = first if is_common else None
    return found


def cores_of_rank(world_size: int) -> int | None:
    """Return the number of CPU cores per rank on this host; None if unknown.

    A container may have a quota of CPU time: "200000 100000" are 2 cores.
    """
    cores = os.cpu_count() or 0
    with suppress(AttributeError, OSError):
        cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # Without a quota, the file has "max 100000".
        quota_us, period_us = map(int, _CPU_QUOTA.read_text().split())
        cores = min(cores, max(quota_us // period_us, 1))
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local_world_size.isdigit():
        ranks = int(local_world_size)
    else:  # The launcher does not set it: assume one rank per device.
        ranks = min(world_size, torch.accelerator.device_count() or world_size)
    return max(cores // max(ranks, 1), 1) if cores else None


def _unfused(optimizers: Sequence[Any], device_type: str) -> str:
    """Return the class of the first optimizer that would be faster if fused; empty if none."""
    for optimizer in optimizers:
        groups, name = attribute_of(optimizer, "param_groups"), type(optimizer).__name__
        # 2 to 7 times faster on a CPU, where fusing SGD makes no difference.
        is_faster_on_cpu = name in ("Adam", "AdamW", "Adagrad")
        is_faster = device_type == "cuda" or (device_type == "cpu" and is_faster_on_cpu)
        if not (is_faster and isinstance(groups, list) and groups):
            continue
        # Each group has an option `fused` that is off.
        if all(isinstance(group, dict) and not group.get("fused", True) for group in groups):
            return name
    return ""


@dataclass(frozen=True, slots=True)
class CostlySettings:
    """Facts about a training with which `read` finds costly settings. Keeps no model alive."""

    environment: Environment = field(default_factory=Environment)
    logging: str = ""  # Option that makes the trainer log every step; empty if none.
    has_convolutions: bool = False
    # Modules and parameters that have gradients, and that no optimizer has updated.
    not_updated: tuple[str, ...] = ()

    @classmethod
    def of(cls, environment: Environment, loop: Loop) -> Self:
        modules = [*nn.Module.modules(loop.called)]
        return cls(
            environment=environment,
            logging=loop.every_step_log,
            has_convolutions=any(isinstance(module, _CONVOLUTIONS) for module in modules),
        )

    def read(self, setup: TrainingSetup) -> tuple[CostlySetting, ...]:
        """Return the settings that may cost time now.

        Never raise: after an error, return the settings found so far, because only advice is lost.
        """
        found: list[CostlySetting] = []
        with suppress(Exception):
            for setting in self._find(setup):
                found.append(setting)
        return tuple(found)

    def _find(self, setup: TrainingSetup) -> Iterator[CostlySetting]:
        device_type = self.environment.device_type
        is_cuda = device_type == "cuda"
        if option := self.logging:
            text = f"{option}=1 may cost time in loggers: log every 50 steps, for example"
            yield CostlySetting(option, text, CALLBACKS)
        if names := self.not_updated:
            shown = ", ".join(f"`{name}`" for name in names[:_MAX_NAMES])
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            yield CostlySetting(
                "unused_gradients",
                f"backward computes gradients of {shown}{more}, which no optimizer has updated:"
                " call requires_grad_(False) on them before training",
                BACKWARD,
            )
        threads, cores = torch.get_num_threads(), setup.cores
        # Only check the threads of torch on a CPU: with a GPU, few operations use them.
        if cores is not None and threads > cores and device_type == "cpu":
            yield CostlySetting(
                "num_threads",
                f"{threads} threads of torch may cost time in every operation on {cores} CPU cores:"
                f" call torch.set_num_threads({cores}), or set OMP_NUM_THREADS={cores}",
            )
        if torch.is_anomaly_enabled():
            yield CostlySetting(
                "detect_anomaly",
                "detect_anomaly=True may cost time in forward and backward: turn it off after"
                " debugging",
            )
        if not is_cuda:
            return
        cudnn = torch.backends.cudnn
        # The benchmark may choose a different algorithm in each run, so a training that must be
        # repeatable cannot use it.
        must_be_repeatable = torch.are_deterministic_algorithms_enabled() or cudnn.deterministic
        can_benchmark = cudnn.enabled and not (cudnn.benchmark or must_be_repeatable)
        if self.has_convolutions and can_benchmark:
            yield CostlySetting(
                "cudnn.benchmark",
                "cudnn.benchmark=False may cost time in convolutions: set"
                " torch.backends.cudnn.benchmark = True if inputs have fixed shapes",
                operation="convolves",
            )
        if self.environment.precision in _FLOAT32 and _has_unused_tf32():
            yield CostlySetting(
                "float32_matmul_precision",
                'float32 matmul precision "highest" may cost time in matrix products outside of'
                ' autocast: torch.set_float32_matmul_precision("high") uses TF32',
                operation="multiplies_float32",
            )
        blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "").strip().upper()
        if blocking not in ("", "0", "FALSE", "OFF"):
            yield CostlySetting(
                "CUDA_LAUNCH_BLOCKING",
                "CUDA_LAUNCH_BLOCKING=1 may cost time in all phases, and distorts all times, as the"
                " CPU waits for each kernel: unset it and time again",
            )


def merge(*readings: Iterable[CostlySetting]) -> tuple[CostlySetting, ...]:
    """Return the settings of several readings without duplicates."""
    return tuple({setting.name: setting for found in readings for setting in found}.values())


def _has_unused_tf32() -> bool:
    """Return True if the current GPU has TF32, but float32 matrix products do not use it."""
    if torch.version.hip or torch.cuda.get_device_capability() < _AMPERE:
        return False
    # torch 2.9 added this attribute. If it is set, `get_float32_matmul_precision` may raise.
    if attribute_of(torch.backends.cuda.matmul, "fp32_precision") == "tf32":
        return False
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        return True
