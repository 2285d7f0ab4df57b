"""The precision of a training, and what a GPU can do in it by its data sheet."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from typing import Any

import torch
from torch import nn

from lightning_gputime._compat.torch_ import is_autocast_on, unwrapped

_MAKER = re.compile(r"^(NVIDIA |AMD |Tesla |GeForce |Instinct )+")
_MEMORY = re.compile(r"([ -](\d+GB|HBM\d\w*|SXM[45]|OAM|(?<=A100-)PCIE|(?<=GB )PCIe))+$")
_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def dtype_of_call(model: nn.Module, device: torch.device) -> torch.dtype:
    """Return the dtype in which a call of a model computes that begins here and now."""
    kind = device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    for found in _around(unwrapped(model).forward):
        if isinstance(found, torch.autocast) and found.device == kind and is_autocast_on(found):
            return found.fast_dtype
    return dtype_of(model)


def dtype_of(model: nn.Module) -> torch.dtype:
    dtypes = (one.dtype for one in nn.Module.parameters(model) if one.is_floating_point())
    return next(dtypes, torch.get_default_dtype())


def _around(forward: Any) -> Iterator[Any]:
    """Yield what the wrappers of a `forward` hold, such as Accelerate's."""
    while forward is not None:
        forward = getattr(forward, "__func__", forward)
        for cell in getattr(forward, "__closure__", None) or ():
            with suppress(ValueError):  # It is empty.
                yield cell.cell_contents
        forward = getattr(forward, "__wrapped__", None)


def precision_of(model: nn.Module, dtype: torch.dtype, device: torch.device) -> str:
    """Return the name of a precision: "bf16", "fp16", "tf32", "fp32", or that of another dtype."""
    if dtype is torch.float32 and device.type == "cuda" and _allows_tf32(model, device):
        return "tf32"  # It takes the same numbers, and has another peak.
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name)


def _allows_tf32(model: nn.Module, device: torch.device) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    # By default convolutions are allowed it and products of matrices are not: what holds most of
    # the parameters decides.
    convolutions = [one for one in nn.Module.modules(model) if isinstance(one, _CONVOLUTIONS)]
    if 2 * sum(map(_size, convolutions)) > _size(model):
        setting = getattr(torch.backends.cudnn, "conv", None)
        if setting is not None:
            return bool(setting.fp32_precision == "tf32")
        return bool(torch.backends.cudnn.allow_tf32)
    try:
        # Torch refuses to tell one setting where the other was made by a newer name.
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _size(module: nn.Module) -> int:
    return sum(one.numel() for one in nn.Module.parameters(module))


def peaks_tflops(device_name: str) -> Mapping[str, float]:
    """Return the dense peaks of a GPU by its name: of each precision, in TFLOP/s, if known."""
    known = json.loads(files(__package__).joinpath("peaks.json").read_text(encoding="utf-8"))
    # What has more words is another one: a laptop's, a "Ti", a part of a GPU (MIG).
    name = _MAKER.sub("", _MEMORY.sub("", device_name))
    peaks: Mapping[str, float] = known["peaks"].get(name, {})
    return peaks


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "a CPU"
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if get_name is None else str(get_name(device))
