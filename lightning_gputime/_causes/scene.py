"""A slow step as witnesses find it: where it grew, and what of that is explained."""

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from lightning_gputime._causes.usual import Usual, UsualPassed, leaves
from lightning_gputime._phases import of_one_callback
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.slow import Cause, Kind

# A cause of less than this part of the excess is not told: it stays unexplained.
_LEAST = 0.05


class Span(NamedTuple):
    """Something that held up the host.

    Attributes:
        begin_ns: The host's time when it began (in nanoseconds).
        end_ns: When it ended (in nanoseconds).
        detail: What it was.
    """

    begin_ns: int
    end_ns: int
    detail: str


class Part:
    """A part of a slow step.

    Attributes:
        name: The smallest phase that it is.
        growth_ms: How much longer than usual it took the device (in milliseconds).
        idle_ms: How much of that the device can have waited for the host (in milliseconds).
        open_ms: How much longer than usual it took the host, less what is explained (in
            milliseconds); 0 if that may be chance.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.growth_ms = self.idle_ms = self.open_ms = 0.0
        self.took_ms = self.host_ms = self.usual_host_ms = 0.0
        self.intervals: list[tuple[int, int]] = []
        """When the host was in it (in nanoseconds)."""
        self.free: list[tuple[int, int]] = []
        """What of its host time no span has yet (in nanoseconds)."""
        self.host_claims: dict[tuple[Kind, str], float] = {}
        self.device_claims: dict[tuple[Kind, str], float] = {}


class Scene:
    """A slow step, of which witnesses claim parts, one after the other.

    A host delay reaches the device within the same pair of marks, if at all: the device ran ahead
    of it by what was queued. So what of it has reached is the growth of the device's time there, at
    most the delay, and none where the device had not even come there when the host went on, as far
    as that is known: the two clocks meet where the host waits for the end of the step. Several
    causes share it. No time is claimed twice.

    Args:
        step: The step as it was read.
        step_ms: How long it took (in milliseconds).
        usual: What is usual around it.
        waits: The timer's own waits, which explain nothing.
    """

    def __init__(
        self,
        step: StepRecord,
        step_ms: float,
        usual: Usual | UsualPassed,
        waits: Iterable[tuple[int, int]],
    ) -> None:
        self.begin_ns, self.end_ns = step.host_ns[0], step.host_ns[-1]
        """The host's time at its begin and at its end (in nanoseconds)."""
        self.step_ms = step_ms
        self.excess_ms = step_ms - usual.step_ms
        """How much longer than usual it took (in milliseconds)."""
        self._parts: dict[str, Part] = {}
        self._sort_out(step)
        for part in self._parts.values():
            known = usual.part(part.name)
            part.growth_ms = max(part.took_ms - known.device_ms, 0.0)
            part.idle_ms = min(part.idle_ms, part.growth_ms)
            part.usual_host_ms = known.host_ms
            waited_ms = sum(_cut_out(part, *wait) for wait in waits)
            host_ms = part.host_ms - known.host_ms - max(waited_ms - usual.wait_ms, 0.0)
            part.open_ms = host_ms if host_ms > known.host_noise_ms else 0.0

    def _sort_out(self, step: StepRecord) -> None:
        # Without a wait of the host's it was hardly ahead.
        met_ns = step.finished_ns - sum(step.device_ms) * 1e6 if step.finished_ns else -inf
        arrives_ns = accumulate((ms * 1e6 for ms in step.device_ms[:-1]), initial=met_ns)
        intervals = pairwise(step.host_ns)
        marks = zip(leaves(step.labels), step.device_ms, intervals, arrives_ns, strict=True)
        for name, ms, interval, arrived_ns in marks:
            if name:
                part = self._parts.get(name)
                if part is None:
                    part = self._parts[name] = Part(name)
                part.took_ms += ms
                part.idle_ms += max(interval[1] - arrived_ns, 0.0) / 1e6
                part.host_ms += (interval[1] - interval[0]) / 1e6
                part.intervals.append(interval)
                part.free.append(interval)

    @property
    def parts(self) -> list[Part]:
        """Its parts; first the one in which the host has most that is not explained."""
        return sorted(self._parts.values(), key=lambda part: part.open_ms, reverse=True)

    @property
    def phase(self) -> str:
        """The part that grew most on the device."""
        name = max(self._parts.values(), key=lambda part: part.growth_ms).name
        one = of_one_callback(name)
        return name.removesuffix(f"/{one}") if one else name

    @property
    def unexplained_ms(self) -> float:
        """What of its excess is not explained (in milliseconds)."""
        return max(self.excess_ms - sum(cause.reached_ms for cause in self.causes()), 0.0)

    @property
    def is_stretched(self) -> bool:
        """Whether all parts that take long took the device longer, by about the same factor."""
        factors = [
            part.took_ms / (part.took_ms - part.growth_ms)
            for part in self._parts.values()
            if part.took_ms >= 0.05 * self.step_ms and part.took_ms > part.growth_ms
        ]
        return len(factors) > 2 and min(factors) > 1.05 and max(factors) < 1.2 * min(factors)

    def claim_spans(self, kind: Kind, spans: Iterable[Span]) -> None:
        """Says what held up the host, and when."""
        for span in spans:
            for part in self._parts.values():
                ms = _cut_out(part, span.begin_ns, span.end_ns)
                if ms:
                    _claim(part.host_claims, kind, span.detail, ms)
                    part.open_ms = max(part.open_ms - ms, 0.0)

    def claim_growth(
        self, kind: Kind, detail: str, most_ms: float, where: Callable[[str], bool]
    ) -> float:
        """Says that something held up the host in some parts, for so long; when is not known.

        Args:
            kind: What it was.
            detail: More on that.
            most_ms: For how long (in milliseconds). No more than the growth of these parts that is
                not explained.
            where: Tells of the name of a part whether it is one of them.

        Returns:
            How much was claimed (in milliseconds).
        """
        left_ms = most_ms
        for part in self.parts:
            ms = min(part.open_ms, left_ms)
            if ms > 0.0 and where(part.name):
                _claim(part.host_claims, kind, detail, ms)
                part.open_ms -= ms
                left_ms -= ms
        return most_ms - left_ms

    def grown_since(self, name: str, begins_ns: Iterable[int]) -> float:
        """Returns how much longer than usual the host took for what came last in a part.

        Args:
            name: The part.
            begins_ns: When that began, once or more often (in nanoseconds).

        Returns:
            The time, at least 0 (in milliseconds): what began there held up no more than that.
        """
        part = self._parts.get(name)
        if part is None:
            return 0.0
        took_ns = sum(
            end - begin
            for begin in begins_ns
            for start, end in part.intervals
            if start <= begin < end
        )
        return max(took_ns / 1e6 - part.usual_host_ms, 0.0)

    def claim_device(self, kind: Kind, part: Part, detail: str) -> None:
        """Says that the device was held up in a part, whatever the host did."""
        _claim(part.device_claims, kind, detail, part.growth_ms)

    def causes(self) -> tuple[Cause, ...]:
        """Returns what was claimed, by how much of it has reached the device."""
        host_ms: dict[tuple[Kind, str], float] = {}
        reached_ms: dict[tuple[Kind, str], float] = {}
        for part in self._parts.values():
            left_ms = part.growth_ms
            for claims, most_ms in ((part.device_claims, inf), (part.host_claims, part.idle_ms)):
                claimed_ms = sum(claims.values())
                share = min(left_ms / claimed_ms, most_ms / claimed_ms, 1.0) if claimed_ms else 0.0
                left_ms -= claimed_ms * share
                for key, ms in claims.items():
                    reached_ms[key] = reached_ms.get(key, 0.0) + ms * share
            for key, ms in part.host_claims.items():
                host_ms[key] = host_ms.get(key, 0.0) + ms
        # Some parts may have shrunk: more than the step has grown reaches nobody.
        total_ms = sum(reached_ms.values())
        share = min(self.excess_ms / total_ms, 1.0) if total_ms else 0.0
        causes = [
            Cause(kind, host_ms.get((kind, detail), 0.0), ms * share, detail)
            for (kind, detail), ms in reached_ms.items()
            if ms * share >= _LEAST * self.excess_ms
        ]
        return tuple(sorted(causes, key=lambda cause: cause.reached_ms, reverse=True))


def _claim(claims: dict[tuple[Kind, str], float], kind: Kind, detail: str, ms: float) -> None:
    claims[kind, detail] = claims.get((kind, detail), 0.0) + ms


def _cut_out(part: Part, begin_ns: int, end_ns: int) -> float:
    """Takes a span out of the free host time of a part; returns how much (in milliseconds)."""
    free, taken = [], 0
    for start, end in part.free:
        first, last = max(start, begin_ns), min(end, end_ns)
        if first >= last:
            free.append((start, end))
            continue
        taken += last - first
        free += [one for one in ((start, first), (last, end)) if one[0] < one[1]]
    part.free = free
    return taken / 1e6
