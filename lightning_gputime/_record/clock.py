"""Clocks: where timing events come from. The only place that names an event class."""

import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn

from lightning_gputime._compat.torch_ import raw_stream, spin_function
from lightning_gputime._messages import WarnOnce

_warn_once = WarnOnce()


class TimingEvent(Protocol):
    """A point on the timeline of a device: what is timed of `torch.Event`, see there.

    `elapsed_time` raises RuntimeError where the device has not reached both events.
    """

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...


class Clock(Protocol):
    """A device's time beside the host's.

    It may have more: `spin(cycles)` keeps the device busy, for probes; `peak_memory()` returns the
    peaks of its allocator; `device` is where its counters are read; without `streams`, see
    `DeviceClock`, all that is launched is timed; `may_capture` is a cheaper `is_capturing` that may
    be true without need.
    """

    def event(self) -> TimingEvent:
        """Return a new event, not yet recorded."""

    def host_ns(self) -> int: ...

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph.

        Then no event may be recorded or queried: it would break the capture.
        """


_NEVER: Callable[[], bool] = bool
"""Return False, without a call of a Python function."""

Mark = tuple[str, TimingEvent, int] | tuple[str, TimingEvent, int, Any]
"""A label, the event from which on the time belongs to it, and the host's time there (in ns).

In a located step also the place in the code.
"""


class DeviceClock:
    """The clock of an accelerator: CUDA, ROCm, XPU, NPU or MPS.

    `torch.Event` rather than `torch.cuda.Event`: it works on every backend, and its `record` takes
    a quarter of the time, because it does not look the current stream up in Python.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        try:
            module = torch.get_device_module(device)
            if device.index is not None and device.index >= module.device_count():
                raise RuntimeError(f"this machine has {module.device_count()}")
            # `record` takes the stream of the thread's current device, whatever device the event
            # was created for.
            self._is_current = device.index in (None, torch.accelerator.current_device_index())
            # A device without timing events raises here, and not in the loop.
            self.event().record()
        except Exception as error:
            raise ValueError(
                f"device {str(device)!r} cannot be timed here ({error}): give an available"
                " accelerator, or 'cpu' for the host clock"
            ) from error
        self.host_ns = time.perf_counter_ns
        # `wait_event` and `wait_stream` of their class let a stream wait for others.
        self.streams = SimpleNamespace(
            kind=getattr(module, "Stream", None),
            current=lambda: torch.accelerator.current_stream(device.index).stream_id,
        )
        self.is_capturing = getattr(module, "is_current_stream_capturing", _NEVER)
        self.may_capture: Callable[[], object] = self.is_capturing
        stream_of = raw_stream()
        if device.type == "cuda" and self._is_current and stream_of is not None:
            # On a default stream, whose number is 0, no graph can be captured, see
            # `cudaStreamBeginCapture`. Beside an H200 that number takes the host 0.1 us, and to ask
            # whether it is captured 0.5 us.
            self.may_capture = functools.partial(stream_of, torch.cuda.current_device())
        # It fills the queue of the current device, whatever device is timed.
        spin = spin_function(module)
        if spin is not None and self._is_current:
            self.spin = spin
        if device.type == "mps":
            # The first elapsed_time on MPS fails unless the device was synchronized once.
            torch.mps.synchronize()

    def peak_memory(self) -> tuple[int, int, int] | None:
        """Return peak allocated, peak reserved and total memory (in bytes); None if not counted."""
        module = torch.get_device_module(self.device)
        # Not `memory_stats`, which takes seven times as long to flatten them.
        stats = getattr(module, "memory_stats_as_nested_dict", None)
        counted = stats(self.device) if stats is not None else {}
        if "allocated_bytes" not in counted:
            return None
        allocated, reserved = (
            counted[f"{kind}_bytes"]["all"]["peak"] for kind in ("allocated", "reserved")
        )
        device = module.get_device_properties(self.device).total_memory
        return allocated, reserved, device

    def event(self) -> TimingEvent:
        event = torch.Event(device=self.device, enable_timing=True)
        return event if self._is_current else _EventOnOtherDevice(event, self.device)


class _EventOnOtherDevice:
    """An event for a device that is not the thread's current one."""

    __slots__ = ("__weakref__", "_device", "_event", "query", "synchronize")

    def __init__(self, event: torch.Event, device: torch.device) -> None:
        self._event, self._device = event, device
        self.query, self.synchronize = event.query, event.synchronize

    def record(self) -> None:
        self._event.record(torch.accelerator.current_stream(self._device))

    def elapsed_time(self, end_event: "_EventOnOtherDevice", /) -> float:
        return self._event.elapsed_time(end_event._event)


class HostClock:
    """The host's clock behind the interface of a device's, for models that run on the CPU."""

    def __init__(self) -> None:
        self.host_ns = time.perf_counter_ns
        self.is_capturing = self.may_capture = _NEVER

    def event(self) -> TimingEvent:
        return _HostEvent()


class _HostEvent:
    """A point in the host's time, reached as soon as it is recorded."""

    __slots__ = ("_ns",)

    def __init__(self) -> None:
        self._ns: int | None = None

    def record(self) -> None:
        self._ns = time.perf_counter_ns()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: "_HostEvent", /) -> float:
        if self._ns is None or end_event._ns is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._ns - self._ns) / 1e6


def clock_for(device: torch.device, *, tell: bool = False) -> Clock:
    """Return the clock of a device. If that is the CPU, log so once, if `tell` is given.

    Raises:
        ValueError: If the device is not here or has no timing events.
    """
    if device.type != "cpu":
        return DeviceClock(device)
    if tell:
        _warn_once("The model is on the CPU: its phases are timed on the host's clock.")
    return HostClock()


def check_device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device {device!r} is unknown: give a torch.device or a name such as 'cuda'"
        ) from error


def device_of(model: nn.Module) -> torch.device:
    """Return the device that a model is on; one that is nowhere runs on the accelerator."""
    devices = [
        tensor.device for tensor in (*nn.Module.parameters(model), *nn.Module.buffers(model))
    ]
    # One that is partly on the CPU, such as its embeddings, does the work on the accelerator.
    for device in (*(one for one in devices if one.type not in ("cpu", "meta")), *devices):
        return device
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
