"""What detects the causes of slow steps: each kind on its own."""

import gc
import math
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from time import thread_time_ns
from typing import Any, Protocol

import torch

from lightning_gputime._causes.attribution import Baseline, ExcessAttribution, Span, median
from lightning_gputime._phases import (
    BACKWARD,
    CALLBACKS,
    DATA,
    FETCH,
    FORWARD,
    LOSS,
    OPTIMIZER,
    PHASES,
    TRAINING_STEP,
    is_wait,
    of_one_callback,
)
from lightning_gputime._results.slow import Kind
from lightning_gputime._untraced import untraced

_MAX_SPANS = 500
"""Number of spans to remember: those of steps that are not judged yet, and more."""

_SHORTEST_NS = 50_000
"""A shorter span explains no slow step, and is forgotten at once."""

_NEAR_NS = 1_000_000
"""A reading that belongs to a mark is no further away from it."""

_WORTH_MS = 2.0
"""Of shorter steps no CPU time is sampled: beside a GPU that costs some 5 us each (a system call
whose code is cold)."""

_MAX_SAMPLES = 1_000
"""Number of samples to remember: of the steps that are not judged yet, and of the baseline."""

Counts = Sequence[int]

Growth = tuple[int, int, Counts]
"""When counters were read, when they were read next, and by how much they grew in between."""


class CauseDetector(Protocol):
    """Detects one kind of cause, and nothing where its source is missing.

    It may also have these, none of which may cost more than a step can bear:

    - `attach()` and `remove()`, which is safe to call twice, and in a process that was forked;
    - `loop_begins(now_ns)`, called in the loop's thread where a loop starts;
    - `step_ends(now_ns)`, called just before the end of each timed step is marked;
    - `read_counters(now_ns)`, called after a step that took the host long, and every 50 steps;
    - `baseline_changed(baseline)`, called every 25 steps.
    """

    def detect(self, attribution: ExcessAttribution) -> None:
        """Attribute what it has seen of a slow step to its cause."""


@untraced
class Spans:
    """Remembers the newest times at which something started and ended."""

    def __init__(self, kind: Kind, now_ns: Callable[[], int]) -> None:
        self._kind = kind
        self._now_ns = now_ns
        self._newest: deque[Span] = deque(maxlen=_MAX_SPANS)
        self.started_ns = 0
        """When the open span started (in nanoseconds); 0 without one."""

    def start(self) -> None:
        """Start a span."""
        self.started_ns = self._now_ns()

    def end(self, detail: str) -> None:
        """End the span, and say what it was."""
        now = self._now_ns()
        if self.started_ns and now - self.started_ns >= _SHORTEST_NS:
            self._newest.append((self.started_ns, now, detail))
        self.started_ns = 0

    def detect(self, attribution: ExcessAttribution) -> None:
        """Attribute the spans of which at least a part is in the step."""
        start_ns, end_ns = attribution.start_ns, attribution.end_ns
        spans = [one for one in [*self._newest] if one[1] > start_ns and one[0] < end_ns]
        attribution.attribute_spans(self._kind, spans)


@untraced
class Garbage:
    """Sees Python's garbage collections in any thread, for which the loop waits."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._spans = Spans("garbage", now_ns)
        self.detect = self._spans.detect

    def attach(self) -> None:
        gc.callbacks.append(self._on_collection)

    def remove(self) -> None:
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        # It holds no reference to the timer, and allocates nothing that a collection would see.
        if phase == "start":
            self._spans.start()
        else:
            self._spans.end(f"generation {info['generation']}")


@untraced
class Compilation:
    """Sees from when to when dynamo compiles, with all that this needs (Inductor, Triton).

    That is by `torch.compile`, also for a new shape, and for a backward at its first run. It does
    not import dynamo: until other code has, nothing is compiled.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._spans = Spans("compilation", now_ns)
        self.detect = self._spans.detect

    def attach(self, baseline: Baseline | None = None) -> None:
        for callbacks, own in self._callbacks():
            if own not in callbacks:
                callbacks.append(own)

    baseline_changed = attach  # Dynamo may have been loaded, or reset, since.

    def remove(self) -> None:
        for callbacks, own in self._callbacks():
            if own in callbacks:
                callbacks.remove(own)

    def _callbacks(self) -> list[tuple[list[Any], Any]]:
        """Return dynamo's lists of callbacks, each with the one of ours."""
        module = sys.modules.get("torch._dynamo.callback")
        handler = getattr(module, "callback_handler", None)
        if handler is None:
            return []
        return [(handler.start_callbacks, self._on_start), (handler.end_callbacks, self._on_end)]

    def _on_start(self, *_: Any) -> None:
        self._spans.start()

    def _on_end(self, *about: Any) -> None:
        trigger = getattr(getattr(about[0], "callback_trigger", None), "name", "") if about else ""
        self._spans.end("of a backward" if trigger == "LAZY_BACKWARD" else "")


@untraced
class Loader:
    """Sees fetches that took long."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._loops_ns: deque[int] = deque(maxlen=100)
        # The starts of fetches, where `data` holds other things, too.
        self._fetches_ns: deque[int] = deque(maxlen=500)
        self._phase = FETCH
        self._workers = 0

    def set_loader(self, loader: object, in_data: bool) -> None:
        """Take the loader of the next loop; its fetches may be no phase of their own in `data`."""
        self._phase = DATA if in_data else FETCH
        workers = attribute(loader, "num_workers")
        self._workers = workers if isinstance(workers, int) else 0
        if in_data:
            self.fetch_starts()

    def fetch_starts(self) -> None:
        """Call just before each fetch that is no phase of its own."""
        self._fetches_ns.append(self._now_ns())

    def loop_begins(self, now_ns: int) -> None:
        """Remember when: loaders start their workers there."""
        self._loops_ns.append(now_ns)

    def detect(self, attribution: ExcessAttribution) -> None:
        """Attribute the host's excess in fetches."""
        most_ms = math.inf
        if self._phase == DATA:
            start_ns, end_ns = attribution.start_ns, attribution.end_ns
            fetches_ns = [ns for ns in [*self._fetches_ns] if start_ns <= ns < end_ns]
            most_ms = attribution.host_excess_since(DATA, fetches_ns)
        detail = self._detail(attribution)
        attribution.attribute_host_excess("loader", detail, most_ms, self._phase.__eq__)

    def _detail(self, attribution: ExcessAttribution) -> str:
        start_ns, end_ns = attribution.start_ns - _NEAR_NS, attribution.end_ns
        if any(start_ns <= ns <= end_ns for ns in self._loops_ns):
            return "its first batch, for which its workers start" if self._workers else "its start"
        if self._workers:
            return f"none of its {self._workers} workers had a batch ready"
        return "it loads in the loop's own process"


class Phases:
    """Sees what has a phase of its own: callbacks, phases named by hand, waits for other ranks."""

    def detect(self, attribution: ExcessAttribution) -> None:
        """Attribute the host's excess in callbacks, and the device's in waits."""
        for part in attribution.parts:
            if detail := _callback(part.name):
                attribution.attribute_host_excess("callback", detail, math.inf, part.name.__eq__)
            if is_wait(part.name) and part.device_excess_ms:
                attribution.attribute_device_excess("ranks", part, f"in {part.name}")


def _callback(name: str) -> str:
    """Return what a phase runs besides the training itself; empty for a phase of the training."""
    if name == CALLBACKS:
        return "logging, a checkpoint or a hook"
    if name.partition("/")[0] in (*PHASES, TRAINING_STEP):
        return of_one_callback(name)
    return f"phase {name}"


def attribute(one: object, name: str) -> Any:
    """Return an attribute of an object of the user's; None if it has none, or raises."""
    try:
        return getattr(one, name, None)
    except Exception:
        return None


@untraced
class Counters:
    """The newest growths of counters from one reading to the next; none after an error."""

    def __init__(self, read: Callable[[], Counts]) -> None:
        self._read = read
        self._last: tuple[int, Counts] | None = None
        self._newest: deque[Growth] = deque(maxlen=200)
        self.is_there = True

    def read(self, now_ns: int) -> None:
        """Read the counters now."""
        if self.is_there:
            try:
                counts = self._read()
            except Exception:  # A device without counters says so in an error of its own.
                self.is_there = False
                return
            if self._last is not None:
                before_ns, before = self._last
                growth = [now - then for then, now in zip(before, counts, strict=True)]
                self._newest.append((before_ns, now_ns, growth))
            self._last = now_ns, counts

    def until(self, end_ns: int) -> list[Growth]:
        """Return the growths up to that at the end of a step; none where there is none."""
        newest = [*self._newest]
        # The one at its end was read just before the mark there.
        near = [i for i, (_, ns, _) in enumerate(newest) if abs(ns - end_ns) <= _NEAR_NS]
        return newest[: near[0] + 1] if near else []


def read_scheduler() -> Counts:
    """Return how long (in ns) the calling thread waited for a processor, and how often it ran."""
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
    """

    def __init__(
        self,
        cpu_ns: Callable[[], int] = thread_time_ns,
        read: Callable[[], Counts] = read_scheduler,
    ) -> None:
        self._cpu_ns = cpu_ns
        self._counters = Counters(read)
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
        growths = self._counters.until(end_ns)
        if off_cpu_ms is None or not growths:
            return
        queued_ns, slices = _beyond_usual(growths, start_ns)
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


def _beyond_usual(growths: Sequence[Growth], start_ns: int) -> list[float]:
    """Return the growth in a step, less what is usual for the time from a reading to its start."""
    *others, (before_ns, _, growth) = growths
    rates = [[grown / (end - start) for grown in one] for start, end, one in others if end > start]
    usual = map(median, zip(*rates, strict=True)) if rates else (0.0, 0.0)
    rest_ns = max(start_ns - before_ns, 0)
    of_each = zip(growth, usual, strict=True)
    return [max(grown - rate * rest_ns, 0.0) for grown, rate in of_each]


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
    """Takes what no other detector explains, where the counters of the device's allocator grew."""

    def __init__(self, read: Callable[[], Counts]) -> None:
        self._counters = Counters(read)
        self.read_counters = self._counters.read

    def detect(self, attribution: ExcessAttribution) -> None:
        """Attribute what is left of the host's excess: the counters have no times."""
        for _, _, growth in self._counters.until(attribution.end_ns)[-1:]:
            words = zip(growth, _COUNTERS.values(), strict=True)
            if not (detail := ", ".join(f"{word} {n}" for n, word in words if n > 0)):
                return
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
    """Asks what lowers the device's clocks where all of a step was slower alike.

    That is when the step is read, some steps later.
    """

    def __init__(self, read: Callable[[], str]) -> None:
        self._read = read

    def detect(self, attribution: ExcessAttribution) -> None:
        """Attribute the whole excess, if nothing else explains it and the clocks are lower."""
        detail = ""
        if attribution.is_stretched and not attribution.causes():
            with suppress(Exception):  # NVML's errors are its own, and it may be gone by now.
                detail = self._read()
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
