"""The cells of a summary's table."""

import math

from lightning_gputime._results.ranks import RankStats
from lightning_gputime._results.stats import PhaseStats


def cells(name: str, row: PhaseStats) -> tuple[str, ...]:
    """Returns the cells of a row; empty where a number is not known."""
    times = (row.p50_ms, row.p95_ms, row.max_ms, row.host_mean_ms)
    share = "" if math.isnan(row.share) else f"{row.share:.1%}"
    return (name, _ms(row.mean_ms), share, *map(_ms, times), str(row.n or ""))


def busy(row: PhaseStats) -> str:
    return "" if row.busy_mean_ms is None else f"{row.busy_mean_ms:.3f}"


def peak(row: PhaseStats) -> str:
    return "" if row.peak_mb is None else f"{row.peak_mb:,.1f}"


def of_ranks(row: RankStats | None) -> str:
    return "" if row is None else f"{row.min_ms:.3f} - {row.max_ms:.3f} ({row.slowest})"


def _ms(ms: float) -> str:
    return "" if math.isnan(ms) else f"{ms:.3f}"
