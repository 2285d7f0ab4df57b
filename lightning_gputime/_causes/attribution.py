"""A slow step beside its baseline: where its excess is, and what explains it."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from math import inf
from statistics import median
from typing import Any, NamedTuple

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

_SIZE = 50  # Number of steps in a baseline.
_FEWEST = 10  # Fewer steps make no baseline.
_EVERY = 25  # The baseline is taken anew after as many steps.
_MADS = 5.0
_SHARE = 0.1
# A slow step exceeds the median by more than each of these: a multiple of the median absolute
# deviation, a fraction of the median, and a time (in milliseconds).
_LEAST_MS = 0.5
# A cause of a smaller fraction of the excess is left out: it stays unexplained.
_LEAST_SHARE = 0.05

# Times by cause, and by what it was (in milliseconds).
_Causes = defaultdict[tuple[CauseKind, str], float]

_NONE: tuple[Any, str] = (None, "")

# When something that held up the host started and ended (in nanoseconds), and what it was.
Span = tuple[int, int, CauseKind, str]

# Of a part of the step: device ms, host ms, and by how much these deviate by chance.
_Medians = tuple[float, float, float]


NOT_SAID = "Why steps are slow is no longer said: %r"


class Medians(NamedTuple):
    """Medians of the steps in a baseline."""

    step_ms: float
    wait_ms: float  # How long the timer itself makes the host wait in a step.
    parts: Mapping[str, _Medians]

    def part(self, name: str) -> _Medians:
        """Return the medians of a part; a part that most steps do not have takes no time."""
        return self.parts.get(name, (0.0, 0.0, 0.0))


class Baseline:
    """The newest steps before those that are judged, and their medians.

    Median and median absolute deviation are robust to slow steps.
    """

    def __init__(self) -> None:
        self.step_ms = self.host_ms = 0.0
        self.slow_threshold_ms = inf  # A step that takes longer is slow.
        self.steps: deque[StepRecord] = deque(maxlen=_SIZE)
        self.each_ms: deque[float] = deque(maxlen=_SIZE)
        self._n_new = 0
        self._medians: Medians | None = None

    @property
    def is_known(self) -> bool:
        return self.slow_threshold_ms != inf

    def add(self, steps: Sequence[StepRecord], each_ms: Sequence[float]) -> bool:
        """Take the next steps; return whether the baseline was taken anew."""
        self.steps.extend(steps)
        self.each_ms.extend(each_ms)
        self._n_new += len(steps)
        if len(self.steps) < _FEWEST or (self._n_new < _EVERY and self.is_known):
            return False
        self._n_new = 0
        self._medians = None
        self.step_ms = median(self.each_ms)
        self.host_ms = median([step.host_ns[-1] - step.host_ns[0] for step in self.steps]) / 1e6
        # A step that takes the host longer may turn out to be slow.
        self.host_threshold_ms = self.host_ms + max(_SHARE * self.host_ms, _LEAST_MS)
        noise_ms = _MADS * _deviation(self.each_ms, self.step_ms)
        self.slow_threshold_ms = self.step_ms + max(noise_ms, _SHARE * self.step_ms, _LEAST_MS)
        return True

    def medians(self) -> Medians:
        if self._medians is None:
            # Only where a step was slow: most blocks of steps have none.
            wait_ms = median([step.wait_ms for step in self.steps])
            self._medians = Medians(self.step_ms, wait_ms, _parts_of([*self.steps]))
        return self._medians


@lru_cache(maxsize=256)
def _leaves(labels: tuple[str, ...]) -> Sequence[str]:
    """Return for each mark the smallest phase that its time counts under; empty if none."""
    return [names[-1] if names else "" for names in resolve_labels(labels)]


def _parts_of(steps: Sequence[StepRecord]) -> dict[str, _Medians]:
    """Return the medians of each part; a step without it counts with nothing."""
    indices = defaultdict[tuple[str, ...], list[int]](list)
    for i, step in enumerate(steps):
        indices[step.labels].append(i)
    rows = {name: row for row, name in enumerate(dict.fromkeys(chain(*map(_leaves, indices))))}
    device_ms = np.zeros((len(rows), len(steps)))
    host_ns = np.zeros((len(rows), len(steps)), np.int64)
    # All steps with the same marks at once: this runs in the loop.
    for labels, at in indices.items():
        of_marks_ms = np.array([steps[i].device_ms for i in at]).T
        marked_ns = np.array([steps[i].host_ns for i in at]).T
        of_marks_ns = marked_ns[1:] - marked_ns[:-1]
        columns = slice(None) if len(indices) == 1 else at
        for name, ms, ns in zip(_leaves(labels), of_marks_ms, of_marks_ns, strict=True):
            device_ms[rows[name], columns] += ms
            host_ns[rows[name], columns] += ns
    usual_ns = _medians_of(host_ns)
    noise_ns = _MADS * _medians_of(np.abs(host_ns - usual_ns[:, None]))
    usual_ms = _medians_of(device_ms)
    found = zip(
        usual_ms.tolist(), (usual_ns / 1e6).tolist(), (noise_ns / 1e6).tolist(), strict=True
    )
    return dict(zip(rows, found, strict=True))


def _medians_of(rows: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    # Not `numpy.median`, whose Python code takes longer than the sort.
    ordered, n = np.sort(rows, axis=1), rows.shape[1]
    middle: npt.NDArray[np.float64] = (ordered[:, (n - 1) // 2] + ordered[:, n // 2]) / 2
    return middle


def _deviation(values: Iterable[float], middle: float) -> float:
    return median([abs(value - middle) for value in values])


class PartExcess:
    """The excess of a part of a slow step: of its smallest phases one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device_ms = self.host_ms = self.device_excess_ms = 0.0
        # When the host was in it, less the spans that were attributed.
        self.free: list[tuple[int, int]] = []
        # How much of the excess the device may have waited for the host.
        self.idle_ms = 0.0
        # Host time beyond the baseline without a cause; 0 if it may be chance.
        self.unattributed_host_ms = 0.0
        self.host_causes: _Causes = defaultdict(float)
        self.device_causes: _Causes = defaultdict(float)

    def compare(self, baseline: Medians, waits: Sequence[tuple[int, int]]) -> None:
        """Set the excess over a baseline; the timer's own waits are none."""
        usual_device_ms, usual_host_ms, noise_ms = baseline.part(self.name)
        self.device_excess_ms = max(self.device_ms - usual_device_ms, 0.0)
        self.idle_ms = min(self.idle_ms, self.device_excess_ms)
        waited_ms = sum(self.take(*wait) for wait in waits)
        host_ms = self.host_ms - usual_host_ms - max(waited_ms - baseline.wait_ms, 0.0)
        self.unattributed_host_ms = host_ms if host_ms > noise_ms else 0.0

    def take(self, start_ns: int, end_ns: int) -> float:
        """Take a span out of the free host time; return how much it was (in milliseconds)."""
        free, taken = [], 0
        for start, end in self.free:
            first, last = max(start, start_ns), min(end, end_ns)
            if first >= last:
                free.append((start, end))
                continue
            taken += last - first
            free += [one for one in ((start, first), (last, end)) if one[0] < one[1]]
        self.free = free
        return taken / 1e6


class ExcessAttribution:
    """Attribute the excess of a slow step to causes, one detector after the other.

    A host delay reaches the device between the same two marks, or never: the device ran ahead of it
    by what was queued. So the part that reached it is the device's excess there, at most the delay.
    It is nothing where the device had not even come there when the host went on. That is known
    where the host waited for the end of the step, where the two clocks meet. Several causes share
    it. No time is attributed twice. `waits` of the host for the timer explain nothing.
    """

    def __init__(
        self, step: StepRecord, step_ms: float, baseline: Medians, waits: Sequence[tuple[int, int]]
    ) -> None:
        self.start_ns, self.end_ns = step.host_ns[0], step.host_ns[-1]
        self.step, self.step_ms, self.baseline = step, step_ms, baseline
        self.excess_ms = step_ms - baseline.step_ms
        self._parts: dict[str, PartExcess] = {}
        # Without a wait of the host's it was hardly ahead.
        met_ns = step.finished_ns - sum(step.device_ms) * 1e6 if step.finished_ns else -inf
        arrives_ns = accumulate((ms * 1e6 for ms in step.device_ms[:-1]), initial=met_ns)
        intervals = pairwise(step.host_ns)
        marks = zip(_leaves(step.labels), step.device_ms, intervals, arrives_ns, strict=True)
        for name, ms, interval, arrived_ns in marks:
            if name:
                part = self._parts.setdefault(name, PartExcess(name))
                part.device_ms += ms
                part.idle_ms += max(interval[1] - arrived_ns, 0.0) / 1e6
                part.host_ms += (interval[1] - interval[0]) / 1e6
                part.free.append(interval)
        inside = [wait for wait in waits if wait[1] > self.start_ns and wait[0] < self.end_ns]
        for part in self._parts.values():
            part.compare(baseline, inside)

    @property
    def parts(self) -> list[PartExcess]:
        parts = self._parts.values()
        return sorted(parts, key=lambda part: part.unattributed_host_ms, reverse=True)

    def attribute_spans(self, spans: Iterable[Span]) -> None:
        for start_ns, end_ns, kind, detail in spans:
            for part in self._parts.values():
                ms = part.take(start_ns, end_ns)
                if ms:
                    part.host_causes[kind, detail] += ms
                    part.unattributed_host_ms = max(part.unattributed_host_ms - ms, 0.0)

    def attribute_host_excess(
        self,
        kind: CauseKind,
        detail: str,
        is_there: Callable[[str], bool] = bool,
        most_ms: float = inf,
    ) -> None:
        """Attribute the host excess of the parts where it `is_there`, `most_ms` in all."""
        for part in self.parts:
            ms = min(part.unattributed_host_ms, most_ms)
            if ms > 0.0 and is_there(part.name):
                part.host_causes[kind, detail] += ms
                part.unattributed_host_ms -= ms
                most_ms -= ms

    def result(self) -> SlowStep:
        times = self.step.times()
        host_ms: _Causes = defaultdict(float)
        exposed_ms: _Causes = defaultdict(float)
        phases_ms: dict[str, _Causes] = defaultdict(lambda: defaultdict(float))
        for part in self._parts.values():
            phase_ms = phases_ms[CALLBACKS if of_one_callback(part.name) else part.name]
            left_ms = part.device_excess_ms
            for causes, most_ms in ((part.device_causes, inf), (part.host_causes, part.idle_ms)):
                total_ms = sum(causes.values())
                share = min(left_ms / total_ms, most_ms / total_ms, 1.0) if total_ms else 0.0
                left_ms -= total_ms * share
                for cause, ms in causes.items():
                    exposed_ms[cause] += ms * share
                    phase_ms[cause] += ms * share
            phase_ms[_NONE] += left_ms
            for cause, ms in part.host_causes.items():
                host_ms[cause] += ms
        # Other parts may be shorter than the baseline: no more than the step's excess reaches it.
        all_ms = sum(exposed_ms.values())
        share = min(self.excess_ms / all_ms, 1.0) if all_ms else 0.0
        found = [
            Cause(kind, host_ms[kind, detail], ms * share, detail)
            for (kind, detail), ms in exposed_ms.items()
            if ms * share >= _LEAST_SHARE * self.excess_ms
        ]
        found.sort(key=lambda cause: cause.exposed_ms, reverse=True)
        unexplained_ms = max(self.excess_ms - sum(one.exposed_ms for one in found), 0.0)
        grew_ms = {name: sum(causes.values()) for name, causes in phases_ms.items()}
        phase = max(grew_ms, key=grew_ms.__getitem__)
        return SlowStep(
            step=times.step,
            step_ms=self.step_ms,
            baseline_ms=self.baseline.step_ms,
            phase=phase,
            causes=tuple(found),
            unexplained_ms=unexplained_ms,
            phase_excess_ms=grew_ms[phase] * self.excess_ms / (sum(grew_ms.values()) or inf),
            lost_ms=_lost(phases_ms, found, share, unexplained_ms),
            phase_ms=_top_level(times.phase_ms),
            host_ms=_top_level(times.host_ms),
        )


Detector = Callable[[ExcessAttribution], None]
"""It attributes what it has found of the causes of slow steps."""


def explain(
    step: StepRecord,
    step_ms: float,
    baseline: Medians,
    waits: Sequence[tuple[int, int]],
    detectors: Sequence[Detector],
    warn_once: WarnOnce,
) -> SlowStep:
    """Return a slow step with its causes, from what was collected when it was judged."""
    step = unpack(step)
    attribution = ExcessAttribution(step, step_ms, baseline, waits)
    try:
        for detect in detectors:
            detect(attribution)
    except Exception as error:
        warn_once(NOT_SAID, error)
        attribution = ExcessAttribution(step, step_ms, baseline, waits)
    return attribution.result()


def _top_level(times_ms: Mapping[str, float]) -> dict[str, float]:
    return {name: times_ms[name] for name in in_order([*times_ms]) if "/" not in name}


def _lost(
    phases_ms: Mapping[str, _Causes], found: Sequence[Cause], share: float, unexplained_ms: float
) -> dict[str, dict[str, float]]:
    """Return what is not that of a phase such as `data` anyway, by phase and cause."""
    names = {(one.kind, one.detail): one.name for one in found}
    lost_ms: dict[str, dict[str, float]] = {}
    left_ms = {}
    for phase, causes in phases_ms.items():
        left_ms[phase] = sum(ms for cause, ms in causes.items() if cause not in names)
        for one in causes:
            if one in names and one[0] not in HAVE_PHASES:
                lost = lost_ms.setdefault(phase, {})
                lost[names[one]] = lost.get(names[one], 0.0) + causes[one] * share
    # What has no cause is where most has none.
    scale = unexplained_ms / (sum(left_ms.values()) or inf)
    for phase, ms in left_ms.items():
        if ms * scale and phase.partition("/")[0] not in BETWEEN_BATCHES and not is_wait(phase):
            lost_ms.setdefault(phase, {})[UNEXPLAINED] = ms * scale
    return lost_ms
