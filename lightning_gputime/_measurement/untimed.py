"""The steps between the timed ones: their durations are known, their phases are estimated."""

import math
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_gputime._measurement.ranks import STEP
from lightning_gputime._measurement.sums import Sums
from lightning_gputime._phases import StepRecord

# A step is long from this many medians on. Each further stratum begins at twice the duration.
LONG, _GROWTH, _MAX_STRATUM = 1.5, 2.0, 12
_RECENT, _RECENT_TIMED = 500, 50  # Medians are those of this many newest steps.
_MAX_TIMING_NS = 0.4e6  # Timing adds at most this to a step.
_MAX_BLOCK = 5  # Timed steps in a row of one stratum, up to this many, are one block.
_REMEMBERED = 8  # Newest long steps of a stratum, by which the next one is predicted.
# Quantiles of Student's t for a 95 % interval, from 1 degree of freedom on.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
_PACED = 0.1  # The device sets the pace where the host waits for this fraction of the time.
_BINS_PER_FACTOR_E = 50  # Bins of the histogram of durations are 2 % wide.


_NOTHING = Sums()


class Estimate(NamedTuple):
    """Sums over the steps that were not timed, estimated from those that were.

    Attributes:
        sums: The sums of the steps that timed ones represent.
        errors_ms: Half the width of the 95 % interval of the device time of each phase, and of
            "step" (in milliseconds).
        unsampled_steps: Number of long steps that no timed step represents.
        unsampled_ms: The duration of those (in milliseconds).
    """

    sums: Sums = _NOTHING
    errors_ms: Mapping[str, float] = MappingProxyType({})
    unsampled_steps: int = 0
    unsampled_ms: float = 0.0


class Composition(NamedTuple):
    """How a block of timed steps divides into phases.

    Attributes:
        n: Number of its steps.
        ms: Their device time (in milliseconds).
        device: The fraction of `ms` of each phase.
        host: Host time of each phase, as a fraction of `ms`.
        ran: In which fraction of the steps each phase ran.
        items: Items per millisecond; NaN where they are not known.
    """

    n: int
    ms: float
    device: Mapping[str, float]
    host: Mapping[str, float]
    ran: Mapping[str, float]
    items: float

    def differences(self, other: "Composition") -> Iterator[tuple[str, float, float]]:
        """Yield by how much each phase, and the step, differ: as a fraction, and in ms per step."""
        per_step, of_other = self.ms / self.n, other.ms / other.n
        for name in {*self.device, *other.device}:
            here, there = self.device.get(name, 0.0), other.device.get(name, 0.0)
            yield name, here - there, here * per_step - there * of_other
        yield STEP, 0.0, per_step - of_other

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> "Composition":
        sums = Sums(steps)
        ms = sums.step.device_ms or math.nan
        return cls(
            n=len(steps),
            ms=ms,
            device={name: phase.device_ms / ms for name, phase in sums.phases.items()},
            host={name: phase.host_ms / ms for name, phase in sums.phases.items()},
            ran={name: phase.n / len(steps) for name, phase in sums.phases.items()},
            items=sums.items / ms if sums.items_ms else math.nan,
        )


class _Gap(NamedTuple):
    """Untimed steps of a stratum: `n` that took `ms`, and `uncertain` ones of unknown duration."""

    n: int = 0
    ms: float = 0.0
    uncertain: int = 0

    def plus(self, other: "_Gap") -> "_Gap":
        return _Gap(self.n + other.n, self.ms + other.ms, self.uncertain + other.uncertain)

    def minus(self, other: "_Gap") -> "_Gap":
        return _Gap(self.n - other.n, self.ms - other.ms, self.uncertain - other.uncertain)

    def represented_by(self, block: Composition | None) -> Estimate:
        if block is None:
            return Estimate(Sums(), {}, self.n + self.uncertain, self.ms)
        return Estimate(_extend(block, self), {})


class UntimedSteps:
    """Know how long every step took, and estimate how the untimed ones divide into phases.

    The host's clock is read at the end of every step, timed or not. It splits all steps into
    strata: ordinary steps, and long ones by their duration relative to the median of the newest
    steps. So the total time of each stratum is known exactly. A block of timed steps says how its
    stratum divides into phases, for the untimed steps since the block before it. A stratum without
    a timed step is reported as not sampled.

    Where the device sets the pace, the host runs ahead and then waits for several steps at once:
    how long a single step takes the host says nothing. There each untimed step counts as the timed
    ones of the next block.

    This is post-stratification (Holt and Smith 1979, https://doi.org/10.2307/2344652). The variance
    within a stratum is that of successive differences between its blocks.

    Args:
        warmup_steps: Number of first steps that count nowhere.
        history_size: Number of newest timed steps that have `weights`.
    """

    def __init__(self, warmup_steps: int = 0, history_size: int = 0) -> None:
        self._warmup_steps = warmup_steps
        # The strata of the newest timed steps. Of each stratum: all steps, and the timed ones.
        self._strata_of_timed = deque[int](maxlen=history_size)
        self._steps = np.zeros((2, _MAX_STRATUM + 1))
        self._ns = np.zeros((2, _MAX_STRATUM + 1))
        self.since_ns = 0
        """End of the last step, as the time of all steps until then (in nanoseconds)."""
        self._durations_ns = array("q")  # Of the newest steps, not yet settled; -1: left out.
        self._settled = 0  # The index of the first of these.
        self._recent = deque[float](maxlen=_RECENT)  # Durations of untimed steps,
        self._recent_timed = deque[float](maxlen=_RECENT_TIMED)  # and of timed ones.
        self._strata = [_Stratum() for _ in range(_MAX_STRATUM + 1)]
        self._counts = defaultdict[int, int](int)  # Histogram of all durations.
        self._max_ns = 0
        self._waits = False  # True while the host waits for the device: it sets the pace.
        self._has_untimed = False
        self._block: tuple[int, list[StepRecord]] = (0, [])

    # At the end of each step: these cost each step time.

    # `now_ns` is the time of all steps so far, without pauses and evaluations.

    def restart(self, now_ns: int) -> None:
        """Start the next step now: the time since the last one belongs to no step."""
        self.since_ns = now_ns

    def end_step(self, now_ns: int) -> int:
        """End a step. Return its index."""
        self._durations_ns.append(now_ns - self.since_ns)
        self.since_ns = now_ns
        return self._settled + len(self._durations_ns) - 1

    def leave_out(self, now_ns: int) -> None:
        """End a step that counts nowhere, such as one that was probed."""
        self._durations_ns.append(-1)
        self.since_ns = now_ns

    @property
    def unsettled(self) -> int:
        """The number of steps that have ended since the last settled one."""
        return len(self._durations_ns)

    # Where steps are read

    def settle(self, timed: Sequence[StepRecord], until: int, *, warmup: int = 0) -> None:
        """Take the timed steps that were read; all others up to index `until` are untimed.

        Args:
            timed: Records of steps, in order.
            until: The index after the last step that is settled now.
            warmup: How many of the first records belong to the warm-up, and represent no others.
        """
        n = min(max(until - self._settled, 0), len(self._durations_ns))
        if not n:
            return
        first, self._settled = self._settled, self._settled + n
        took_ns = np.array(self._durations_ns[:n], dtype=float)
        del self._durations_ns[:n]
        at = [step.step_index - first for step in timed if first <= step.step_index < first + n]
        is_timed = np.zeros(n, bool)
        is_timed[at] = True
        is_known = took_ns >= 0
        is_known[: max(self._warmup_steps - first, 0)] = False
        took_ns[~is_known] = -1
        if timed:
            waited_ms = sum(step.wait_ms for step in timed)
            self._waits = waited_ms >= _PACED * sum(sum(step.device_ms) for step in timed)
        self._recent.extend(took_ns[is_known & ~is_timed].tolist())
        self._recent_timed.extend(took_ns[is_known & is_timed].tolist())
        stratum_of = self._strata_of(took_ns, is_timed)
        if self._waits:
            stratum_of[:] = 0
        self._strata_of_timed.extend(stratum_of[is_timed].tolist())
        for i, which in enumerate((is_known, is_known & is_timed)):
            of_step, strata = stratum_of[which], _MAX_STRATUM + 1
            self._steps[i] += np.bincount(of_step, minlength=strata)
            self._ns[i] += np.bincount(of_step, weights=took_ns[which], minlength=strata)
        self._count(took_ns[is_known])
        for k in np.unique(stratum_of[is_known & (stratum_of > 0)]).tolist():
            found = np.flatnonzero(is_known & (stratum_of == k))
            self._strata[k].newest.extend((first + found).tolist())
        records = {step.step_index - first: step for step in timed[warmup:]}
        # In the order of the steps, as each block stands for the untimed steps before it.
        edges = [*at, n]
        start = 0
        for place in edges:
            if place > start:
                self._add_untimed(took_ns[start:place], stratum_of[start:place])
            if place in records:
                self._add_timed(int(stratum_of[place]), records[place])
            start = place + 1
        self._end_block()

    def _strata_of(
        self, took_ns: npt.NDArray[np.float64], is_timed: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.int64]:
        """Return the stratum of each step: 0 for an ordinary one."""
        timed, untimed = [*self._recent_timed], [*self._recent]
        median_ns = float(np.median(untimed or timed or [1.0]))
        # Timing makes a step longer, and must not make it a long one. Half of the timed steps may
        # really be long: the first quartile is that of ordinary ones.
        added_ns = np.quantile(timed, 0.25) - median_ns if timed and untimed else 0.0
        own_ns = took_ns - is_timed * min(max(added_ns, 0.0), _MAX_TIMING_NS)
        ratio = np.maximum(own_ns, 1.0) / (LONG * max(median_ns, 1.0))
        levels = np.floor(np.log(ratio) / math.log(_GROWTH)).astype(np.int64) + 1
        return np.clip(levels, 0, _MAX_STRATUM)

    def _count(self, took_ns: npt.NDArray[np.float64]) -> None:
        bins = np.floor(np.log(np.maximum(took_ns, 1.0)) * _BINS_PER_FACTOR_E).astype(int)
        for place, n in zip(*np.unique(bins, return_counts=True), strict=True):
            self._counts[int(place)] += int(n)
        if len(took_ns):
            self._max_ns = max(self._max_ns, int(took_ns.max()))

    def _add_untimed(self, took_ns: npt.NDArray[np.float64], strata: npt.NDArray[np.int64]) -> None:
        self._end_block()
        is_known = took_ns >= 0
        if not is_known.any():
            return
        self._has_untimed = True
        n = np.bincount(strata[is_known])
        ns = np.bincount(strata[is_known], weights=took_ns[is_known])
        for k in np.flatnonzero(n).tolist():
            self._strata[k].add_untimed(int(n[k]), math.nan if self._waits else float(ns[k]) / 1e6)

    def _add_timed(self, stratum: int, step: StepRecord) -> None:
        k, steps = self._block
        if steps and (k != stratum or len(steps) >= _MAX_BLOCK):
            self._end_block()
            steps = []
        self._block = stratum, [*steps, step]

    def _end_block(self) -> None:
        stratum, steps = self._block
        if steps:
            self._block = 0, []
            block = Composition.of(steps)
            if self._has_untimed:
                self._strata[stratum].add_block(block)
            elif not stratum:
                # The first steps are all timed, and represent only themselves.
                self._strata[0].replace_last(block)

    # What is known

    def estimate(self) -> Estimate:
        """Return sums over all untimed steps, with their errors. It changes nothing."""
        strata = enumerate(self._strata)
        return _combine([stratum.estimate(self._composition(k)) for k, stratum in strata])

    def estimate_since(self, totals: Sequence[_Gap]) -> Estimate:
        """Return sums over the untimed steps that were settled since `totals` were taken."""
        if totals == self.totals:
            return Estimate()
        found = []
        for k, (stratum, before) in enumerate(zip(self._strata, totals, strict=True)):
            if stratum.total is not before:
                gap = stratum.total.minus(before)
                found.append(gap.represented_by(self._composition(k)))
        return _combine(found)

    @property
    def totals(self) -> list[_Gap]:
        """The untimed steps of each stratum."""
        return [stratum.total for stratum in self._strata]

    def _composition(self, k: int) -> Composition | None:
        """Return the newest composition of a stratum, or that of one whose steps are like it."""
        strata = self._strata
        # The ordinary steps are no neighbours of long ones.
        if strata[k].last is not None or k == 0:
            return strata[k].last
        mean_ns = self._ns[0] / np.maximum(self._steps[0], 1)
        for other in (k + 1, k - 1):
            if 0 < other < len(strata) and strata[other].last is not None:
                ratio = mean_ns[other] / max(mean_ns[k], 1.0)
                if 1 / LONG < ratio < LONG:
                    return strata[other].last
        return None

    @property
    def n(self) -> int:
        """The number of untimed steps that are settled, without the warm-up."""
        every, timed = self._steps.sum(axis=1)
        return int(every - timed)

    def weights(self, n: int) -> npt.NDArray[np.float64]:
        """Return how many steps each of the newest `n` timed ones stands for."""
        every, timed = self._steps
        per_stratum = every / np.maximum(timed, 1.0)
        return per_stratum[[*self._strata_of_timed][-n:]] if n else np.zeros(0)

    @property
    def slow_scale(self) -> float:
        """What long steps cost of the time of all steps, relative to that of the timed ones.

        Blocks are moved onto long steps, so timed steps are long more often than others.
        """
        shares = []
        for n, ns in zip(self._steps, self._ns, strict=True):
            excess_ns = (ns - n * ns[0] / max(n[0], 1))[1:].sum()
            shares.append(excess_ns / max(ns.sum(), 1.0))
        return float(min(shares[0] / shares[1], 1.0)) if shares[1] > 0 else 1.0

    def percentiles_ms(self, *quantiles: float) -> list[float]:
        """Return percentiles of the durations of all steps, to 1 % (in milliseconds)."""
        bins = sorted(self._counts)
        ends = np.cumsum([self._counts[place] for place in bins])
        if not len(ends):
            return [math.nan] * len(quantiles)
        places = np.searchsorted(ends, np.array(quantiles) / 100 * ends[-1])
        places = np.minimum(places, len(bins) - 1)
        return [math.exp((bins[i] + 0.5) / _BINS_PER_FACTOR_E) / 1e6 for i in places.tolist()]

    @property
    def knows_durations(self) -> bool:
        """Whether the host knows how long each step took, as the device never set the pace."""
        return not any(stratum.total.uncertain for stratum in self._strata)

    @property
    def max_ms(self) -> float:
        """The longest of all steps (in milliseconds)."""
        return self._max_ns / 1e6

    def next_long(self) -> tuple[int, int] | None:
        """Return the index of a recent long step and the distance to expect to the next one.

        Of several strata it is the one of which fewest blocks were timed for the time it takes;
        None where no long step has recurred.
        """
        found = [one for one in self._strata[1:] if len(one.newest) >= 2]
        if not found:
            return None
        stratum = max(found, key=lambda one: one.total.ms / (1 + one.blocks))
        distance = int(np.median(np.diff(stratum.newest)))
        return stratum.newest[-1], max(distance, 1)


class _Stratum:
    """The untimed steps of one stratum, and what its blocks of timed steps say of them."""

    def __init__(self) -> None:
        self.newest = deque[int](maxlen=_REMEMBERED)  # Indices of steps, timed or not.
        self.blocks = 0
        self.total = _Gap()  # The untimed steps, and those of them since the last block.
        self._pending = _Gap()
        self.last: Composition | None = None
        self._represented = Sums()
        # For the variance: squared differences of successive blocks, of fractions and of times per
        # step, and what they are scaled by.
        self._squares = defaultdict[str, float](float)
        self._squares_ms2 = defaultdict[str, float](float)
        self._scale = _Scale()

    def add_untimed(self, n: int, ms: float) -> None:
        """Add steps that take `ms` together; NaN where that is not known."""
        gap = _Gap(0, 0.0, n) if ms != ms else _Gap(n, ms, 0)
        self._pending, self.total = self._pending.plus(gap), self.total.plus(gap)

    def add_block(self, block: Composition) -> None:
        if block.ms != block.ms:
            return  # The steps took no time.
        if self.blocks and self.last is not None:
            for name, change, change_ms in block.differences(self.last):
                self._squares[name] += change * change
                self._squares_ms2[name] += change_ms * change_ms
        self.blocks += 1
        self.last = block
        self._represented.merge(_extend(block, self._pending))
        self._scale = self._scale.plus(self._pending, block)
        self._pending = _Gap()

    def replace_last(self, block: Composition) -> None:
        self.last = block

    def estimate(self, composition: Composition | None) -> Estimate:
        """Return its sums. Where none of its steps was timed, `composition` stands for them."""
        if self.last is None:
            return self._pending.represented_by(composition)
        sums = self._represented.copy()
        sums.merge(_extend(self.last, self._pending))
        return Estimate(sums, self._errors_ms(self._scale.plus(self._pending, self.last)))

    def _errors_ms(self, scale: "_Scale") -> dict[str, float]:
        """Return half of the width of the 95 % interval of each phase, and of the step."""
        last = self.last
        if last is None or not (scale.ms2 or scale.n2):
            return {}
        if self.blocks < 2:
            # One block does not tell how much blocks differ: take the most that a fraction can.
            most = {name: share * max(1 - share, 0.0) for name, share in last.device.items()}
            ms2 = scale.ms2 + scale.n2 * (last.ms / last.n) ** 2
            return {name: 2 * math.sqrt(ms2 * square) for name, square in most.items()}
        # Successive differences have about two thirds of the degrees of freedom.
        freedom = max(round(2 * (self.blocks - 1) / 3), 1)
        t = _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.5 / freedom
        per_square = t * t / (2 * (self.blocks - 1))
        return {
            name: math.sqrt(
                per_square * (scale.ms2 * self._squares[name] + scale.n2 * self._squares_ms2[name])
            )
            for name in self._squares
        }


class _Scale(NamedTuple):
    """What the variance within a stratum is multiplied by, for times and for numbers of steps."""

    ms2: float = 0.0
    n2: float = 0.0

    def plus(self, gap: _Gap, block: Composition) -> "_Scale":
        ms2 = gap.ms * (gap.ms + block.ms) if gap.ms else 0.0
        n2 = gap.uncertain * (gap.uncertain + block.n)
        return _Scale(self.ms2 + ms2, self.n2 + n2)


def _extend(block: Composition, gap: _Gap) -> Sums:
    """Return the sums of the steps of a gap, which divide into phases as those of a block do."""
    sums, n = Sums(), gap.n + gap.uncertain
    if not n:
        return sums
    ms = gap.ms + gap.uncertain * block.ms / block.n
    phases = (
        (name, n * block.ran[name], ms * share, ms * block.host[name])
        for name, share in block.device.items()
    )
    sums.add_alike(n, ms, phases, ms * block.items)
    return sums


def _combine(estimates: Sequence[Estimate]) -> Estimate:
    sums, squares = Sums(), defaultdict[str, float](float)
    for one in estimates:
        sums.merge(one.sums)
        for name, error_ms in one.errors_ms.items():
            squares[name] += error_ms * error_ms
    return Estimate(
        sums,
        {name: math.sqrt(square) for name, square in squares.items()},
        sum(one.unsampled_steps for one in estimates),
        sum(one.unsampled_ms for one in estimates),
    )
