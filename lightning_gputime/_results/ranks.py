"""The times of several ranks beside each other: who is slow, and in what."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_gputime._phases import COMM, DATA, in_order, of_one_callback
from lightning_gputime._results.sums import Sums

Totals = Mapping[str, tuple[float, int]]
"""What one rank adds up: for each phase, and for "step", the sum of its times (in milliseconds)
and the number of steps in which it ran."""

STEP = "step"
LOCAL = "local"
_WAIT = f"/{COMM}"

NAMED_FROM = 0.05
"""A rank is named when it is slower than the others by this part of their step."""


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
    others.

    Attributes:
        rows: For each phase that ran, for "step" and for "local".
        ranks: The ranks that took part, in order.
        slowest: The rank whose local time is the longest, if it is longer than the median of the
            other ranks by 5 % of their median step or more; else None.
        behind_ms: How much longer the longest local time is than that median (in milliseconds).
        phase: The phase in which that rank loses most, of its local time.
    """

    rows: Mapping[str, RankStats]
    ranks: tuple[int, ...]
    slowest: int | None
    behind_ms: float
    phase: str

    @property
    def sentence(self) -> str:
        """Says which rank is slow, and in what; empty where none is."""
        if self.slowest is None:
            return ""
        has_waits = self.phase != DATA and f"{self.phase}{_WAIT}" in self.rows
        where = f"{self.phase} compute" if has_waits else self.phase
        return (
            f"rank {self.slowest} is {self.behind_ms:.3g} ms a step slower than the median,"
            f" in {where}"
        )

    def metrics(self) -> dict[str, float]:
        """Returns what is logged; `slowest` is -1 where no rank is slow."""
        metrics = {}
        for name, row in self.rows.items():
            metrics[f"{name}_max_ms"] = row.max_ms
            metrics[f"{name}_min_ms"] = row.min_ms
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
    names = {name for one in totals.values() for name in one} - {STEP, LOCAL}
    rows = {
        name: _row({rank: one[name] for rank, one in totals.items() if name in one})
        for name in (*in_order(list(names)), STEP, LOCAL)
    }
    own = {rank: _own_times(one) for rank, one in totals.items()}
    slowest = max(own, key=lambda rank: own[rank][LOCAL])
    behind_ms = own[slowest][LOCAL] - _median_of_others(slowest, LOCAL, own)
    return RankSummary(
        rows=rows,
        ranks=tuple(totals),
        slowest=(
            slowest
            if len(own) > 1 and behind_ms >= NAMED_FROM * _median_of_others(slowest, STEP, own)
            else None
        ),
        behind_ms=behind_ms,
        phase=max(
            (name for name in own[slowest] if name not in (STEP, LOCAL)),
            key=lambda name: own[slowest][name] - _median_of_others(slowest, name, own),
            default="",
        ),
    )


def totals_of(sums: Sums) -> Totals:
    """Returns the totals of a rank's steps."""
    phases = {**sums.phases, STEP: sums.step}
    return {
        name: (phase.device_ms, phase.n)
        for name, phase in phases.items()
        if not of_one_callback(name)
    }


def since(now: Totals, before: Totals) -> Totals:
    """Returns what was added to a rank's totals since `before`."""
    return {
        name: (ms - before.get(name, (0.0, 0))[0], n - before.get(name, (0.0, 0))[1])
        for name, (ms, n) in now.items()
        if n > before.get(name, (0.0, 0))[1]
    }


def _with_local(totals: Totals) -> Totals:
    # With its waits the step of every rank is as long as that of the slowest: under DDP, with one
    # rank late in backward, two read 20.8 and 20.9 ms there, of which 3.5 and 20.5 were work of
    # their own.
    step_ms, steps = totals[STEP]
    waits_ms = sum(ms for name, (ms, _) in totals.items() if name.endswith(_WAIT))
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
    """Returns the time a step of each top-level phase, without the waits for other ranks."""
    # Over all steps, also where a phase ran in some: so they add up to the local time.
    steps = totals[STEP][1]
    own = {name: ms / steps for name, (ms, _) in totals.items() if "/" not in name}
    for name, (ms, _) in totals.items():
        if name.endswith(_WAIT):
            own[name.partition("/")[0]] -= ms / steps
    return own


def _median_of_others(rank: int, name: str, own: Mapping[int, Mapping[str, float]]) -> float:
    # Without its own: of two ranks, the slow one would be half of what it is held against.
    others = [one.get(name, 0.0) for other, one in own.items() if other != rank]
    return statistics.median(others) if others else own[rank][name]
