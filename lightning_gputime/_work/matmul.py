"""What a GPU reaches in one large matrix product, in the precision of the training."""

from itertools import pairwise

import torch

_REPEATS = 5
# The larger one is nearer to the peak, and takes 0.4 GB.
_SIDE, _SMALL_SIDE, _LEAST_FREE = 8192, 4096, 4 * 2**30


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Returns what the fastest of some products of square matrices reaches, in TFLOP/s.

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
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    # What the allocator holds and does not use is there, too.
    if device.type == "cuda":
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    # In full 32 bits a product takes ten times as long.
    is_large = free >= _LEAST_FREE and dtype.itemsize <= 2
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
