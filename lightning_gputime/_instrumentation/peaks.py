"""Precision of a training, and peak FLOP/s of GPUs by their data sheets."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from typing import Any

import torch
from torch import nn

from lightning_gputime._compat.torch_ import is_autocast_on, unwrapped

# Parts of device names that the names in `peaks.json` do not contain.
_MAKER = re.compile(r"^(NVIDIA |AMD |Tesla |GeForce |Instinct )+")
_MEMORY = re.compile(r"([ -](\d+GB|HBM\d\w*|SXM[45]|OAM|(?<=A100-)PCIE|(?<=GB )PCIe))+$")
_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_SHORT_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def dtype_of_call(model: nn.Module, device: torch.device) -> torch.dtype:
    """Return the dtype that a model call would compute in if it began now."""
    kind = device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    for value in _closure_values(unwrapped(model).forward):
        if isinstance(value, torch.autocast) and value.device == kind and is_autocast_on(value):
            return value.fast_dtype
    return dtype_of(model)


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the first floating-point parameter, or the default dtype of torch."""
    parameters = nn.Module.parameters(model)
    dtypes = (parameter.dtype for parameter in parameters if parameter.is_floating_point())
    return next(dtypes, torch.get_default_dtype())


def _closure_values(forward: Any) -> Iterator[Any]:
    """Yield the closure variables of the functions that wrap a `forward`.

    Accelerate stores its autocast in such a variable.
    """
    while forward is not None:
        forward = getattr(forward, "__func__", forward)
        for cell in getattr(forward, "__closure__", None) or ():
            with suppress(ValueError):  # The cell is empty.
                yield cell.cell_contents
        forward = getattr(forward, "__wrapped__", None)


def precision_of(model: nn.Module, dtype: torch.dtype, device: torch.device) -> str:
    """Return the name of a precision: "bf16", "fp16", "tf32", "fp32", or another dtype's name."""
    if dtype is torch.float32 and device.type == "cuda" and _allows_tf32(model, device):
        return "tf32"  # Tensors have the dtype float32, but the peak is higher.
    name = str(dtype).removeprefix("torch.")
    return _SHORT_NAMES.get(name, name)


def _allows_tf32(model: nn.Module, device: torch.device) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    # By default torch allows TF32 in convolutions but not in matrix products. Follow the setting
    # of the kind of layer that has most of the parameters.
    modules = nn.Module.modules(model)
    convolutions = [module for module in modules if isinstance(module, _CONVOLUTIONS)]
    if 2 * sum(map(_n_parameters, convolutions)) > _n_parameters(model):
        setting = getattr(torch.backends.cudnn, "conv", None)
        if setting is not None:
            return bool(setting.fp32_precision == "tf32")
        return bool(torch.backends.cudnn.allow_tf32)
    try:
        # Raises if the setting was changed through the newer `fp32_precision`.
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _n_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in nn.Module.parameters(module))


def peaks_tflops(device_name: str) -> Mapping[str, float]:
    """Return the dense peak of a GPU for each precision (in TFLOP/s); empty if unknown."""
    known = json.loads(files(__package__).joinpath("peaks.json").read_text(encoding="utf-8"))
    # Without maker and memory size, match the full name. A suffix means a different GPU, such as a
    # laptop GPU, a "Ti" or a MIG slice.
    name = _MAKER.sub("", _MEMORY.sub("", device_name))
    peaks: Mapping[str, float] = known["peaks"].get(name, {})
    return peaks


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "a CPU"
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if get_name is None else str(get_name(device))
