"""The baseline of the next steps: how long a step takes, as a whole and in each of its parts."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import inf
from operator import attrgetter, sub
from typing import Any, NamedTuple

from lightning_gputime._phases import settle
from lightning_gputime._record.steps import StepRecord

_SIZE = 50
"""Number of steps in a baseline."""

_FEWEST = 10
"""Fewer steps make no baseline."""

_EVERY = 25
"""The baseline is taken anew after as many steps."""

_MADS = 5.0
_SHARE = 0.1
_LEAST_MS = 0.5
"""A slow step exceeds the median by more than each of these: a multiple of the median absolute
deviation, a fraction of the median, and a time (in milliseconds)."""


class PartBaseline(NamedTuple):
    """The medians of a part of the step; a host time that deviates by more is not chance."""

    device_ms: float = 0.0
    host_ms: float = 0.0
    host_noise_ms: float = 0.0


class Baseline:
    """The newest steps before those that are judged, and their medians.

    Median and median absolute deviation are robust to slow steps.
    """

    step_ms = host_ms = 0.0
    """How long a step takes, and how long the host takes for it (in milliseconds)."""
    slow_threshold_ms = inf
    """A step that takes longer is slow (in milliseconds)."""
    wait_ms = 0.0
    """How long the timer itself makes the host wait in a step (in milliseconds)."""

    def __init__(self) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=_SIZE)
        self.each_ms: deque[float] = deque(maxlen=_SIZE)
        self._n_new = 0
        self._parts: dict[str, PartBaseline] | None = None

    @property
    def is_known(self) -> bool:
        """Whether there were enough steps."""
        return self.slow_threshold_ms != inf

    @property
    def host_threshold_ms(self) -> float:
        """A step that takes the host longer may turn out to be slow (in milliseconds)."""
        return self.host_ms + max(_SHARE * self.host_ms, _LEAST_MS)

    @property
    def each_host_ns(self) -> list[tuple[int, int]]:
        """The host time at the start and at the end of each step (in nanoseconds)."""
        return [(step.host_ns[0], step.host_ns[-1]) for step in self.steps]

    def add(self, steps: Sequence[StepRecord], each_ms: Sequence[float]) -> bool:
        """Take the next steps; return whether the baseline was taken anew."""
        self.steps.extend(steps)
        self.each_ms.extend(each_ms)
        self._n_new += len(steps)
        if len(self.steps) < _FEWEST or (self._n_new < _EVERY and self.is_known):
            return False
        self._n_new = 0
        self._parts = None
        self.step_ms = median(self.each_ms)
        self.host_ms = median([end - start for start, end in self.each_host_ns]) / 1e6
        noise_ms = _MADS * _deviation(self.each_ms, self.step_ms)
        self.slow_threshold_ms = self.step_ms + max(noise_ms, _SHARE * self.step_ms, _LEAST_MS)
        return True

    def part(self, name: str) -> PartBaseline:
        """Return the baseline of a part; one that most steps do not have takes no time."""
        if self._parts is None:
            # Only where a step was slow: most blocks of steps have none.
            self._parts = _parts_of([*self.steps])
            self.wait_ms = median([step.wait_ms for step in self.steps])
        return self._parts.get(name, PartBaseline())


def leaves(labels: tuple[str, ...]) -> list[str]:
    """Return for each mark the smallest phase that its time counts under; empty if none."""
    return [names[-1] if names else "" for names in settle(labels)]


def _parts_of(steps: Sequence[StepRecord]) -> dict[str, PartBaseline]:
    device_ms: dict[str, list[float]] = {}
    host_ns: dict[str, list[int]] = {}
    # By columns, as steps are much alike.
    for labels, alike in groupby(steps, attrgetter("labels")):
        _, _, of_device, of_host, *_ = zip(*alike, strict=True)
        marks_ms, marked_ns = [*zip(*of_device, strict=True)], [*zip(*of_host, strict=True)]
        names = leaves(labels)
        for name in {*names} - {""}:
            marks = [mark for mark, of_mark in enumerate(names) if of_mark == name]
            starts, ends = (_added([marked_ns[mark + i] for mark in marks]) for i in (0, 1))
            device_ms.setdefault(name, []).extend(_added([marks_ms[mark] for mark in marks]))
            host_ns.setdefault(name, []).extend(map(sub, ends, starts))
    return {name: _part(ms, host_ns[name], len(steps)) for name, ms in device_ms.items()}


def _added(columns: Sequence[Sequence[Any]]) -> Sequence[Any]:
    return columns[0] if len(columns) == 1 else [*map(sum, zip(*columns, strict=True))]


def _part(device_ms: list[float], host_ns: list[int], n: int) -> PartBaseline:
    # A step without it counts with nothing.
    absent = [0] * (n - len(device_ms))
    host_ns = host_ns + absent
    middle_ns = median(host_ns)
    noise_ns = _MADS * _deviation(host_ns, middle_ns)
    return PartBaseline(median([*device_ms, *absent]), middle_ns / 1e6, noise_ns / 1e6)


def median(values: Iterable[float]) -> float:
    # Not that of `statistics`, which takes twice as long: this runs every few steps.
    ordered = sorted(values)
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def _deviation(values: Iterable[float], middle: float) -> float:
    return median([abs(value - middle) for value in values])
