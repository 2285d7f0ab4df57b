"""Statistics of phases, and the rows that a table shows."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lightning_gputime._phases import SAVES, of_one_callback


@dataclass(frozen=True, slots=True)
class PhaseStats:
    """Statistics of one phase over the steps in which it ran.

    Attributes:
        n: Number of timed steps in which the phase ran.
        mean_ms: Mean device time per step (in milliseconds).
        p50_ms: Median, over the steps in the history (in milliseconds).
        p95_ms: 95th percentile, over the steps in the history (in milliseconds).
        max_ms: Maximum (in milliseconds).
        share: Fraction of the device time of all steps, from 0 to 1.
        host_mean_ms: Mean host time per step between the same marks (in milliseconds).
        tflops: FLOPs per second, including recomputation (in TFLOP/s); None if unknown.
        error_ms: Half the width of the 95 % interval of `mean_ms` (in milliseconds); 0.0 if every
            step was timed.
        share_error: Half the width of the 95 % interval of `share`, from 0 to 1.
        p5_ms: 5th percentile, over the steps in the history (in milliseconds).
        frequency: Fraction of all steps in which the phase ran, from 0 to 1.
    """

    n: int
    mean_ms: float = math.nan
    p50_ms: float = math.nan
    p95_ms: float = math.nan
    max_ms: float = math.nan
    share: float = math.nan
    host_mean_ms: float = math.nan
    tflops: float | None = None
    error_ms: float = 0.0
    share_error: float = 0.0
    p5_ms: float = math.nan
    frequency: float = 1.0


def is_uneven(row: PhaseStats) -> bool:
    """Return True if a minority of the steps takes most of a phase's time."""
    return row.p50_ms < 0.5 * row.mean_ms


def is_rare(row: PhaseStats) -> bool:
    """Return True if a phase is uneven, and at most 5 % of the steps take longer than its mean."""
    return is_uneven(row) and row.p95_ms < row.mean_ms


def largest_part(of_phases: Mapping[str, float], parent: str = "", sign: float = 1.0) -> str:
    """Return the phase with the most time, or its sub-phase with more than half of that time.

    With a `parent`, return that phase or one of its sub-phases. Without, return an empty string if
    no time is positive. With a negative `sign`, search for the largest decrease instead.
    """
    signed_ms = {name: math.copysign(1.0, sign) * ms for name, ms in of_phases.items()}
    while True:
        min_ms = 0.5 * signed_ms.get(parent, 0.0)
        inside = [name for name in signed_ms if name.rpartition("/")[0] == parent]
        large = [name for name in inside if signed_ms[name] > min_ms]
        if not large:
            return parent
        parent = max(large, key=signed_ms.__getitem__)


def table_rows(rows: Mapping[str, PhaseStats]) -> Iterator[tuple[str, str, PhaseStats]]:
    """Yield the name, the title and the statistics of each row of the table."""
    for name, row in rows.items():
        top, _, part = name.partition("/")
        if name == SAVES or not of_one_callback(name):
            yield name, f"  {part}" if part else top, row
