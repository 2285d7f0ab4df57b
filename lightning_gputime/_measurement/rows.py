"""Statistics of each phase over all steps, timed or not."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gputime._measurement.history import list_phases
from lightning_gputime._measurement.ranks import STEP
from lightning_gputime._measurement.stats import PhaseStats
from lightning_gputime._measurement.sums import Sums
from lightning_gputime._measurement.untimed import Estimate, Percentiles, percentiles
from lightning_gputime._phases import in_order


def phase_rows(
    timed: Sums,
    untimed: Estimate,
    times: npt.NDArray[Any],
    weights: npt.NDArray[np.float64],
    tflops: Mapping[str, float],
) -> dict[str, PhaseStats]:
    """Return the statistics of each phase and of "step".

    Args:
        timed: Sums over the timed steps.
        untimed: Estimate for the untimed steps.
        times: History of the timed steps.
        weights: Number of steps that each step of the history represents.
        tflops: TFLOP/s of each phase, if known.
    """
    every = timed.plus(untimed.sums)
    phases = {name: every.phases[name] for name in in_order([*every.phases])}
    steps = every.step.n + untimed.unsampled_steps
    all_ms = every.step.device_ms + untimed.unsampled_ms
    rows = {}
    for name, phase in {**phases, STEP: every.step}.items():
        column = f"{name}_ms"
        column_ms = times[column] if column in (times.dtype.names or ()) else ()
        p5_ms, p50_ms, p95_ms = _percentiles(column_ms, weights)
        timed_phase = timed.step if name == STEP else timed.phases.get(name)
        error_ms = untimed.errors_ms.get(name, 0.0)
        rows[name] = PhaseStats(
            n=int(timed_phase.n) if timed_phase is not None else 0,
            mean_ms=all_ms / steps if name == STEP and steps else phase.mean_ms,
            p50_ms=p50_ms,
            p95_ms=p95_ms,
            max_ms=phase.max_ms if phase.n else math.nan,
            share=(all_ms if name == STEP else phase.device_ms) / (all_ms or math.nan),
            host_mean_ms=phase.host_ms / phase.n if phase.n else math.nan,
            tflops=tflops.get(name),
            error_ms=error_ms / phase.n if phase.n else 0.0,
            share_error=error_ms / all_ms if all_ms and name != STEP else 0.0,
            p5_ms=p5_ms,
            frequency=phase.n / steps if name != STEP and steps else 1.0,
        )
    return rows


def least_shares(times: npt.NDArray[Any], weights: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return the fraction of the step that each phase takes in the half in which it takes less.

    Empty with fewer than 10 timed steps per half. The arguments are those of `phase_rows`.
    """
    half = len(times) // 2
    if half < 10:
        return {}
    if not len(weights):
        weights = np.ones(len(times))

    def shares(of: slice) -> dict[str, float]:
        all_ms = float(np.sum(times["step_ms"][of] * weights[of])) or math.nan
        return {
            name: float(np.nansum(times[f"{name}_ms"][of] * weights[of])) / all_ms
            for name in list_phases(times)
        }

    first, second = shares(slice(half)), shares(slice(half, None))
    return {name: min(first[name], second[name]) for name in first}


def _percentiles(times_ms: npt.ArrayLike, weights: npt.NDArray[np.float64]) -> Percentiles:
    """Return the percentiles over the steps in which a phase ran (NaN in all other steps)."""
    every_ms = np.asarray(times_ms)
    has_run = np.isfinite(every_ms)
    ran_ms = every_ms[has_run]
    if not len(ran_ms):
        return math.nan, math.nan, math.nan
    if len(weights) == len(every_ms) and np.ptp(weights):
        return percentiles(ran_ms, weights[has_run])
    p5_ms, p50_ms, p95_ms = np.percentile(ran_ms, (5, 50, 95)).tolist()
    return p5_ms, p50_ms, p95_ms
