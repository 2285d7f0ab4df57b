"""Detectors that read counters: of the processor, of the device's allocator, and its clocks."""

import math
import sys
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from time import thread_time_ns
from typing import Any

import torch

from lightning_gputime._causes.attribution import ExcessAttribution
from lightning_gputime._causes.baseline import Baseline, median
from lightning_gputime._phases import BACKWARD, FORWARD, LOSS, OPTIMIZER, is_wait
from lightning_gputime._untraced import untraced

_NEAR_NS = 1_000_000
"""A reading that belongs to a mark is no further away from it."""

_WORTH_MS = 2.0
"""Of shorter steps no CPU time is sampled: beside a GPU that costs some 5 us each (a system call
whose code is cold)."""

_MAX_SAMPLES = 1_000
"""Number of samples to remember: of the steps that are not judged yet, and of the baseline."""

Counts = Sequence[int]


class Counters:
    """The newest readings of counters that only grow.

    Args:
        read: Returns the counters. Once it raises, they are not read any more.
    """

    def __init__(self, read: Callable[[], Counts]) -> None:
        self._read: Callable[[], Counts] | None = read
        self._newest: deque[tuple[int, Counts]] = deque(maxlen=200)

    @property
    def is_there(self) -> bool:
        """Whether they can be read, as far as is known."""
        return self._read is not None

    def read(self, now_ns: int) -> None:
        """Read the counters now."""
        if self._read is not None:
            try:
                self._newest.append((now_ns, self._read()))
            except Exception:  # A device without counters says so in an error of its own.
                self._read = None

    def until(self, end_ns: int) -> list[tuple[int, Counts]]:
        """Return the readings up to that at the end of a step; none where there is none."""
        newest = [*self._newest]
        # The one at its end is just before the mark there.
        at = bisect_left(newest, end_ns - _NEAR_NS, key=itemgetter(0))
        if at == len(newest) or newest[at][0] > end_ns + _NEAR_NS:
            return []
        return newest[: at + 1]

    def remove(self) -> None:
        """Read them no more."""
        self._read = None


def _growth(before: tuple[int, Counts], after: tuple[int, Counts]) -> list[int]:
    return [now - then for then, now in zip(before[1], after[1], strict=True)]


def read_scheduler() -> Counts:
    """Return how long Linux let the calling thread wait for a processor, and how often it ran.

    Raises:
        OSError: If this system, or its kernel, does not count that.
    """
    with open("/proc/thread-self/schedstat", "rb", buffering=0) as file:
        ran_ns, queued_ns, slices = map(int, file.read().split())
    if not ran_ns:
        raise OSError("the kernel was built without these counters")
    return queued_ns, slices


@untraced
class Preemption:
    """Sees when the loop's thread was not on a processor: others were, or it was stopped.

    It samples the thread's CPU time at the end of each step. What the step took beyond that is
    off-CPU time, which is exact. How much of it the thread was ready and others ran is known from
    Linux's counters. Those are read after a long step, and else now and then. So the usual growth
    of the other steps since the last reading is taken off.

    A process that was stopped waits for nothing: there the thread was off the CPU in a phase in
    which it has nothing to wait for, for longer at a time than threads of Python take turns. That
    it was blocked in a system call cannot be separated from it.

    Args:
        cpu_ns: Returns the CPU time of the calling thread (in nanoseconds).
        read: Returns how long it was ready and others ran (in nanoseconds), and how often it ran.
    """

    def __init__(
        self,
        cpu_ns: Callable[[], int] = thread_time_ns,
        read: Callable[[], Counts] = read_scheduler,
    ) -> None:
        self._cpu_ns = cpu_ns
        self._counters = Counters(read)
        self.remove = self._counters.remove
        self._samples: deque[tuple[int, int]] = deque(maxlen=_MAX_SAMPLES)
        self._is_worth_it = True

    def step_ends(self, now_ns: int) -> None:
        """Sample the CPU time: every step pays for this."""
        if self._is_worth_it:
            self._samples.append((now_ns, self._cpu_ns()))

    def read_counters(self, now_ns: int) -> None:
        """Read the scheduler's counters."""
        if self._is_worth_it:
            self._counters.read(now_ns)

    def baseline_changed(self, baseline: Baseline) -> None:
        """Look only where steps are long enough for it."""
        self._is_worth_it = self._counters.is_there and baseline.host_ms >= _WORTH_MS

    def detect(self, attribution: ExcessAttribution) -> None:
        """Attribute the time in which others ran, and that in which it was stopped."""
        start_ns, end_ns = attribution.start_ns, attribution.end_ns
        off_cpu_ms = self._off_cpu_ms(start_ns, end_ns)
        readings = self._counters.until(end_ns)
        if off_cpu_ms is None or len(readings) < 2:
            return
        queued_ns, slices = _beyond_usual(readings, start_ns)
        queued_ms = min(queued_ns / 1e6, off_cpu_ms)
        # All of it, though some is usual on a busy machine: it may have fallen elsewhere than it
        # usually does, and must not count for what runs there.
        attribution.attribute_host_excess(
            "preemption", "others had the processor", queued_ms, lambda name: True
        )
        least_ms = 1.2e3 * sys.getswitchinterval()
        if off_cpu_ms - queued_ms <= least_ms:
            return  # Before what takes longest: most slow steps have another cause.
        others_ms = (self._off_cpu_ms(*step_ns) for step_ns in attribution.baseline.each_host_ns)
        usual_ms = median([ms for ms in others_ms if ms is not None] or [0.0])
        stopped_ms = off_cpu_ms - queued_ms - usual_ms
        if stopped_ms / max(slices, 1.0) > least_ms:
            attribution.attribute_host_excess(
                "preemption", "stopped, or blocked", stopped_ms, _is_at_work
            )

    def _off_cpu_ms(self, start_ns: int, end_ns: int) -> float | None:
        """Return how long the thread was off the CPU in a step; None if that is not known."""
        samples = [*self._samples]
        # Those before the marks at its start and at its end.
        first = bisect_right(samples, start_ns, key=itemgetter(0)) - 1
        last = bisect_right(samples, end_ns, key=itemgetter(0)) - 1
        if first < 0 or first == last or samples[first][0] < start_ns - _NEAR_NS:
            return None  # It started where nobody looked.
        (before_ns, before_cpu_ns), (after_ns, after_cpu_ns) = samples[first], samples[last]
        return (after_ns - before_ns - (after_cpu_ns - before_cpu_ns)) / 1e6


def _beyond_usual(readings: Sequence[tuple[int, Counts]], start_ns: int) -> list[float]:
    """Return the growth in a step, less what is usual for the time from a reading to its start.

    Args:
        readings: All until that at the end of the step.
        start_ns: The host time at its start (in nanoseconds).
    """
    *others, (before, after) = pairwise(readings)
    rates = [[grown / (b[0] - a[0]) for grown in _growth(a, b)] for a, b in others if b[0] > a[0]]
    usual = map(median, zip(*rates, strict=True)) if rates else (0.0, 0.0)
    rest_ns = max(start_ns - before[0], 0)
    growth = zip(_growth(before, after), usual, strict=True)
    return [max(grown - rate * rest_ns, 0.0) for grown, rate in growth]


def _is_at_work(name: str) -> bool:
    return name.partition("/")[0] in (FORWARD, LOSS, BACKWARD, OPTIMIZER)


_COUNTERS: Mapping[str, str] = {
    "num_alloc_retries": "retries",
    "num_device_alloc": "device allocations",
    "num_device_free": "device frees",
    "num_sync_all_streams": "waits for all streams",
}
"""The counters of torch's allocators that grow only where it calls the driver."""


class Allocator:
    """Reads the counters of the device's allocator after a long step, and else now and then.

    They have no times: the host was held up by it only in a step in which they grew, and only for
    what no other detector explains.

    Args:
        read: Returns the counters.
    """

    def __init__(self, read: Callable[[], Counts]) -> None:
        self._counters = Counters(read)
        self.read_counters, self.remove = self._counters.read, self._counters.remove

    def detect(self, attribution: ExcessAttribution) -> None:
        """Attribute what is left of the host's excess, if the counters grew."""
        readings = self._counters.until(attribution.end_ns)[-2:]
        if len(readings) < 2:
            return
        words = zip(_growth(*readings), _COUNTERS.values(), strict=True)
        if detail := ", ".join(f"{word} {n}" for n, word in words if n > 0):
            attribution.attribute_host_excess(
                "allocator", detail, math.inf, lambda name: not is_wait(name)
            )


def allocator_of(device: torch.device | None) -> Callable[[], Counts] | None:
    """Return what reads the allocator's counters of a device; None if there are none."""
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

    def remove(self) -> None:
        """Ask no more."""
        self._read = None

    def detect(self, attribution: ExcessAttribution) -> None:
        """Attribute the whole excess, if nothing else explains it and the clocks are lower."""
        if self._read is None or attribution.causes() or not attribution.is_stretched:
            return
        try:
            detail = self._read()
        except Exception:  # NVML's errors are its own, and it may not be loaded any more.
            self._read = None
            return
        if detail:
            for part in attribution.parts:
                attribution.attribute_device_excess("clocks", part, detail)


_REASONS: Mapping[int, str] = {
    0x4: "a cap of power",
    0x8: "a slowdown by the hardware",
    0x20: "heat",
    0x40: "heat, by the hardware",
    0x80: "a brake of power",
}
"""NVML's reasons for lower clocks that are no choice of the user's."""


def clocks_of(device: torch.device | None) -> Callable[[], str] | None:
    """Return what reads the clocks of a device; None if NVML is not there."""
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
