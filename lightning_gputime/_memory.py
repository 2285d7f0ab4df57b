"""The memory of phases: read at the marks of sampled steps, kept, logged and summed up."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from lightning_gputime._compat.torch_ import memory_counters
from lightning_gputime._messages import WarnOnce, messages
from lightning_gputime._phases import (
    BACKWARD,
    FORWARD,
    LOSS,
    OPTIMIZER,
    StepRecord,
    of_one_callback,
    resolve_labels,
)
from lightning_gputime._record.clock import Clock, HostClock
from lightning_gputime._record.recorder import FIRST_SAMPLED, SAMPLED_EVERY

_MIB = 2**20
_NEARLY_FULL = 0.9  # From this fraction of the device's memory on, advice is given.
# From this fraction of a peak on, what the step allocates counts, or what is there before.
_MOST_OF_IT, _MUCH_OF_IT = 0.5, 0.1
_CPU = "memory=True needs a GPU, whose allocator counts: nothing is measured on the CPU."
_NO_COUNTERS = (
    "memory=True: the peaks of %s cannot be read, and no memory is measured (%s). That needs"
    " torch's own allocator on a GPU (CUDA or ROCm; others from torch 2.9 on)."
)
_RESETS = (
    "memory=True resets torch's peak counters in the steps that it samples (the first %d, then 1"
    " in %d): max_memory_allocated() then has the peak since the last boundary of such a step."
)
_OTHERS_RESET = (
    "memory=True: other code resets the peak counters. Sampled steps where this is detected have no"
    " peaks."
)


def torch_counters(device: torch.device) -> Any:
    """Return the counters of torch's allocator of an accelerator, or raise if there are none.

    `total` is the device's memory in bytes, None if not known. `read()` returns what
    `torch.cuda.memory_stats_as_nested_dict` does; `reset()` sets all peaks to what is allocated.
    """
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    functions = memory_counters(device.type)
    if functions is None:
        raise LookupError("this torch has no functions for that")
    read, reset = (partial(function, index) for function in functions)
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    total = getattr(properties(device), "total_memory", None) if properties else None
    return SimpleNamespace(index=index, total=total, read=read, reset=reset)


# By the number of a device, who has reset its peaks last. Module state, as the counters are.
_last_reset: dict[int, object] = {}


def sampler(counters: Any) -> Callable[[], tuple[int, int]]:
    """Return a function that reads an allocator's counters at a mark, and resets its peaks.

    It returns the peak since the last mark (-1 where another timer has reset it since) and what is
    allocated now, in bytes.
    """
    own = object()

    def sample() -> tuple[int, int]:
        counted = counters.read()["allocated_bytes"]["all"]
        counters.reset()
        is_own = _last_reset.get(counters.index) is own
        _last_reset[counters.index] = own
        return counted["peak"] if is_own else -1, counted["current"]

    return sample


def counters_of(clock: Clock) -> Any:
    """Return the counters of the device that a clock times; say so and return None without any."""
    if isinstance(clock, HostClock):
        messages.warning(_CPU)
        return None
    device: Any = getattr(clock, "device", None)
    counters = getattr(clock, "allocator", None)
    try:
        if counters is None and device is None:
            raise LookupError("it has no attribute `allocator`")
        counters = counters or torch_counters(device)
        if "peak" not in counters.read()["allocated_bytes"]["all"]:
            raise LookupError("it does not count them")
    except Exception as error:
        messages.warning(_NO_COUNTERS, device or "this clock", error)
        return None
    messages.warning(_RESETS, FIRST_SAMPLED, SAMPLED_EVERY)
    return counters


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """The most memory that was allocated in each phase, in the steps that were sampled.

    It is what `torch.cuda.max_memory_allocated` returns, of the timed device; memory that torch has
    reserved beyond that, or that others use, is not in it. The warm-up is in it.

    Attributes:
        peak_mib: The highest peak of each phase and sub-phase (in MiB).
        at_step: The number of the step in which it was first seen.
        start_mib: Memory allocated at the start of the newest of these steps (in MiB): parameters,
            optimizer state and the like.
        device_mib: The memory of the device (in MiB); None if it is not known.
        steps: How many steps were sampled.
    """

    peak_mib: Mapping[str, float]
    at_step: Mapping[str, int]
    start_mib: float
    device_mib: float | None
    steps: int

    @property
    def sentences(self) -> tuple[str, ...]:
        """What is printed: which phase would run out first, and what helps where that is near."""
        top_level = [name for name in self.peak_mib if "/" not in name]
        highest, *others = sorted(top_level, key=lambda name: -self.peak_mib[name])
        of_total = "" if self.device_mib is None else f" of {self.device_mib:,.0f}"
        said = (
            f"memory: the highest is `{highest}` with {self.peak_mib[highest]:,.0f}{of_total} MiB,"
            f" at step {self.at_step[highest]}"
        )
        if others:
            said += f"; `{others[0]}` follows with {self.peak_mib[others[0]]:,.0f}"
        return (said + self._advice(highest),)

    def _advice(self, highest: str) -> str:
        peak_mib = self.peak_mib[highest]
        if self.device_mib is None or peak_mib < _NEARLY_FULL * self.device_mib:
            return ""
        own_mib = peak_mib - self.start_mib
        near = f". That is {peak_mib / self.device_mib:.0%} of the GPU's"
        of_step = f"{near}, {own_mib:,.0f} of it from the step itself"
        if highest in (FORWARD, LOSS, BACKWARD) and own_mib >= _MOST_OF_IT * peak_mib:
            return f"{of_step}: checkpoint activations"
        if highest == OPTIMIZER and own_mib >= _MUCH_OF_IT * peak_mib:
            return f"{of_step}: try foreach=False or fused=True"
        if self.start_mib >= _MOST_OF_IT * peak_mib:
            return (
                f"{near}, {self.start_mib:,.0f} of it there when a step begins: shard parameters"
                " and optimizer state, or keep a smaller state"
            )
        return near


class PhaseMemory:
    """The peaks of the steps that were sampled, on a device with `total` bytes."""

    def __init__(self, total: int | None = None) -> None:
        self._total = total
        self._warn_once = WarnOnce()
        self._steps = self._held = 0
        self._highest: Mapping[str, tuple[int, int]] = {}  # Each with the step that it is of.
        self._window: deque[tuple[int, Mapping[str, int]]] = deque(maxlen=1000)  # Not logged yet.

    def steps_read(self, steps: Iterable[StepRecord]) -> None:
        for step in steps:
            if step.memory:
                (_, *peaks), allocated = zip(*step.memory, strict=True)
                if any(peak < before for peak, before in zip(peaks, allocated, strict=False)):
                    self._warn_once(_OTHERS_RESET)
                elif of_phases := _by_phase(step.labels, peaks):
                    self._held = allocated[0]
                    self._keep(step.number, of_phases)

    def _keep(self, number: int, peaks: Mapping[str, int]) -> None:
        highest = {**self._highest}
        for name, peak in peaks.items():
            if peak > highest.get(name, (-1, 0))[0]:
                highest[name] = peak, number
        self._highest = highest  # Replaced whole: another thread may read it.
        self._steps += 1
        self._window.append((number, peaks))

    def summary(self) -> MemorySummary | None:
        highest = self._highest
        if not highest:
            return None
        return MemorySummary(
            peak_mib={name: peak / _MIB for name, (peak, _) in highest.items()},
            at_step={name: number for name, (_, number) in highest.items()},
            start_mib=self._held / _MIB,
            device_mib=None if self._total is None else self._total / _MIB,
            steps=self._steps,
        )

    def metrics(self, newest: int, *, keep: bool = False) -> dict[str, float]:
        """Return the highest peaks since the last log, up to the step `newest`."""
        due: dict[str, float] = {}
        for peaks in [peaks for number, peaks in [*self._window] if number <= newest]:
            for name, peak in peaks.items():
                if not of_one_callback(name):
                    due[f"{name}_peak_mib"] = max(due.get(f"{name}_peak_mib", 0.0), peak / _MIB)
        while not keep and self._window and self._window[0][0] <= newest:
            self._window.popleft()
        return due


def _by_phase(labels: tuple[str, ...], peaks: Sequence[int]) -> dict[str, int]:
    """Return the highest peak of each phase; nothing where the device does not count."""
    found: dict[str, int] = {}
    for names, peak in zip(resolve_labels(labels), peaks, strict=True):
        for name in names:
            found[name] = max(found.get(name, 0), peak)
    return found if any(found.values()) else {}
