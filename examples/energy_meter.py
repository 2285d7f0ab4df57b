"""Observer that logs the energy of an NVIDIA GPU: joules per step, items per joule.

python -m pip install nvidia-ml-py
python examples/energy_meter.py
"""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_gputime import GPUPhaseHooks

_SHORTEST_S = 1.0  # Shorter windows are not logged: the counter changes only every 100 ms.


class EnergyMeter:
    """Observer that measures the energy that a GPU uses between two logs.

    It logs `energy_j`, the energy per step (in joules), `power_w`, the mean power (in watts), and
    `items_per_j`, items per joule, if the timer counts items. It reads the counter
    `nvmlDeviceGetTotalEnergyConsumption` (Volta and newer) only at logs. The counter includes all
    work of the GPU, even evaluations and other processes. It changes only every 100 ms, so energy
    cannot be split by phase.

    Args:
        device: GPU, as a number or a `torch.device`. Default: torch's current device when the
            timer is attached.

    Raises:
        ImportError: If `nvidia-ml-py` is not installed.
    """

    def __init__(self, device: int | torch.device | None = None) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise ImportError("EnergyMeter needs nvidia-ml-py: pip install nvidia-ml-py") from error
        self._nvml: Any = pynvml
        self._device = device
        self._handle: Any = None
        self._reset()

    def _reset(self) -> None:
        self._last: tuple[float, float] | None = None
        self._newest: dict[str, float] = {}
        # Totals over all windows: seconds, joules, seconds times joules per step, and items.
        self._seconds = self._joules = self._of_steps = self._items = 0.0

    def attach(self) -> None:
        """Find and read the GPU's counter."""
        self._reset()
        self._nvml.nvmlInit()
        # CUDA_VISIBLE_DEVICES renumbers devices, so find the GPU by its UUID.
        index = torch.cuda.current_device() if self._device is None else self._device
        found = torch.cuda.get_device_properties(index)
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{found.uuid}")
        self._last = self._read()

    def _read(self) -> tuple[float, float]:
        """Return the time (in seconds) and the energy counter (in joules)."""
        joules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
        return time.monotonic(), joules

    def metrics(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Return the energy since the last log, or the last values if that was under 1 s ago."""
        if self._last is None:
            return {}
        now = self._read()
        seconds, joules = (b - a for a, b in zip(self._last, now, strict=True))
        if seconds < _SHORTEST_S:
            return self._newest
        self._last = now
        power_w = joules / seconds
        step_j, items_per_sec = power_w * means["step_ms"] / 1e3, means.get("items_per_sec", 0.0)
        self._seconds += seconds
        self._joules += joules
        self._of_steps += step_j * seconds
        self._items += items_per_sec * seconds
        self._newest = {"energy_j": step_j, "power_w": power_w}
        if items_per_sec and power_w:
            self._newest["items_per_j"] = items_per_sec / power_w
        return self._newest

    def summary(self) -> str | None:
        """Return the means over all windows."""
        if not self._joules:
            return None
        said = (
            f"{self._of_steps / self._seconds:.3g} J per step, at"
            f" {self._joules / self._seconds:,.0f} W"
        )
        return f"{said}, {self._items / self._joules:.3g} items per joule" if self._items else said

    def remove(self) -> None:
        """Release the counter. Safe to call twice."""
        if self._handle is not None:
            self._handle = self._last = None
            self._nvml.nvmlShutdown()


def main(steps: int = 500, width: int = 4096) -> GPUPhaseHooks:
    """Train a two-layer net, and print the energy that it uses."""
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(width, width, device="cuda")
    with GPUPhaseHooks(model, optimizer, observers=[EnergyMeter()]) as timer:
        for x in timer.steps([batch] * steps):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    print(timer.summary())
    return timer


if __name__ == "__main__":
    main()
