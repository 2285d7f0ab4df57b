"""The times of several ranks beside each other: who is slow, and in what."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from lightning_gputime._phases import COMM, DATA, in_order, is_wait, of_one_callback, settle
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.sums import Sums
from lightning_gputime._results.units import duration, unit_of

# What one rank adds up, and sends to be compared

Totals = Mapping[str, tuple[float, int]]
"""Sums of one rank by name, each with the number of steps in which it ran (in milliseconds).

Of each phase, and of "step". Of `noise(scale)` those of changes, see `Noise`; of `STAGE` those of
the rank's place in a pipeline; of `ITEMS` and `ITEMS_TIME` those of its items, and of the time of
the steps whose items are known; of `host(phase)` those of the host's times.
"""

STEP = "step"
LOCAL = "local"
STAGE = "<stage>"
ITEMS = "<items>"
ITEMS_TIME = "<items time>"

SCALES = tuple(2**i for i in range(11))
"""Numbers of steps: what slows a rank down may last for some, or for hundreds."""


def host(phase: str) -> str:
    """Return the name of the host's time in a phase, waits for other ranks excluded."""
    return f"<host>{phase}"


def noise(scale: int) -> str:
    """Return the name of the changes at a scale."""
    return f"<noise>{scale}"


class Noise:
    """Adds up the changes of a rank's local time, that without the waits for other ranks.

    From one step to the next, from two steps to the next two, and so on. Changes, and not squares:
    one step that took very long must not hide what all others show.
    """

    def __init__(self) -> None:
        # Of each scale: the sum of the changes, their number, the last mean, and the first one of
        # a pair.
        self._sums_ms = [0.0] * len(SCALES)
        self._n = [0] * len(SCALES)
        self._last_ms: list[float | None] = [None] * len(SCALES)
        self._first_ms: list[float | None] = [None] * len(SCALES)

    def add(self, steps: Iterable[StepRecord]) -> None:
        """Add the next steps."""
        for step in steps:
            self.take(sum(map(step.device_ms.__getitem__, _own_marks(step.labels))))

    def take(self, local_ms: float) -> None:
        """Add the local time of the next step (in milliseconds)."""
        mean_ms = local_ms
        for i, last_ms in enumerate(self._last_ms):
            if last_ms is not None:
                self._sums_ms[i] += abs(mean_ms - last_ms)
                self._n[i] += 1
            self._last_ms[i] = mean_ms
            first_ms = self._first_ms[i]
            if first_ms is None:
                self._first_ms[i] = mean_ms
                return
            self._first_ms[i] = None
            mean_ms = (first_ms + mean_ms) / 2

    def changes(self) -> Mapping[int, tuple[float, int]]:
        """Return for each scale the sum of its changes (in milliseconds), and their number."""
        of_scales = zip(SCALES, self._sums_ms, self._n, strict=True)
        return {scale: (sum_ms, n) for scale, sum_ms, n in of_scales if n}


@lru_cache(maxsize=256)
def _own_marks(labels: tuple[str, ...]) -> tuple[int, ...]:
    settled = settle(labels)
    return tuple(i for i, names in enumerate(settled) if names and not is_wait(names[-1]))


def totals_of(
    sums: Sums, changes: Noise | None = None, stage: int | None = None, *, with_host: bool = False
) -> Totals:
    """Return the totals of a rank's steps.

    Args:
        sums: Over the steps.
        changes: Those of the steps, if they are known.
        stage: The rank's place in a pipeline, if there is one.
        with_host: Whether the host's times differ from the phases' own.
    """
    totals = {
        name: (phase.device_ms, phase.n)
        for name, phase in {**sums.phases, STEP: sums.step}.items()
        if not of_one_callback(name)
    }
    if with_host:
        totals |= _host_totals(sums)
    if changes is not None:
        totals |= {noise(scale): one for scale, one in changes.changes().items()}
    if sums.items_ms:
        totals[ITEMS] = (sums.items, sums.step.n)
        totals[ITEMS_TIME] = (sums.items_ms, sums.step.n)
    if stage is not None:
        totals[STAGE] = (float(stage * sums.step.n), sums.step.n)
    return totals


def _host_totals(sums: Sums) -> dict[str, tuple[float, int]]:
    of_phases = {name: one.host_ms for name, one in sums.phases.items() if "/" not in name}
    for name, one in sums.phases.items():
        if is_wait(name):
            of_phases[name.partition("/")[0]] -= one.host_ms
    return {host(name): (ms, sums.phases[name].n) for name, ms in of_phases.items()}


def since(now: Totals, before: Totals) -> Totals:
    """Return what was added to a rank's totals since `before`."""
    nothing = (0.0, 0)
    changes = {
        name: (ms - before.get(name, nothing)[0], n - before.get(name, nothing)[1])
        for name, (ms, n) in now.items()
    }
    return {name: (ms, n) for name, (ms, n) in changes.items() if n > 0}


# What is told of all ranks

_MIN_BEHIND = 0.05
"""A rank is named if it is slower than the others by this fraction of their step."""

_STANDARD_ERRORS = 4.0
"""And by this many standard errors of the difference."""

_CORRELATED_STEPS = 10
"""What slows a rank down lasts for some steps: this many count as one."""

_MIN_CHANGES = 3
"""With fewer changes at a scale of several steps nothing is known."""

_HOST_BOUND = 0.8
"""From this fraction of the device's time on, the host's is as long."""

# Of a normal distribution: its standard deviation, by the mean change from one value to the next.
_DEVIATION = math.sqrt(math.pi) / 2

_ERROR = "<error>"


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
    others. Ranks are compared with the others of their stage, if they are a pipeline; where none of
    these is slow, the stages are compared.

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
        sentence: Which rank is slow, and in what; empty where none is.
        items_per_s: Items per second, all ranks together; None where those of a rank are not known,
            or ranks work on the same batch: a pipeline, tensor parallelism.
    """

    rows: Mapping[str, RankStats]
    ranks: tuple[int, ...]
    slowest: int | None
    behind_ms: float
    phase: str
    stage: int | None = None
    sentence: str = ""
    items_per_s: float | None = None

    @property
    def sentences(self) -> tuple[str, ...]:
        """What is printed."""
        return (self.sentence,)

    def metrics(self) -> dict[str, float]:
        """Return what is logged; `slowest` is -1 where no rank is slow."""
        metrics = {}
        for name, row in self.rows.items():
            metrics[f"{name}_max_ms"] = row.max_ms
            metrics[f"{name}_min_ms"] = row.min_ms
        if self.items_per_s is not None:
            metrics["items_per_s"] = self.items_per_s
        metrics["slowest"] = -1.0 if self.slowest is None else float(self.slowest)
        return metrics


def compare(totals: Mapping[int, Totals]) -> RankSummary | None:
    """Compare the ranks.

    Args:
        totals: Those of each rank.

    Returns:
        The comparison, or None if no rank has timed a step.
    """
    totals = {
        rank: _with_local(one)
        for rank, one in sorted(totals.items())
        if STEP in one and one[STEP][1]
    }
    if not totals:
        return None
    rows = _rows(totals)
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
        items_per_s=_items_per_s(totals.values()) if len(stages) == 1 else None,
    )


class _Group:
    """Ranks, or stages, of which each should take as long as the others.

    Args:
        own: The times per step of each, see `_own_times`.
    """

    def __init__(self, own: Mapping[int, Mapping[str, float]]) -> None:
        self.own = own
        self.slowest = max(own, key=lambda rank: own[rank][LOCAL])
        self._of_slowest = own[self.slowest]
        self._others = [one for rank, one in own.items() if rank != self.slowest]
        self.local_ms, self.step_ms = self._of_slowest[LOCAL], self._of_slowest[STEP]
        self.behind_ms = self._behind(LOCAL)
        self.phase = self._phase_behind()

    def _phase_behind(self) -> str:
        """Return the phase in which the slowest loses most; of `data` the part, if it is known."""
        names = [name for name in self._of_slowest if _is_phase(name) and name != LOCAL]
        top_level = [name for name in names if "/" not in name]
        phase = max(top_level, key=self._behind, default="")
        if phase == DATA:
            parts = [name for name in names if name.startswith(f"{DATA}/")]
            part = max(parts, key=self._behind, default=DATA)
            return part if 2 * self._behind(part) >= self._behind(DATA) else DATA
        return phase

    @property
    def is_slow(self) -> bool:
        """Whether the slowest of them is slow beyond the noise."""
        error_ms = math.hypot(self._of_slowest[_ERROR], self._median(_ERROR))
        return (
            len(self.own) > 1
            and self.behind_ms >= _MIN_BEHIND * self._median(STEP)
            and self.behind_ms > _STANDARD_ERRORS * error_ms
        )

    @property
    def is_launching(self) -> bool:
        """Whether the host of the slowest takes as long for that phase as its device."""
        own = self._of_slowest
        return own.get(host(self.phase), 0.0) >= _HOST_BOUND * own.get(self.phase, math.inf)

    @property
    def waiting(self) -> list[int]:
        """Those that are not the slowest."""
        return [rank for rank in self.own if self.own[rank][LOCAL] < self.local_ms]

    def _behind(self, name: str) -> float:
        # Of two ranks, the slow one would be half of a median that it is part of.
        return self._of_slowest[name] - self._median(name)

    def _median(self, name: str) -> float:
        others = [one.get(name, 0.0) for one in self._others]
        return statistics.median(others) if others else self._of_slowest[name]


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
    waiting = slow.waiting
    which = f"stage {waiting[0]} waits" if len(waiting) == 1 else "the others wait"
    unit = unit_of(slow.step_ms)
    return (
        f"stage {stage} works {unit.number(slow.local_ms)} of {unit.of(slow.step_ms)} a step,"
        f" {unit.of(slow.behind_ms)} more than the median, in {where}: {which}"
    )


def _is_phase(name: str) -> bool:
    return name != STEP and not name.startswith("<")


def _with_local(totals: Totals) -> Totals:
    # With its waits the step of every rank is as long as that of the slowest: under DDP, with one
    # rank late in backward, two read 20.8 and 20.9 ms there, of which 3.5 and 20.5 were work of
    # their own.
    step_ms, steps = totals[STEP]
    waits_ms = sum(ms for name, (ms, _) in totals.items() if is_wait(name))
    return {**totals, LOCAL: (step_ms - waits_ms, steps)}


def _rows(totals: Mapping[int, Totals]) -> dict[str, RankStats]:
    # In the order of the first rank.
    names = dict.fromkeys(name for one in totals.values() for name in one if _is_phase(name))
    names.pop(LOCAL, None)
    return {
        name: _row({rank: one[name] for rank, one in totals.items() if name in one})
        for name in (*in_order(list(names)), STEP, LOCAL)
    }


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
    """Return the time per step of each phase, and of the host in it, without waits for ranks.

    Also of the parts of `data`, and the standard error of the local time.
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
    """Return the standard error of the local time, at the scale where it is largest."""
    errors_ms = []
    for scale in SCALES:
        changes_ms, n = totals.get(noise(scale), (0.0, 0))
        if n >= (_MIN_CHANGES if scale > 1 else 1):
            correlated = scale if scale > 1 else _CORRELATED_STEPS
            # The mean of few changes may be too small by chance.
            error_ms = _DEVIATION * changes_ms / n * math.sqrt(correlated / steps)
            errors_ms.append(error_ms * (1 + 2 / n))
    # Nothing is known of one step.
    return max(errors_ms, default=math.inf)


def _by_stage(totals: Mapping[int, Totals]) -> dict[int, list[int]]:
    """Return the ranks of each stage of a pipeline; without one, all are of the same stage."""
    stages: dict[int, list[int]] = {}
    for rank, one in totals.items():
        ms, n = one.get(STAGE, (0.0, 1))
        stages.setdefault(round(ms / n), []).append(rank)
    return stages


def _mean_of(ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    several = [*ranks]
    names = {name for one in several for name in one}
    return {name: statistics.fmean(one.get(name, 0.0) for one in several) for name in names}


def _items_per_s(totals: Iterable[Totals]) -> float | None:
    """Return the items per second of all ranks; None if one does not know its own."""
    found = 0.0
    for one in totals:
        items, _ = one.get(ITEMS, (0.0, 0))
        ms, _ = one.get(ITEMS_TIME, (0.0, 0))
        if not ms:
            return None
        found += 1e3 * items / ms
    return found
