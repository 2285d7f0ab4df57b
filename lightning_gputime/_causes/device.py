"""Causes that only the device's own counters tell: its allocator, and its clocks."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_gputime._causes.scene import Scene
from lightning_gputime._causes.usual import Usual
from lightning_gputime._phases import is_wait
from lightning_gputime._untraced import untraced

_COUNTERS: Mapping[str, str] = {
    "num_alloc_retries": "retries",
    "num_device_alloc": "device allocations",
    "num_device_free": "device frees",
    "num_sync_all_streams": "waits for all streams",
}
"""The counters of torch's allocators that grow only where it calls the driver."""

Counts = tuple[int, ...]

# So many readings are remembered.
_MOST = 200


@untraced
class Allocator:
    """Reads the counters of the device's allocator when steps are read, and after a long step.

    They have no times: that the host was held up by it is said only of a step in which they grew,
    and of what no other witness explains.

    Args:
        now_ns: Returns the host's time (in nanoseconds).
        read: Returns the counters; None where there are none.
    """

    def __init__(self, now_ns: Callable[[], int], read: Callable[[], Counts] | None) -> None:
        self._now_ns = now_ns
        self._read = read
        self._newest: deque[tuple[int, Counts]] = deque(maxlen=_MOST)
        self._ended_ns = 0
        self._limit_ns = math.inf
        self._is_due = False

    def attach(self) -> None:
        self._look(self._now_ns())

    def remove(self) -> None:
        self._read = None

    def step_ends(self) -> None:
        """Must be called at the end of each step."""
        now = self._now_ns()
        if now - self._ended_ns > self._limit_ns:
            self._look(now)
        self._ended_ns = now

    def steps_were_read(self, usual: Usual) -> None:
        """Remembers from which host time on a step is long; reads the counters every other time."""
        if self._read is not None:
            self._limit_ns = usual.host_limit_ms * 1e6
            self._is_due = not self._is_due
            if self._is_due:  # A reading takes 20 us.
                self._look(self._now_ns())

    def _look(self, now: int) -> None:
        if self._read is not None:
            try:
                self._newest.append((now, self._read()))
            except Exception:  # A device without them says so in words of its own.
                self._read = None

    def testify(self, scene: Scene) -> None:
        # The reading at its end is the first after the mark there, as this is told before it.
        newest = [*self._newest]
        after = next((i for i, (now, _) in enumerate(newest) if now >= scene.end_ns - 1e6), 0)
        if after and newest[after][0] <= scene.end_ns + 1e6:
            grown = [
                now - then for then, now in zip(newest[after - 1][1], newest[after][1], strict=True)
            ]
            words = zip(grown, _COUNTERS.values(), strict=True)
            if detail := ", ".join(f"{word} {n}" for n, word in words if n > 0):
                scene.claim_growth("allocator", detail, math.inf, lambda name: not is_wait(name))


def counters_of(device: torch.device | None) -> Callable[[], Counts] | None:
    """Returns what reads the allocator's counters of a device; None if there are none."""
    if device is None or device.type != "cuda":
        return None
    # Not `memory_stats`, which takes seven times as long to flatten them.
    stats: Callable[[Any], Any] = torch.cuda.memory_stats_as_nested_dict

    def read() -> Counts:
        found = stats(device)
        return tuple(found.get(name, 0) for name in _COUNTERS)

    return read


class Clocks:
    """Asks NVML for the device's clocks where all of a step was slower alike.

    That is when the step is read, some steps later.

    Args:
        read: Returns what lowers the clocks now, in words; empty if nothing does. None where that
            is not known.
    """

    def __init__(self, read: Callable[[], str] | None) -> None:
        self._read = read

    def attach(self) -> None:
        """Does nothing, as there is nothing to put on."""

    def remove(self) -> None:
        self._read = None

    def testify(self, scene: Scene) -> None:
        if self._read is None or scene.causes() or not scene.is_stretched:
            return
        try:
            detail = self._read()
        except Exception:  # NVML's errors are its own, and it may not be loaded any more.
            self._read = None
            return
        if detail:
            for part in scene.parts:
                scene.claim_device("clocks", part, detail)


_REASONS: Mapping[int, str] = {
    0x4: "a cap of power",
    0x8: "a slowdown by the hardware",
    0x20: "heat",
    0x40: "heat, by the hardware",
    0x80: "a brake of power",
}
"""NVML's reasons for lower clocks that are no choice of the user's."""


def clocks_of(device: torch.device | None) -> Callable[[], str] | None:
    """Returns what reads the clocks of a device; None if NVML is not there."""
    if device is None or device.type != "cuda" or torch.version.hip is not None:
        return None
    try:
        import pynvml
    except ImportError:
        return None

    def read() -> str:
        # By its bus: `CUDA_VISIBLE_DEVICES` gives devices other numbers than NVML does.
        about: Any = torch.cuda.get_device_properties(device)
        bus = f"{about.pci_domain_id:08x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus.encode())
            reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            now = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
            most = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
        finally:
            pynvml.nvmlShutdown()
        found = [word for bit, word in _REASONS.items() if reasons & bit]
        return f"{now} of {most} MHz: {', '.join(found)}" if found else ""

    return read
