"""The times of several ranks beside each other: who is slow, and in what."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_gputime._phases import COMM, DATA, in_order, is_wait
from lightning_gputime._results.noise import SCALES
from lightning_gputime._results.totals import (
    STAGE,
    STEP,
    Totals,
    host,
    is_phase,
    items_per_s,
    noise,
)
from lightning_gputime._results.units import duration, unit_of

LOCAL = "local"

NAMED_FROM = 0.05
"""A rank is named when it is slower than the others by this part of their step."""

_STANDARD_ERRORS = 4.0
"""And by so many standard errors of the difference."""

_ALIKE = 10
"""What slows a rank down lasts for some steps: at least so many count as one."""

_FEWEST = 3
"""Of fewer changes at a scale of several steps nothing is known."""

_ERROR = "<error>"

_AS_LONG = 0.8
"""From this part of the device's time on, the host's is as long."""

# Of a normal distribution: its standard deviation, by the mean change from one value to the next.
_DEVIATION = math.sqrt(math.pi) / 2


@dataclass(frozen=True, slots=True)
class RankStats:
    """The mean times of one phase on all ranks.

    Attributes:
        min_ms: Shortest of the ranks' means (in milliseconds).
        mean_ms: Mean over the steps of all ranks (in milliseconds).
        max_ms: Longest of the ranks' means (in milliseconds).
        slowest: The rank that it is of.
    """

    min_ms: float
    mean_ms: float
    max_ms: float
    slowest: int


@dataclass(frozen=True, slots=True)
class RankSummary:
    """The times of all ranks beside each other.

    A rank's local time is its step without `backward/comm` and the like, in which it waits for the
    others. Ranks are held against the others of their stage, if they are a pipeline; where none of
    these is slow, the stages are held against each other.

    Attributes:
        rows: For each phase that ran, for "step" and for "local".
        ranks: The ranks that took part, in order.
        slowest: The rank whose local time is the longest, if it is longer than the median of the
            other ranks by 5 % of their median step or more, and by more than 4 standard errors;
            else None. The standard error is the largest of those by the mean changes from step to
            step (ten counted as one), from two steps to the next two, and so on up to 1,024.
        behind_ms: How much longer the longest local time is than that median (in milliseconds).
        phase: The phase in which that rank loses most, of its local time; of `data` the part, if
            that is known.
        stage: The stage of that rank, where not the rank is slow but its stage is longer than the
            others; else None.
        sentence: Says which rank is slow, and in what; empty where none is.
        items_per_s: Items in a second, all ranks together; None where those of a rank are not
            known, or ranks work on the same batch: a pipeline, tensor parallelism.
    """

    rows: Mapping[str, RankStats]
    ranks: tuple[int, ...]
    slowest: int | None
    behind_ms: float
    phase: str
    stage: int | None = None
    sentence: str = ""
    items_per_s: float | None = None

    def metrics(self) -> dict[str, float]:
        """Returns what is logged; `slowest` is -1 where no rank is slow."""
        metrics = {}
        for name, row in self.rows.items():
            metrics[f"{name}_max_ms"] = row.max_ms
            metrics[f"{name}_min_ms"] = row.min_ms
        if self.items_per_s is not None:
            metrics["items_per_s"] = self.items_per_s
        metrics["slowest"] = -1.0 if self.slowest is None else float(self.slowest)
        return metrics


def compare(totals: Mapping[int, Totals]) -> RankSummary | None:
    """Sets the ranks beside each other.

    Args:
        totals: Those of each rank.

    Returns:
        The comparison, or None where no rank has timed a step.
    """
    totals = {
        rank: _with_local(one)
        for rank, one in sorted(totals.items())
        if STEP in one and one[STEP][1]
    }
    if not totals:
        return None
    # In the order of the first rank.
    names = dict.fromkeys(name for one in totals.values() for name in one if is_phase(name))
    names.pop(LOCAL, None)
    rows = {
        name: _row({rank: one[name] for rank, one in totals.items() if name in one})
        for name in (*in_order(list(names)), STEP, LOCAL)
    }
    own = {rank: _own_times(one) for rank, one in totals.items()}
    stages = _by_stage(totals)
    peers = [_Group({rank: own[rank] for rank in ranks}) for ranks in stages.values()]
    slow = max(peers, key=lambda group: (group.is_slow, group.behind_ms))
    slowest, stage = slow.slowest, None
    if len(stages) > 1 and not slow.is_slow:
        slow = _Group({at: _mean_of([own[rank] for rank in of]) for at, of in stages.items()})
        stage = slow.slowest
        slowest = max(stages[stage], key=lambda rank: own[rank][LOCAL])
    is_named = slow.is_slow
    return RankSummary(
        rows=rows,
        ranks=tuple(totals),
        slowest=slowest if is_named else None,
        behind_ms=slow.behind_ms,
        phase=slow.phase,
        stage=stage if is_named else None,
        sentence=_sentence(slow, stage, rows) if is_named else "",
        items_per_s=items_per_s(totals.values()) if len(stages) == 1 else None,
    )


class _Group:
    """Ranks of which each should take as long as the others, or stages.

    Args:
        own: The times a step of each, see `_own_times`.
    """

    def __init__(self, own: Mapping[int, Mapping[str, float]]) -> None:
        self.own = own
        self.slowest = max(own, key=lambda rank: own[rank][LOCAL])
        of_slowest = own[self.slowest]
        self._others = [one for rank, one in own.items() if rank != self.slowest]
        self.local_ms, self.step_ms = of_slowest[LOCAL], of_slowest[STEP]
        self.behind_ms = self._behind(LOCAL)
        top_level = [
            name for name in of_slowest if "/" not in name and is_phase(name) and name != LOCAL
        ]
        self.phase = max(top_level, key=self._behind, default="")
        if self.phase == DATA:
            parts = [name for name in of_slowest if name.startswith(f"{DATA}/")]
            part = max(parts, key=self._behind, default=DATA)
            if 2 * self._behind(part) >= self._behind(DATA):
                self.phase = part

    @property
    def is_slow(self) -> bool:
        """Whether the slowest of them is slow for certain, and not by chance."""
        error_ms = math.hypot(self.own[self.slowest][_ERROR], self._median(_ERROR))
        return (
            len(self.own) > 1
            and self.behind_ms >= NAMED_FROM * self._median(STEP)
            and self.behind_ms > _STANDARD_ERRORS * error_ms
        )

    @property
    def is_launching(self) -> bool:
        """Whether the host of the slowest takes as long for that phase as its device."""
        own = self.own[self.slowest]
        return own.get(host(self.phase), 0.0) >= _AS_LONG * own.get(self.phase, math.inf)

    @property
    def waiting(self) -> list[int]:
        """Those that are not the slowest."""
        return [rank for rank in self.own if self.own[rank][LOCAL] < self.local_ms]

    def _behind(self, name: str) -> float:
        # Without its own: of two ranks, the slow one would be half of what it is held against.
        return self.own[self.slowest][name] - self._median(name)

    def _median(self, name: str) -> float:
        others = [one.get(name, 0.0) for one in self._others]
        return statistics.median(others) if others else self.own[self.slowest][name]


def _sentence(slow: _Group, stage: int | None, rows: Mapping[str, RankStats]) -> str:
    where = slow.phase
    if not where.startswith(DATA):
        if slow.is_launching:
            where += ", which takes its host as long"
        elif f"{where}/{COMM}" in rows:
            where += " compute"
    if stage is None:
        return (
            f"rank {slow.slowest} is {duration(slow.behind_ms)} a step slower than the median,"
            f" in {where}"
        )
    waiting = [str(one) for one in slow.waiting]
    which = f"stage {waiting[0]} waits" if len(waiting) == 1 else "the others wait"
    unit = unit_of(slow.step_ms)
    return (
        f"stage {stage} works {unit.number(slow.local_ms)} of {unit.of(slow.step_ms)} a step,"
        f" {unit.of(slow.behind_ms)} more than the median, in {where}: {which}"
    )


def _with_local(totals: Totals) -> Totals:
    # With its waits the step of every rank is as long as that of the slowest: under DDP, with one
    # rank late in backward, two read 20.8 and 20.9 ms there, of which 3.5 and 20.5 were work of
    # their own.
    step_ms, steps = totals[STEP]
    waits_ms = sum(ms for name, (ms, _) in totals.items() if is_wait(name))
    return {**totals, LOCAL: (step_ms - waits_ms, steps)}


def _row(of_ranks: Mapping[int, tuple[float, int]]) -> RankStats:
    means = {rank: ms / n for rank, (ms, n) in of_ranks.items()}
    slowest = max(means, key=means.__getitem__)
    return RankStats(
        min_ms=min(means.values()),
        mean_ms=sum(ms for ms, _ in of_ranks.values()) / sum(n for _, n in of_ranks.values()),
        max_ms=means[slowest],
        slowest=slowest,
    )


def _own_times(totals: Totals) -> dict[str, float]:
    """Returns the time a step of each phase, and of the host in it, without the waits for ranks.

    Those below the top level of `data` alone; and the standard error of the local time.
    """
    # Over all steps, also where a phase ran in some: so they add up to the local time.
    steps = totals[STEP][1]
    own = {
        name: ms / steps
        for name, (ms, _) in totals.items()
        if "/" not in name or name.startswith(f"{DATA}/")
    }
    for name, (ms, _) in totals.items():
        if is_wait(name):
            own.pop(name, None)
            own[name.partition("/")[0]] -= ms / steps
    own[_ERROR] = _error_ms(totals, steps)
    return own


def _error_ms(totals: Totals, steps: int) -> float:
    """Returns the standard error of the local time, that of the scale at which it is largest."""
    errors_ms = []
    for scale in SCALES:
        changes_ms, n = totals.get(noise(scale), (0.0, 0))
        if n >= (_FEWEST if scale > 1 else 1):
            alike = scale if scale > 1 else _ALIKE
            # Of few changes the mean may be too small by chance.
            error_ms = _DEVIATION * changes_ms / n * math.sqrt(alike / steps)
            errors_ms.append(error_ms * (1 + 2 / n))
    # Of one step nothing is known.
    return max(errors_ms, default=math.inf)


def _by_stage(totals: Mapping[int, Totals]) -> dict[int, list[int]]:
    """Returns the ranks of each stage of a pipeline; all are of one where there is none."""
    stages: dict[int, list[int]] = {}
    for rank, one in totals.items():
        ms, n = one.get(STAGE, (0.0, 1))
        stages.setdefault(round(ms / n), []).append(rank)
    return stages


def _mean_of(ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    several = [*ranks]
    names = {name for one in several for name in one}
    return {name: statistics.fmean(one.get(name, 0.0) for one in several) for name in names}
