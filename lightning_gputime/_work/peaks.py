"""The precision of a training, and what a GPU can do in it by its data sheet."""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from lightning_gputime._results.throughput import ThroughputReference
from lightning_gputime._work.flops import unwrapped

# TFLOP/s without sparsity, which data sheets often show first; 16-bit figures are with 32-bit
# accumulation, as training has it. A figure that was found nowhere is left out. Read in:
# [1] lightning/fabric/utilities/throughput.py, `_CUDA_FLOPS`, which names the data sheets. Not its
#     H200 and H100 NVL, which are sparse, nor 16 bits on GA102 and Ada, which are without tensor
#     cores: A100, H100 SXM and PCIe, L4, L40, A10, T4, V100; 32 bits of A40, A6000, 3090, 4090
# [2] stanford-crfm/levanter, src/levanter/utils/flop_utils.py: 16 bits of the A10
# [3] stas00/ml-engineering, compute/accelerator/README.md: H200, B200, GB200, L40S, MI300X
# [4] pytorch/torchtitan, torchtitan/tools/utils.py, `get_peak_flops`: H100 NVL; MI325X as MI300X
# [5] karpathy/nanochat, nanochat/common.py, in copies: A30, A40, H200 NVL, 3090, 4090, MI325X
# [6] https://www.mullet.se/product.html?product_id=355414 (a data sheet's table): L40, L40S
# [7] https://www.ecer.com/corp/details-uuuedqa-p1bsay9-... (another): 16 bits of the A40
# [8] https://glennklockwood.com/garden/processors/B200 and
#     https://zdszero.github.io/Computer/Artificial_Intelligence/Hardware.html: B200, GB200
# [9] https://waredb.com/processor/nvidia-geforce-rtx-4090
# Of GH200 and RTX A6000 only tables of 16 bits in other repositories were found.
_HOPPER = {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9}
_MI300X = {"bf16": 1307.4, "fp16": 1307.4, "fp32": 163.4}
_A100 = {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5}

# By the name that torch gives, without the maker, and without what stands behind it of the memory.
_PEAKS = {
    "H200 NVL": {"bf16": 836.0, "fp16": 836.0},
    "H200": _HOPPER,
    "GH200": {"bf16": 989.0, "fp16": 989.0},
    "H100 NVL": {"bf16": 835.0, "fp16": 835.0},
    "H100 PCIe": {"bf16": 756.0, "fp16": 756.0, "tf32": 378.0, "fp32": 51.2},
    "H100": _HOPPER,
    "GB200": {"bf16": 2500.0, "fp16": 2500.0, "tf32": 1250.0, "fp32": 80.0},
    "B200": {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1100.0, "fp32": 75.0},
    "A100": _A100,
    "A30": {"bf16": 165.0, "fp16": 165.0},
    "A10": {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2},
    "A40": {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4},
    "RTX A6000": {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7},
    "L40S": {"bf16": 362.0, "fp16": 362.0, "tf32": 183.0, "fp32": 91.6},
    "L40": {"bf16": 181.0, "fp16": 181.0, "tf32": 90.5, "fp32": 90.5},
    "L4": {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3},
    "T4": {"fp16": 65.0, "fp32": 8.1},
    "V100-SXM2": {"fp16": 125.0, "fp32": 15.7},
    "V100-PCIE": {"fp16": 112.0, "fp32": 14.0},
    "RTX 4090": {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6},
    "RTX 3090": {"bf16": 71.0, "fp16": 71.0, "tf32": 35.6, "fp32": 35.6},
    "MI300X": _MI300X,
    "MI325X": _MI300X,
}

_MAKER = re.compile(r"^(NVIDIA |AMD |Tesla |GeForce |Instinct )+")
_MEMORY = re.compile(r"([ -](\d+GB|HBM\d\w*|SXM[45]|OAM|(?<=A100-)PCIE|(?<=GB )PCIe))+$")
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def dtype_of_call(model: nn.Module, device: torch.device) -> torch.dtype:
    """Return the dtype in which a call of a model computes that begins here and now."""
    kind = device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    for found in _around(unwrapped(model).forward):
        if isinstance(found, torch.autocast) and found.device == kind and found._enabled:
            return found.fast_dtype
    return dtype_of(model)


def dtype_of(model: nn.Module) -> torch.dtype:
    dtypes = (one.dtype for one in model.parameters() if one.is_floating_point())
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
    convolutions = [one for one in model.modules() if isinstance(one, nn.modules.conv._ConvNd)]
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
    return sum(one.numel() for one in module.parameters())


def fill_in_peak(reference: ThroughputReference, device: torch.device, precision: str) -> None:
    """Fill in the precision and its peak, or why that is not known."""
    name, reference.precision = device_name(device), precision
    reference.peak_tflops = peak_tflops(name, precision)
    if reference.peak_tflops is None and not reference.note:
        unseen = "it is not seen in what is computed"
        why = f"no {precision} peak is known of {name}" if precision else unseen
        reference.note = f"{why}: there is no MFU"


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Return the dense peak of a GPU by its name, in TFLOP/s; None if it is not known."""
    # What has more words is another one: a laptop's, a "Ti", a part of a GPU (MIG).
    name = _MAKER.sub("", _MEMORY.sub("", device_name))
    return _PEAKS.get(name, {}).get(precision)


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "a CPU"
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if get_name is None else str(get_name(device))
