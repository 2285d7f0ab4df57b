"""What stands between what a model computes and the peak of its GPU."""

from collections.abc import Mapping

from lightning_gputime._phases import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    OTHER,
    TRAINING_STEP,
    is_wait,
)
from lightning_gputime._results.stats import PhaseStats

KERNELS = "kernels below the peak"
GAPS = "launch gaps"
COMMUNICATION = "communication"

COMPUTE = (FORWARD, BACKWARD, TRAINING_STEP)
"""The phases that the FLOPs of the model are in."""


def waterfall(mfu: float, rows: Mapping[str, PhaseStats], step: PhaseStats) -> dict[str, float]:
    """Returns what the rest of the peak is lost to; with `mfu` it adds up to 1, else it is empty.

    Args:
        mfu: The part of the peak that the model's FLOPs are.
        rows: The phases, some of whose steps were probed.
        step: The steps.
    """
    whole_ms = step.n * step.mean_ms
    lost = dict.fromkeys((GAPS, DATA, COMMUNICATION, OPTIMIZER, OTHER), 0.0)
    waits = dict.fromkeys(rows, 0.0)
    for name, row in rows.items():
        if is_wait(name):
            lost[COMMUNICATION] += row.n * row.mean_ms
            waits[name.partition("/")[0]] = row.n * row.mean_ms
    for name, row in rows.items():
        if "/" in name:
            continue
        own_ms = row.n * row.mean_ms - waits[name]
        if name == DATA:
            lost[DATA] += own_ms
            continue
        # What a probe has not seen is taken for work.
        busy_ms = own_ms if row.busy_mean_ms is None else row.n * row.busy_mean_ms
        lost[GAPS] += own_ms - busy_ms
        if name not in COMPUTE:
            lost[OPTIMIZER if name == OPTIMIZER else OTHER] += busy_ms
    # Below zero only by chance: the probed steps are others.
    shares = {name: max(ms / whole_ms, 0.0) for name, ms in lost.items()}
    below_peak = 1.0 - mfu - sum(shares.values())
    # More than all: the FLOPs, or the peak, are not those of this training.
    return {KERNELS: below_peak, **shares} if below_peak >= 0 else {}


def in_points(shares: Mapping[str, float]) -> dict[str, int]:
    """Returns shares as whole percents that add up to their sum, rounded."""
    floors = {name: int(100 * share // 1) for name, share in shares.items()}
    rest = {name: 100 * share - floors[name] for name, share in shares.items()}
    # The largest remainders are rounded up.
    up = sorted(rest, key=lambda name: -rest[name])[: round(sum(rest.values()))]
    return {name: n + (name in up) for name, n in floors.items()}
