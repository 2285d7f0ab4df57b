"""Which rows of a summary its table shows: of many modules those that take longest."""

import math
from collections.abc import Iterator, Mapping, Sequence

from lightning_gputime._phases import BACKWARD, FORWARD, is_wait, of_one_callback
from lightning_gputime._results.stats import PhaseStats

MOST = 10
"""So many modules the table shows, where there are more than one more."""


def shown(rows: Mapping[str, PhaseStats]) -> Iterator[tuple[str, str, PhaseStats]]:
    """Yields the rows of the table: their names, what the table calls them, and their statistics.

    Of the modules inside `forward` and `backward` the same are shown, those that take longest in
    both together. The rest is one row, with the time that is in none of the innermost rows; its
    name is that of no phase.
    """
    chosen = _longest(rows)
    hidden: dict[str, PhaseStats] = {}
    top = ""
    for name, row in rows.items():
        if "/" not in name:
            yield from _others(top, hidden, chosen)
            top, hidden = name, {}
        if of_one_callback(name):
            continue
        if _is_module(name) and name.partition("/")[2] not in chosen:
            hidden[name] = row
        else:
            yield name, _title(name, chosen), row
    yield from _others(top, hidden, chosen)


def _is_module(name: str) -> bool:
    top, slash, _ = name.partition("/")
    return bool(slash) and top in (FORWARD, BACKWARD) and not is_wait(name)


def _longest(rows: Mapping[str, PhaseStats]) -> set[str]:
    """Returns the modules that are shown."""
    took: dict[str, float] = {}
    for name, row in rows.items():
        if _is_module(name):
            module = name.partition("/")[2]
            took[module] = took.get(module, 0.0) + row.n * row.mean_ms
    # What takes as long as a module inside it comes first: it is around it.
    longest = sorted(took, key=lambda module: (-took[module], module.count("/")))
    return {*(longest if len(longest) <= MOST + 1 else longest[:MOST])}


def _title(name: str, chosen: set[str]) -> str:
    """Returns a name, indented under what is above it in the table, and without that one's name."""
    top, *parts = name.split("/")
    if not parts:
        return top
    if not _is_module(name):
        return f"  {'/'.join(parts)}"
    above = [i for i in range(1, len(parts)) if "/".join(parts[:i]) in chosen]
    own = parts[-1]
    if above and own.startswith(f"{parts[above[-1] - 1]}."):
        own = own.removeprefix(parts[above[-1] - 1])
    return f"{'  ' * (len(above) + 1)}{own}"


def _others(
    top: str, hidden: Mapping[str, PhaseStats], chosen: set[str]
) -> Iterator[tuple[str, str, PhaseStats]]:
    if hidden:
        # The time of a module is part of that of the one around it. What is shown with modules
        # inside says by these how its time is made up; else it says all there is.
        parents = {above for module in chosen for above in _above(module)}
        told = {*hidden, *(f"{top}/{module}" for module in chosen - parents)}
        outside = [row for name, row in hidden.items() if told.isdisjoint(_above(name))]
        yield f"{top}/<others>", f"  {len(hidden)} others", _sum_of(outside)


def _above(name: str) -> Iterator[str]:
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


def _sum_of(rows: Sequence[PhaseStats]) -> PhaseStats:
    n = max((row.n for row in rows), default=0)
    busy = [row.busy_mean_ms for row in rows if row.busy_mean_ms is not None]
    peaks = [row.peak_mb for row in rows if row.peak_mb is not None]
    return PhaseStats(
        n=n,
        mean_ms=sum(row.n * row.mean_ms for row in rows) / n if n else math.nan,
        # Those of a sum are not known.
        p50_ms=math.nan,
        p95_ms=math.nan,
        max_ms=math.nan,
        share=sum(row.share for row in rows) if n else math.nan,
        host_mean_ms=sum(row.n * row.host_mean_ms for row in rows) / n if n else math.nan,
        busy_mean_ms=sum(busy) if n and len(busy) == len(rows) else None,
        peak_mb=max(peaks, default=None),
    )
