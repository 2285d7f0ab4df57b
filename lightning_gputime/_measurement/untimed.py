"""Untimed steps: their durations are measured, and their phases are estimated.

- Stratum: all steps of similar duration. Stratum 0 has the ordinary steps.
- Block: up to 5 consecutive timed steps of a stratum.
- Gap: the untimed steps of a stratum between two blocks. Its total time is exact, and is divided
  into phases like the next block.
- Settled step: a step that the statistics include.
"""

import math
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import copy, deepcopy
from itertools import pairwise
from operator import attrgetter, sub
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_gputime._ledger.rows import LONG_STEP, t95
from lightning_gputime._measurement.sums import STEP, PhaseSum, Sums
from lightning_gputime._phases import StepRecord

MAX_NEWEST = 4000
"""Number of newest steps in which causes are looked for. Chosen: more take memory and time."""
MIN_WAIT_SHARE = 0.1
"""The device sets the pace if the host waits for it for this fraction of the step. Chosen: smaller
ones time each step of some host-bound runs, larger ones sample some GPU-bound runs."""
_STRATA = 13  # Number of strata, with the ordinary steps. The last starts at 3,072 medians.
# Fraction of the time of a log that may be divided like other steps. Chosen: logs are wrong by as
# much at most; with a smaller one, they settle steps more often, which takes time.
_MAX_LONG_SHARE = 0.05
_MAX_UNSETTLED = 200  # Number of untimed steps that logs may leave unsettled, to bound their time.
_BINS_PER_FACTOR_E = 50  # Bins of a histogram of durations are 2 % wide.

_NO_STEPS = Sums()

Percentiles = tuple[float, float, float]


def percentiles(values: npt.NDArray[np.float64], weights: npt.NDArray[Any]) -> Percentiles:
    """Return the 5th, 50th and 95th percentile of weighted values; NaN without values."""
    if not len(values):
        return math.nan, math.nan, math.nan
    order = np.argsort(values)
    ends = np.cumsum(weights[order])
    places = np.searchsorted(ends, np.array([0.05, 0.5, 0.95]) * ends[-1])
    p5, p50, p95 = values[order][np.minimum(places, len(values) - 1)].tolist()
    return p5, p50, p95


class Estimate(NamedTuple):
    """Sums over the untimed steps, estimated from the timed steps."""

    sums: Sums = _NO_STEPS  # Over the untimed steps that timed steps represent.
    # Half the width of the 95 % interval of the total device time of each phase, and of "step".
    errors_ms: Mapping[str, float] = MappingProxyType({})
    unsampled_steps: int = 0  # Number of long steps that no timed step represents.
    unsampled_ms: float = 0.0  # Total duration of the unsampled steps.


class _Block(NamedTuple):
    """Consecutive timed steps of a stratum, divided into phases."""

    n: int  # Number of steps.
    ms: float  # Device time of all steps; NaN if the steps took no time.
    device: Mapping[str, float]  # Device time of each phase, as a fraction of `ms`.
    host: Mapping[str, float]  # Host time of each phase, as a fraction of `ms`.
    ran: Mapping[str, float]  # Fraction of the steps in which each phase ran.
    items: float  # Items per millisecond; NaN if unknown.

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> "_Block":
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
    """Untimed steps of a stratum."""

    n: int = 0  # Number of steps of known duration.
    ms: float = 0.0  # Total duration of these `n` steps.
    uncertain: int = 0  # Number of other steps, of unknown duration: training was GPU-bound.

    def plus(self, other: "_Gap") -> "_Gap":
        return _Gap(self.n + other.n, self.ms + other.ms, self.uncertain + other.uncertain)

    def minus(self, other: "_Gap") -> "_Gap":
        return _Gap(self.n - other.n, self.ms - other.ms, self.uncertain - other.uncertain)

    def divided_like(self, block: _Block) -> Sums:
        """Return the sums over the steps, divided into phases like a block."""
        sums, n = Sums(), self.n + self.uncertain
        if not n:
            return sums
        # Steps of unknown duration take as long as the mean step of the block.
        ms = self.ms + self.uncertain * block.ms / block.n
        sums.step.add(n, device_ms=ms, host_ms=ms)
        for name, share in block.device.items():
            sums.phases[name] = phase = PhaseSum()
            phase.n, phase.device_ms = n * block.ran[name], ms * share
            phase.host_ms = ms * block.host[name]
        if not math.isnan(block.items):
            sums.items, sums.items_ms = ms * block.items, ms
        return sums

    def represented_by(self, block: _Block | None) -> Estimate:
        """Return the estimate for these steps; without a block, they are unsampled."""
        if block is None:
            return Estimate(unsampled_steps=self.n + self.uncertain, unsampled_ms=self.ms)
        return Estimate(self.divided_like(block))


_TOTAL = attrgetter("total")  # In C, because logs call it.


class Recurrence(NamedTuple):
    """Long steps that recur at a distance."""

    last: int  # Index of a long step.
    distance: int  # Expected number of steps from one to the next.

    def next_from(self, first: int) -> int:
        """Return the index of the next long step from `first` on."""
        return self.last + max(math.ceil((first - self.last) / self.distance), 1) * self.distance


Totals = Sequence[_Gap]
"""Untimed steps of each stratum since the start of a run."""


class _StepLengths:
    """Durations of the newest steps, to distinguish long steps from ordinary steps."""

    def __init__(self) -> None:
        self._untimed = deque[float](maxlen=500)
        self._timed = deque[float](maxlen=50)
        self.long_ns = 0.0  # Steps of this duration or more are long.
        self._added_ns = 0.0  # Time that timing adds to a step.
        self._n_new = math.inf  # Number of steps since the last estimate of the two.

    def add(self, took_ns: Sequence[float], timed: AbstractSet[int]) -> list[int]:
        """Add steps, and return the stratum of each: 0 for ordinary steps and unknown durations.

        For example, with a median of 10 ms, steps from 15 ms on are in stratum 1, and from 30 ms on
        in stratum 2. Durations are negative if unknown; `timed` has the indices of the timed steps.
        """
        # One function, because it runs in the loop: calls would cost more than the work.
        self._untimed.extend([ns for i, ns in enumerate(took_ns) if ns >= 0 and i not in timed])
        if timed:
            self._timed.extend([took_ns[i] for i in timed if took_ns[i] >= 0])
        self._n_new += len(took_ns)
        if self._n_new >= 0.2 * len(self._untimed):  # Many are new: estimate again.
            self._n_new = 0
            median_ns, added_ns = median(self._untimed or self._timed or [0.0]), 0.0
            if self._timed and self._untimed:
                # Timing windows are moved onto long steps, so up to half of the timed steps may be
                # long. The first quartile ignores them.
                added_ns = sorted(self._timed)[len(self._timed) // 4] - median_ns
            self._added_ns = min(max(added_ns, 0.0), 0.4e6)
            self.long_ns = LONG_STEP * max(median_ns, 1.0)
        without_timing_ns = took_ns
        if timed:  # Do not mistake them for long steps.
            added_ns = self._added_ns
            without_timing_ns = [
                ns - added_ns if i in timed else ns for i, ns in enumerate(took_ns)
            ]
        long_ns = self.long_ns
        # The durations in a stratum of long steps differ by up to a factor of 2.
        return [
            0 if ns < long_ns else min(int(math.log(ns / long_ns, 2.0)) + 1, _STRATA - 1)
            for ns in without_timing_ns
        ]


class UntimedSteps:
    """Durations of all steps, and an estimate of the phases of the untimed steps.

    Steps are divided into strata by their duration relative to the median of the newest steps:
    ordinary steps, and strata of long steps. The host's clock is read at the end of every step,
    timed or not, so the total time of each stratum is exact. A block of timed steps represents the
    untimed steps of its stratum since the previous block. A stratum without a timed step is
    reported as not sampled.

    In GPU-bound training, the host runs ahead and then waits for several steps at once, so the host
    time of a single step has no meaning. All steps then belong to stratum 0, and each untimed step
    counts like the mean step of the next block.

    This is post-stratification (Holt and Smith 1979, https://doi.org/10.2307/2344652). The variance
    within a stratum is estimated from the differences between successive blocks.

    The first `warmup_steps` are excluded. `weights` knows the newest `history_size` timed steps.
    """

    def __init__(self, warmup_steps: int, history_size: int) -> None:
        self._warmup_steps = warmup_steps
        self._strata_of_timed = deque[int](maxlen=history_size)  # Newest timed steps.
        self.ends_ns = array("q")
        """Cumulative time of all steps at the end of each step that is not yet settled. Append to
        it (in C, because this runs in every step) to end a step."""
        # Index of each step whose start is not the end of the step before it, and that start.
        self._restarts = deque[tuple[int, int]]()
        self._left_out = set[int]()  # Indices of steps that no statistic includes.
        self._settled_ns = 0  # Cumulative time of all steps at the end of the last settled step.
        self.newest = deque[tuple[int, int, int]](maxlen=MAX_NEWEST)
        """Index, start and end of the newest settled steps, as cumulative time of all steps."""
        self._n_settled = 0  # Number of settled steps, and index of the first other step.
        self._step_lengths = _StepLengths()
        self._strata = [_Stratum() for _ in range(_STRATA)]
        # Histogram of all durations, on a logarithmic scale, and the longest.
        self._histogram, self._max_ns = Counter[int](), 0
        self.is_gpu_bound = False
        """True while the host waits for the device. Then durations of single steps are unknown."""
        self.n = 0
        """Number of settled untimed steps, without excluded steps."""
        self._unsettled: list[StepRecord] = []  # Timed steps that were read, not yet settled.
        self._n_unsettled_warmup = 0  # Number of steps at the start of this list that are warm-up.
        self._logged_until = 0  # Index of the first step after the last log.
        self.logged = self.totals
        """`totals` of the steps up to the last log, once they are settled."""
        # Consecutive timed steps of a stratum, to which further steps may be added.
        self._open_stratum, self._open_steps = 0, list[StepRecord]()

    def __getstate__(self) -> dict[str, Any]:
        # `copy.copy` calls this, too. A copy must not change while steps are added.
        changing = ("_strata_of_timed", "ends_ns", "_restarts", "_left_out", "newest", "_unsettled")
        state = {**self.__dict__, **{name: copy(vars(self)[name]) for name in changing}}
        return {**state, **deepcopy({name: state[name] for name in ("_step_lengths", "_strata")})}

    # `now_ns` is the time of all steps so far, without pauses and evaluations.

    @property
    def since_ns(self) -> int:
        """Cumulative time of all steps at the start of the open step (in nanoseconds).

        That is the end of the last step, or the newest restart if it is later.
        """
        end_ns = self.ends_ns[-1] if self.ends_ns else self._settled_ns
        return max(end_ns, self._restarts[-1][1]) if self._restarts else end_ns

    def restart(self, now_ns: int) -> None:
        """Start the next step now. The time since the last step is not part of any step."""
        self._restarts.append((self._n_settled + len(self.ends_ns), now_ns))

    def leave_out(self, now_ns: int) -> None:
        """End a step that no statistic includes, such as an examined step."""
        self._left_out.add(self._n_settled + len(self.ends_ns))
        self.ends_ns.append(now_ns)

    # After steps were read

    def add_timed(self, steps: Sequence[StepRecord], warmup: int = 0) -> bool:
        """Add timed steps that were read, in order. Skipped step indices are untimed steps.

        The first `warmup` steps represent no other steps. Return True if the statistics include the
        steps, False if a later call will add them.
        """
        self._unsettled += steps
        self._n_unsettled_warmup += warmup
        n = self._unsettled[-1].step_index + 1 - self._n_settled
        # Settling costs the same for one step and for a hundred, so collect 50 steps, unless most
        # of them are timed.
        if n < 50 and 2 * len(self._unsettled) < n:
            return False
        self.settle()
        return True

    def settle(self, until: int = 0) -> None:
        """Add all steps up to the last timed step that was read, and all before index `until`.

        One function, because it runs in the loop: calls would cost more than the work. Its parts
        are durations, strata, totals of strata, and at last blocks with the gaps before them.
        """
        timed, n_warmup = self._unsettled, self._n_unsettled_warmup
        self._unsettled, self._n_unsettled_warmup = [], 0
        if timed:
            until = max(until, timed[-1].step_index + 1)
        if self._n_settled < self._logged_until < until:
            # `log_unsettled` has logged some of these steps. Settle them first, and take the totals
            # from which the next log counts.
            self.settle(self._logged_until)
            self.logged = self.totals
        first = self._n_settled
        n = min(max(until - first, 0), len(self.ends_ns))
        if not n:
            return
        self._n_settled += n

        # Durations. In the lists from here on, step `first` is at position 0.
        # Plain Python: NumPy's code is not in the CPU caches while a training loop runs.
        ends_ns = self.ends_ns[:n].tolist()
        del self.ends_ns[:n]
        # The start of each step, which is the end of the step before it unless it is a restart.
        starts_ns = [self._settled_ns, *ends_ns[:-1]]
        while self._restarts and self._restarts[0][0] < first + n:
            index, start_ns = self._restarts.popleft()
            starts_ns[max(index - first, 0)] = start_ns
        self._settled_ns = ends_ns[-1]
        took_ns = [*map(sub, ends_ns, starts_ns)]  # -1 for excluded steps.
        newest = [*zip(range(first, first + n), starts_ns, ends_ns, strict=True)]
        if left_out := {index for index in self._left_out if index < first + n}:
            self._left_out -= left_out
            newest = [step for step in newest if step[0] not in left_out]
            for index in left_out:
                took_ns[index - first] = -1
        self.newest.extend(newest)
        warmup_steps = min(max(self._warmup_steps - first, 0), n)
        took_ns[:warmup_steps] = [-1] * warmup_steps
        self._histogram.update(
            [int(math.log(ns or 1) * _BINS_PER_FACTOR_E) for ns in took_ns if ns >= 0]
        )
        self._max_ns = max(self._max_ns, *took_ns)

        # Strata of all steps
        timed_at: list[int] = []  # Positions of the timed steps.
        if timed:
            indices = [step.step_index for step in timed]
            timed_at = [index - first for index in indices if first <= index < first + n]
            device_ms = sum([sum(step.device_ms) for step in timed])
            waited_ms = sum([step.wait_ms for step in timed])
            self.is_gpu_bound = waited_ms >= MIN_WAIT_SHARE * device_ms
        strata = self._step_lengths.add(took_ns, {*timed_at})
        if self.is_gpu_bound:
            strata = [0] * n
        self._strata_of_timed.extend(map(strata.__getitem__, timed_at))

        # Totals of each stratum
        for k in {*strata}:
            stratum = self._strata[k]
            known_ns = [
                ns for ns, each in zip(took_ns, strata, strict=True) if each == k and ns >= 0
            ]
            stratum.n += len(known_ns)
            stratum.ns += sum(known_ns)
            if k:
                stratum.newest.extend([first + i for i, each in enumerate(strata) if each == k])
        for i in timed_at:
            if took_ns[i] >= 0:
                self._strata[strata[i]].timed_n += 1
                self._strata[strata[i]].timed_ns += took_ns[i]

        # Gaps and blocks, in order: a block represents the gaps since the block before it. Untimed
        # steps end a block. The warm-up is in no block.
        records = {step.step_index - first: step for step in timed[n_warmup:]}
        start = 0  # First step that is in no gap and in no block yet.
        for i in [*timed_at, n]:
            if i > start:
                self._end_block()
                for k in sorted({*strata[start:i]}):
                    each_ns = zip(took_ns[start:i], strata[start:i], strict=True)
                    if known_ns := [ns for ns, stratum in each_ns if stratum == k and ns >= 0]:
                        self.n += len(known_ns)
                        gap = _Gap(len(known_ns), sum(known_ns) / 1e6)
                        if self.is_gpu_bound:
                            gap = _Gap(uncertain=len(known_ns))
                        self._strata[k].add_untimed(gap)
            if i in records:
                if strata[i] != self._open_stratum or len(self._open_steps) >= 5:
                    self._end_block()
                    self._open_stratum = strata[i]
                self._open_steps.append(records[i])
            start = i + 1
        self._end_block()

    def _end_block(self) -> None:
        if self._open_steps:
            block = _Block.of(self._open_steps)
            self._open_steps = []
            if self.n:
                self._strata[self._open_stratum].settle_gap_with(block)
            elif not self._open_stratum:
                # Before the first untimed step, a block has no gap to represent.
                self._strata[0].observe(block)

    # Readings

    def estimate(self) -> Estimate:
        """Return sums over all untimed steps, with their errors."""
        strata = enumerate(self._strata)
        return _combine([stratum.estimate(self._block_for(k)) for k, stratum in strata])

    def log_unsettled(self, until: int) -> Sums | None:
        """Log the steps since the last log, before the index `until`, without settling them.

        Settling takes longer than all else in a log. Return sums over the steps, divided into
        phases like the newest block of ordinary steps. None, and no log, if they must be settled,
        for example because long steps take more than 5 % of their time: then call `settle` and
        `log_settled`. All timed steps before `until` must have been read, and none of them may be
        after the last log.
        """
        start, block = self._logged_until - self._n_settled, self._strata[0].last
        end = until - self._n_settled
        if (
            block is None
            or self.is_gpu_bound
            or self._unsettled
            or self._restarts
            or self._left_out
        ):
            return None
        if not 0 <= start < end <= min(len(self.ends_ns), _MAX_UNSETTLED):
            return None
        ends_ns = self.ends_ns[start:end]
        start_ns = self.ends_ns[start - 1] if start else self._settled_ns
        took_ns, long_ns = ends_ns[-1] - start_ns, self._step_lengths.long_ns
        each_ns = map(sub, ends_ns, [start_ns, *ends_ns[:-1]])
        if sum([ns for ns in each_ns if ns >= long_ns]) > _MAX_LONG_SHARE * took_ns:
            return None
        self._logged_until = until
        return _Gap(end - start, took_ns / 1e6).divided_like(block)

    def log_settled(self) -> None:
        """Note that a log includes all settled steps."""
        self._logged_until, self.logged = self._n_settled, self.totals

    def estimate_since(self, totals: Totals) -> Estimate:
        """Return sums over the untimed steps that were settled since `totals` were taken."""
        found = []
        for k, (stratum, before) in enumerate(zip(self._strata, totals, strict=True)):
            if stratum.total is not before:
                gap = stratum.total.minus(before)
                found.append(gap.represented_by(self._block_for(k)))
        return _combine(found) if found else Estimate()

    @property
    def totals(self) -> Totals:
        """Untimed steps of each stratum."""
        return [*map(_TOTAL, self._strata)]

    def _block_for(self, k: int) -> _Block | None:
        """Return the newest block of stratum `k`, or of a neighbor with similar durations."""
        strata = self._strata
        if strata[k].last is not None or k == 0:
            return strata[k].last
        for other in (k + 1, k - 1):
            # Stratum 0 is no neighbor, because ordinary steps do not represent long steps.
            if 0 < other < _STRATA and strata[other].last is not None:
                ratio = strata[other].mean_ns / max(strata[k].mean_ns, 1.0)
                if 1 / LONG_STEP < ratio < LONG_STEP:
                    return strata[other].last
        return None

    def weights(self, n: int) -> npt.NDArray[np.float64]:
        """Return the number of steps that each of the newest `n` timed steps represents."""
        per_stratum = np.array([each.n / max(each.timed_n, 1) for each in self._strata])
        return per_stratum[[*self._strata_of_timed][-n:]] if n else np.zeros(0)

    @property
    def long_share(self) -> float:
        """Excess of long steps over ordinary steps, as a fraction of the time of settled steps."""
        return _excess_share([(each.n, each.ns) for each in self._strata])

    @property
    def unsettled_long_share(self) -> float:
        """The same for the steps that are not yet settled."""
        ends_ns, long_ns = self.ends_ns, self._step_lengths.long_ns
        if len(ends_ns) < 2 or not long_ns:
            return 0.0
        took_ns = map(sub, ends_ns[1:], ends_ns[:-1])
        usual_ns = long_ns / LONG_STEP
        excess_ns = sum([ns - usual_ns for ns in took_ns if ns >= long_ns])
        return float(excess_ns / max(ends_ns[-1] - ends_ns[0], 1))

    @property
    def slow_correction(self) -> float:
        """Factor for the cost of slow steps, from 0 to 1.

        Timing windows are moved onto long steps, so there are too many of them among the timed
        steps. The factor is the excess of long steps, as a fraction of the time of all steps,
        divided by the same fraction of timed steps. For example, if long steps cost 2 % of the time
        of all steps, and 10 % of the time of timed steps, 0.2.
        """
        of_timed = _excess_share([(each.timed_n, each.timed_ns) for each in self._strata])
        return min(self.long_share / of_timed, 1.0) if of_timed > 0 else 1.0

    def durations_ms(self) -> dict[str, Any]:
        """Return the percentiles (accurate to 1 %) and the maximum as fields of a `PhaseStats`.

        Empty if training was GPU-bound: then the host time of a step is not its duration.
        """
        if any(stratum.total.uncertain for stratum in self._strata):
            return {}
        centers_ms = [math.exp((bin_ + 0.5) / _BINS_PER_FACTOR_E) / 1e6 for bin_ in self._histogram]
        counts = np.array([*self._histogram.values()])
        p5_ms, p50_ms, p95_ms = percentiles(np.array(centers_ms), counts)
        return {"p5_ms": p5_ms, "p50_ms": p50_ms, "p95_ms": p95_ms, "max_ms": self._max_ns / 1e6}

    def next_long(self, first: int) -> float:
        """Return the index of the next expected long step from `first` on; infinity without one."""
        recurrence = self.recurrence()
        return math.inf if recurrence is None else recurrence.next_from(first)

    def recurrence(self) -> Recurrence | None:
        """Return how long steps recur; None if no long step has recurred.

        If they recur in several strata, choose the stratum in which a block of timed steps
        represents the most untimed time.
        """
        recurring = [stratum for stratum in self._strata[1:] if len(stratum.newest) >= 2]
        if not recurring:
            return None
        chosen = max(recurring, key=lambda stratum: stratum.total.ms / (1 + stratum.blocks))
        distance = int(median(after - before for before, after in pairwise(chosen.newest)))
        return Recurrence(chosen.newest[-1], max(distance, 1))


def _excess_share(strata: Sequence[tuple[int, int]]) -> float:
    """Return the excess of long steps over ordinary steps, as a fraction of the time of all.

    `strata` has the number of steps and their time (in nanoseconds) of each stratum. For example,
    with 90 steps that take 900 ns, and 10 long steps that take 300 ns: (300 - 10 * 10) / 1200.
    """
    n, ns = np.array(strata).T
    ordinary_ns = ns[0] / max(n[0], 1)
    # After a slowdown, steps that were long at first may be shorter than ordinary steps.
    excess_ns = np.maximum(ns - n * ordinary_ns, 0.0)[1:].sum()
    return float(excess_ns / max(ns.sum(), 1.0))


class _Stratum:
    """Untimed steps of a stratum, and the blocks of timed steps that represent them."""

    def __init__(self) -> None:
        # Number and time of all steps, and of the timed steps.
        self.n = self.ns = self.timed_n = self.timed_ns = 0
        self.newest = deque[int](maxlen=8)  # Indices of steps, timed or not.
        self.blocks = 0  # Number of blocks that may represent untimed steps.
        self.total = _Gap()  # All untimed steps.
        self._pending = _Gap()  # Untimed steps since the last block.
        self.last: _Block | None = None  # Newest block.
        self._represented = Sums()  # Estimate for the untimed steps before the last block.
        # Sums of squared differences between successive blocks, by phase: of fractions of the step,
        # and of times per step. Each is divided by its variance if that of a step is 1. Example:
        # blocks of 5 and 2 steps with means of 4 and 5 ms add (5 - 4)² / (1 / 5 + 1 / 2) = 1.43
        # ms².
        self._differences = 0  # Number of differences.
        self._squared_share_changes = defaultdict[str, float](float)
        self._squared_time_changes = defaultdict[str, float](float)
        # Factors that turn the variance of a step into the variance of the estimate for all gaps:
        # for fractions of the step, in gaps of known duration (in ms²), and for times per step, in
        # gaps of unknown duration (in steps²).
        self._share_factor = self._time_factor = 0.0

    @property
    def mean_ns(self) -> float:
        return self.ns / max(self.n, 1)

    def add_untimed(self, gap: _Gap) -> None:
        self._pending, self.total = self._pending.plus(gap), self.total.plus(gap)

    def settle_gap_with(self, block: _Block) -> None:
        """Let a block represent the untimed steps since the last block, and those that follow."""
        if math.isnan(block.ms):
            return
        self.observe(block)
        self.blocks += 1
        self._represented.merge(self._pending.divided_like(block))
        self._share_factor, self._time_factor = self._factors(block)
        self._pending = _Gap()

    def observe(self, block: _Block) -> None:
        """Compare a block with the one before. It represents the untimed steps that follow."""
        if math.isnan(block.ms):
            return
        if self.last is not None:
            variance = 1 / block.n + 1 / self.last.n  # Of a difference, if that of a step is 1.
            self._differences += 1
            new, old = ({**each.device, STEP: 1.0} for each in (block, self.last))
            new_ms, old_ms = block.ms / block.n, self.last.ms / self.last.n  # Mean steps.
            for name in {*new, *old}:
                change = new.get(name, 0.0) - old.get(name, 0.0)
                change_ms = new.get(name, 0.0) * new_ms - old.get(name, 0.0) * old_ms
                self._squared_share_changes[name] += change * change / variance
                self._squared_time_changes[name] += change_ms * change_ms / variance
        self.last = block

    def estimate(self, block: _Block | None) -> Estimate:
        """Return the estimate for all untimed steps; `block` is used if no step was timed."""
        if self.last is None:
            return self._pending.represented_by(block)
        sums = self._represented.copy()
        sums.merge(self._pending.divided_like(self.last))
        last, (share_factor, time_factor) = self.last, self._factors(self.last)
        if not (share_factor or time_factor):
            return Estimate(sums)
        errors_ms = {}
        if not self._differences:
            # A single block does not show how much blocks differ: use the maximum variance of a
            # fraction, which is p (1 - p) for steps that consist of this phase or do not have it.
            ms2 = share_factor + time_factor * (last.ms / last.n) ** 2
            for name, share in last.device.items():
                errors_ms[name] = 2 * math.sqrt(ms2 * (share * max(1 - share, 0.0)))
            return Estimate(sums, errors_ms)
        # Successive differences have about two thirds of the degrees of freedom: each block is in
        # two of them. So 9 differences count as 6, for which t is 2.45.
        freedom = max(round(2 * self._differences / 3), 1)
        t = t95(freedom)
        for name, share_changes in self._squared_share_changes.items():
            time_changes = self._squared_time_changes[name]
            squares = share_factor * share_changes + time_factor * time_changes
            errors_ms[name] = math.sqrt(t * t / self._differences * squares)
        return Estimate(sums, errors_ms)

    def _factors(self, block: _Block) -> tuple[float, float]:
        """Return the share factor and the time factor if a block represents the pending gap.

        The total of a gap of g steps is estimated from a block of n. Both vary, so with the
        variance s² of a step, the variance of the estimate is g² s² / n + g s² = s² g (g + n) / n.
        For example, 5 timed steps for 95 untimed steps: s² 95 * 100 / 5 = 1900 s².
        """
        gap = self._pending
        ms2 = gap.ms * (gap.ms + block.ms) if gap.ms else 0.0
        n2 = gap.uncertain * (gap.uncertain + block.n)
        return self._share_factor + ms2 / block.n, self._time_factor + n2 / block.n


def _combine(estimates: Sequence[Estimate]) -> Estimate:
    """Add the estimates of several strata, whose errors are independent."""
    if len(estimates) == 1:
        return estimates[0]
    sums, squares = Sums(), defaultdict[str, float](float)
    for estimate in estimates:
        sums.merge(estimate.sums)
        for name, error_ms in estimate.errors_ms.items():
            squares[name] += error_ms * error_ms
    return Estimate(
        sums,
        errors_ms={name: math.sqrt(square) for name, square in squares.items()},
        unsampled_steps=sum([estimate.unsampled_steps for estimate in estimates]),
        unsampled_ms=sum([estimate.unsampled_ms for estimate in estimates]),
    )
