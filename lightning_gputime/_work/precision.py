"""The precision that the products of a training are computed in."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from lightning_gputime._work.flops import unwrapped

ComputedIn = Mapping[tuple[torch.dtype, bool], float]
"""FLOPs by the dtype of their factors, and by whether they are convolutions."""

# With this share of all FLOPs the peak of one precision is that of all.
_NEARLY_ALL = 0.95

_SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


def precision_of(device: torch.device, computed_in: ComputedIn) -> tuple[str, torch.dtype | None]:
    """Return the precision of nearly all FLOPs on a device, and the dtype of their factors.

    The name is "bf16", "fp16", "tf32", "fp32", "fp8", or that of another dtype. Several precisions
    have one name with their shares, and no dtype. The name is empty if nothing is known.
    """
    flops: dict[str, float] = {}
    types: dict[str, torch.dtype] = {}
    for (dtype, is_convolution), some in computed_in.items():
        name = _name(device, dtype, is_convolution)
        flops[name] = flops.get(name, 0.0) + some
        types[name] = dtype
    whole = sum(flops.values())
    if not whole:
        return "", None
    shares = sorted(((of / whole, name) for name, of in flops.items()), reverse=True)
    share, name = shares[0]
    if share >= _NEARLY_ALL:
        return name, types[name]
    return " and ".join(f"{one} ({share:.0%})" for share, one in shares), None


def precision_outside(model: nn.Module, device: torch.device) -> ComputedIn:
    """Return what a call of a model that begins here and now looks like from outside."""
    dtype = _autocast_dtype(model, device.type) or dtype_of(model)
    convolves = any(isinstance(one, nn.modules.conv._ConvNd) for one in model.modules())
    return {(dtype, False): 1.0, (dtype, True): float(convolves)}


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's parameters."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.get_default_dtype()


def _autocast_dtype(model: nn.Module, kind: str) -> torch.dtype | None:
    """Return the dtype of autocast, of the caller or around the model's `forward`, if it is on."""
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    for found in _around(unwrapped(model).forward):
        if isinstance(found, torch.autocast) and found.device == kind and found._enabled:
            return found.fast_dtype
    return None


def _around(forward: Any) -> Iterator[Any]:
    """Yield what the wrappers of a `forward` hold, such as Accelerate's."""
    while forward is not None:
        forward = getattr(forward, "__func__", forward)
        for cell in getattr(forward, "__closure__", None) or ():
            with suppress(ValueError):  # It is empty.
                yield cell.cell_contents
        forward = getattr(forward, "__wrapped__", None)


def _name(device: torch.device, dtype: torch.dtype, is_convolution: bool) -> str:
    if dtype is torch.float32 and device.type == "cuda" and _allows_tf32(device, is_convolution):
        return "tf32"  # It takes the same numbers, and has another peak.
    name = str(dtype).removeprefix("torch.")
    return "fp8" if name.startswith("float8") else _SHORT.get(dtype, name)


def _allows_tf32(device: torch.device, is_convolution: bool) -> bool:
    # By default that of convolutions is on, and that of products of matrices is off.
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    if is_convolution:
        setting = getattr(torch.backends.cudnn, "conv", None)
        if setting is not None:
            return bool(setting.fp32_precision == "tf32")
        return bool(torch.backends.cudnn.allow_tf32)
    try:
        # Torch refuses to tell one setting where the other was made by a newer name.
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
