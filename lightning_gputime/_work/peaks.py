"""What a GPU can do at most: in the vendors' data sheets, and in one large matrix product."""

import re
from itertools import pairwise

import torch

from lightning_gputime._results.throughput import ThroughputReference
from lightning_gputime._work.precision import ComputedIn, precision_of

# TFLOP/s without sparsity, which data sheets often show first; 16-bit figures are with 32-bit
# accumulation, as training has it. A figure that was found nowhere is left out. Read in:
# [1] lightning/fabric/utilities/throughput.py, `_CUDA_FLOPS`, which names the data sheets. Not its
#     H200 and H100 NVL, which are sparse, nor 16 bits on GA102 and Ada, which are without tensor
#     cores: A100, H100 SXM and PCIe, L4, L40, A10, T4, V100; 32 bits of A40, A6000, 3090, 4090
# [2] stanford-crfm/levanter, src/levanter/utils/flop_utils.py: 8 bits of the H100, 16 of the A10
# [3] stas00/ml-engineering, compute/accelerator/README.md: H200, B200, GB200, L40S, MI300X
# [4] pytorch/torchtitan, torchtitan/tools/utils.py, `get_peak_flops`: H100 NVL; MI325X as MI300X
# [5] karpathy/nanochat, nanochat/common.py, in copies: A30, A40, H200 NVL, 3090, 4090, MI325X
# [6] https://www.mullet.se/product.html?product_id=355414 (a data sheet's table): L40, L40S
# [7] https://www.ecer.com/corp/details-uuuedqa-p1bsay9-... (another): 16 bits of the A40
# [8] https://glennklockwood.com/garden/processors/B200 and
#     https://zdszero.github.io/Computer/Artificial_Intelligence/Hardware.html: B200, GB200
# [9] https://waredb.com/processor/nvidia-geforce-rtx-4090
# Of GH200 and RTX A6000 only tables of 16 bits in other repositories were found.
_HOPPER = {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp8": 1979.0}
_MI300X = {"bf16": 1307.4, "fp16": 1307.4, "fp32": 163.4}
_A100 = {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5}

# By the name that torch gives, without the maker, and without what stands behind it of the memory.
_PEAKS = {
    "H200 NVL": {"bf16": 836.0, "fp16": 836.0},
    "H200": _HOPPER,
    "GH200": {"bf16": 989.0, "fp16": 989.0},
    "H100 NVL": {"bf16": 835.0, "fp16": 835.0},
    "H100 PCIe": {"bf16": 756.0, "fp16": 756.0, "tf32": 378.0, "fp32": 51.2, "fp8": 1513.0},
    "H100": _HOPPER,
    "GB200": {"bf16": 2500.0, "fp16": 2500.0, "tf32": 1250.0, "fp32": 80.0, "fp8": 5000.0},
    "B200": {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1100.0, "fp32": 75.0, "fp8": 4500.0},
    "A100": _A100,
    "A30": {"bf16": 165.0, "fp16": 165.0},
    "A10": {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2},
    "A40": {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4},
    "RTX A6000": {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7},
    "L40S": {"bf16": 362.0, "fp16": 362.0, "tf32": 183.0, "fp32": 91.6, "fp8": 733.0},
    "L40": {"bf16": 181.0, "fp16": 181.0, "tf32": 90.5, "fp32": 90.5, "fp8": 362.0},
    "L4": {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3},
    "T4": {"fp16": 65.0, "fp32": 8.1},
    "V100-SXM2": {"fp16": 125.0, "fp32": 15.7},
    "V100-PCIE": {"fp16": 112.0, "fp32": 14.0},
    "RTX 4090": {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6, "fp8": 330.3},
    "RTX 3090": {"bf16": 71.0, "fp16": 71.0, "tf32": 35.6, "fp32": 35.6},
    "MI300X": _MI300X,
    "MI325X": _MI300X,
}

_MAKER = re.compile(r"^(NVIDIA |AMD |Tesla |GeForce |Instinct )+")
_MEMORY = re.compile(r"([ -](\d+GB|HBM\d\w*|SXM[45]|OAM|(?<=A100-)PCIE|(?<=GB )PCIe))+$")


_REPEATS = 5
# The larger one is nearer to the peak, and takes 0.4 GB.
_SIDE, _SMALL_SIDE, _LEAST_FREE = 8192, 4096, 4 * 2**30


def find_peak(
    reference: ThroughputReference, device: torch.device, computed_in: ComputedIn
) -> torch.dtype | None:
    """Fill in the precision and its peak; if that is new, return the dtype of its factors."""
    precision, dtype = precision_of(device, computed_in)
    if precision and precision == reference.precision:
        return None
    reference.precision, reference.peak_tflops, why = precision, None, ""
    if not precision:
        why = "it is not seen in what is computed"
    elif dtype is None:
        reference.matmul_tflops = None
        why = f"{precision} have no peak in common"
    else:
        name = device_name(device)
        reference.peak_tflops = peak_tflops(name, precision)
        why = f"no {precision} peak is known of {name}"
    if reference.peak_tflops is None:
        reference.note = reference.note or f"{why}: there is no MFU"
    return dtype


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Return the dense peak of a GPU by its name, in TFLOP/s; None if it is not known."""
    # What has more words is another one: a laptop's, a "Ti", a part of a GPU (MIG).
    name = _MAKER.sub("", _MEMORY.sub("", device_name))
    return _PEAKS.get(name, {}).get(precision)


def device_name(device: torch.device) -> str:
    """Return the name of a device, as torch gives it."""
    if device.type == "cpu":
        return "a CPU"
    return str(torch.get_device_module(device).get_device_name(device))


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return what the fastest of some products of square matrices reaches, in TFLOP/s.

    The host waits for them. They take a few milliseconds, and leave their memory to the allocator.

    Args:
        device: An accelerator with timing events.
        dtype: The type of the factors.

    Raises:
        RuntimeError: If the device cannot.
    """
    # First: where there are none, as on a CPU, a product would take seconds for nothing.
    events = [torch.Event(device=device, enable_timing=True) for _ in range(_REPEATS + 1)]
    events[0].record()
    # In full 32 bits a product takes ten times as long.
    is_large = dtype.itemsize <= 2 and _free_bytes(device) >= _LEAST_FREE
    side = _SIDE if is_large else _SMALL_SIDE
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        # No random numbers: those of the training must stay. Nor zeros, which take less power.
        one = torch.linspace(-1, 1, side, device=device).to(dtype)
        a = one.repeat(side, 1)
        b = a.t().contiguous()
        out = a @ b  # what is chosen and loaded at the first call
        events[0].record()
        for event in events[1:]:
            torch.mm(a, b, out=out)
            event.record()
        events[-1].synchronize()
    ms = min(start.elapsed_time(end) for start, end in pairwise(events))
    return 2 * side**3 / ms / 1e9


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    # What the allocator holds and does not use is there, too.
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held
