"""Detectors of the causes of slow steps; a detector whose source is missing finds nothing.

Each has a function that collects the evidence when steps are judged, in the loop: it must be cheap.
It returns the detector, which is called with each of these steps once somebody asks for causes.
Until then only the evidence is kept.
"""

import gc
import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from statistics import median
from typing import Any

import torch

from lightning_gputime._causes.attribution import Baseline, Detector, ExcessAttribution, Span
from lightning_gputime._compat.torch_ import compile_callbacks
from lightning_gputime._culprits.places import Here, frames_here
from lightning_gputime._instrumentation.loaders import attribute
from lightning_gputime._measurement.culprits import PLACE, CulpritSums
from lightning_gputime._measurement.loader import MadeBatch
from lightning_gputime._measurement.slow import CauseKind
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
    StepRecord,
    is_wait,
    of_one_callback,
)

_MAX_LOOPS = 100  # Number of starts of loops to remember.
_MAX_SPANS = 1_000  # Number of spans to remember: those of steps that are not judged yet, and more.
_SHORTEST_LOCATED_NS = 1_000_000  # A shorter span is not located in the code.
_SHORTEST_NS = 50_000  # A shorter span explains no slow step, and is forgotten at once.
# The kinds of spans: one may hold those before it.
_INSIDE_OUT: Sequence[CauseKind] = ("garbage_collection", "compilation", "callback")
_NEAR_NS = 1_000_000  # A reading that belongs to a mark is no further away from it.
# Number of samples to remember, of steps that are not judged yet and of those before.
_MAX_SAMPLES = 500
# Less time off the CPU is not told: the kernel counts CPU time by ticks of up to 4 ms, and threads
# of Python take turns of 5 ms.
_LEAST_OFF_CPU_MS = 6.0

Counts = Sequence[int]

# How long a step was off the CPU (in milliseconds), and how often it waited, and lost it.
_OffCpu = tuple[float, int, int]


class HostSpans:
    """The newest times at which something held up the host.

    It sees Python's garbage collections in any thread, for which the loop waits, and compilations
    by dynamo, with all that these need (Inductor, Triton). It does not import dynamo: until other
    code has, nothing is compiled. Of other spans it is told.
    """

    def __init__(self, now_ns: Callable[[], int], culprits: CulpritSums) -> None:
        self._now_ns, self._culprits = now_ns, culprits
        self._newest: deque[Span] = deque(maxlen=_MAX_SPANS)
        self._started_ns: dict[CauseKind, int] = {}

    def attach(self) -> None:
        for callbacks, own in self._callbacks():
            if own not in callbacks:
                callbacks.append(own)

    def remove(self) -> None:
        """Listen no more. Safe to call twice, and in a process that was forked."""
        for callbacks, own in self._callbacks():
            if own in callbacks:
                callbacks.remove(own)

    def _callbacks(self) -> list[tuple[list[Any], Any]]:
        found: list[tuple[list[Any], Any]] = [(gc.callbacks, self._on_collection)]
        if callbacks := compile_callbacks():
            starts, ends = callbacks
            found += [(starts, self._on_compile_start), (ends, self._on_compile_end)]
        return found

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        # It holds no reference to the timer, and allocates nothing that a collection would see.
        if phase == "start":
            self.start("garbage_collection")
        else:
            self.end("garbage_collection", f"generation {info['generation']}")

    def _on_compile_start(self, *_: Any) -> None:
        self.start("compilation")

    def _on_compile_end(self, *about: Any) -> None:
        trigger = getattr(getattr(about[0], "callback_trigger", None), "name", "") if about else ""
        self.end("compilation", "of a backward" if trigger == "LAZY_BACKWARD" else "")

    def start(self, kind: CauseKind) -> None:
        self._started_ns[kind] = self._now_ns()

    def end(self, kind: CauseKind, detail: str) -> None:
        now_ns, started_ns = self._now_ns(), self._started_ns.pop(kind, None)
        if started_ns is not None and now_ns - started_ns >= _SHORTEST_NS:
            self._newest.append((started_ns, now_ns, kind, detail))
            if kind != "callback" and now_ns - started_ns >= _SHORTEST_LOCATED_NS:
                entry = f"slow steps: {kind.replace('_', ' ')}"
                source = Here(frames_here())
                self._culprits.add(entry, "", now_ns - started_ns, source=source, kind=PLACE)

    def collect(self, steps: Sequence[StepRecord], baseline: Baseline) -> Detector | None:
        """Return the detector of the spans in slow steps; None if there are none."""
        start_ns, end_ns = steps[0].host_ns[0], steps[-1].host_ns[-1]
        spans = [span for span in [*self._newest] if span[1] > start_ns and span[0] < end_ns]
        return partial(_detect_spans, spans) if spans else None


def _detect_spans(spans: Sequence[Span], attribution: ExcessAttribution) -> None:
    """Attribute the spans of which at least a part is in the step."""
    start_ns, end_ns = attribution.start_ns, attribution.end_ns
    inside = [span for span in spans if span[1] > start_ns and span[0] < end_ns]
    # What is inside of another counts for itself.
    attribution.attribute_spans(sorted(inside, key=lambda span: _INSIDE_OUT.index(span[2])))
    for part in attribution.parts:
        for kind, detail in [*part.host_causes]:
            if kind == "compilation":  # New code is loaded, too, and runs for the first time.
                attribution.attribute_host_excess(kind, detail, part.name.__eq__)


# What a loop iterates over that loads nothing.
_AT_HAND = (range, itertools.count, itertools.repeat, list, tuple)


class Loader:
    """Detect fetches that took long."""

    def __init__(self, newest_batches: Callable[[], Sequence[MadeBatch]] = tuple) -> None:
        self._newest_batches = newest_batches
        self._loops_ns: tuple[int, ...] = ()
        self._phase, self._workers = FETCH, 0

    def set_loader(self, loader: object, in_data: bool) -> None:
        """Take the loader of the next loop; its fetches may be no phase of their own in `data`."""
        self._phase = DATA if in_data else FETCH
        if type(loader) in _AT_HAND:
            self._phase = ""  # No phase: what is long there is not the fetch.
        workers = attribute(loader, "num_workers")
        self._workers = workers if isinstance(workers, int) else 0

    def loop_begins(self, now_ns: int) -> None:
        # Loaders start their workers there.
        self._loops_ns = (*self._loops_ns[-_MAX_LOOPS + 1 :], now_ns)

    def collect(self, steps: Sequence[StepRecord], baseline: Baseline) -> Detector | None:
        if not self._phase:
            return None
        batches = self._newest_batches()
        return partial(_detect_fetch, self._phase, self._workers, self._loops_ns, batches)


def _detect_fetch(
    phase: str,
    workers: int,
    loops_ns: Sequence[int],
    batches: Sequence[MadeBatch],
    attribution: ExcessAttribution,
) -> None:
    start_ns, end_ns = attribution.start_ns - _NEAR_NS, attribution.end_ns
    is_first = any(start_ns <= ns <= end_ns for ns in loops_ns)
    detail = "its start" if is_first else "it loads in the loop's own process"
    if workers:
        detail = f"none of its {workers} workers had a batch ready"
        made = [batch for batch in batches if attribution.start_ns < batch.end_ns <= end_ns]
        if made:  # The loop has waited for one of them.
            detail = str(max(made, key=lambda batch: batch.end_ns - batch.start_ns))
        detail = "its first batch, for which its workers start" if is_first else detail
    attribution.attribute_host_excess("dataloader", detail, phase.__eq__)


def collect_phases(steps: Sequence[StepRecord], baseline: Baseline) -> Detector:
    return detect_phases


def detect_phases(attribution: ExcessAttribution) -> None:
    """Attribute the host's excess in callbacks and named phases, and the device's in waits."""
    for part in attribution.parts:
        if detail := _callback(part.name):
            attribution.attribute_host_excess("callback", detail, part.name.__eq__)
        if is_wait(part.name) and part.device_excess_ms:
            part.device_causes["ranks", f"in {part.name}"] += part.device_excess_ms


def _callback(name: str) -> str:
    """Return what a phase runs besides the training itself; empty for a phase of the training."""
    if name == CALLBACKS:
        return "other callbacks"
    if name.partition("/")[0] in (*PHASES, TRAINING_STEP):
        return of_one_callback(name)
    return f"phase {name}"


class Preemption:
    """Detect when the loop's thread was off the CPU for longer than it usually is (on Linux).

    At the end of each step it asks how long the thread has run, and how often it gave the processor
    up, or lost it.
    """

    def __init__(self, usage: Callable[[], Any] | None) -> None:
        self.usage = usage
        self._samples: deque[tuple[int, Any]] = deque(maxlen=_MAX_SAMPLES)

    def sample(self, now_ns: int) -> None:
        """Sample at the end of a step: all of them pay for this."""
        if self.usage is not None:
            self._samples.append((now_ns, self.usage()))

    def collect(self, steps: Sequence[StepRecord], baseline: Baseline) -> Detector | None:
        """Return the detector of the slow steps that were off the CPU; None if none was."""
        if not self._samples:
            return None
        samples = [*self._samples]
        slow = {step.host_ns[0]: _off_cpu(samples, step) for step in steps}
        found = {ns: off for ns, off in slow.items() if off and off[0] >= _LEAST_OFF_CPU_MS}
        if not found:
            return None  # Before what takes longest: most slow steps have another cause.
        others = filter(None, [_off_cpu(samples, step) for step in baseline.steps])
        usual = [*zip(*others, strict=True)]
        return partial(_detect_off_cpu, found, [*map(median, usual)]) if usual else None


def _detect_off_cpu(
    found: Mapping[int, _OffCpu], usual: Sequence[float], attribution: ExcessAttribution
) -> None:
    """Attribute the time in which others ran, or in which the thread was stopped."""
    own = found.get(attribution.start_ns)
    if own is None:
        return
    off_ms, waits, losses = (ms - of for ms, of in zip(own, usual, strict=True))
    if off_ms < _LEAST_OFF_CPU_MS:
        return
    attribute_excess = partial(attribution.attribute_host_excess, "off_cpu", most_ms=off_ms)
    if losses > max(waits, 0.0):
        attribute_excess("others had the processor")
    elif off_ms >= _LEAST_OFF_CPU_MS * waits:
        # Not where threads take turns, nor where the host may wait for something.
        at_work = (FORWARD, LOSS, BACKWARD, OPTIMIZER)
        attribute_excess("stopped or blocked", lambda name: name.partition("/")[0] in at_work)


def _off_cpu(samples: Sequence[tuple[int, Any]], step: StepRecord) -> _OffCpu | None:
    """Return for how many ms a step was off the CPU, and how often it waited, and lost it.

    None where nobody looked when it started.
    """
    start_ns, end_ns = step.host_ns[0], step.host_ns[-1]
    # The samples before the marks at its start and at its end.
    first = bisect_right(samples, start_ns, key=itemgetter(0)) - 1
    last = bisect_right(samples, end_ns, key=itemgetter(0)) - 1
    if first < 0 or first == last or samples[first][0] < start_ns - _NEAR_NS:
        return None
    (before_ns, before), (after_ns, after) = samples[first], samples[last]
    ran_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    off_us = round((after_ns - before_ns) / 1e3 - 1e6 * ran_s)
    return off_us / 1e3, after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw


def thread_usage() -> Callable[[], Any] | None:
    """Return what tells the calling thread's usage of the CPU; None where the system does not."""
    try:
        from resource import RUSAGE_THREAD, getrusage
    except ImportError:
        return None
    return partial(getrusage, RUSAGE_THREAD)


# The counters of torch's allocators that grow only where it calls the driver.
_COUNTERS: Mapping[str, str] = {
    "num_alloc_retries": "retries",
    "num_device_alloc": "device allocations",
    "num_device_free": "device frees",
    "num_sync_all_streams": "waits for all streams",
}


class Allocator:
    """Explain what no other detector does, where the counters of the device's allocator grew."""

    def __init__(self, read: Callable[[], Counts] | None) -> None:
        self._read = read
        self._last: Counts | None = None
        # When the counters were read, and by how much they had grown.
        self._growths: deque[tuple[int, Counts]] = deque(maxlen=200)

    def sample(self, now_ns: int) -> None:
        """Read the counters, after a step that took the host long and every 25 steps."""
        if self._read is None:
            return
        try:
            counts = self._read()
        except Exception:  # A device without counters says so in an error of its own.
            self._read = None
            return
        if self._last is not None:
            growth = [now - then for then, now in zip(self._last, counts, strict=True)]
            self._growths.append((now_ns, growth))
        self._last = counts

    def collect(self, steps: Sequence[StepRecord], baseline: Baseline) -> Detector | None:
        """Return the detector of what the counters grew by; None if they were not read."""
        start_ns, end_ns = steps[0].host_ns[0], steps[-1].host_ns[-1] + _NEAR_NS
        growths = [growth for growth in self._growths if start_ns <= growth[0] <= end_ns]
        return partial(_detect_growth, growths) if growths else None


def _detect_growth(growths: Sequence[tuple[int, Counts]], attribution: ExcessAttribution) -> None:
    """Attribute what is left of the host's excess: the counters have no times."""
    near = (growth for ns, growth in growths if abs(ns - attribution.end_ns) <= _NEAR_NS)
    words = zip(next(near, ()), _COUNTERS.values(), strict=False)
    if detail := ", ".join(f"{word} {n}" for n, word in words if n > 0):
        attribution.attribute_host_excess("allocator", detail, lambda name: not is_wait(name))


def allocator_of(device: torch.device | None) -> Callable[[], Counts] | None:
    if device is None or device.type != "cuda":
        return None

    def read() -> Counts:
        # Not `memory_stats`, which takes seven times as long to flatten them.
        found: Any = torch.cuda.memory_stats_as_nested_dict(device)
        return tuple(found.get(name, 0) for name in _COUNTERS)

    return read
