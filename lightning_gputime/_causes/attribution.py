"""Compare a slow step with its baseline, and attribute its excess to causes.

The *excess* is the time by which a step exceeds the median of the baseline. A *part* of a step is
an innermost phase, such as `data/fetch`.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from math import inf
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lightning_gputime._measurement.history import unpack
from lightning_gputime._measurement.slow import HAVE_PHASES, UNEXPLAINED, Cause, CauseKind, SlowStep
from lightning_gputime._messages import WarnOnce
from lightning_gputime._phases import (
    BETWEEN_BATCHES,
    CALLBACKS,
    StepRecord,
    in_order,
    is_wait,
    of_one_callback,
    resolve_labels,
)

_BASELINE_STEPS = 50  # Maximum number of steps in a baseline: the newest steps.
_MIN_BASELINE_STEPS = 10  # Minimum number of steps for a baseline.
_STEPS_PER_BASELINE = 25  # The baseline is computed again after this many steps.
# A step is slow if its excess is larger than each of these:
_MIN_EXCESS_DEVIATIONS = 5.0  # As a multiple of the median absolute deviation.
_MIN_EXCESS_SHARE = 0.1  # As a fraction of the median.
_MIN_EXCESS_MS = 0.5
_MIN_CAUSE_SHARE = 0.05  # Causes of a smaller fraction of the excess count as unexplained.

_Causes = defaultdict[tuple[CauseKind, str], float]
"""Times by kind and detail of their cause (in milliseconds)."""

_NO_CAUSE: tuple[Any, str] = (None, "")  # Key of the time without a cause.

Span = tuple[int, int, CauseKind, str]
"""Start and end of a delay of the host (in nanoseconds), and kind and detail of its cause."""

_AnySpan = TypeVar("_AnySpan", Span, tuple[int, int])

NOT_EXPLAINED = "Slow steps are no longer explained: %r"


class PartMedians(NamedTuple):
    """Medians of a part of the step (in milliseconds)."""

    device_ms: float = 0.0
    host_ms: float = 0.0
    host_noise_ms: float = 0.0  # Not a median: a host excess up to this value may be noise.


class Medians(NamedTuple):
    """Medians of the steps in a baseline."""

    step_ms: float
    wait_ms: float  # Time for which the timer blocked the host.
    parts: Mapping[str, PartMedians]

    def part(self, name: str) -> PartMedians:
        """Return the medians of a part; zeros for a part that no step of the baseline has."""
        return self.parts.get(name, PartMedians())


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
        self.steps: deque[StepRecord] = deque(maxlen=_BASELINE_STEPS)
        self.each_ms: deque[float] = deque(maxlen=_BASELINE_STEPS)  # Their step times.
        self._n_new = 0  # Number of steps that were added since the medians were computed.
        self._medians: Medians | None = None

    def add(self, steps: Sequence[StepRecord], each_ms: Sequence[float]) -> bool:
        """Add the next steps. Return True if the baseline was computed again."""
        self.steps.extend(steps)
        self.each_ms.extend(each_ms)
        self._n_new += len(steps)
        if len(self.steps) < _MIN_BASELINE_STEPS:
            return False
        if self.is_ready and self._n_new < _STEPS_PER_BASELINE:
            return False
        self.is_ready = True
        self._n_new = 0
        self._medians = None
        self.step_ms = median(self.each_ms)
        self.host_ms = median([step.host_ns[-1] - step.host_ns[0] for step in self.steps]) / 1e6
        host_excess_ms = max(_MIN_EXCESS_SHARE * self.host_ms, _MIN_EXCESS_MS)
        self.host_threshold_ms = self.host_ms + host_excess_ms
        deviation_ms = median([abs(ms - self.step_ms) for ms in self.each_ms])
        noise_ms = _MIN_EXCESS_DEVIATIONS * deviation_ms
        excess_ms = max(noise_ms, _MIN_EXCESS_SHARE * self.step_ms, _MIN_EXCESS_MS)
        self.slow_threshold_ms = self.step_ms + excess_ms
        return True

    def medians(self) -> Medians:
        # Computed on request, because most blocks of steps have no slow step.
        if self._medians is None:
            wait_ms = median([step.wait_ms for step in self.steps])
            self._medians = Medians(self.step_ms, wait_ms, _medians_of_parts([*self.steps]))
        return self._medians


def overlapping(spans: Iterable[_AnySpan], start_ns: int, end_ns: int) -> list[_AnySpan]:
    """Return the spans that overlap with the time from `start_ns` to `end_ns`."""
    return [span for span in spans if span[0] < end_ns and span[1] > start_ns]


@lru_cache(maxsize=256)
def _innermost_phases(labels: tuple[str, ...]) -> Sequence[str]:
    """Return the innermost phase of each mark, or "" if its time belongs to no phase."""
    return [names[-1] if names else "" for names in resolve_labels(labels)]


def _medians_of_parts(steps: Sequence[StepRecord]) -> dict[str, PartMedians]:
    """Return the medians of each part. In steps without the part, its time is zero.

    A step may have several marks of a part, whose times add up.
    """
    # The arrays have a row per part and a column per step.
    columns_by_labels = defaultdict[tuple[str, ...], list[int]](list)
    for column, step in enumerate(steps):
        columns_by_labels[step.labels].append(column)
    names = dict.fromkeys(chain(*map(_innermost_phases, columns_by_labels)))
    rows = {name: row for row, name in enumerate(names)}
    device_ms = np.zeros((len(rows), len(steps)))
    host_ns = np.zeros((len(rows), len(steps)), np.int64)
    # Vectorized over all steps with the same marks, because this runs in the loop.
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
    noise_ms = _MIN_EXCESS_DEVIATIONS * deviation_ns / 1e6
    fields = (_row_medians(device_ms).tolist(), (median_ns / 1e6).tolist(), noise_ms.tolist())
    return dict(zip(rows, map(PartMedians, *fields), strict=True))


def _row_medians(rows: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    # `numpy.median` takes longer, because of its Python code.
    ordered, n = np.sort(rows, axis=1), rows.shape[1]
    middle: npt.NDArray[np.float64] = (ordered[:, (n - 1) // 2] + ordered[:, n // 2]) / 2
    return middle


class PartExcess:
    """Excess of a part of a slow step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device_ms = 0.0
        self.host_ms = 0.0
        self.device_excess_ms = 0.0
        self.idle_ms = 0.0
        """Time in which the device may have waited for the host; at most `device_excess_ms`."""
        self.unattributed_host_ms = 0.0
        """Host excess without a cause so far; 0 if it may be noise."""
        self._free: list[tuple[int, int]] = []  # Host spans of this part without a cause so far.
        self.host_causes: _Causes = defaultdict(float)
        """Delays of the host by cause."""
        self.device_causes: _Causes = defaultdict(float)
        """Delays of the device that are no delays of the host, by cause."""

    def add_mark(self, device_ms: float, span: tuple[int, int], idle_ms: float) -> None:
        """Add the time from a mark to the next; `span` is that time on the host's clock."""
        self.device_ms += device_ms
        self.host_ms += (span[1] - span[0]) / 1e6
        self.idle_ms += idle_ms
        self._free.append(span)

    def compare(self, baseline: Medians, waits: Sequence[tuple[int, int]]) -> None:
        """Compute the excess over a baseline, excluding the timer's own host waits."""
        usual = baseline.part(self.name)
        self.device_excess_ms = max(self.device_ms - usual.device_ms, 0.0)
        self.idle_ms = min(self.idle_ms, self.device_excess_ms)
        waited_ms = sum(self._take(*wait) for wait in waits)
        # The usual host time includes the usual wait, so subtract only the rest of the wait.
        wait_excess_ms = max(waited_ms - baseline.wait_ms, 0.0)
        excess_ms = self.host_ms - usual.host_ms - wait_excess_ms
        self.unattributed_host_ms = excess_ms if excess_ms > usual.host_noise_ms else 0.0

    def attribute_span(self, span: Span) -> None:
        """Attribute the time of a span inside this part, as far as that time has no cause yet."""
        start_ns, end_ns, kind, detail = span
        ms = self._take(start_ns, end_ns)
        if ms:
            self.host_causes[kind, detail] += ms
            self.unattributed_host_ms = max(self.unattributed_host_ms - ms, 0.0)

    def attribute_host(self, kind: CauseKind, detail: str, max_ms: float = inf) -> float:
        """Attribute the rest of the host excess, at most `max_ms`. Return the attributed time."""
        ms = min(self.unattributed_host_ms, max_ms)
        if ms > 0.0:
            self.host_causes[kind, detail] += ms
            self.unattributed_host_ms -= ms
        return max(ms, 0.0)

    def exposed_ms(self) -> _Causes:
        """Return the device excess by cause. Host causes get at most the device's idle time."""
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

    def _take(self, start_ns: int, end_ns: int) -> float:
        """Remove a span from the free host time. Return the removed time (in milliseconds)."""
        free, taken_ns = [], 0
        for free_start, free_end in self._free:
            start, end = max(free_start, start_ns), min(free_end, end_ns)
            if start >= end:  # The spans do not overlap.
                free.append((free_start, free_end))
                continue
            taken_ns += end - start
            if free_start < start:
                free.append((free_start, start))
            if end < free_end:
                free.append((end, free_end))
        self._free = free
        return taken_ns / 1e6


class ExcessAttribution:
    """Attribute the excess of a slow step to causes, one detector after the other.

    A delay of the host delays the device in the same part of the step, unless queued work hides the
    delay. So a cause gets at most the delay of the host, and at most the excess of the device in
    that part. It gets nothing if the device had not reached the part when the host continued.
    Causes in the same part share the excess of that part. No time is attributed twice.

    Args:
        step: The slow step.
        step_ms: Duration of the slow step (in milliseconds).
        baseline: Medians of earlier steps.
        waits: Spans in which the timer blocked the host. They do not count as a cause.
    """

    def __init__(
        self, step: StepRecord, step_ms: float, baseline: Medians, waits: Sequence[tuple[int, int]]
    ) -> None:
        self.start_ns, self.end_ns = step.host_ns[0], step.host_ns[-1]
        self.step, self.step_ms, self.baseline = step, step_ms, baseline
        self.excess_ms = step_ms - baseline.step_ms
        self._parts: dict[str, PartExcess] = {}
        # Host times at which the device reached each mark. If the host waited for the end of the
        # step, compute them from that time. Otherwise they are unknown: assume that the device was
        # always waiting for the host.
        began_ns = step.finished_ns - sum(step.device_ms) * 1e6 if step.finished_ns else -inf
        arrivals_ns = accumulate((ms * 1e6 for ms in step.device_ms[:-1]), initial=began_ns)
        spans = pairwise(step.host_ns)
        names = _innermost_phases(step.labels)
        marks = zip(names, step.device_ms, spans, arrivals_ns, strict=True)
        for name, ms, span, arrival_ns in marks:
            if name:
                part = self._parts.setdefault(name, PartExcess(name))
                part.add_mark(ms, span, idle_ms=max(span[1] - arrival_ns, 0.0) / 1e6)
        waits_inside = overlapping(waits, self.start_ns, self.end_ns)
        for part in self._parts.values():
            part.compare(baseline, waits_inside)

    @property
    def parts(self) -> list[PartExcess]:
        """Parts of the step, the largest host excess without a cause first."""
        parts = self._parts.values()
        return sorted(parts, key=lambda part: part.unattributed_host_ms, reverse=True)

    def attribute_spans(self, spans: Iterable[Span]) -> None:
        for span in spans:
            for part in self._parts.values():
                part.attribute_span(span)

    def attribute_host_excess(
        self,
        kind: CauseKind,
        detail: str,
        includes: Callable[[str], bool] = bool,
        max_ms: float = inf,
    ) -> None:
        """Attribute at most `max_ms` of the host excess of the parts that `includes` selects."""
        for part in self.parts:
            if includes(part.name):
                max_ms -= part.attribute_host(kind, detail, max_ms)

    def result(self) -> SlowStep:
        """Return the slow step with the causes that were attributed."""
        times = self.step.times()
        host_ms: _Causes = defaultdict(float)
        exposed_ms: _Causes = defaultdict(float)
        phases_ms: dict[str, _Causes] = defaultdict(lambda: defaultdict(float))
        for part in self._parts.values():
            phase = CALLBACKS if of_one_callback(part.name) else part.name
            for cause, ms in part.exposed_ms().items():
                phases_ms[phase][cause] += ms
                if cause != _NO_CAUSE:
                    exposed_ms[cause] += ms
            for cause, ms in part.host_causes.items():
                host_ms[cause] += ms
        # If other parts are shorter than in the baseline, the parts exceed it by more than the step
        # does: limit the causes to the excess of the step.
        all_ms = sum(exposed_ms.values())
        share = min(self.excess_ms / all_ms, 1.0) if all_ms else 0.0
        causes = [
            Cause(kind, host_ms[kind, detail], ms * share, detail)
            for (kind, detail), ms in exposed_ms.items()
            if ms * share >= _MIN_CAUSE_SHARE * self.excess_ms
        ]
        causes.sort(key=lambda cause: cause.exposed_ms, reverse=True)
        explained_ms = sum(cause.exposed_ms for cause in causes)
        unexplained_ms = max(self.excess_ms - explained_ms, 0.0)
        excess_ms = {phase: sum(causes_ms.values()) for phase, causes_ms in phases_ms.items()}
        longest = max(excess_ms, key=excess_ms.__getitem__)
        all_excess_ms = sum(excess_ms.values()) or inf
        return SlowStep(
            step=times.step,
            step_ms=self.step_ms,
            baseline_ms=self.baseline.step_ms,
            phase=longest,
            causes=tuple(causes),
            unexplained_ms=unexplained_ms,
            phase_excess_ms=excess_ms[longest] * self.excess_ms / all_excess_ms,
            lost_ms=_lost_ms(phases_ms, causes, share, unexplained_ms),
            phase_ms=_top_level(times.phase_ms),
            host_ms=_top_level(times.host_ms),
        )


Detector = Callable[[ExcessAttribution], None]
"""Function that attributes the excess of a slow step to the causes of one kind."""


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
    attribution = ExcessAttribution(step, step_ms, baseline, waits)
    try:
        for detect in detectors:
            detect(attribution)
    except Exception as error:
        warn_once(NOT_EXPLAINED, error)
        attribution = ExcessAttribution(step, step_ms, baseline, waits)
    return attribution.result()


def _top_level(times_ms: Mapping[str, float]) -> dict[str, float]:
    return {name: times_ms[name] for name in in_order([*times_ms]) if "/" not in name}


def _lost_ms(
    phases_ms: Mapping[str, _Causes], causes: Sequence[Cause], share: float, unexplained_ms: float
) -> dict[str, dict[str, float]]:
    """Return the excess by phase and cause, without causes whose time has a phase (`HAVE_PHASES`).

    Args:
        phases_ms: Device excess of each phase by cause, before `share` is applied.
        causes: Causes of the step.
        share: Factor that limits the excess of all phases to the excess of the step.
        unexplained_ms: Excess of the step without a cause.
    """
    names = {(cause.kind, cause.detail): cause.name for cause in causes}
    lost_ms: dict[str, dict[str, float]] = {}
    left_ms = {}
    for phase, causes_ms in phases_ms.items():
        left_ms[phase] = sum(ms for cause, ms in causes_ms.items() if cause not in names)
        for cause, ms in causes_ms.items():
            kind, _ = cause
            if cause in names and kind not in HAVE_PHASES:
                lost = lost_ms.setdefault(phase, {})
                lost[names[cause]] = lost.get(names[cause], 0.0) + ms * share
    # Divide the unexplained excess among the phases, in proportion to their time without a cause.
    scale = unexplained_ms / (sum(left_ms.values()) or inf)
    for phase, ms in left_ms.items():
        if ms * scale and phase.partition("/")[0] not in BETWEEN_BATCHES and not is_wait(phase):
            lost_ms.setdefault(phase, {})[UNEXPLAINED] = ms * scale
    return lost_ms
