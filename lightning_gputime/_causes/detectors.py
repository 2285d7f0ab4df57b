"""Detectors of the causes of slow steps.

A detector has two halves. `collect` runs in the loop, for the slow steps of a block, and must be
cheap: it only keeps the evidence. It returns the other half, a function that attributes the excess
of a step when the log is asked for causes; without evidence, it returns None.
"""

import gc
import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

import torch

from lightning_gputime._causes.attribution import (
    Baseline,
    Detector,
    ExcessAttribution,
    Span,
    overlapping,
)
from lightning_gputime._compat.torch_ import compile_callbacks
from lightning_gputime._compat.user_code import running_line
from lightning_gputime._instrumentation.loaders import attribute
from lightning_gputime._measurement.culprits import GC_COLLECT, CulpritSums, Source
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

_MAX_LOOPS = 100  # Number of newest loops whose start is kept.
_MAX_SPANS = 1_000  # Number of newest spans to keep.
_MIN_LOCATED_NS = 1_000_000  # The code that ran is not recorded for shorter spans.
_MIN_SPAN_NS = 50_000  # Shorter spans cannot explain a slow step, and are dropped.
# Kinds of spans, innermost first. A span may contain spans of earlier kinds.
_INSIDE_OUT: Sequence[CauseKind] = ("garbage_collection", "compilation", "callback")
_NEAR_NS = 1_000_000  # Maximum distance of a sample from the mark that it belongs to.
_MAX_SAMPLES = 500  # Number of newest samples of CPU time to keep.
# Minimum time off the CPU. Less may be an artifact: the kernel counts CPU time in ticks of up to
# 4 ms, and Python switches threads every 5 ms.
_MIN_OFF_CPU_MS = 6.0

Counts = Sequence[int]
"""Values of the counters of torch's allocator, in the order of `_COUNTERS`."""


class _OffCpu(NamedTuple):
    """Time of a step off the CPU (in milliseconds), and number of context switches."""

    ms: float
    voluntary: float  # Switches because the thread waited.
    involuntary: float  # Switches because the system gave the CPU to another thread.


class HostSpans:
    """Newest spans in which something delayed the host.

    - garbage collections of Python in any thread, because they block all threads
    - compilations by dynamo, including Inductor and Triton. Dynamo is not imported for this: if
      no other code has imported it, nothing is compiled.
    - spans that callers report with `start` and `end`
    """

    def __init__(self, now_ns: Callable[[], int], culprits: CulpritSums) -> None:
        self._now_ns, self._culprits = now_ns, culprits
        self._newest: deque[Span] = deque(maxlen=_MAX_SPANS)
        self._started_ns: dict[CauseKind, int] = {}  # Start of the open span of each kind.
        self._is_explicit = False  # True if a call of `gc.collect` started the newest collection.

    def attach(self) -> None:
        for callbacks, callback in self._callbacks():
            if callback not in callbacks:
                callbacks.append(callback)

    def remove(self) -> None:
        """Remove the callbacks. Safe to call twice, and in a forked process."""
        for callbacks, callback in self._callbacks():
            if callback in callbacks:
                callbacks.remove(callback)

    def _callbacks(self) -> list[tuple[list[Any], Any]]:
        """Return each list of callbacks with the callback to add to it."""
        callbacks: list[tuple[list[Any], Any]] = [(gc.callbacks, self._on_collection)]
        if compile_lists := compile_callbacks():
            starts, ends = compile_lists
            callbacks += [(starts, self._on_compile_start), (ends, self._on_compile_end)]
        return callbacks

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        # Short collections are frequent: for these, allocate nothing that the collector tracks.
        generation = info["generation"]
        if phase == "start":
            # Python starts a collection itself only if a count exceeds its threshold.
            self._is_explicit = generation == 2 and gc.get_count()[2] <= gc.get_threshold()[2]
            self.start("garbage_collection")
        else:
            name = GC_COLLECT if self._is_explicit else ""
            self.end("garbage_collection", f"generation {generation}", name)

    def _on_compile_start(self, *_: Any) -> None:
        self.start("compilation")

    def _on_compile_end(self, args: Any = None, *_: Any) -> None:
        trigger = getattr(getattr(args, "callback_trigger", None), "name", "")
        self.end("compilation", "of a backward graph" if trigger == "LAZY_BACKWARD" else "")

    def start(self, kind: CauseKind) -> None:
        self._started_ns[kind] = self._now_ns()

    def end(self, kind: CauseKind, detail: str, name: str = "") -> None:
        """End the span of this kind. Keep it, and for long spans also the code that was running.

        Args:
            kind: Kind of the cause.
            detail: Detail of the cause, for the log of slow steps.
            name: Name of the code that was running; empty for its function.
        """
        now_ns, started_ns = self._now_ns(), self._started_ns.pop(kind, None)
        if started_ns is not None and now_ns - started_ns >= _MIN_SPAN_NS:
            self._newest.append((started_ns, now_ns, kind, detail))
            if kind != "callback" and now_ns - started_ns >= _MIN_LOCATED_NS:
                entry = f"slow steps: {kind.replace('_', ' ')}"
                found = running_line()
                source = None if found is None else Source(found[0], found[1], found[1], found[2])
                self._culprits.add(entry, name, now_ns - started_ns, source)

    def collect(self, steps: Sequence[StepRecord], baseline: Baseline) -> Detector | None:
        # Copy the spans, because a garbage collection may add one at any time.
        spans = overlapping([*self._newest], steps[0].host_ns[0], steps[-1].host_ns[-1])
        return partial(_detect_spans, spans) if spans else None


def _detect_spans(spans: Sequence[Span], attribution: ExcessAttribution) -> None:
    """Attribute the spans that overlap with the step."""
    inside = overlapping(spans, attribution.start_ns, attribution.end_ns)
    # Inner spans come first, so that their time does not count again for the outer span.
    attribution.attribute_spans(sorted(inside, key=lambda span: _INSIDE_OUT.index(span[2])))
    for part in attribution.parts:
        for kind, detail in [*part.host_causes]:
            if kind == "compilation":
                # In the rest of the excess, the new code was loaded and run for the first time.
                part.attribute_host(kind, detail)


# Iterables that load nothing.
_NOT_LOADERS = (range, itertools.count, itertools.repeat, list, tuple)


class Loader:
    """Detector of slow fetches."""

    def __init__(self, newest_batches: Callable[[], Sequence[MadeBatch]] = tuple) -> None:
        self._newest_batches = newest_batches
        self._loops_ns: tuple[int, ...] = ()  # Host times of the newest starts of loops.
        self._phase = FETCH  # Phase of the fetches; empty for an iterable that loads nothing.
        self._workers = 0

    def set_loader(self, loader: object, in_data: bool) -> None:
        """Set the loader of the next loop. With `in_data`, all of `data` is its fetch."""
        self._phase = DATA if in_data else FETCH
        if type(loader) in _NOT_LOADERS:
            self._phase = ""  # Time in `data` is not a fetch: detect nothing.
        workers = attribute(loader, "num_workers")
        self._workers = workers if isinstance(workers, int) else 0

    def loop_begins(self, now_ns: int) -> None:
        """Keep the start of a loop, because loaders start their workers there."""
        self._loops_ns = (*self._loops_ns[-_MAX_LOOPS + 1 :], now_ns)

    def collect(self, steps: Sequence[StepRecord], baseline: Baseline) -> Detector | None:
        if not self._phase:
            return None
        batches = self._newest_batches() if self._workers else ()
        return partial(_detect_fetch, self._phase, self._workers, self._loops_ns, batches)


def _detect_fetch(
    phase: str,
    workers: int,
    loops_ns: Sequence[int],
    batches: Sequence[MadeBatch],
    attribution: ExcessAttribution,
) -> None:
    start_ns, end_ns = attribution.start_ns, attribution.end_ns
    starts_loop = any(start_ns - _NEAR_NS <= ns <= end_ns for ns in loops_ns)
    # Batches that workers completed during this step: the loop has waited for one of them.
    made = [batch for batch in batches if start_ns < batch.end_ns <= end_ns]
    if not workers:
        detail = "its start" if starts_loop else "it loads in the main process"
    elif starts_loop:
        detail = "starting its workers for the first batch"
    elif made:
        detail = str(max(made, key=lambda batch: batch.end_ns - batch.start_ns))
    else:
        detail = f"its {workers} workers had no batch ready"
    attribution.attribute_host_excess("dataloader", detail, lambda name: name == phase)


def collect_phases(steps: Sequence[StepRecord], baseline: Baseline) -> Detector:
    return _detect_phases


def _detect_phases(attribution: ExcessAttribution) -> None:
    """Attribute host excess in callbacks and named phases, and device excess in waits for ranks."""
    for part in attribution.parts:
        if detail := _callback_name(part.name):
            part.attribute_host("callback", detail)
        if is_wait(part.name) and part.device_excess_ms:
            part.device_causes["ranks", f"in {part.name}"] += part.device_excess_ms


def _callback_name(part: str) -> str:
    """Return the name of a callback or named phase; empty for phases of the training itself."""
    if part == CALLBACKS:
        return "other callbacks"
    if part.partition("/")[0] in (*PHASES, TRAINING_STEP):
        return of_one_callback(part)
    return f"phase {part}"


class Preemption:
    """Detector of steps in which the loop's thread was off the CPU for longer than usual.

    Args:
        usage: Function that returns the CPU time and the context switches of the thread, as
            `getrusage` does. None if the system does not count them per thread.
    """

    def __init__(self, usage: Callable[[], Any] | None) -> None:
        self.usage = usage
        self._samples: deque[tuple[int, Any]] = deque(maxlen=_MAX_SAMPLES)

    def sample(self, now_ns: int) -> None:
        """Sample at the end of a step. Keep it cheap, because it runs in every step."""
        if self.usage is not None:
            self._samples.append((now_ns, self.usage()))

    def collect(self, steps: Sequence[StepRecord], baseline: Baseline) -> Detector | None:
        if not self._samples:
            return None
        samples = [*self._samples]
        slow = {step.host_ns[0]: _off_cpu(samples, step) for step in steps}
        found = {ns: off for ns, off in slow.items() if off and off.ms >= _MIN_OFF_CPU_MS}
        if not found:
            return None  # Most slow steps have another cause: do not compute the usual values.
        others = filter(None, [_off_cpu(samples, step) for step in baseline.steps])
        columns = [*zip(*others, strict=True)]
        if not columns:
            return None
        return partial(_detect_off_cpu, found, _OffCpu(*map(median, columns)))


def _detect_off_cpu(
    slow: Mapping[int, _OffCpu], usual: _OffCpu, attribution: ExcessAttribution
) -> None:
    """Attribute the time in which other threads ran, or in which the thread was stopped.

    Args:
        slow: Values of slow steps, by the host time of the start of the step.
        usual: Medians of the steps in the baseline.
        attribution: Attribution of the excess of one of the slow steps.
    """
    off_cpu = slow.get(attribution.start_ns)
    if off_cpu is None:
        return
    excess = _OffCpu(*(value - mid for value, mid in zip(off_cpu, usual, strict=True)))
    if excess.ms < _MIN_OFF_CPU_MS:
        return
    attribute_excess = partial(attribution.attribute_host_excess, "off_cpu", max_ms=excess.ms)
    if excess.involuntary > max(excess.voluntary, 0.0):
        attribute_excess("other threads had the CPU")
    elif excess.ms >= _MIN_OFF_CPU_MS * excess.voluntary:
        # Each wait took long. Many short waits would only mean that threads alternate. Phases
        # outside of `working` may wait on purpose.
        working = (FORWARD, LOSS, BACKWARD, OPTIMIZER)
        attribute_excess("stopped or blocked", lambda name: name.partition("/")[0] in working)


def _off_cpu(samples: Sequence[tuple[int, Any]], step: StepRecord) -> _OffCpu | None:
    """Return off-CPU time and context switches of a step; None without a sample at its start."""
    start_ns, end_ns = step.host_ns[0], step.host_ns[-1]
    # Find the newest sample before the start and before the end of the step, because a sample is
    # taken just before the mark between two steps.
    first = bisect_right(samples, start_ns, key=itemgetter(0)) - 1
    last = bisect_right(samples, end_ns, key=itemgetter(0)) - 1
    if first < 0 or first == last or samples[first][0] < start_ns - _NEAR_NS:
        return None
    (before_ns, before), (after_ns, after) = samples[first], samples[last]
    ran_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    off_us = round((after_ns - before_ns) / 1e3 - 1e6 * ran_s)
    voluntary = after.ru_nvcsw - before.ru_nvcsw
    return _OffCpu(off_us / 1e3, voluntary, after.ru_nivcsw - before.ru_nivcsw)


def thread_usage() -> Callable[[], Any] | None:
    """Return a function that returns the CPU usage of the calling thread; None if not on Linux."""
    try:
        from resource import RUSAGE_THREAD, getrusage
    except ImportError:
        return None
    return partial(getrusage, RUSAGE_THREAD)


# Counters of torch's allocator that only grow when it calls the driver, and their names in texts.
_COUNTERS: Mapping[str, str] = {
    "num_alloc_retries": "retries",
    "num_device_alloc": "device allocations",
    "num_device_free": "device frees",
    "num_sync_all_streams": "waits for all streams",
}


class Allocator:
    """Detector of slow calls of torch's allocator to the driver.

    If the counters of such calls grew in a step, they explain the host excess without other cause.

    Args:
        read: Function that returns the counters; None for a device without counters.
    """

    def __init__(self, read: Callable[[], Counts] | None) -> None:
        self._read = read
        self._last: Counts | None = None  # Counters at the previous read.
        # Time at which the counters were read, and their growth since the previous read.
        self._growths: deque[tuple[int, Counts]] = deque(maxlen=200)

    def sample(self, now_ns: int) -> None:
        """Read the counters, which takes about 70 us."""
        if self._read is None:
            return
        try:
            counts = self._read()
        except Exception:  # Devices without counters raise various errors.
            self._read = None
            return
        if self._last is not None:
            growth = [now - then for then, now in zip(self._last, counts, strict=True)]
            self._growths.append((now_ns, growth))
        self._last = counts

    def collect(self, steps: Sequence[StepRecord], baseline: Baseline) -> Detector | None:
        start_ns, end_ns = steps[0].host_ns[0], steps[-1].host_ns[-1] + _NEAR_NS
        growths = [(ns, growth) for ns, growth in self._growths if start_ns <= ns <= end_ns]
        return partial(_detect_growth, growths) if growths else None


def _detect_growth(growths: Sequence[tuple[int, Counts]], attribution: ExcessAttribution) -> None:
    """Attribute only host excess that has no cause yet, because counters have no timestamps."""
    of_step = (growth for ns, growth in growths if abs(ns - attribution.end_ns) <= _NEAR_NS)
    growth = next(of_step, ())  # Empty if the counters were not read at the end of this step.
    counters = zip(_COUNTERS.values(), growth, strict=False)
    if detail := ", ".join(f"{counter} {n}" for counter, n in counters if n > 0):
        attribution.attribute_host_excess("allocator", detail, lambda name: not is_wait(name))


def allocator_of(device: torch.device | None) -> Callable[[], Counts] | None:
    """Return a function that reads the allocator's counters; None for a device without them."""
    if device is None or device.type != "cuda":
        return None

    def read() -> Counts:
        # `memory_stats` takes seven times as long, because it flattens the result.
        found: Any = torch.cuda.memory_stats_as_nested_dict(device)
        return tuple(found.get(name, 0) for name in _COUNTERS)

    return read
