"""The statistics of phases, and which of them the table shows."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from lightning_gputime._phases import BACKWARD, FORWARD, SAVES, is_wait, of_one_callback

_MOST_OF_IT = 0.5  # A part that is more than this fraction of its phase is named in its place.
_MAX_MODULES = 10  # The table shows this many modules, or one more if that is all.


@dataclass(frozen=True, slots=True)
class PhaseStats:
    """Statistics of one phase over the steps in which it ran.

    Attributes:
        n: Number of those steps.
        mean_ms: Mean device time per step (in milliseconds).
        p50_ms: Median, over the steps in the history (in milliseconds).
        p95_ms: 95th percentile, over the steps in the history (in milliseconds).
        max_ms: Longest (in milliseconds).
        share: Fraction of the device time of all steps, from 0 to 1.
        host_mean_ms: Mean host time per step between the same marks (in milliseconds).
        gpu_busy_mean_ms: Mean device time in probed steps: the work without launch gaps (in
            milliseconds). None if no step was probed.
        tflops: Its FLOPs per second, recomputation included (in TFLOP/s). None if not known.
        error_ms: Half the width of the 95 % interval of `mean_ms`, where a sample of the steps was
            timed (in milliseconds); 0.0 where every step was.
        share_error: The same for `share`, from 0 to 1.
        p5_ms: 5th percentile, over the steps in the history (in milliseconds).
        frequency: Fraction of all steps in which it ran, from 0 to 1.
    """

    n: int
    mean_ms: float = math.nan
    p50_ms: float = math.nan
    p95_ms: float = math.nan
    max_ms: float = math.nan
    share: float = math.nan
    host_mean_ms: float = math.nan
    gpu_busy_mean_ms: float | None = None
    tflops: float | None = None
    error_ms: float = 0.0
    share_error: float = 0.0
    p5_ms: float = math.nan
    frequency: float = 1.0


def is_uneven(row: PhaseStats) -> bool:
    """Return whether few steps have most of a phase's time."""
    return row.p50_ms < 0.5 * row.mean_ms


def largest_part(of_phases: Mapping[str, float], found: str = "", sign: float = 1.0) -> str:
    """Return the phase with the most time, or the part of it (or of `found`) that is half of it.

    With a negative `sign` that is the one with the least.
    """
    along = {name: math.copysign(1.0, sign) * ms for name, ms in of_phases.items()}
    while True:
        least = _MOST_OF_IT * along.get(found, 0.0)
        inside = [one for one in along if one.rpartition("/")[0] == found and along[one] > least]
        if not inside:
            return found
        found = max(inside, key=along.__getitem__)


def table_rows(rows: Mapping[str, PhaseStats]) -> Iterator[tuple[str, str, PhaseStats]]:
    """Yield the name, the title and the statistics of each row of the table.

    Of the modules, `forward` and `backward` show the same: those that take longest in both
    together. Of the others one row has the number.
    """
    chosen = _longest_modules(rows)
    for top, of_phase in groupby(rows, lambda name: name.partition("/")[0]):
        hidden = 0
        for name in of_phase:
            if _is_module(name) and name.partition("/")[2] not in chosen:
                hidden += 1
            elif name == SAVES or not of_one_callback(name):
                yield name, _title(name, chosen), rows[name]
        if hidden:
            yield f"{top}/<others>", f"  {hidden} others", PhaseStats(0)


def _is_module(name: str) -> bool:
    top, slash, _ = name.partition("/")
    return bool(slash) and top in (FORWARD, BACKWARD) and not is_wait(name)


def _longest_modules(rows: Mapping[str, PhaseStats]) -> set[str]:
    took: dict[str, float] = {}
    for name, row in rows.items():
        if _is_module(name):
            module = name.partition("/")[2]
            took[module] = took.get(module, 0.0) + row.n * row.mean_ms
    # Of two that take as long, the outer one comes first.
    longest = sorted(took, key=lambda module: (-took[module], module.count("/")))
    return {*(longest if len(longest) <= _MAX_MODULES + 1 else longest[:_MAX_MODULES])}


def _title(name: str, chosen: set[str]) -> str:
    """Return a name, indented below the row that it is part of, without that row's name."""
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
