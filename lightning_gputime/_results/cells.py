"""The cells of a summary's table."""

from lightning_gputime._results.ranks import RankStats
from lightning_gputime._results.stats import PhaseStats


def indented(name: str) -> str:
    _, slash, part = name.partition("/")
    return f"  {part}" if slash else name


def cells(name: str, row: PhaseStats) -> tuple[str, ...]:
    times = (f"{ms:.3f}" for ms in (row.p50_ms, row.p95_ms, row.max_ms, row.host_mean_ms))
    return (name, f"{row.mean_ms:.3f}", f"{row.share:.1%}", *times, str(row.n))


def busy(row: PhaseStats) -> str:
    return "" if row.busy_mean_ms is None else f"{row.busy_mean_ms:.3f}"


def peak(row: PhaseStats) -> str:
    return "" if row.peak_mb is None else f"{row.peak_mb:,.1f}"


def of_ranks(row: RankStats | None) -> str:
    return "" if row is None else f"{row.min_ms:.3f} - {row.max_ms:.3f} ({row.slowest})"
