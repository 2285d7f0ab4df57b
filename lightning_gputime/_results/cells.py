"""The cells of a summary's table."""

import math

from lightning_gputime._results.ranks import RankStats
from lightning_gputime._results.stats import PhaseStats
from lightning_gputime._results.units import Unit

RANKS = "min - max (rank)"
PEAK = "peak MiB"

DROPS = ("max", "steps", "host", "p95", "p50", "share", "busy", PEAK, RANKS)
"""The columns that go where a table is too wide, the first of them first."""


def cells(name: str, row: PhaseStats, unit: Unit) -> tuple[str, ...]:
    """Returns the cells of a row; empty where a number is not known."""
    times = (row.p50_ms, row.p95_ms, row.max_ms, row.host_mean_ms)
    share = "" if math.isnan(row.share) else f"{row.share:.1%}"
    shown = (_time(ms, unit) for ms in times)
    return (name, _time(row.mean_ms, unit), share, *shown, str(row.n or ""))


def busy(row: PhaseStats, unit: Unit) -> str:
    return "" if row.busy_mean_ms is None else unit.cell(row.busy_mean_ms)


def peak(row: PhaseStats) -> str:
    return "" if row.peak_mb is None else f"{row.peak_mb:,.1f}"


def of_ranks(row: RankStats | None, unit: Unit) -> str:
    if row is None:
        return ""
    return f"{unit.cell(row.min_ms)} - {unit.cell(row.max_ms)} ({row.slowest})"


def _time(ms: float, unit: Unit) -> str:
    return "" if math.isnan(ms) else unit.cell(ms)
