"""In what the products of a training are computed."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_gputime._work.copies import unwrapped

ComputedIn = Mapping[tuple[torch.dtype, bool], float]
"""How many FLOPs have factors of which type, and whether they are of convolutions."""

# Of so much of all FLOPs the peak of one precision is that of all.
_NEARLY_ALL = 0.95

_SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


@dataclass(frozen=True, slots=True)
class Precision:
    """What the products of a training are computed in.

    Attributes:
        name: "bf16", "fp16", "tf32", "fp32", "fp8", or the name of another type of torch; each with
            its share where there are several; empty where nothing is known.
        dtype: The type of the factors; None where there are several.
    """

    name: str
    dtype: torch.dtype | None


def precision_of(device: torch.device, computed_in: ComputedIn) -> Precision:
    """Returns the precision that nearly all FLOPs have on a device, or all of theirs.

    Args:
        device: The device.
        computed_in: How many FLOPs have which factors.
    """
    flops: dict[str, float] = {}
    types: dict[str, torch.dtype] = {}
    for (dtype, is_convolution), some in computed_in.items():
        name = _name(device, dtype, is_convolution)
        flops[name] = flops.get(name, 0.0) + some
        types[name] = dtype
    whole = sum(flops.values())
    if not whole:
        return Precision("", None)
    shares = sorted(((of / whole, name) for name, of in flops.items()), reverse=True)
    share, name = shares[0]
    if share >= _NEARLY_ALL:
        return Precision(name, types[name])
    return Precision(" and ".join(f"{one} ({share:.0%})" for share, one in shares), None)


def looks_like(model: nn.Module, device: torch.device) -> ComputedIn:
    """Returns what a call of a model that begins here and now looks like from outside.

    Args:
        model: The model.
        device: Where it is.
    """
    dtype = autocast_dtype(model, device.type) or dtype_of(model)
    convolves = any(isinstance(one, nn.modules.conv._ConvNd) for one in model.modules())
    return {(dtype, False): 1.0, (dtype, True): float(convolves)}


def autocast_dtype(model: nn.Module, kind: str) -> torch.dtype | None:
    """Returns the type of autocast, of the caller or around the model's `forward`; None if none."""
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    forward: Any = unwrapped(model).forward
    # As Accelerate wraps it: hooks of the model are called outside of it.
    while forward is not None:
        forward = getattr(forward, "__func__", forward)
        for cell in getattr(forward, "__closure__", None) or ():
            with suppress(ValueError):  # It is empty.
                found = cell.cell_contents
                if isinstance(found, torch.autocast) and found.device == kind and found._enabled:
                    return found.fast_dtype
        forward = getattr(forward, "__wrapped__", None)
    return None


def dtype_of(model: nn.Module) -> torch.dtype:
    """Returns the type of a model's parameters."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.get_default_dtype()


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
