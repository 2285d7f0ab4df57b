"""Clocks: sources of timing events, and the CPU time of threads."""

import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter, sub
from pathlib import Path
from threading import get_native_id
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from lightning_gputime._compat.torch_ import PIN_LOOP, raw_stream, spin_kernel
from lightning_gputime._messages import WarnOnce

_warn_once = WarnOnce()

_MIN_CORE_WAIT_NS = 100_000  # A thread that loses its core gets it back later than this.
_TRIAL_EVERY_NS = 100_000_000  # The speed of the host is measured this often, in 0.1 to 0.2 ms.
# Parts of thread names. Autograd's threads and the loader's pin-memory thread run little Python.
# Never blame a thread of this package, whose name starts with that of the package.
IGNORED_THREADS = ("Dummy-", PIN_LOOP.attribute, __name__.partition(".")[0])


class TimingEvent(Protocol):
    """Point on the timeline of a device, with a part of the interface of `torch.Event`.

    `elapsed_time` raises RuntimeError if the device has not reached both events.
    """

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...


class Clock(Protocol):
    """Clock of a device and of the host.

    Optional attributes:

    - `device` is the device. `peak_memory()` returns the peaks of its allocator.
    - `streams` is described in `DeviceClock`. Without it, all work is on the timed stream.
    - `may_capture()` is a cheaper `is_capturing()`, which may return True without a capture.
    - `elapsed_ms(events)` replaces the function `elapsed_ms`.
    - `spin_cycles(n)` launches a kernel that takes `n` cycles of the device's clock.
    """

    def event(self) -> TimingEvent:
        """Return a new event, not yet recorded."""

    def host_ns(self) -> int: ...

    def is_capturing(self) -> bool:
        """Return True while the current stream is being captured into a graph.

        Recording or querying an event would break the capture.
        """


# Functions that return False and True. They are implemented in C, because marks call them.
_NEVER: Callable[[], bool] = bool
_ALWAYS: Callable[[], bool] = True.__bool__


def elapsed_ms(events: Sequence[TimingEvent]) -> tuple[float, ...]:
    """Return the time from each event to the next (in milliseconds)."""
    # Avoid a loop in Python, because this runs for every step.
    return tuple(map(type(events[0]).elapsed_time, events, events[1:]))


Mark = tuple[str, TimingEvent, int]
"""A label, the event at which its time starts, and the host time of that event (in nanoseconds)."""


class DeviceClock:
    """Clock of an accelerator: CUDA, ROCm, XPU, NPU or MPS.

    `torch.Event` works on every backend. Recording it takes a quarter of the time of a
    `torch.cuda.Event`, which looks up the current stream in Python.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        try:
            module = torch.get_device_module(device)
            if device.index is not None and device.index >= module.device_count():
                raise RuntimeError(f"this machine has {module.device_count()}")
            # `record` uses the current stream of the current device, even if the event belongs to
            # another device.
            self._is_current = device.index in (None, torch.accelerator.current_device_index())
            # A device without timing events raises here, not in the loop.
            self.event().record()
        except Exception as error:
            raise ValueError(
                f"device {str(device)!r} cannot be timed here ({error}): pass an available"
                " accelerator, or 'cpu' for the host clock"
            ) from error
        self.host_ns = time.perf_counter_ns
        # `kind` is the class whose `wait_event` and `wait_stream` wait for another stream.
        self.streams = SimpleNamespace(
            kind=getattr(module, "Stream", None),
            current=lambda: torch.accelerator.current_stream(device.index).stream_id,
        )
        self.is_capturing = getattr(module, "is_current_stream_capturing", _NEVER)
        self.may_capture: Callable[[], object] = self.is_capturing
        stream_of = raw_stream()
        if device.type == "cuda" and self._is_current and stream_of is not None:
            # Return the number of the current stream. The default stream, number 0, cannot be
            # captured (see `cudaStreamBeginCapture`), so any other number means "maybe". Reading
            # the number takes 0.1 us on the host of an H200, `is_capturing` 0.5 us.
            self.may_capture = functools.partial(stream_of, torch.cuda.current_device())
        self.spin_cycles = spin_kernel() if device.type == "cuda" and self._is_current else None
        if device.type == "mps":
            # The first elapsed_time on MPS fails unless the device was synchronized once.
            torch.mps.synchronize()

    def peak_memory(self) -> tuple[int, int, int] | None:
        """Return peak allocated, peak reserved and total memory of the device (in bytes).

        Return None if its allocator does not count them.
        """
        module = torch.get_device_module(self.device)
        # `memory_stats` takes seven times as long, because it flattens the dict.
        stats = getattr(module, "memory_stats_as_nested_dict", None)
        counters = stats(self.device) if stats is not None else {}
        if "allocated_bytes" not in counters:
            return None
        allocated, reserved = (
            counters[f"{kind}_bytes"]["all"]["peak"] for kind in ("allocated", "reserved")
        )
        total = module.get_device_properties(self.device).total_memory
        return allocated, reserved, total

    def event(self) -> TimingEvent:
        event = torch.Event(device=self.device, enable_timing=True)
        return event if self._is_current else _EventOnOtherDevice(event, self.device)


class _EventOnOtherDevice:
    """Event on a device that is not the current device of the thread."""

    __slots__ = ("__weakref__", "_device", "_event", "query", "synchronize")

    def __init__(self, event: torch.Event, device: torch.device) -> None:
        self._event, self._device = event, device
        self.query, self.synchronize = event.query, event.synchronize

    def record(self) -> None:
        self._event.record(torch.accelerator.current_stream(self._device))

    def elapsed_time(self, end_event: "_EventOnOtherDevice", /) -> float:
        return self._event.elapsed_time(end_event._event)


class LoopTime:
    """Time of a thread without its waits for a CPU core, which other threads or processes used.

    Any thread may call it. Create it in the thread.

    Args:
        file: Descriptor of the file in which Linux counts these waits, see
            `Documentation/scheduler/sched-stats.rst`. It is closed with this object.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        weakref.finalize(self, os.close, file)
        self.waited_ns = 0
        """All waits for a core so far (in nanoseconds)."""
        self._start_ns = 0  # Waits before now, which `_read` subtracts.
        self._start_ns = self._read()
        self._thread_clock = _thread_clock(get_native_id())
        # Time of the last reading, and for how long the thread had run until then; newest result.
        self._read_ns = self._ran_ns = self._last_ns = 0
        self.trial_ms = 0.0
        """Mean time of a fixed calculation, which shows the speed of the host (in milliseconds)."""
        self._trials, self._trial_due_ns, self._trials_ns = 0, 0, 0

    def __reduce__(self) -> tuple[Callable[[], Callable[[], int]], tuple[()]]:
        return loop_time, ()

    def __call__(self) -> int:
        """Return the time (in nanoseconds)."""
        now_ns = time.perf_counter_ns()
        # The system gives a core to another thread for longer than this, so no wait is missed.
        if now_ns - self._read_ns > _MIN_CORE_WAIT_NS:
            try:
                ran_ns = time.clock_gettime_ns(self._thread_clock)
            except OSError:  # The thread has ended.
                ran_ns = self._ran_ns
            # While it ran, it has not waited. This saves most readings, which take ten times as
            # long as the clock of the thread.
            if now_ns - self._read_ns - (ran_ns - self._ran_ns) > _MIN_CORE_WAIT_NS:
                waited_ns = self._read()
                for _ in range(5):
                    before_ns, now_ns, waited_ns = waited_ns, time.perf_counter_ns(), self._read()
                    if waited_ns == before_ns:
                        break  # Else the thread has waited between these readings.
                self._read_ns, self._ran_ns, self.waited_ns = now_ns, ran_ns, waited_ns
        self._last_ns = max(now_ns - self.waited_ns - self._trials_ns, self._last_ns)
        return self._last_ns

    def time_trial(self) -> None:
        """Repeat the fixed calculation if it is due. This clock stands still meanwhile."""
        start_ns = self()
        if start_ns < self._trial_due_ns:
            return
        for _ in range(20):
            np.full(24_576, 1.0, np.float32)  # As long as a small activation.
        took_ns = self() - start_ns
        self._trials_ns += took_ns
        self._last_ns, self._trial_due_ns = start_ns, start_ns + _TRIAL_EVERY_NS
        self._trials += 1
        self.trial_ms += (took_ns / 1e6 - self.trial_ms) / self._trials

    def _read(self) -> int:
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) - self._start_ns
        except (OSError, ValueError, IndexError):  # The thread has ended, for example.
            return self.waited_ns


def loop_time() -> Callable[[], int]:
    """Return a clock for a loop in the calling thread (in nanoseconds).

    On a CPU, it stands still while the thread waits for a core. With an accelerator, whose time
    passes meanwhile, or on a system that does not count these waits, it is `time.perf_counter_ns`.
    """
    if not torch.accelerator.is_available():
        with suppress(OSError):
            path = f"/proc/self/task/{get_native_id()}/schedstat"
            return LoopTime(os.open(path, os.O_RDONLY))
    return time.perf_counter_ns


class HostClock:
    """Host clock with the interface of a device clock, for models on the CPU.

    Args:
        host_ns: Time of the host (in nanoseconds); that of the calling thread by default.
    """

    def __init__(self, host_ns: Callable[[], int] | None = None) -> None:
        self.host_ns = host_ns or loop_time()
        self.is_capturing = self.may_capture = _NEVER

    def event(self) -> TimingEvent:
        return _HostEvent(self.host_ns)

    def elapsed_ms(self, events: "Sequence[_HostEvent]") -> tuple[float, ...]:
        """Return the time from each event to the next (in milliseconds)."""
        ns = tuple(map(_TIME_OF, events))
        return tuple(map(_TO_MS, map(sub, ns[1:], ns)))


class _HostEvent:
    """Point in host time. It is reached as soon as it is recorded."""

    __slots__ = ("_now_ns", "ns")

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.ns: int | None = None
        self._now_ns = now_ns

    def record(self) -> None:
        self.ns = self._now_ns()

    query = staticmethod(_ALWAYS)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: "_HostEvent", /) -> float:
        if self.ns is None or end_event.ns is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event.ns - self.ns) / 1e6


_TIME_OF = attrgetter("ns")
_TO_MS = (1e6).__rtruediv__  # Divides by 1e6, without calling a Python function.


def clock_for(device: torch.device, host_ns: Callable[[], int], *, report_cpu: bool) -> Clock:
    """Return the clock of a device.

    Args:
        device: The device.
        host_ns: Time of the host, for models on the CPU; see `HostClock`.
        report_cpu: True to warn once about a model on the CPU.

    Raises:
        ValueError: If the device is not available or has no timing events.
    """
    if device.type != "cpu":
        return DeviceClock(device)
    if report_cpu:
        _warn_once("The model is on the CPU: its phases are timed on the host's clock.")
    return HostClock(host_ns)


def check_device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device {device!r} is unknown: pass a torch.device or a name such as 'cuda'"
        ) from error


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model; if it has no tensors, the accelerator, or else the CPU."""
    devices = [
        tensor.device for tensor in (*nn.Module.parameters(model), *nn.Module.buffers(model))
    ]
    # A model with only some parts on the CPU, such as its embeddings, runs on the accelerator.
    on_accelerator = [device for device in devices if device.type not in ("cpu", "meta")]
    if found := on_accelerator or devices:
        return found[0]
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def thread_ns(native_id: int) -> int:
    """Return for how long a thread of this process ran (in nanoseconds).

    Linux defines the clock of a thread by its id, see `include/linux/posix-timers.h`. Reading it
    takes 1 us, reading `/proc` 20 us.

    Raises:
        OSError: The thread has ended, or this system has no such clocks.
    """
    if sys.platform != "linux":
        raise OSError
    return time.clock_gettime_ns(_thread_clock(native_id))


def _thread_clock(native_id: int) -> int:
    """Return the number of the clock that `thread_ns` reads."""
    return (~native_id << 3) | 6  # CPUCLOCK_SCHED and PERTHREAD


def core_times(native_id: int | None) -> tuple[int, int] | None:
    """Return for how many ns a thread of this process ran, and waited; None if unknown."""
    try:
        run_ns, wait_ns, _ = Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()
        return int(run_ns), int(wait_ns)
    except (OSError, ValueError):
        return None  # Not on Linux, or not counted by this kernel.
