"""What a run ran on: found without Lightning, and once, where a measurement begins."""

import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_gputime._boundaries.comm import is_distributed
from lightning_gputime._boundaries.compiled import is_compiled
from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._messages import messages
from lightning_gputime._options import Options


@dataclass(frozen=True, slots=True)
class Environment:
    """What a run ran on. What is not known is empty, or None.

    Attributes:
        device: The name of the GPU, or of the CPU that took its place.
        device_type: Such as "cuda" or "cpu".
        driver: The version of NVIDIA's driver.
        cuda: The version of CUDA that torch was built with.
        torch: The version of torch.
        lightning: The version of Lightning.
        python: The version of Python.
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
        options: Those of the timer that are numbers, strings or switches.
    """

    device: str = ""
    device_type: str = ""
    driver: str = ""
    cuda: str = ""
    torch: str = ""
    lightning: str = ""
    python: str = ""
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
    """Returns what a measurement begins on; of a part that cannot be found, nothing.

    Args:
        loop: What is timed.
        options: Those of the timer.
        known: Fields that the front end knows better; None if it does not.
    """
    try:
        found = _found(loop, options)
    except Exception as error:
        messages.warning("What the run runs on could not be found: %r", error)
        found = {}
    # No loop has so many micro-batches: an update ends a step there, after any number of them.
    told = {key: one for key, one in known.items() if one not in (None, sys.maxsize)}
    return Environment(**{**found, **told})


def _found(loop: Loop, options: Options) -> dict[str, Any]:
    parameters = list(loop.model.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    shared = is_distributed()
    return {
        "device": _name_of(device),
        "device_type": device.type,
        "driver": _driver() if device.type == "cuda" else "",
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "lightning": _lightning_version(),
        "python": platform.python_version(),
        "package": sys.modules["lightning_gputime"].__version__,
        "world_size": torch.distributed.get_world_size() if shared else 1,
        "rank": torch.distributed.get_rank() if shared else 0,
        "precision": str(parameters[0].dtype).removeprefix("torch.") if parameters else "",
        "compiled": loop.compiled_step or any(map(is_compiled, loop.model.modules())),
        "parameters": sum(map(_size, parameters)),
        "commit": _commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": options_to_save(options),
    }


def options_to_save(options: Options) -> dict[str, Any]:
    """Returns the options that JSON has a word for."""
    values = {one.name: getattr(options, one.name) for one in fields(options)}
    if isinstance(values.get("modules"), Mapping):
        values["modules"] = [*values["modules"]]
    simple = (bool, int, float, str)
    return {
        name: list(value) if isinstance(value, list | tuple) else value
        for name, value in values.items()
        if isinstance(value, simple)
        or (isinstance(value, list | tuple) and all(isinstance(one, simple) for one in value))
    }


def _size(parameter: nn.Parameter) -> int:
    # One that is lazy has no shape yet.
    return 0 if isinstance(parameter, nn.UninitializedParameter) else parameter.numel()


def _name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return _processor()
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(get_name(device)) if get_name is not None else device.type


@lru_cache(maxsize=1)
def _lightning_version() -> str:
    return version("lightning")


@lru_cache(maxsize=1)
def _processor() -> str:
    text = _text("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _driver() -> str:
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _text("/proc/driver/nvidia/version"))
    return found[1] if found else ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


# Once in a process: what runs is what was there when it began.
@lru_cache(maxsize=1)
def _commit() -> str:
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(program).resolve().parent if program else Path.cwd()
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
