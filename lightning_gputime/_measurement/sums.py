"""Statistics of phases: sums over steps, and the rows of a table; and work per second."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import copysign, isnan, nan
from operator import attrgetter, sub
from typing import Any

from lightning_gputime._messages import percent
from lightning_gputime._phases import (
    BACKWARD,
    FORWARD,
    StepRecord,
    resolve_labels,
)

STEP = "step"
"""Key of the whole step, next to the phases."""


class Sums:
    """Sums over steps."""

    def __init__(self, steps: Iterable[StepRecord] = ()) -> None:
        self.phases = defaultdict[str, PhaseSum](PhaseSum)
        self.step = PhaseSum()
        self.each_ms: list[float] = []
        """Device time of each step; empty after a merge."""
        self.wait_ms = 0.0  # Host wait.
        self.skipped_updates = 0  # Number of steps without an update.
        self.items = 0.0  # Number of items in all steps that report it.
        self.items_ms = 0.0  # Device time of these steps.
        # Add successive steps with the same labels column by column. A loop over the steps is
        # slower, and so is NumPy, whose code is not in the CPU caches while a training loop runs.
        for labels, alike in groupby(steps, attrgetter("labels")):
            # Each field of `columns` has the values of all steps.
            columns: Any = StepRecord._make(zip(*alike, strict=True))
            n = len(columns.number)
            marks_ms = [*zip(*columns.device_ms, strict=True)]  # Device time of each step, by mark.
            # Host time of all steps, by mark: the sum over the next mark minus that over this mark.
            starts_ns = [*map(sum, zip(*columns.host_ns, strict=True))]
            marks_ns = [*map(sub, starts_ns[1:], starts_ns)]
            for name, marks in _marks_of(labels):
                if len(marks) == 1:
                    steps_ms: Sequence[float] = marks_ms[marks[0]]
                else:
                    times = map(marks_ms.__getitem__, marks)
                    # Without marks, there are no times to add.
                    steps_ms = [*map(sum, zip(*times, strict=True))] or [0.0] * n
                host_ms = sum(map(marks_ns.__getitem__, marks)) / 1e6
                phase = self.step if name is None else self.phases[name]
                phase.add(n, sum(steps_ms), host_ms, max(steps_ms))
            self.each_ms += steps_ms  # Of the whole step, which is last.
            items = sum(columns.items)
            if isnan(items):  # Some steps do not report it.
                counted = [i for i, number in enumerate(columns.items) if not isnan(number)]
                items = sum([columns.items[i] for i in counted])
                steps_ms = [steps_ms[i] for i in counted]
            self.items += items
            self.items_ms += sum(steps_ms)
            self.wait_ms += sum(columns.wait_ms)
            self.skipped_updates += sum(columns.skipped_update)

    def merge(self, other: "Sums") -> None:
        """Add the sums over other steps."""
        self.step.merge(other.step)
        for name, phase in other.phases.items():
            self.phases[name].merge(phase)
        self.wait_ms += other.wait_ms
        self.skipped_updates += other.skipped_updates
        self.items += other.items
        self.items_ms += other.items_ms

    def copy(self) -> "Sums":
        copied = Sums()
        copied.merge(self)
        return copied

    def plus(self, other: "Sums") -> "Sums":
        """Return the sums over the steps of both; if one has no steps, the other object."""
        if not other.step.n:
            return self
        if not self.step.n:
            return other
        both = self.copy()
        both.merge(other)
        return both


class PhaseSum:
    """Sums of a phase over the `n` steps in which it ran (in milliseconds)."""

    # Class attributes as initial values, because each log creates many objects: this saves calls of
    # an `__init__`.
    n: float = 0  # Fractional in estimates.
    device_ms = host_ms = max_ms = 0.0

    @property
    def mean_ms(self) -> float:
        return self.device_ms / self.n if self.n else nan

    def add(self, n: float, device_ms: float, host_ms: float, max_ms: float = 0.0) -> None:
        self.n += n
        self.device_ms += device_ms
        self.host_ms += host_ms
        self.max_ms = max(self.max_ms, max_ms)

    def merge(self, other: "PhaseSum") -> None:
        self.n += other.n
        self.device_ms += other.device_ms
        self.host_ms += other.host_ms
        self.max_ms = max(self.max_ms, other.max_ms)


@lru_cache(maxsize=256)
def _marks_of(labels: tuple[str, ...]) -> Sequence[tuple[str | None, Sequence[int]]]:
    """Return the indices of the marks of each phase that ran, and of the step (name None)."""
    resolved = resolve_labels(labels)
    names = list(dict.fromkeys(name for phases in resolved for name in phases))
    marks_of: list[tuple[str | None, Sequence[int]]] = [
        (name, [mark for mark, phases in enumerate(resolved) if name in phases]) for name in names
    ]
    return [*marks_of, (None, [mark for mark, phases in enumerate(resolved) if phases])]


@dataclass(slots=True)
class ThroughputReference:
    """Peak throughput and FLOPs per item for a `WorkSummary`. Set during the first step."""

    items_by: str = ""  # Source of the number of items.
    precision: str = ""  # Precision of the model's computation; empty if unknown.
    peak_tflops: float | None = None  # Dense peak in that precision, from the data sheet.
    note: str = ""  # Reason why a value is unknown.
    # FLOPs per item: total, forward and backward; NaN if unknown.
    flops: tuple[float, float, float] = (nan, nan, nan)

    def set_precision(self, precision: str, peak_tflops: float | None) -> None:
        self.precision, self.peak_tflops = precision, peak_tflops

    def set_note(self, note: str) -> None:
        self.note = note

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Return the known values to log, by key."""
        rates = self._rates(sums)
        rates.pop("tflops", None)
        phases = self.tflops_of_phases(sums)
        return rates | {f"{name}_tflops": tflops for name, tflops in phases.items()}

    def summary(self, sums: Sums) -> "WorkSummary":
        rates, note = self._rates(sums), self.note
        if not note and "tflops" in rates and not self.precision:
            note = "MFU is unknown, because the precision of the model could not be detected"
        return WorkSummary(
            **rates,
            items_by=self.items_by,
            precision=self.precision,
            peak_tflops=self.peak_tflops,
            note=note,
        )

    def _rates(self, sums: Sums) -> dict[str, float]:
        """Return the known rates of a `WorkSummary`, by field."""
        items_per_sec = 1e3 * sums.items / sums.items_ms if sums.items_ms else nan
        tflops = items_per_sec * self.flops[0] / 1e12
        mfu = tflops / (self.peak_tflops or nan)
        rates = {"items_per_sec": items_per_sec, "tflops": tflops, "mfu": mfu}
        return {name: rate for name, rate in rates.items() if not isnan(rate)}

    def tflops_of_phases(self, sums: Sums) -> dict[str, float]:
        """Return the TFLOP/s of forward and backward; empty if their FLOPs are unknown."""
        _, forward_flops, backward_flops = self.flops
        if isnan(forward_flops) or not sums.items_ms:
            return {}
        # Assume the same item rate in steps whose number of items is unknown.
        items = sums.items / sums.items_ms * sums.step.device_ms
        flops = {FORWARD: items * forward_flops, BACKWARD: items * backward_flops}
        ms = {name: phase.device_ms for name, phase in sums.phases.items() if phase.device_ms}
        return {name: flops[name] / ms[name] / 1e9 for name in flops if name in ms}


@dataclass(frozen=True, slots=True)
class WorkSummary:
    """Work per second; None if unknown."""

    items_per_sec: float | None = None  # Per second of step time, without pauses.
    items_by: str = ""  # Source of the number of items.
    tflops: float | None = None  # FLOPs of the model per second.
    mfu: float | None = None  # `tflops` as a fraction of `peak_tflops`, from 0 to 1.
    precision: str = ""  # Precision of the model's computation.
    peak_tflops: float | None = None  # Dense peak in that precision, from the data sheet.
    note: str = ""  # Reason why a value is unknown.

    @property
    def sentences(self) -> Iterator[str]:
        """Sentences on items and FLOPs."""
        n, mfu = self.items_per_sec, self.mfu
        if n is not None:
            amount = f"{n:,.0f}" if n >= 100 else f"{n:.3g}"
            yield f"{amount} items per second, counted by {self.items_by}"
        if mfu is not None:
            wrong = ", which is impossible: check flops and the precision" if mfu > 1 else ""
            peak = f"{self.peak_tflops:.4g} dense {self.precision} TFLOP/s"
            yield f"MFU {percent(mfu)} (of {peak}){wrong}"
        elif self.tflops is not None:
            yield f"{self.tflops:.3g} TFLOP/s of the model's work"
        yield self.note


@dataclass(frozen=True, slots=True)
class PhaseStats:
    """Statistics of one phase over the steps in which it ran.

    Attributes:
        n: Number of timed steps in which the phase ran.
        mean_ms: Mean device time per step (in milliseconds).
        p50_ms: Median, over the steps in the history (in milliseconds).
        p95_ms: 95th percentile, over the steps in the history (in milliseconds).
        max_ms: Maximum (in milliseconds).
        share: Fraction of the device time of all steps, from 0 to 1.
        host_mean_ms: Mean host time per step between the same marks (in milliseconds).
        tflops: FLOPs per second, including recomputation (in TFLOP/s); None if unknown.
        error_ms: Half the width of the 95 % interval of `mean_ms` (in milliseconds); 0.0 if every
            step was timed.
        share_error: Half the width of the 95 % interval of `share`, from 0 to 1.
        p5_ms: 5th percentile, over the steps in the history (in milliseconds).
        frequency: Fraction of all steps in which the phase ran, from 0 to 1.
    """

    n: int
    mean_ms: float = nan
    p50_ms: float = nan
    p95_ms: float = nan
    max_ms: float = nan
    share: float = nan
    host_mean_ms: float = nan
    tflops: float | None = None
    error_ms: float = 0.0
    share_error: float = 0.0
    p5_ms: float = nan
    frequency: float = 1.0


def is_uneven(row: PhaseStats) -> bool:
    """Return True if a minority of the steps takes most of a phase's time."""
    return row.p50_ms < 0.5 * row.mean_ms


def is_rare(row: PhaseStats) -> bool:
    """Return True if a phase is uneven, and at most 5 % of the steps take longer than its mean."""
    return is_uneven(row) and row.p95_ms < row.mean_ms


def largest_part(of_phases: Mapping[str, float], parent: str = "", sign: float = 1.0) -> str:
    """Return the phase with the most time, or its sub-phase with more than half of that time.

    With a `parent`, return that phase or one of its sub-phases. Without, return an empty string if
    no time is positive. With a negative `sign`, search for the largest decrease instead.
    """
    signed_ms = {name: copysign(1.0, sign) * ms for name, ms in of_phases.items()}
    found = parent
    while True:  # From each phase to the largest of its sub-phases.
        min_ms = 0.5 * signed_ms.get(found, 0.0)
        inside = [name for name in signed_ms if name.rpartition("/")[0] == found]
        large = [name for name in inside if signed_ms[name] > min_ms]
        if not large:
            return found
        found = max(large, key=signed_ms.__getitem__)
