"""What a GPU can do at most: dense figures of the vendors' data sheets."""

import re
from dataclasses import dataclass

import torch

# TFLOP/s without sparsity, which data sheets often show first; 16-bit figures are with 32-bit
# accumulation, as training has it. From:
# V100, T4: https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
#   https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf
# A100, A30, A10, A40: https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
#   https://www.nvidia.com/en-us/data-center/products/a30-gpu/ and .../a10-gpu/, .../a40/
# H100, H200: https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
#   https://resources.nvidia.com/en-us-data-center-overview-mc/en-us-data-center-overview/hpc-datasheet-sc23-h200
# L4, L40, L40S: https://www.nvidia.com/en-us/data-center/l4/ and .../l40/, .../l40s/
# B200, GB200: https://resources.nvidia.com/en-us-blackwell-architecture/datasheet
# RTX 3090, A6000: https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf
# RTX 4090: https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
# MI210, MI300X, MI325X: https://www.amd.com/en/products/accelerators/instinct.html
_HOPPER = {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp8": 1978.9}
_HOPPER_NVL = {"bf16": 835.5, "fp16": 835.5, "tf32": 417.7, "fp32": 60.0, "fp8": 1671.0}
_CDNA3 = {"bf16": 1307.4, "fp16": 1307.4, "tf32": 653.7, "fp32": 163.4, "fp8": 2614.9}
_A100 = {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5}

# By the name that torch gives, without the maker, and without what stands behind it of the memory.
_PEAKS = {
    "H200 NVL": _HOPPER_NVL,
    "H200": _HOPPER,
    "GH200": _HOPPER,
    "H100 NVL": _HOPPER_NVL,
    "H100 PCIe": {"bf16": 756.0, "fp16": 756.0, "tf32": 378.0, "fp32": 51.0, "fp8": 1513.0},
    "H100": _HOPPER,
    "GB200": {"bf16": 2500.0, "fp16": 2500.0, "tf32": 1250.0, "fp32": 80.0, "fp8": 5000.0},
    "B200": {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1125.0, "fp32": 75.0, "fp8": 4500.0},
    "A100": _A100,
    "A30": {"bf16": 165.0, "fp16": 165.0, "tf32": 82.0, "fp32": 10.3},
    "A10": {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2},
    "A40": {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4},
    "RTX A6000": {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7},
    "L40S": {"bf16": 362.0, "fp16": 362.0, "tf32": 183.0, "fp32": 91.6, "fp8": 733.0},
    "L40": {"bf16": 181.0, "fp16": 181.0, "tf32": 90.5, "fp32": 90.5, "fp8": 362.0},
    "L4": {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3, "fp8": 242.5},
    "T4": {"fp16": 65.0, "fp32": 8.1},
    "V100-SXM2": {"fp16": 125.0, "fp32": 15.7},
    "V100-PCIE": {"fp16": 112.0, "fp32": 14.0},
    "RTX 4090": {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6, "fp8": 330.3},
    "RTX 3090": {"bf16": 71.0, "fp16": 71.0, "tf32": 35.6, "fp32": 35.6},
    "MI300X": _CDNA3,
    "MI325X": _CDNA3,
    "MI210": {"bf16": 181.0, "fp16": 181.0, "fp32": 22.6},
}

_MAKER = re.compile(r"^(NVIDIA |AMD |Tesla |GeForce |Instinct )+")
_MEMORY = re.compile(r"([ -](\d+GB|HBM\d\w*|SXM[45]|OAM|(?<=A100-)PCIE|(?<=GB )PCIe))+$")

_SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


@dataclass(frozen=True, slots=True)
class Precision:
    """What the matrix products of a training are computed in.

    Attributes:
        name: "bf16", "fp16", "tf32", "fp32", or the name of another type of torch.
        dtype: The type of the factors.
    """

    name: str
    dtype: torch.dtype


def precision_of(device: torch.device, parameter: torch.dtype) -> Precision:
    """Returns the precision of work on a device that is launched here and now.

    Args:
        device: The device.
        parameter: The type of the parameters.
    """
    dtype = parameter
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    name = _SHORT.get(dtype, str(dtype).removeprefix("torch."))
    # TF32 takes the same numbers, and has another peak.
    if name == "fp32" and device.type == "cuda" and _allows_tf32():
        name = "tf32"
    return Precision(name, dtype)


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Returns the dense peak of a GPU by its name, in TFLOP/s; None if it is not known."""
    # What has more words is another one: a laptop's, a "Ti", a part of a GPU (MIG).
    name = _MAKER.sub("", _MEMORY.sub("", device_name))
    return _PEAKS.get(name, {}).get(precision)


def device_name(device: torch.device) -> str:
    """Returns the name of a device, as torch gives it."""
    if device.type == "cpu":
        return "a CPU"
    return str(torch.get_device_module(device).get_device_name(device))


def _allows_tf32() -> bool:
    try:
        # Torch refuses to tell one setting where the other was made by a newer name.
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
