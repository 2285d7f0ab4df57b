"""What is usual around a step: how long it takes, as a whole and in each of its parts."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import inf
from operator import attrgetter, sub
from typing import Any, NamedTuple

from lightning_gputime._phases import settle
from lightning_gputime._record.steps import StepRecord

AROUND = 50
"""So many steps are the neighbourhood of the next ones."""

_FEWEST = 10
"""Of fewer steps nothing is usual."""

_EVERY = 25
"""After so many steps what is usual is taken anew."""

_MADS = 5.0
_SHARE = 0.1
_LEAST_MS = 0.5
"""A step is slow that is longer than the median by more than each of these: so many times the
median deviation, this part of the median, and so long (in milliseconds)."""


_DRIFT = 0.01
"""Where the device takes longer for a step than the host by this part, the host does not set the
pace."""


class UsualPart(NamedTuple):
    """A part of the usual step.

    Attributes:
        device_ms: Median device time (in milliseconds).
        host_ms: Median host time (in milliseconds).
        host_noise_ms: From which deviation of the host time on it is not chance (in milliseconds).
    """

    device_ms: float = 0.0
    host_ms: float = 0.0
    host_noise_ms: float = 0.0


class Usual:
    """The steps before those that are judged, and what is usual among them.

    The median and the median deviation do not heed the slow ones among them.
    """

    step_ms = 0.0
    """How long a step takes (in milliseconds)."""
    limit_ms = inf
    """From which time on it is slow (in milliseconds)."""
    host_ms = 0.0
    """How long the host takes for a step (in milliseconds)."""
    wait_ms = 0.0
    """How long the timer itself makes the host wait in a step (in milliseconds)."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=AROUND)
        self._each_ms: deque[float] = deque(maxlen=AROUND)
        self._new = 0
        self._parts: dict[str, UsualPart] | None = None
        # Whether the host sets the pace; None if that is to be found out anew.
        self._sets_pace: bool | None = None

    @property
    def is_known(self) -> bool:
        """Whether there were enough steps."""
        return self.limit_ms != inf

    @property
    def host_limit_ms(self) -> float:
        """From which time of the host on a step may turn out to be slow (in milliseconds)."""
        return self.host_ms + max(_SHARE * self.host_ms, _LEAST_MS)

    def add(self, steps: Sequence[StepRecord], each_ms: Sequence[float]) -> bool:
        """Takes the next steps; tells whether what is usual was taken anew."""
        self._steps.extend(steps)
        self._each_ms.extend(each_ms)
        self._new += len(steps)
        self._sets_pace = None
        if len(self._steps) < _FEWEST or (self._new < _EVERY and self.is_known):
            return False
        self._new = 0
        self._parts = None
        self.step_ms = median(self._each_ms)
        self.host_ms = median(self._each_host_ns()) / 1e6
        self.limit_ms = limit_of(self._each_ms, self.step_ms)
        return True

    def host_sets_pace(self) -> bool:
        """Tells whether the host takes about as long for a step as the device, and need not wait.

        Then what it takes for a step is what the step takes.
        """
        # Each 50 of the steps that are not timed ask, which are many more than those that are.
        if self._sets_pace is None:
            self._sets_pace = self.is_known and self._is_paced_by_host()
        return self._sets_pace

    def _is_paced_by_host(self) -> bool:
        wait_ms = median([one.wait_ms for one in self._steps])
        host_ms = [ns / 1e6 for ns in self._each_host_ns()]
        each_ms = [*map(sub, self._each_ms, host_ms)]
        behind_ms = median(each_ms)
        most_ms = _SHARE * self.step_ms
        chance_ms = _deviation(each_ms, behind_ms) / 2
        # Where the device falls behind, the host makes up for many steps at once where it waits.
        return (
            wait_ms <= most_ms
            and self.host_ms - self.step_ms <= most_ms
            and behind_ms <= max(_DRIFT * self.step_ms, chance_ms)
        )

    def newest_ms(self) -> tuple[float, float]:
        """Returns how long the newest step took the host, and the device (in milliseconds)."""
        return self._each_host_ns()[-1] / 1e6, self._each_ms[-1]

    def _each_host_ns(self) -> list[int]:
        return [one.host_ns[-1] - one.host_ns[0] for one in self._steps]

    def part(self, name: str) -> UsualPart:
        """Returns a part of the usual step; one that steps do not have usually takes no time."""
        if self._parts is None:
            # Only where a step was slow: most blocks of steps have none.
            self._parts = _parts_of([*self._steps])
            self.wait_ms = median([one.wait_ms for one in self._steps])
        return self._parts.get(name, UsualPart())


class UsualPassed(NamedTuple):
    """The usual step of those that are not timed: the host's time alone, in one part.

    Attributes:
        step_ms: How long it takes (in milliseconds).
        wait_ms: How long the timer makes the host wait in it (in milliseconds).
    """

    step_ms: float
    wait_ms: float = 0.0

    def part(self, name: str) -> UsualPart:
        """Returns its only part."""
        return UsualPart(self.step_ms, self.step_ms)


def limit_of(each: Iterable[float], usual: float, ms: float = 1.0) -> float:
    """Returns from which time on a step is slow.

    Args:
        each: How long each took of those around it.
        usual: The median of that.
        ms: How many units of these are a millisecond.
    """
    return usual + max(_MADS * _deviation(each, usual), _SHARE * usual, _LEAST_MS * ms)


def falls_behind(host_ms: float, device_ms: float) -> bool:
    """Tells whether one step took the device longer than the host, by more than chance."""
    return device_ms - host_ms > max(_SHARE * host_ms, _LEAST_MS)


def leaves(labels: tuple[str, ...]) -> list[str]:
    """Returns for each mark the smallest phase that its time counts under; empty if none."""
    return [names[-1] if names else "" for names in settle(labels)]


def _parts_of(steps: Sequence[StepRecord]) -> dict[str, UsualPart]:
    device_ms: dict[str, list[float]] = {}
    host_ns: dict[str, list[int]] = {}
    # By columns, as steps are much alike.
    for labels, alike in groupby(steps, attrgetter("labels")):
        _, _, of_device, of_host, *_ = zip(*alike, strict=True)
        marks_ms, marked_ns = [*zip(*of_device, strict=True)], [*zip(*of_host, strict=True)]
        names = leaves(labels)
        for name in {*names} - {""}:
            marks = [mark for mark, of_mark in enumerate(names) if of_mark == name]
            begins, ends = (_added([marked_ns[mark + i] for mark in marks]) for i in (0, 1))
            device_ms.setdefault(name, []).extend(_added([marks_ms[mark] for mark in marks]))
            host_ns.setdefault(name, []).extend(map(sub, ends, begins))
    return {name: _part(ms, host_ns[name], len(steps)) for name, ms in device_ms.items()}


def _added(columns: Sequence[Sequence[Any]]) -> Sequence[Any]:
    return columns[0] if len(columns) == 1 else [*map(sum, zip(*columns, strict=True))]


def _part(device_ms: list[float], host_ns: list[int], n: int) -> UsualPart:
    # A step without it counts with nothing.
    absent = [0] * (n - len(device_ms))
    host_ns = host_ns + absent
    usual_ns = median(host_ns)
    noise_ns = _MADS * _deviation(host_ns, usual_ns)
    return UsualPart(median([*device_ms, *absent]), usual_ns / 1e6, noise_ns / 1e6)


def median(values: Iterable[float]) -> float:
    """Returns the median of some values."""
    # Not that of `statistics`, which takes as long again: this runs every few steps.
    ordered = sorted(values)
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def _deviation(values: Iterable[float], middle: float) -> float:
    return median([abs(value - middle) for value in values])
