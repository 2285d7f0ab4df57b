"""Component that sets the pace of a step: the GPU, kernel launches, or synchronizations."""

from typing import NamedTuple

from lightning_gputime._diagnosis.codes import COMPUTE_BOUND, GPU_BOUND, LAUNCH_BOUND, SYNC_BOUND
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.stats import largest_part
from lightning_gputime._measurement.units import percent, unit_of
from lightning_gputime._phases import COPY, DATA, FETCH, WAIT

# Minimum fractions of the step:
_MIN_WAIT = 0.1  # Host wait at which the GPU sets the pace.
_MIN_LAG = 0.2  # Lag of the GPU at which work queues up.
_MIN_BLOCKED = 0.05  # Decrease of the lag in a phase at which the CPU blocks there.
_MIN_GAPS = 0.1  # Launch gaps at which launches set the pace.


class Pace(NamedTuple):
    """Component that would set the pace of a step without its removable entries, such as `data`.

    Attributes:
        code: `GPU-bound`, `launch-bound` or `sync-bound`; `compute-bound` without a GPU.
        reason: Evidence, as part of a sentence.
        phases: Phases in which the CPU blocks, if sync-bound.
    """

    code: str
    reason: str
    phases: tuple[str, ...] = ()


def pace_of(measurement: Measurement) -> Pace:
    """Return the component that sets the pace of a step."""
    m = measurement
    if m.on_host_clock:
        return Pace(COMPUTE_BOUND, "the CPU computes the whole step")
    step_ms, wait_ms = m.step.mean_ms, m.host_wait_mean_ms
    unit = unit_of(step_ms)
    step = f"{unit.of(step_ms)} per step"
    waits = f"the CPU waits {unit.number(wait_ms)} of {step} for the GPU"
    if wait_ms >= _MIN_WAIT * step_ms:
        return Pace(GPU_BOUND, waits)
    # GPU time minus CPU time. Work queues up in phases in which it is positive. In phases in which
    # it is negative, the CPU is busy (a fetch) or blocked (a copy, `.item()`).
    lag_ms = {
        name: row.frequency * (row.mean_ms - row.host_mean_ms)
        for name, row in m.rows.items()
        if "/" not in name
    }
    queued_ms = sum(ms for ms in lag_ms.values() if ms > 0)
    if queued_ms >= _MIN_LAG * step_ms:
        lags = f"the GPU lags the CPU by {unit.number(queued_ms)} of {step}"
        blocked = [name for name, ms in lag_ms.items() if ms <= -_MIN_BLOCKED * step_ms]
        if not blocked:
            return Pace(GPU_BOUND, lags)
        # If `data` blocks, name its longest part.
        parts_of_data = (DATA, FETCH, COPY, WAIT)
        host_ms = {name: m.rows[name].host_mean_ms for name in parts_of_data if name in m.rows}
        phases = tuple(largest_part(host_ms, name) for name in blocked)
        quoted = ", ".join(f"`{name}`" for name in phases)
        return Pace(SYNC_BOUND, f"the CPU blocks on the GPU in {quoted}: {lags}", phases)
    idles = "the GPU idles while the CPU launches kernels"
    gap_share = m.launch_gap_share
    if gap_share is None:
        return Pace(LAUNCH_BOUND, f"{idles}; {waits}")
    if gap_share < _MIN_GAPS:
        return Pace(GPU_BOUND, f"launch gaps are only {percent(gap_share)} of the step")
    return Pace(LAUNCH_BOUND, f"{idles} ({percent(gap_share)} of the step)")
