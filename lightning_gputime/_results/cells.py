"""The cells of a summary's table."""

from lightning_gputime._results.ranks import RankStats
from lightning_gputime._results.stats import PhaseStats
from lightning_gputime._results.units import Unit

RANKS = "min - max (rank)"

DROPS = ("max", "steps", "host", "p95", "p50", "share", "busy", RANKS)
"""The columns that go where a table is too wide, the first of them first."""


def indented(name: str) -> str:
    _, slash, part = name.partition("/")
    return f"  {part}" if slash else name


def cells(name: str, row: PhaseStats, unit: Unit) -> tuple[str, ...]:
    times = map(unit.cell, (row.p50_ms, row.p95_ms, row.max_ms, row.host_mean_ms))
    return (name, unit.cell(row.mean_ms), f"{row.share:.1%}", *times, str(row.n))


def busy(row: PhaseStats, unit: Unit) -> str:
    return "" if row.busy_mean_ms is None else unit.cell(row.busy_mean_ms)


def of_ranks(row: RankStats | None, unit: Unit) -> str:
    if row is None:
        return ""
    return f"{unit.cell(row.min_ms)} - {unit.cell(row.max_ms)} ({row.slowest})"
