"""What sets the pace of a step: the GPU, the launches by the CPU, or waits of the CPU."""

from typing import NamedTuple

from lightning_gputime._diagnosis.codes import COMPUTE, GPU, LAUNCH, SYNC
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.stats import largest_part
from lightning_gputime._measurement.units import percent, unit_of
from lightning_gputime._phases import COPY, DATA, FETCH, WAIT

# Fractions of the step. The host waits for the GPU: it sets the pace. The GPU runs behind the host
# by this much: the host is blocked or busy in the phases in which it catches up.
_MIN_WAIT, _MIN_BEHIND, _MIN_BLOCKED = 0.1, 0.2, 0.05
MIN_GAPS = 0.1  # Smaller launch gaps do not limit a step.


class Pace(NamedTuple):
    """What limits the model's own work in a step.

    Attributes:
        code: `GPU-bound`, `launch-bound` or `sync-bound`; `compute-bound` without a GPU.
        grounds: The reason, in words.
        phases: Phases in which the CPU is blocked or busy, if it is sync-bound.
    """

    code: str
    grounds: str
    phases: tuple[str, ...] = ()


def pace_of(measurement: Measurement) -> Pace:
    """Return what limits the model's own work in a step."""
    m = measurement
    if m.on_host_clock:
        return Pace(COMPUTE, "the CPU computes all the time")
    step_ms, wait_ms = m.step.mean_ms, m.host_wait_mean_ms
    unit = unit_of(step_ms)
    step = f"{unit.of(step_ms)} per step"
    waits = f"the CPU waits {unit.number(wait_ms)} of {step} for the GPU"
    if wait_ms >= _MIN_WAIT * step_ms:
        return Pace(GPU, waits)
    # Where the GPU takes longer than the host, work is queued. Where the host takes longer, it is
    # busy (a fetch) or blocked (a copy, `.item()`).
    behind_ms = {
        name: row.frequency * (row.mean_ms - row.host_mean_ms)
        for name, row in m.rows.items()
        if "/" not in name
    }
    ahead_ms = sum(ms for ms in behind_ms.values() if ms > 0)
    if ahead_ms >= _MIN_BEHIND * step_ms:
        grounds = f"the GPU runs behind the CPU for {unit.number(ahead_ms)} of {step}"
        late = [name for name, ms in behind_ms.items() if -ms >= _MIN_BLOCKED * step_ms]
        if not late:
            return Pace(GPU, grounds)
        of_data = (DATA, FETCH, COPY, WAIT)
        host_ms = {name: m.rows[name].host_mean_ms for name in of_data if name in m.rows}
        phases = tuple(largest_part(host_ms, name) for name in late)
        named = ", ".join(f"`{name}`" for name in phases)
        return Pace(SYNC, f"the CPU blocks on the GPU in {named}: {grounds}", phases)
    idles = "the GPU idles while the CPU launches kernels"
    gaps = m.launch_gap_share
    if gaps is None:
        return Pace(LAUNCH, f"{idles}; {waits}")
    if gaps < MIN_GAPS:
        return Pace(GPU, f"launch gaps are only {percent(gaps)} of the step")
    return Pace(LAUNCH, f"{idles} ({percent(gaps)} of the step)")
