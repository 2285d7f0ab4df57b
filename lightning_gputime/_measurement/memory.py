"""Peak memory of a run on its device."""

from collections.abc import Callable
from dataclasses import dataclass

Peaks = tuple[int, int, int]
"""Peak allocated, peak reserved and total memory of a device (in bytes)."""


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """Peak memory of a run, as counted by torch's allocator.

    The timer never resets torch's counters, so the peaks include memory that was used before it
    was attached.

    Attributes:
        allocated_mib: Peak memory of tensors (in MiB), as `torch.cuda.max_memory_allocated` returns
            it.
        reserved_mib: Peak memory that the allocator reserved (in MiB), as
            `torch.cuda.max_memory_reserved` returns it.
        device_mib: Total memory of the device (in MiB).
    """

    allocated_mib: float = 0.0
    reserved_mib: float = 0.0
    device_mib: float = 0.0

    @property
    def share(self) -> float:
        """Peak allocated memory as a fraction of the device's memory, from 0 to 1."""
        return self.allocated_mib / self.device_mib if self.device_mib else 0.0

    @property
    def sentences(self) -> tuple[str, ...]:
        """Sentence on memory for the summary."""
        return (
            f"peak memory: {self.allocated_mib:,.0f} of {self.device_mib:,.0f} MiB allocated"
            f" ({100 * self.share:.0f} %), {self.reserved_mib:,.0f} MiB reserved",
        )


class MemoryWatch:
    """Highest memory peaks of a run, read at each log and at the end.

    Code in the loop may reset torch's counters. Reading them at each log preserves earlier peaks.
    `read` returns None if the device does not count them.
    """

    def __init__(self, read: Callable[[], Peaks | None]) -> None:
        self._read: Callable[[], Peaks | None] | None = read  # None once reading has ended.
        self._highest: Peaks | None = None

    def __getstate__(self) -> dict[str, object]:
        # A copy may be in another process, with another device.
        return {"_read": None, "_highest": self._highest}

    def read(self) -> None:
        try:
            peaks = self._read() if self._read is not None else None
        except Exception:  # Some allocators have no counters. Training continues.
            peaks = self._read = None
        if peaks is not None:
            allocated, reserved, device = map(max, peaks, self._highest or peaks)
            self._highest = allocated, reserved, device

    def end(self) -> None:
        self.read()
        self._read = None

    def summary(self) -> MemorySummary | None:
        """Return the highest peaks so far; None if they are not measured."""
        if self._highest is None:
            return None
        allocated_mib, reserved_mib, device_mib = (size / 2**20 for size in self._highest)
        return MemorySummary(allocated_mib, reserved_mib, device_mib)
