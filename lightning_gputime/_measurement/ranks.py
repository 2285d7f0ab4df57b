"""Comparison of the ranks of a distributed run."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_gputime._measurement.sums import Sums, largest_part
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

# Total time of each phase and of "step" (in milliseconds), and the number of steps in which it ran.
PhaseTotals = Mapping[str, tuple[float, int]]


# Totals of one rank


@dataclass(frozen=True, slots=True)
class RankTotals:
    """Sums over the steps of a rank, which the rank sends to rank zero."""

    phases: PhaseTotals
    deviation_ms: float = 0.0  # See `BatchMeans.deviation_ms`.

    @property
    def steps(self) -> int:
        return self.phases.get(STEP, (0.0, 0))[1]

    @property
    def error_ms(self) -> float:
        """Standard error of the mean local time (in milliseconds); infinite for a single step."""
        return self.deviation_ms / math.sqrt(self.steps) if self.steps > 1 else math.inf


class BatchMeans:
    """Noise of a rank's local time, which excludes waiting for other ranks.

    Delays of a rank may last for hundreds of steps, so successive steps are correlated, but means
    over long blocks are not. The block length doubles as the run grows: "dynamic batch means", Yeh
    and Schmeiser (2000).
    """

    def __init__(self) -> None:
        self._length = 1  # Number of steps in a block.
        self._means_ms: list[float] = []  # Mean local time of each full block.
        self._open_ms, self._n_open = 0.0, 0  # Local time and number of steps after these blocks.

    def add(self, steps: Iterable[StepRecord]) -> None:
        for step in steps:
            self.take(sum(map(step.device_ms.__getitem__, _local_marks(step.labels))))

    def take(self, local_ms: float) -> None:
        """Add the local time of the next step."""
        self._open_ms += local_ms
        self._n_open += 1
        if self._n_open < self._length:
            return
        self._means_ms.append(self._open_ms / self._length)
        self._open_ms, self._n_open = 0.0, 0
        if len(self._means_ms) == 64:
            self._means_ms = _pair_means(self._means_ms)
            self._length *= 2

    @property
    def deviation_ms(self) -> float:
        """Standard deviation of a step, increased to account for correlation (in milliseconds).

        Divided by the square root of n, it is the standard error of the mean over n steps. It is
        the maximum of the estimates from blocks of the current length, twice that length, and so
        on. 0 if there are too few blocks.
        """
        means, length = self._means_ms, self._length
        largest_ms = 0.0
        while (n := len(means)) >= (4 if length > 1 else 2):
            # Delays of a rank last for several steps, so count at least 10 steps as one sample.
            deviation_ms = statistics.stdev(means) * math.sqrt(max(length, 10))
            # The deviation of a few blocks may be too small by chance.
            largest_ms = max(largest_ms, deviation_ms * (1 + 2 / (n - 1)))
            means, length = _pair_means(means), 2 * length
        return largest_ms


def _pair_means(means: list[float]) -> list[float]:
    """Return the mean of each pair of neighbors, without an odd last value."""
    return [sum(pair) / 2 for pair in zip(means[::2], means[1::2], strict=False)]


@lru_cache(maxsize=256)
def _local_marks(labels: tuple[str, ...]) -> tuple[int, ...]:
    """Return the indices of the marks that start local time."""
    phases_of_marks = resolve_labels(labels)
    return tuple(i for i, names in enumerate(phases_of_marks) if names and not is_wait(names[-1]))


def totals_of(sums: Sums, deviation_ms: float = 0.0) -> RankTotals:
    """Return the totals of a rank, without the sub-phases of single callbacks."""
    phases = {**sums.phases, STEP: sums.step}
    return RankTotals(
        {
            name: (phase.device_ms, int(phase.n))
            for name, phase in phases.items()
            if not of_one_callback(name)
        },
        deviation_ms,
    )


def since(now: RankTotals, before: RankTotals | None) -> RankTotals:
    """Return a rank's totals minus its totals `before`."""
    if before is None:
        return now
    phases = {}
    for name, (ms, n) in now.phases.items():
        ms_before, n_before = before.phases.get(name, (0.0, 0))
        if n > n_before:
            phases[name] = ms - ms_before, n - n_before
    return RankTotals(phases, now.deviation_ms)


# Comparison of all ranks


@dataclass(frozen=True, slots=True)
class RankStats:
    """Mean times of a phase on all ranks.

    Attributes:
        min_ms: Shortest of the ranks' means (in milliseconds).
        mean_ms: Mean over the steps of all ranks (in milliseconds).
        max_ms: Longest of the ranks' means (in milliseconds).
        slowest_rank: Rank with the longest mean.
    """

    min_ms: float
    mean_ms: float
    max_ms: float
    slowest_rank: int


@dataclass(frozen=True, slots=True)
class RankSummary:
    """Comparison of all ranks.

    The local time of a rank is its step time without `backward/comm` and similar phases, in which
    it waits for other ranks. In a pipeline, the rank with the longest stage is the slowest.

    Attributes:
        rows: Statistics of each phase that ran, of "step" and of "local".
        ranks: Ranks that took part, in order.
        slowest_rank: Rank with the longest local time, if it exceeds the median of the other ranks
            by 5 % of their median step or more, and by more than 4 standard errors; else None. The
            standard error is estimated from means over blocks of steps ("batch means").
        behind_median_ms: Longest local time minus the median of the other ranks (in milliseconds).
        phase: Phase with the largest part of this difference; for `data`, a sub-phase if known.
        sentence: Sentence on the slow ranks; empty if no rank is slow.
        slow: All ranks whose local time is closer to the slowest rank than to the median; empty if
            `slowest_rank` is None. Several slow ranks point to a common cause, such as a longer
            stage of a pipeline.
        suspect: Rank with the longest local time, if it exceeds the median by 5 % or more as above,
            but not by enough standard errors to be `slowest_rank`; else None.
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
        """Return the values to log; `slowest_rank` is -1 if no rank is slow."""
        metrics: dict[str, float] = {}
        for name, row in self.rows.items():
            metrics |= {f"{name}_max_ms": row.max_ms, f"{name}_min_ms": row.min_ms}
        metrics["slowest_rank"] = -1.0 if self.slowest_rank is None else float(self.slowest_rank)
        return metrics


class RankResults:
    """Newest comparison of the ranks."""

    def __init__(self) -> None:
        self._summary: RankSummary | None = None
        self._complete: Callable[[], object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_complete": None}

    def add(self, summary: RankSummary | None) -> None:
        self._summary = summary

    def complete_later(self, complete: Callable[[], object]) -> None:
        """Set a function for the next `complete` to call: it waits for late ranks and adds them."""
        self._complete = complete

    def complete(self) -> RankSummary | None:
        """Return the comparison, after waiting for late ranks if necessary."""
        complete, self._complete = self._complete, None
        if complete is not None:
            complete()
        return self._summary


def compare(totals: Mapping[int, RankTotals]) -> RankSummary | None:
    """Compare the ranks by their totals; return None if no step was timed."""
    totals = {rank: total for rank, total in sorted(totals.items()) if total.steps}
    if not totals:
        return None
    phases: dict[int, PhaseTotals] = {}
    # Time per step, without waits, of each top-level phase and sub-phase of `data`, and of "local".
    # With waits included, a step takes equally long on all ranks, so compare local work. Example:
    # under DDP with one slow rank, backward took 20.8 and 20.9 ms, of which 3.5 and 20.5 ms were
    # local work.
    local_ms: dict[int, dict[str, float]] = {}
    for rank, total in totals.items():
        step_ms, steps = total.phases[STEP]
        waits_ms = sum(ms for name, (ms, _) in total.phases.items() if is_wait(name))
        phases[rank] = {**total.phases, LOCAL: (step_ms - waits_ms, steps)}
        # Divide by the number of all steps, even for a phase that ran in only a few of them, so
        # that the phases add up to the local time.
        ms = {name: total_ms / steps for name, (total_ms, _) in phases[rank].items()}
        local_ms[rank] = {
            name: mean
            for name, mean in ms.items()
            if ("/" not in name or name.startswith(f"{DATA}/")) and not is_wait(name)
        }
        for name in filter(is_wait, ms):
            local_ms[rank][name.partition("/")[0]] -= ms[name]
    slowest = max(local_ms, key=lambda rank: local_ms[rank][LOCAL])
    # Exclude the slowest rank from the median. With two ranks, it would make up half of the median.
    others = [rank for rank in totals if rank != slowest] or [slowest]

    def median_ms(name: str) -> float:
        return statistics.median(local_ms[rank].get(name, 0.0) for rank in others)

    # Time of the slowest rank above the median of the others: of each phase, and in total.
    excess_ms = {name: ms - median_ms(name) for name, ms in local_ms[slowest].items()}
    total_ms = excess_ms.pop(LOCAL)
    del excess_ms[STEP]
    error_ms = math.hypot(
        totals[slowest].error_ms, statistics.median(totals[rank].error_ms for rank in others)
    )
    is_large = total_ms >= 0.05 * median_ms(STEP)
    is_slow = is_large and total_ms > 4.0 * error_ms
    phase, rows = largest_part(excess_ms), _rows(phases)
    has_waits = f"{phase}/{COMM}" in rows and phase.partition("/")[0] not in BETWEEN_BATCHES
    where = f"{phase} compute" if has_waits else phase
    # Local time halfway between the slowest rank and the median of the others.
    threshold_ms = local_ms[slowest][LOCAL] - total_ms / 2
    slow = tuple(rank for rank in totals if is_slow and local_ms[rank][LOCAL] >= threshold_ms)
    subject = f"rank {slowest} is"
    if len(slow) > 1:
        more = f" and {len(slow) - 8} more" if len(slow) > 8 else ""
        subject = f"ranks {', '.join(map(str, slow[:8]))}{more} are up to"
    excess = f"{duration(total_ms)} per step slower than the median of the others, in {where}"
    return RankSummary(
        rows=rows,
        ranks=tuple(totals),
        slowest_rank=slowest if is_slow else None,
        behind_median_ms=total_ms,
        phase=phase,
        sentence=f"{subject} {excess}" if is_slow else "",
        slow=slow,
        suspect=slowest if is_large and not is_slow else None,
        error_ms=error_ms if math.isfinite(error_ms) else None,
    )


def _rows(phases: Mapping[int, PhaseTotals]) -> dict[str, RankStats]:
    """Return the statistics of each phase, in execution order, and of "step" and "local"."""
    names = dict.fromkeys(name for totals in phases.values() for name in totals)
    ordered = in_order([name for name in names if name not in (STEP, LOCAL)])
    rows = {}
    for name in (*ordered, STEP, LOCAL):
        by_rank = {rank: totals[name] for rank, totals in phases.items() if name in totals}
        means_ms = {rank: ms / n for rank, (ms, n) in by_rank.items()}
        slowest = max(means_ms, key=means_ms.__getitem__)
        all_ms, steps = map(sum, zip(*by_rank.values(), strict=True))
        rows[name] = RankStats(
            min_ms=min(means_ms.values()),
            mean_ms=all_ms / steps,
            max_ms=means_ms[slowest],
            slowest_rank=slowest,
        )
    return rows
