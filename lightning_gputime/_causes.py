"""Causes of slow steps: a running baseline, evidence from the loop, and attribution of time.

`SlowStepAnalyzer` compares steps with a baseline of earlier steps. For slow steps, each *collector*
keeps its evidence in the loop, which must be cheap, and returns a *detector*, or None without
evidence. The detectors run when the log (`_measurement.slow`) is asked for causes: `explain`
computes by which time the step exceeds the baseline, and each detector attributes a part of it.

The *excess* is the time by which a step exceeds the median of the baseline. A *part* of a step is
an innermost phase, such as `data/fetch`.
"""

import gc
import itertools
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, chain, pairwise
from math import inf
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from lightning_gputime._compat.python_ import running_line
from lightning_gputime._compat.torch_ import compile_callbacks
from lightning_gputime._instrumentation.loop import attribute_of
from lightning_gputime._loader import GC_COLLECT, CulpritSums, MadeBatch, Source
from lightning_gputime._measurement.history import MIN_PACKED_MARKS, pack, unpack
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.slow import (
    HAVE_PHASES,
    MIN_EXCESS_DEVIATIONS,
    MIN_EXCESS_MS,
    MIN_EXCESS_SHARE,
    UNEXPLAINED,
    Cause,
    CauseKind,
    SlowEvidence,
    SlowLog,
    SlowStep,
)
from lightning_gputime._messages import WarnOnce
from lightning_gputime._phases import (
    BETWEEN_BATCHES,
    CALLBACKS,
    DATA,
    FETCH,
    PHASES,
    TRAINING_STEP,
    StepRecord,
    in_order,
    is_wait,
    of_one_callback,
    resolve_labels,
)
from lightning_gputime._record.clock import Clock

# Number of steps that are compared with the same baseline, and maximum number of steps in it: the
# newest. Chosen: with fewer, medians are noisy and cost more; with more, they lag behind a drift.
_STEPS_PER_BASELINE, _BASELINE_STEPS = 25, 50
_NEAR_NS = 1_000_000  # Maximum distance of a reading from the mark that it belongs to. Chosen.

# Kinds of spans, innermost first. A span may contain spans of earlier kinds.
_INSIDE_OUT: Sequence[CauseKind] = ("garbage_collection", "compilation", "callback")
# Counters of torch's allocator that only grow when it calls the driver, and their names in texts.
_COUNTERS: Mapping[str, str] = {
    "num_alloc_retries": "retries",
    "num_device_alloc": "device allocations",
    "num_device_free": "device frees",
    "num_sync_all_streams": "waits for all streams",
}
_NOT_EXPLAINED = "Slow steps are no longer explained: %r"

Span = tuple[int, int, CauseKind, str]
"""Start and end of a delay of the host (in nanoseconds), and kind and detail of its cause."""

_AnySpan = TypeVar("_AnySpan", Span, tuple[int, int])

Detector = Callable[["Excess"], None]
"""Function that attributes the excess of a slow step to the causes of one kind."""


def _overlapping(spans: Iterable[_AnySpan], start_ns: int, end_ns: int) -> list[_AnySpan]:
    return [span for span in spans if span[0] < end_ns and span[1] > start_ns]


class SlowStepAnalyzer:
    """Compare each step with a baseline of earlier steps, and collect evidence on slow steps.

    The log explains slow steps on request. On a noisy host, a quarter of short steps may be slow:
    explaining each of them in the loop would double the cost of the timer.

    Nothing here raises. After an error, slow steps are still found, but no longer explained.
    """

    def __init__(self, clock: Clock, log: SlowLog, culprits: CulpritSums) -> None:
        self._log, self._culprits = log, culprits
        now_ns = self._now_ns = clock.host_ns
        self._spans = HostSpans(now_ns, culprits)
        # Call these before and after loggers and observers run. `end_callback` takes their name.
        self.start_callback = partial(self._spans.start, "callback")
        self.end_callback = partial(self._spans.end, "callback")
        self.allocator = AllocatorLog(allocator_counters(getattr(clock, "device", None)))
        # Detectors run in this order, and each explains only what the detectors before it did not.
        # So spans with known times come first, the allocator's counters last.
        self.collectors: list[Callable[[Sequence[StepRecord], Baseline], Detector | None]] = [
            self._spans.collect_spans,
            self._collect_fetches,
            _collect_phases,
            self.allocator.collect_counters,
        ]
        self._loops_ns = deque[int](maxlen=100)  # Host times of the newest starts of loops.
        self._fetch_phase = FETCH  # Phase of the fetches; empty for an iterable that loads nothing.
        self._workers = 0
        self._is_attached = False
        self._baseline = Baseline()
        # Host spans in which the timer itself waited for the device or read steps. They must not
        # make a step count as slow. Keep more than the 50 steps that are at most examined together.
        self._waits = deque[tuple[int, int]](maxlen=100)
        self._readings = deque[tuple[int, int]](maxlen=100)
        self._warn_once = WarnOnce()
        self.newest: Sequence[SlowStep] = ()
        """Slow steps among those that were read last; empty unless the log `is_followed`."""

    def attach(self) -> None:
        self._is_attached = True
        try:
            self._spans.attach()
        except Exception as error:
            self._give_up(error)

    def remove(self) -> None:
        """Stop collecting evidence. Safe to call twice, and in a forked process."""
        self._is_attached = False
        self.allocator.stop()
        self._spans.remove()

    def _give_up(self, error: Exception) -> None:
        self._warn_once(_NOT_EXPLAINED, error)
        self.remove()
        self.collectors = []

    def set_loader(self, loader: object, in_data: bool) -> None:
        """Set the loader of the next loop. With `in_data`, all of `data` is its fetch."""
        self._fetch_phase = DATA if in_data else FETCH
        if type(loader) in (range, itertools.count, itertools.repeat, list, tuple):
            self._fetch_phase = ""  # They load nothing.
        workers = attribute_of(loader, "num_workers")
        self._workers = workers if isinstance(workers, int) else 0

    def loop_begins(self) -> None:
        self._loops_ns.append(self._now_ns())
        self.timing_resumes()

    def timing_resumes(self) -> None:
        """Call at the start of a timed step that does not follow a timed step."""
        if self._is_attached:
            self.allocator.start(self._now_ns())

    def steps_read(self, read: ReadSteps) -> None:
        """Find slow steps after the warm-up. Then start a "callback" span: loggers run next."""
        all_steps, all_ms = read.measured, read.sums.each_ms[read.warmup :]
        baseline, found = self._baseline, list[SlowEvidence]()
        # A baseline is computed again every 25 steps, so add the steps in such parts.
        try:
            for loader in self._culprits.loaders:
                if loader.num_workers:
                    loader.look()
            for first in range(0, len(all_steps), _STEPS_PER_BASELINE):
                steps = all_steps[first : first + _STEPS_PER_BASELINE]
                each_ms = all_ms[first : first + _STEPS_PER_BASELINE]
                self._waits += [
                    (step.finished_ns - round(step.wait_ms * 1e6), step.finished_ns)
                    for step in steps
                    if step.finished_ns
                ]
                was_ready = baseline.is_ready
                if was_ready and max(each_ms) > baseline.slow_threshold_ms:
                    found += self._find_slow(steps, each_ms)
                if baseline.add(steps, each_ms):
                    if not was_ready:  # It contains all steps so far: examine them now.
                        found += self._find_slow([*baseline.steps], [*baseline.each_ms])
                    if self._is_attached:
                        self._spans.attach()  # Dynamo may have been imported or reset meanwhile.
                        self.allocator.follow(baseline, self._now_ns())
        except Exception as error:
            found = []
            self._give_up(error)
        self.newest = self._log.add(found, has_baseline=baseline.is_ready)
        self._readings.append((read.since_ns, self._now_ns()))
        self.start_callback()

    def _find_slow(
        self, steps: Sequence[StepRecord], each_ms: Sequence[float]
    ) -> list[SlowEvidence]:
        baseline = self._baseline
        slow = []
        for step, ms in zip(steps, each_ms, strict=True):
            # Most steps fail the first condition, which is cheap.
            if ms > baseline.slow_threshold_ms and step.lines is None:
                start_ns, end_ns = step.host_ns[0], step.host_ns[-1]
                reading_ns = sum(
                    min(end_ns, end) - max(start_ns, start)
                    for start, end in _overlapping(self._readings, start_ns, end_ns)
                )
                if ms - reading_ns / 1e6 > baseline.slow_threshold_ms:
                    slow.append((step, ms))
        if not slow:
            return []
        records = [step for step, _ in slow]
        detectors = [*filter(None, (collect(records, baseline) for collect in self.collectors))]
        waits = _overlapping(self._waits, records[0].host_ns[0], records[-1].host_ns[-1])
        medians = baseline.medians()
        found = []
        for step, ms in slow:
            # Pack long steps to save memory.
            kept = pack(step) if len(step.labels) >= MIN_PACKED_MARKS else step
            call = partial(explain, kept, ms, medians, waits, detectors, self._warn_once)
            found.append(SlowEvidence(ms - baseline.step_ms, call))
        return found

    def _collect_fetches(
        self, steps: Sequence[StepRecord], baseline: "Baseline"
    ) -> Detector | None:
        if not self._fetch_phase:
            return None
        phase, workers, loops_ns = self._fetch_phase, self._workers, [*self._loops_ns]
        batches: list[MadeBatch] = []
        for loader in self._culprits.loaders if workers else ():
            batches += loader.newest_batches()

        def detect(excess: "Excess") -> None:
            start_ns, end_ns = excess.start_ns, excess.end_ns
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
            if phase in excess.parts:
                excess.parts[phase].attribute_host("dataloader", detail)

        return detect


def _collect_phases(*_: object) -> Detector:
    def detect(excess: Excess) -> None:
        """Attribute host excess in callbacks and phases, and device excess in waits for ranks."""
        for part in excess.parts.values():
            name = part.name
            if name == CALLBACKS:
                detail = "other callbacks"
            elif name.partition("/")[0] in (*PHASES, TRAINING_STEP):
                detail = of_one_callback(name)  # Empty for phases of the training itself.
            else:
                detail = f"phase {name}"
            if detail:
                part.attribute_host("callback", detail)
            if is_wait(name) and part.device_excess_ms:
                part.device_causes[_CauseKey("ranks", f"in {name}")] += part.device_excess_ms

    return detect


class HostSpans:
    """Newest spans in which something delayed the host.

    - garbage collections of Python in any thread, because they block all threads
    - compilations by dynamo, including Inductor and Triton. Dynamo is not imported for this: if
      no other code has imported it, nothing is compiled.
    - spans that callers report with `start` and `end`
    """

    def __init__(self, now_ns: Callable[[], int], culprits: CulpritSums) -> None:
        self._now_ns, self._culprits = now_ns, culprits
        self._newest = deque[Span](maxlen=1000)
        self._started_ns: dict[CauseKind, int] = {}  # Start of the open span of each kind.
        self._is_explicit = False  # True if a call of `gc.collect` started the newest collection.
        # An attribute: Python clears the names of modules before its last collections.
        self._is_exiting = sys.is_finalizing

    def attach(self) -> None:
        for callbacks, callback in self._callbacks():
            if callback not in callbacks:
                callbacks.append(callback)

    def remove(self) -> None:
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
        if self._is_exiting():
            return
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

        `name` is the name of that code; empty for its function.
        """
        now_ns, started_ns = self._now_ns(), self._started_ns.pop(kind, None)
        # Shorter spans cannot explain a slow step.
        if started_ns is not None and now_ns - started_ns >= 50_000:
            self._newest.append((started_ns, now_ns, kind, detail))
            if kind != "callback" and now_ns - started_ns >= 1_000_000:
                entry = f"slow steps: {kind.replace('_', ' ')}"
                found = running_line()
                source = None if found is None else Source(found[0], found[1], found[1], found[2])
                self._culprits.add(entry, name, now_ns - started_ns, source)

    def collect_spans(self, steps: Sequence[StepRecord], baseline: "Baseline") -> Detector | None:
        # Copy the spans, because a garbage collection may add one at any time.
        spans = _overlapping([*self._newest], steps[0].host_ns[0], steps[-1].host_ns[-1])

        def detect(excess: "Excess") -> None:
            inside = _overlapping(spans, excess.start_ns, excess.end_ns)
            # Inner spans come first, so that their time does not count again for the outer span.
            inside.sort(key=lambda span: _INSIDE_OUT.index(span[2]))
            for start_ns, end_ns, kind, detail in inside:
                for part in excess.parts.values():
                    if ms := part.take(start_ns, end_ns):
                        part.host_causes[_CauseKey(kind, detail)] += ms
                        part.host_left_ms = max(part.host_left_ms - ms, 0.0)
            for part in excess.parts.values():
                for cause in [*part.host_causes]:
                    if cause.kind == "compilation":
                        # In the rest of the excess, the new code was loaded and run for the first
                        # time.
                        part.attribute_host("compilation", cause.detail)

        return detect if spans else None


class AllocatorLog:
    """Counters of torch's allocator, read after steps with a long host time and every 25 steps.

    `counters` is None for a device without counters.
    """

    def __init__(self, counters: Callable[[], Sequence[int]] | None) -> None:
        self._counters = counters
        self._ended_ns = 0  # Host time of the end of the last step.
        self._threshold_ns = inf  # The counters are read after steps with a longer host time.
        self._last_counts: Sequence[int] | None = None
        # Time at which the counters were read, and their growth since the previous read.
        self._growths = deque[tuple[int, Sequence[int]]](maxlen=200)

    def start(self, now_ns: int) -> None:
        """Sample at the start of a timed step that does not follow a timed step."""
        self._ended_ns = now_ns
        self._read_counters(now_ns)

    def end_step(self, now_ns: int) -> None:
        """Sample just before the mark between two steps. Keep it cheap: it runs in every step."""
        if now_ns - self._ended_ns > self._threshold_ns:
            self._read_counters(now_ns)
        self._ended_ns = now_ns

    def follow(self, baseline: "Baseline", now_ns: int) -> None:
        """Choose the threshold from a new baseline."""
        self._threshold_ns = baseline.host_threshold_ms * 1e6
        self._read_counters(now_ns)

    def stop(self) -> None:
        self._threshold_ns = inf

    def _read_counters(self, now_ns: int) -> None:
        """Read the allocator's counters, which takes about 70 us."""
        if self._counters is None:
            return
        try:
            counts = self._counters()
        except Exception:  # Devices without counters raise various errors.
            self._counters = None
            return
        if self._last_counts is not None:
            growth = [now - then for then, now in zip(self._last_counts, counts, strict=True)]
            self._growths.append((now_ns, growth))
        self._last_counts = counts

    def collect_counters(
        self, steps: Sequence[StepRecord], baseline: "Baseline"
    ) -> Detector | None:
        start_ns, end_ns = steps[0].host_ns[0], steps[-1].host_ns[-1] + _NEAR_NS
        growths = [(ns, growth) for ns, growth in self._growths if start_ns <= ns <= end_ns]

        def detect(excess: "Excess") -> None:
            """Attribute the host excess without a cause if the allocator has called the driver."""
            of_step = (growth for ns, growth in growths if abs(ns - excess.end_ns) <= _NEAR_NS)
            growth = next(of_step, ())  # Empty if no counters were read at the end of this step.
            counters = zip(_COUNTERS.values(), growth, strict=False)
            if detail := ", ".join(f"{counter} {n}" for counter, n in counters if n > 0):
                for part in excess.parts.values():
                    if not is_wait(part.name):
                        part.attribute_host("allocator", detail)

        return detect if growths else None


def allocator_counters(device: torch.device | None) -> Callable[[], Sequence[int]] | None:
    """Return a function that reads the `_COUNTERS`; None for a device without them."""
    if device is None or device.type != "cuda":
        return None

    def read() -> Sequence[int]:
        # `memory_stats` takes seven times as long, because it flattens the result.
        found: Any = torch.cuda.memory_stats_as_nested_dict(device)
        return tuple(found.get(name, 0) for name in _COUNTERS)

    return read


class Medians(NamedTuple):
    """Medians of the steps in a baseline."""

    step_ms: float
    wait_ms: float  # Time for which the timer blocked the host.
    # Median device time and host time of each part, and the host excess that may be noise.
    parts_ms: Mapping[str, tuple[float, float, float]]


class Baseline:
    """Newest steps and their medians, with which the next steps are compared.

    Medians and median absolute deviations are robust to slow steps.
    """

    def __init__(self) -> None:
        self.is_ready = False
        """True once there were enough steps to compute the medians and thresholds."""
        self.step_ms = 0.0  # Median step time.
        self.host_ms = 0.0  # Median host time of a step.
        self.slow_threshold_ms = inf  # Longer steps are slow.
        self.host_threshold_ms = inf  # Steps with a longer host time may be slow.
        self.steps = deque[StepRecord](maxlen=_BASELINE_STEPS)
        self.each_ms = deque[float](maxlen=_BASELINE_STEPS)  # Their step times.
        self._n_new = 0  # Number of steps that were added since the medians were computed.
        self._medians: Medians | None = None

    def add(self, steps: Sequence[StepRecord], each_ms: Sequence[float]) -> bool:
        """Add the next steps. Return True if the baseline was computed again."""
        self.steps.extend(steps)
        self.each_ms.extend(each_ms)
        self._n_new += len(steps)
        if len(self.steps) < 10 or (self.is_ready and self._n_new < _STEPS_PER_BASELINE):
            return False
        self.is_ready, self._n_new, self._medians = True, 0, None
        self.step_ms = median(self.each_ms)
        self.host_ms = median([step.host_ns[-1] - step.host_ns[0] for step in self.steps]) / 1e6
        self.host_threshold_ms = self.host_ms + max(MIN_EXCESS_SHARE * self.host_ms, MIN_EXCESS_MS)
        deviation_ms = median([abs(ms - self.step_ms) for ms in self.each_ms])
        self.slow_threshold_ms = self.step_ms + max(
            MIN_EXCESS_DEVIATIONS * deviation_ms, MIN_EXCESS_SHARE * self.step_ms, MIN_EXCESS_MS
        )
        return True

    def medians(self) -> Medians:
        """Return the medians, which are computed on request: most baselines meet no slow step."""
        if self._medians is not None:
            return self._medians
        # A step may have several marks of a part, whose times add up. In steps without the part,
        # its time is zero. The arrays have a row per part and a column per step, and are filled
        # for all steps with the same marks at once, because this runs in the loop.
        steps = [*self.steps]
        columns_by_labels = defaultdict[tuple[str, ...], list[int]](list)
        for column, step in enumerate(steps):
            columns_by_labels[step.labels].append(column)
        names = dict.fromkeys(chain(*map(_innermost_phases, columns_by_labels)))
        rows = {name: row for row, name in enumerate(names)}
        device_ms = np.zeros((len(rows), len(steps)))
        host_ns = np.zeros((len(rows), len(steps)), np.int64)
        for labels, columns in columns_by_labels.items():
            # Time from each mark to the next. `host_ns` also has the end of the step.
            took_ms = np.array([steps[column].device_ms for column in columns]).T
            at_ns = np.array([steps[column].host_ns for column in columns]).T
            took_ns = at_ns[1:] - at_ns[:-1]
            # A slice is faster than a list of all columns.
            index = slice(None) if len(columns_by_labels) == 1 else columns
            for name, ms, ns in zip(_innermost_phases(labels), took_ms, took_ns, strict=True):
                device_ms[rows[name], index] += ms
                host_ns[rows[name], index] += ns
        median_ns = _row_medians(host_ns)
        deviation_ns = _row_medians(np.abs(host_ns - median_ns[:, None]))
        noise_ms = MIN_EXCESS_DEVIATIONS * deviation_ns / 1e6
        columns_ms = np.stack([_row_medians(device_ms), median_ns / 1e6, noise_ms], axis=1)
        self._medians = Medians(
            self.step_ms,
            wait_ms=median([step.wait_ms for step in steps]),
            parts_ms=dict(zip(rows, map(tuple, columns_ms.tolist()), strict=True)),
        )
        return self._medians


def _row_medians(rows: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    # `numpy.median` takes longer, because of its Python code.
    ordered, n = np.sort(rows, axis=1), rows.shape[1]
    middle: npt.NDArray[np.float64] = (ordered[:, (n - 1) // 2] + ordered[:, n // 2]) / 2
    return middle


@lru_cache(maxsize=256)
def _innermost_phases(labels: tuple[str, ...]) -> Sequence[str]:
    """Return the innermost phase of each mark, or "" if its time belongs to no phase."""
    return [names[-1] if names else "" for names in resolve_labels(labels)]


class _CauseKey(NamedTuple):
    kind: CauseKind | None  # None for time without a cause.
    detail: str


_Causes = defaultdict[_CauseKey, float]
"""Times by cause (in milliseconds)."""

_NO_CAUSE = _CauseKey(None, "")


class _SlowPart:
    """Excess of a part of a slow step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device_ms = self.host_ms = 0.0
        self.device_excess_ms = 0.0
        # Time in which the device may have waited for the host; at most `device_excess_ms`.
        self.idle_ms = 0.0
        self.host_left_ms = 0.0  # Host excess without a cause so far; 0 if it may be noise.
        self.free: list[tuple[int, int]] = []  # Host spans of this part without a cause so far.
        self.host_causes: _Causes = defaultdict(float)  # Delays of the host.
        self.device_causes: _Causes = defaultdict(float)  # Delays of the device but not the host.

    def take(self, start_ns: int, end_ns: int) -> float:
        """Remove a span from the free host time. Return the removed time (in milliseconds)."""
        free, taken_ns = [], 0
        for free_start, free_end in self.free:
            start, end = max(free_start, start_ns), min(free_end, end_ns)
            if start >= end:  # The spans do not overlap.
                free.append((free_start, free_end))
                continue
            taken_ns += end - start
            if free_start < start:
                free.append((free_start, start))
            if end < free_end:
                free.append((end, free_end))
        self.free = free
        return taken_ns / 1e6

    def attribute_host(self, kind: CauseKind, detail: str) -> None:
        """Attribute the rest of the host excess."""
        if self.host_left_ms > 0.0:
            self.host_causes[_CauseKey(kind, detail)] += self.host_left_ms
            self.host_left_ms = 0.0

    def exposed_ms(self) -> _Causes:
        """Return the device excess by cause. Host causes get at most the device's idle time.

        For example, the device is late by 10 ms, of which it was idle for 6. A collection has
        delayed the host by 9 ms, and a callback by 3. They share the 6 ms in this ratio, 4.5 and
        1.5 ms, and 4 ms have no cause.
        """
        found: _Causes = defaultdict(float)
        left_ms = self.device_excess_ms
        for causes, max_ms in ((self.device_causes, inf), (self.host_causes, self.idle_ms)):
            delay_ms = sum(causes.values())
            exposed_ms = min(delay_ms, max_ms, left_ms)
            share = exposed_ms / delay_ms if delay_ms else 0.0
            left_ms -= exposed_ms
            for cause, ms in causes.items():
                found[cause] += ms * share
        found[_NO_CAUSE] = left_ms
        return found


class Excess:
    """Excess of a slow step, which detectors attribute to causes, one after the other.

    A delay of the host delays the device in the same part of the step, unless queued work hides the
    delay. So a cause gets at most the delay of the host, and at most the excess of the device in
    that part. It gets nothing if the device had not reached the part when the host continued.
    Causes in the same part share the excess of that part. No time is attributed twice. `waits` are
    spans in which the timer blocked the host. They do not count as a cause.
    """

    def __init__(
        self, step: StepRecord, step_ms: float, baseline: Medians, waits: Sequence[tuple[int, int]]
    ) -> None:
        self.start_ns, self.end_ns = step.host_ns[0], step.host_ns[-1]
        self.step, self.step_ms, self.baseline = step, step_ms, baseline
        self.parts: dict[str, _SlowPart] = {}
        # Host times at which the device reached each mark. If the host waited for the end of the
        # step, compute them from that time. Otherwise they are unknown: assume that the device was
        # always waiting for the host.
        began_ns = step.finished_ns - sum(step.device_ms) * 1e6 if step.finished_ns else -inf
        arrivals_ns = accumulate((ms * 1e6 for ms in step.device_ms[:-1]), initial=began_ns)
        spans = pairwise(step.host_ns)
        names = _innermost_phases(step.labels)
        for name, ms, span, arrival_ns in zip(
            names, step.device_ms, spans, arrivals_ns, strict=True
        ):
            if name:
                part = self.parts.setdefault(name, _SlowPart(name))
                part.device_ms += ms
                part.host_ms += (span[1] - span[0]) / 1e6
                part.idle_ms += max(span[1] - arrival_ns, 0.0) / 1e6
                part.free.append(span)
        waits_inside = _overlapping(waits, self.start_ns, self.end_ns)
        for name, part in self.parts.items():
            device_ms, host_ms, noise_ms = baseline.parts_ms.get(name, (0.0, 0.0, 0.0))
            part.device_excess_ms = max(part.device_ms - device_ms, 0.0)
            part.idle_ms = min(part.idle_ms, part.device_excess_ms)  # It may be infinite so far.
            waited_ms = sum(part.take(*wait) for wait in waits_inside)
            # The usual host time includes the usual wait, so subtract only the rest of the wait.
            excess_ms = part.host_ms - host_ms - max(waited_ms - baseline.wait_ms, 0.0)
            part.host_left_ms = excess_ms if excess_ms > noise_ms else 0.0

    def result(self) -> SlowStep:
        """Return the slow step with the causes that were attributed.

        For example, the step takes 10 ms longer: forward 8 (6 of it by a collection), backward 3,
        and another part is 1 ms shorter. The collection has 6 ms, and 4 are unexplained: of these,
        forward has 4 * 2 / (2 + 3) = 1.6, and backward 2.4. The excess in forward is
        8 * 10 / 11 = 7.3 ms.
        """
        # Times by cause, over all parts, and by phase
        step_excess_ms = self.step_ms - self.baseline.step_ms
        host_ms: _Causes = defaultdict(float)
        exposed_ms: _Causes = defaultdict(float)
        phases_ms: dict[str, _Causes] = defaultdict(lambda: defaultdict(float))
        for part in self.parts.values():
            phase = CALLBACKS if of_one_callback(part.name) else part.name
            for cause, ms in part.exposed_ms().items():
                phases_ms[phase][cause] += ms
                if cause != _NO_CAUSE:
                    exposed_ms[cause] += ms
            for cause, ms in part.host_causes.items():
                host_ms[cause] += ms

        # Causes. If other parts are shorter than in the baseline, the parts exceed it by more than
        # the step does: limit the causes to the excess of the step.
        all_ms = sum(exposed_ms.values())
        share = min(step_excess_ms / all_ms, 1.0) if all_ms else 0.0
        causes = {
            key: Cause(key.kind, host_ms[key], ms * share, key.detail)
            for key, ms in exposed_ms.items()
            if key.kind is not None
            and ms * share >= 0.05 * step_excess_ms  # Smaller causes count as unexplained.
        }
        ordered = sorted(causes.values(), key=lambda cause: cause.exposed_ms, reverse=True)
        unexplained_ms = max(step_excess_ms - sum(cause.exposed_ms for cause in ordered), 0.0)

        # Excess by phase and cause, except causes whose time is a separate phase.
        lost_ms: dict[str, dict[str, float]] = {}
        left_ms = {}
        for phase, causes_ms in phases_ms.items():
            left_ms[phase] = sum(ms for key, ms in causes_ms.items() if key not in causes)
            for key, ms in causes_ms.items():
                if key in causes and key.kind not in HAVE_PHASES:
                    lost, name = lost_ms.setdefault(phase, {}), causes[key].name
                    lost[name] = lost.get(name, 0.0) + ms * share
        # Divide the unexplained excess among the phases, in proportion to their time without a
        # cause.
        scale = unexplained_ms / (sum(left_ms.values()) or inf)
        for phase, ms in left_ms.items():
            if ms * scale and phase.partition("/")[0] not in BETWEEN_BATCHES and not is_wait(phase):
                lost_ms.setdefault(phase, {})[UNEXPLAINED] = ms * scale

        excess_ms = {phase: sum(causes_ms.values()) for phase, causes_ms in phases_ms.items()}
        longest = max(excess_ms, key=excess_ms.__getitem__)
        times = self.step.times()
        phases = [name for name in in_order([*times.phase_ms]) if "/" not in name]
        return SlowStep(
            step=times.step,
            step_ms=self.step_ms,
            baseline_ms=self.baseline.step_ms,
            phase=longest,
            causes=tuple(ordered),
            unexplained_ms=unexplained_ms,
            phase_excess_ms=excess_ms[longest] * step_excess_ms / (sum(excess_ms.values()) or inf),
            lost_ms=lost_ms,
            phase_ms={name: times.phase_ms[name] for name in phases},
            host_ms={name: times.host_ms[name] for name in phases},
        )


def explain(
    step: StepRecord,
    step_ms: float,
    baseline: Medians,
    waits: Sequence[tuple[int, int]],
    detectors: Sequence[Detector],
    warn_once: WarnOnce,
) -> SlowStep:
    """Return a slow step with its causes, from evidence that was collected in the loop."""
    step = unpack(step)
    excess = Excess(step, step_ms, baseline, waits)
    try:
        for detect in detectors:
            detect(excess)
    except Exception as error:
        warn_once(_NOT_EXPLAINED, error)
        excess = Excess(step, step_ms, baseline, waits)
    return excess.result()
