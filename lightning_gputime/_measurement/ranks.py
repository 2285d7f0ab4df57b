"""The times of several ranks beside each other: who is slow, and in what."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from lightning_gputime._measurement.stats import largest_part
from lightning_gputime._measurement.sums import Sums
from lightning_gputime._measurement.units import duration
from lightning_gputime._phases import (
    BETWEEN_BATCHES,
    COMM,
    DATA,
    StepRecord,
    in_order,
    is_wait,
    of_one_callback,
    resolve_labels,
)

STEP = "step"
LOCAL = "local"
_IN_DATA = f"{DATA}/"

# Sums of phases and of "step" (in milliseconds), each with the number of steps in which it ran.
PhaseTotals = Mapping[str, tuple[float, int]]


# What one rank adds up, and sends to be compared


@dataclass(frozen=True, slots=True)
class RankTotals:
    """What one rank sends: sums over its steps."""

    phases: PhaseTotals
    deviation_ms: float = 0.0  # See `BatchMeans`.

    @property
    def steps(self) -> int:
        return self.phases.get(STEP, (0.0, 0))[1]

    @property
    def error_ms(self) -> float:
        """Standard error of the mean local time; nothing is known of one step."""
        return self.deviation_ms / math.sqrt(self.steps) if self.steps > 1 else math.inf


_MAX_BLOCKS = 64
_MIN_BLOCKS = 4  # With fewer blocks of several steps nothing is known.
# What slows a rank down lasts for some steps: this many count as one at least.
_CORRELATED_STEPS = 10


class BatchMeans:
    """Estimate the noise of a rank's local time, which is that without waits for other ranks.

    Steps are correlated: what slows a rank down may last for some, or for hundreds. Means over long
    blocks of steps are not. The blocks are doubled when there are many: "dynamic batch means",
    Yeh and Schmeiser (2000).
    """

    def __init__(self) -> None:
        self._length = 1
        self._means_ms: list[float] = []
        self._open_ms, self._n_open = 0.0, 0

    def add(self, steps: Iterable[StepRecord]) -> None:
        for step in steps:
            self.take(sum(map(step.device_ms.__getitem__, _own_marks(step.labels))))

    def take(self, local_ms: float) -> None:
        """Add the local time of the next step (in milliseconds)."""
        self._open_ms += local_ms
        self._n_open += 1
        if self._n_open < self._length:
            return
        self._means_ms.append(self._open_ms / self._length)
        self._open_ms, self._n_open = 0.0, 0
        if len(self._means_ms) == _MAX_BLOCKS:
            self._means_ms = _by_twos(self._means_ms)
            self._length *= 2

    @property
    def deviation_ms(self) -> float:
        """Standard deviation of one step; its correlation included (in milliseconds).

        The standard error of the mean over n steps is this, divided by the root of n. It is the
        largest of those by the blocks as they are, by blocks of twice their length, and so on.
        """
        means, length, largest_ms = self._means_ms, self._length, 0.0
        while (n := len(means)) >= (_MIN_BLOCKS if length > 1 else 2):
            own_ms = statistics.stdev(means) * math.sqrt(max(length, _CORRELATED_STEPS))
            # The deviation of few blocks may be too small by chance.
            largest_ms = max(largest_ms, own_ms * (1 + 2 / (n - 1)))
            means, length = _by_twos(means), 2 * length
        return largest_ms


def _by_twos(means: list[float]) -> list[float]:
    return [(one + other) / 2 for one, other in zip(means[::2], means[1::2], strict=False)]


@lru_cache(maxsize=256)
def _own_marks(labels: tuple[str, ...]) -> tuple[int, ...]:
    settled = resolve_labels(labels)
    return tuple(i for i, names in enumerate(settled) if names and not is_wait(names[-1]))


def totals_of(sums: Sums, deviation_ms: float = 0.0) -> RankTotals:
    phases = {**sums.phases, STEP: sums.step}
    return RankTotals(
        {
            name: (one.device_ms, int(one.n))
            for name, one in phases.items()
            if not of_one_callback(name)
        },
        deviation_ms,
    )


def since(now: RankTotals, before: RankTotals | None) -> RankTotals:
    """Return what was added to a rank's totals since `before`."""
    if before is None:
        return now
    phases = {}
    for name, (ms, n) in now.phases.items():
        ms_before, n_before = before.phases.get(name, (0.0, 0))
        if n > n_before:
            phases[name] = ms - ms_before, n - n_before
    return RankTotals(phases, now.deviation_ms)


# The comparison of all ranks

# A rank is named if it is slower than the others by this fraction of their step.
_MIN_BEHIND = 0.05
_STANDARD_ERRORS = 4.0  # And by this many standard errors of the difference.
_MAX_NAMED = 8  # The sentence names no more ranks than this.


@dataclass(frozen=True, slots=True)
class RankStats:
    """The mean times of one phase on all ranks.

    Attributes:
        min_ms: Shortest of the ranks' means (in milliseconds).
        mean_ms: Mean over the steps of all ranks (in milliseconds).
        max_ms: Longest of the ranks' means (in milliseconds).
        slowest_rank: The rank that it is of.
    """

    min_ms: float
    mean_ms: float
    max_ms: float
    slowest_rank: int


@dataclass(frozen=True, slots=True)
class RankSummary:
    """The times of all ranks beside each other.

    A rank's local time is its step without `backward/comm` and the like, in which it waits for the
    others. The ranks of a pipeline are compared as any others: a longer stage is a slower rank.

    Attributes:
        rows: For each phase that ran, for "step" and for "local".
        ranks: The ranks that took part, in order.
        slowest_rank: The rank with the longest local time, if it is longer than the median of the
            other ranks by 5 % of their median step or more, and by more than 4 standard errors;
            else None. The standard error is by the means over blocks of steps ("batch means"), of
            the block length where it is largest.
        behind_median_ms: The longest local time, less that median (in milliseconds).
        phase: The phase in which that rank loses most, of its local time; of `data` the part, if
            that is known.
        sentence: Which rank is slow, and in what; empty where none is.
        slow: All ranks as slow as the slowest: their local times are nearer to its own than to the
            median. Several have a cause in common, such as a longer stage of a pipeline.
        suspect: The rank with the longest local time, if it exceeds the median by 5 % or more, but
            by too few standard errors to be named as the slowest; else None.
        error_ms: Standard error of `behind_median_ms` (in milliseconds; None if unknown).
    """

    rows: Mapping[str, RankStats]
    ranks: tuple[int, ...]
    slowest_rank: int | None
    behind_median_ms: float
    phase: str
    sentence: str = ""
    slow: tuple[int, ...] = ()
    suspect: int | None = None
    error_ms: float | None = None

    def metrics(self) -> dict[str, float]:
        """Return what is logged; `slowest_rank` is -1 where no rank is slow."""
        metrics: dict[str, float] = {}
        for name, row in self.rows.items():
            metrics |= {f"{name}_max_ms": row.max_ms, f"{name}_min_ms": row.min_ms}
        metrics["slowest_rank"] = -1.0 if self.slowest_rank is None else float(self.slowest_rank)
        return metrics


def compare(totals: Mapping[int, RankTotals]) -> RankSummary | None:
    """Compare the ranks by the totals of each; None if no rank has timed a step."""
    totals = {rank: one for rank, one in sorted(totals.items()) if one.steps}
    if not totals:
        return None
    phases = {rank: _with_local(one) for rank, one in totals.items()}
    own_ms = {rank: _own_ms(one) for rank, one in phases.items()}
    rank = max(own_ms, key=lambda one: own_ms[one][LOCAL])
    # Of two ranks, the slow one would be half of a median that it is part of.
    others = [one for one in totals if one != rank] or [rank]

    def median_ms(name: str) -> float:
        return statistics.median(own_ms[one].get(name, 0.0) for one in others)

    behind_median_ms = {name: ms - median_ms(name) for name, ms in own_ms[rank].items()}
    local_ms = behind_median_ms.pop(LOCAL)
    del behind_median_ms[STEP]
    error_ms = math.hypot(
        totals[rank].error_ms, statistics.median(totals[one].error_ms for one in others)
    )
    is_behind = local_ms >= _MIN_BEHIND * median_ms(STEP)
    is_slow = is_behind and local_ms > _STANDARD_ERRORS * error_ms
    phase, rows = largest_part(behind_median_ms), _rows(phases)
    has_waits = f"{phase}/{COMM}" in rows and phase.partition("/")[0] not in BETWEEN_BATCHES
    where = f"{phase} compute" if has_waits else phase
    nearer_ms = own_ms[rank][LOCAL] - local_ms / 2
    slow = tuple(one for one in totals if is_slow and own_ms[one][LOCAL] >= nearer_ms)
    behind = f"{duration(local_ms)} per step slower than the median of the others, in {where}"
    return RankSummary(
        rows=rows,
        ranks=tuple(totals),
        slowest_rank=rank if is_slow else None,
        behind_median_ms=local_ms,
        phase=phase,
        sentence=f"{_named(slow)} {behind}" if is_slow else "",
        slow=slow,
        suspect=rank if is_behind and not is_slow else None,
        error_ms=error_ms if math.isfinite(error_ms) else None,
    )


def _own_ms(phases: PhaseTotals) -> dict[str, float]:
    """Return the time per step of each top-level phase and part of `data`, without waits."""
    # Over all steps, also where a phase ran in some: so they add up to the local time.
    steps = phases[STEP][1]
    ms = {name: total_ms / steps for name, (total_ms, _) in phases.items()}
    own_ms = {name: of for name, of in ms.items() if "/" not in name or name.startswith(_IN_DATA)}
    for name in filter(is_wait, ms):
        own_ms.pop(name, None)
        own_ms[name.partition("/")[0]] -= ms[name]
    return own_ms


def _with_local(totals: RankTotals) -> PhaseTotals:
    # With its waits the step of every rank is as long as that of the slowest: under DDP, with one
    # rank late in backward, two read 20.8 and 20.9 ms there, of which 3.5 and 20.5 were work of
    # their own.
    step_ms, steps = totals.phases[STEP]
    waits_ms = sum(ms for name, (ms, _) in totals.phases.items() if is_wait(name))
    return {**totals.phases, LOCAL: (step_ms - waits_ms, steps)}


def _named(slow: tuple[int, ...]) -> str:
    if len(slow) == 1:
        return f"rank {slow[0]} is"
    more = f" and {len(slow) - _MAX_NAMED} more" if len(slow) > _MAX_NAMED else ""
    return f"ranks {', '.join(map(str, slow[:_MAX_NAMED]))}{more} are up to"


def _rows(phases: Mapping[int, PhaseTotals]) -> dict[str, RankStats]:
    # In the order of the first rank.
    names = dict.fromkeys(name for one in phases.values() for name in one)
    own = in_order([name for name in names if name not in (STEP, LOCAL)])
    rows = {}
    for name in (*own, STEP, LOCAL):
        of_ranks = {rank: one[name] for rank, one in phases.items() if name in one}
        means = {rank: ms / n for rank, (ms, n) in of_ranks.items()}
        slowest = max(means, key=means.__getitem__)
        all_ms, steps = map(sum, zip(*of_ranks.values(), strict=True))
        rows[name] = RankStats(min(means.values()), all_ms / steps, means[slowest], slowest)
    return rows
