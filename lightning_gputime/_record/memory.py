"""What the allocator of a device counts: the most memory that was allocated, from mark to mark."""

from collections.abc import Mapping, Sequence
from functools import partial
from inspect import unwrap
from typing import Any, Protocol

import torch

from lightning_gputime._messages import messages
from lightning_gputime._record.clock import Clock, HostClock
from lightning_gputime._untraced import untraced

Place = tuple[Any, str]
"""Where a function is found: what it is an attribute of, and its name."""

MIB = 2**20

_ALL = ("allocated_bytes", "all")
"""Where the peaks that are wanted stand in the counters."""

_CPU = "memory=True needs a GPU, whose allocator counts: nothing is measured on the CPU."
_NO_COUNTERS = (
    "memory=True: the peaks of %s cannot be read, and no memory is measured (%s). That needs"
    " torch's own allocator on a GPU (CUDA or ROCm; others from torch 2.9 on)."
)
_DRIVERS = (
    "memory=True: under the backend cudaMallocAsync memory counts until the GPU has passed where it"
    " is freed, so the peak of a phase may hold what the one before has freed."
)
_UNSEEN = (
    "memory=True: somebody resets the peak counters past torch's functions in Python; steps in"
    " which that is seen have no peaks."
)
_LOWER = (
    "memory=True has reset torch's peak counters: max_memory_allocated() tells %.1f MiB from now"
    " on, and the highest before was %.1f MiB. Read it before the timer is removed."
)


class Allocator(Protocol):
    """The counters of a device's allocator. A clock may have one as its attribute `allocator`."""

    index: int
    """The number of the device, with which the functions below are called."""
    total: int | None
    """The device's memory (in bytes), if it is known."""
    readers: Sequence[Place]
    """The functions by which all others read the counters: each gives nested dicts."""
    resetters: Sequence[Place]
    """Those by which they reset the peaks."""

    def read(self) -> Mapping[str, Any]:
        """Returns the counters as nested dicts, as torch.cuda.memory_stats_as_nested_dict does."""

    def reset(self) -> None:
        """Sets all peaks to what there is now."""


class _TorchAllocator:
    """Torch's allocator of an accelerator.

    Args:
        device: The accelerator.

    Raises:
        LookupError: If torch has no functions for it.
        Exception: If they fail.
    """

    def __init__(self, device: torch.device) -> None:
        kind = device.type
        index = device.index
        self.index = torch.accelerator.current_device_index() if index is None else index
        names = [
            # Takes half as long as the other: 10 us, and 2 us the reset.
            ("_accelerator_getDeviceStats", "_accelerator_resetPeakStats"),
            (f"_{kind}_memoryStats", f"_{kind}_resetPeakMemoryStats"),
        ]
        # All that is called in Python ends in these, by whatever name it was imported.
        found = [pair for pair in names if all(hasattr(torch._C, name) for name in pair)]
        if not found:
            raise LookupError("this torch has no functions for that")
        self.readers: Sequence[Place] = [(torch._C, read) for read, _ in found]
        self.resetters: Sequence[Place] = [(torch._C, reset) for _, reset in found]
        read, reset = found[0]
        # Past the stand-ins, which may be there for another device, or a timer that is lost.
        self.read = partial(unwrap(getattr(torch._C, read)), self.index)
        self.reset = partial(unwrap(getattr(torch._C, reset)), self.index)
        about = getattr(torch.get_device_module(device), "get_device_properties", None)
        self.total: int | None = None
        if about is not None:
            self.total = getattr(about(device), "total_memory", None)
        if kind == "cuda" and torch.cuda.get_allocator_backend() == "cudaMallocAsync":
            messages.warning(_DRIVERS)


@untraced
class Meter:
    """What one timer reads of the counters.

    Args:
        memory: The counters, which it shares with other timers.
    """

    def __init__(self, memory: "DeviceMemory") -> None:
        self.memory = memory
        self.works = True
        """Whether they can be read; not after an error, of which is told."""
        self.highest = 0
        """The most since this meter was asked last (in bytes)."""
        self.now = 0
        """What was allocated then (in bytes)."""

    def cut(self) -> int | None:
        """Returns the most memory since the last call (in bytes); None if that is not known."""
        if not self.works:
            return None
        try:
            return self.memory.cut(self)
        except Exception as error:
            self.works = False
            messages.warning("Memory is measured no more: %r", error)
            return None


@untraced
class DeviceMemory:
    """The counters of one device, which all timers and everybody else share.

    To know the peak between two marks it must be reset at each. So that nobody else reads too
    little, what was there before is kept, and given to them (`correct`) until they reset it
    themselves (`others_reset`), which takes nothing from the meters either.

    Args:
        allocator: The counters.

    Raises:
        LookupError: If it has none.
        Exception: If they cannot be read.
    """

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self._meters: list[Meter] = []
        # Of each peak, by its path in the counters, the highest before our resets.
        self._paths = _paths_of_peaks(allocator.read())
        if _ALL not in self._paths:
            raise LookupError("it does not count them")
        self._kept = [0] * len(self._paths)
        # What was allocated at the last reset: no peak can be below.
        self._least = 0
        self._told = False

    def meter(self) -> Meter:
        """Returns a new meter, which must be taken back by `leave`."""
        _devices[self.allocator.index] = self
        self._meters.append(Meter(self))
        return self._meters[-1]

    def cut(self, meter: Meter) -> int | None:
        """See `Meter.cut`.

        Raises:
            Exception: What the allocator raises.
        """
        stats = self.allocator.read()
        self._keep(stats)
        self.allocator.reset()
        of_all = stats["allocated_bytes"]["all"]
        peak, now = of_all["peak"], of_all["current"]
        is_known = self._note(peak)
        self._least = meter.now = now
        highest, meter.highest = meter.highest, 0
        return highest if is_known else None

    def others_reset(self) -> None:
        """Must be called before somebody else resets the peaks."""
        try:
            # In a process that was forked off there is no meter.
            if not self._meters:
                return
            of_all = self.allocator.read()["allocated_bytes"]["all"]
            self._note(of_all["peak"])
            self._least = of_all["current"]
        except Exception:
            self._least = 0
        self._kept = [0] * len(self._paths)

    def correct(self, stats: Mapping[str, Any]) -> None:
        """Must be called with what somebody else has read: puts the peaks of before into it."""
        for path, kept in zip(self._paths, self._kept, strict=True):
            found: Any = stats
            for key in path:
                found = found.get(key) if isinstance(found, dict) else None
            if isinstance(found, dict) and kept > found.get("peak", kept):
                found["peak"] = kept

    def leave(self, meter: Meter) -> None:
        """Takes a meter back. What others have not read by then they read too low: that is said."""
        if meter not in self._meters:
            return
        self._meters.remove(meter)
        if not self._meters:
            _devices.pop(self.allocator.index, None)
        if self._meters or not any(self._kept):
            return
        try:
            peak = self.allocator.read()["allocated_bytes"]["all"]["peak"]
        except Exception:
            return
        kept = self._kept[self._paths.index(_ALL)]
        if kept > peak:
            messages.warning(_LOWER, peak / MIB, kept / MIB)

    def abandon(self) -> None:
        """Must be called in a process that was forked off: the device is its parent's."""
        self._meters.clear()
        _devices.pop(self.allocator.index, None)
        self._kept = [0] * len(self._paths)

    def _keep(self, stats: Mapping[str, Any]) -> None:
        kept = self._kept
        for i, path in enumerate(self._paths):
            found: Any = stats
            for key in path:
                found = found[key]
            if found["peak"] > kept[i]:
                kept[i] = found["peak"]

    def _note(self, peak: int) -> bool:
        """Lets all meters know of a peak. Tells if it can be that of all the time since a reset."""
        for meter in self._meters:
            meter.highest = max(meter.highest, peak)
        if peak >= self._least:
            return True
        if not self._told:
            self._told = True
            messages.warning(_UNSEEN)
        return False


# Module state, as the counters are: timers of one process would take peaks from each other.
_devices: dict[int, DeviceMemory] = {}


def meter_for(clock: Clock) -> Meter | None:
    """Returns a meter of the device that a clock times; None, and says so, if there is none."""
    if isinstance(clock, HostClock):
        messages.warning(_CPU)
        return None
    device = getattr(clock, "device", None)
    try:
        allocator: Allocator | None = getattr(clock, "allocator", None)
        if allocator is None:
            if device is None:
                raise LookupError("it has no attribute `allocator`")
            allocator = _TorchAllocator(device)
        memory = _devices.get(allocator.index) or DeviceMemory(allocator)
        return memory.meter()
    except Exception as error:
        messages.warning(_NO_COUNTERS, device or "this clock", error)
        return None


def _paths_of_peaks(stats: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Returns where in the counters there are peaks."""
    found = []
    for key, value in stats.items():
        if isinstance(value, Mapping):
            inner = (*path, key)
            found += [inner] if "peak" in value else _paths_of_peaks(value, inner)
    return found
