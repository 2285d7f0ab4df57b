"""Statistics of a comparison: times of each run, and differences between two sides."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightning_gputime._ledger.rows import LONG_STEP

Floats = npt.NDArray[np.float64]
Outcome = Literal["passed", "regression", "cannot tell"]
OUTCOMES: tuple[Outcome, ...] = ("regression", "cannot tell", "passed")
"""Outcomes, worst first."""

RESOLUTION_MS = 0.002  # Resolution of the clock at each phase boundary.
# Number of blocks of consecutive steps from which a variance is estimated. More blocks are shorter,
# and a slow period of hundreds of steps would span several; fewer show no spread.
_BLOCKS = 12
MIN_STEPS = 2 * _BLOCKS  # Blocks of half the length must have a step.
_TRIMMED_SHARE = 0.25  # Fraction to trim at each end, for the interquartile mean.
# Long steps recur periodically if at least 5 of them have a common period of at least 5 steps:
# fewer, or closer ones, may have a common divisor by chance.
_MIN_LONG_STEPS, _MIN_PERIOD = 5, 5
# Maximum factor on the noise of the time before, in errors of relative changes. Without a limit, a
# short phase that grew many times would never be a regression.
_MAX_RATIO = 2.0
_NORMAL_95 = 1.96  # Two-sided quantile of the normal distribution.
MIN_RUNS = 3  # Minimum number of runs per side: two do not show the spread on a busy host.
# Minimum fraction of the step of a phase by which times are scaled: a short phase varies for other
# reasons than the speed of the host.
_MIN_SCALE_SHARE = 0.1
_LIKELY = 0.6  # Confidence of an interval whose upper end is a one-sided bound of 80 %.


@dataclass(frozen=True, slots=True)
class Estimate:
    """Times of one run: the step in the first column, its phases in the others."""

    values: Floats  # Time of each column per step (in milliseconds).
    variances: Floats  # Variance of each value due to the noise within the run.
    not_sampled_ms: float = 0.0  # Time per step that no timed step represents, in any phase.


Sides = list[list[Estimate]]


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of the step, a phase or an entry of the wall clock between two sides.

    Attributes:
        before_ms: Time before (in milliseconds).
        after_ms: Time after (in milliseconds).
        error_ms: Half-width of the confidence interval of `change_ms` (in milliseconds).
        relative_error: Half-width of the interval of `relative_change`. It includes the noise of
            `before_ms` times `after_ms / before_ms`, a factor that is limited to 2.
        resolution_ms: Resolution of the clock (in milliseconds).
    """

    before_ms: float
    after_ms: float
    error_ms: float
    relative_error: float
    resolution_ms: float = 0.0

    @property
    def change_ms(self) -> float:
        """Time after minus time before (in milliseconds)."""
        return self.after_ms - self.before_ms

    @property
    def relative_change(self) -> float:
        """The change as a fraction of `before_ms`; NaN if `before_ms` is zero."""
        return self.change_ms / self.before_ms if self.before_ms else math.nan

    @property
    def is_significant(self) -> bool:
        """True if the change exceeds its error and the clock's resolution."""
        return abs(self.change_ms) > max(self.error_ms, self.resolution_ms)

    @property
    def direction(self) -> str:
        """Either "slower" or "faster" if the change is significant, else "alike"."""
        if not self.is_significant:
            return "alike"
        return "slower" if self.change_ms > 0 else "faster"

    def to_dict(self) -> dict[str, Any]:
        derived = {"change_ms": self.change_ms, "relative_change": self.relative_change}
        return {**asdict(self), **derived, "direction": self.direction}

    def outcome(self, bound: float, tolerance_ms: float = 0.0) -> Outcome:
        """Return whether the time grew by more than a fraction of the time before.

        Args:
            bound: Fraction, such as 0.02 for 2 %.
            tolerance_ms: Growth that passes even if it is above the bound (in milliseconds).

        Returns:
            "regression" if the whole interval lies above the bound, "passed" if the whole interval
            lies below the bound, the tolerance or the clock's resolution, else "cannot tell".
        """
        # A new phase takes 0 ms before, so any time after is above any bound.
        is_above = not self.before_ms or self.relative_change - self.relative_error > bound
        if self.is_significant and self.change_ms > 0 and is_above:
            return "regression"
        is_below = self.relative_change + self.relative_error <= bound
        max_change_ms = self.change_ms + self.error_ms
        is_passed = is_below or max_change_ms <= max(self.resolution_ms, tolerance_ms)
        return "passed" if is_passed else "cannot tell"


def typical_step(times: Floats) -> Estimate:
    """Return the mean of each column over the middle half of the steps by duration.

    All columns are averaged over the same steps, so the phases still add up to the step. The
    estimate is robust: a step of one second has no more influence than a slightly slow step.

    Example: steps of 10, 10, 11, 11, 12, 12, 13 and 900 ms give 11.5 ms, the mean of the middle 4.
    """
    n = len(times)
    cut = int(n * _TRIMMED_SHARE)
    order = np.argsort(times[:, 0], kind="stable")
    kept = order[cut : n - cut]
    influence = np.empty_like(times)
    influence[kept] = times[kept]
    # A trimmed step only shifts a border of the middle half, so it has the influence of a step at
    # that border. Times may jump at the border, so use the mean of the steps around it.
    near = max(cut // 5, 1)
    influence[order[:cut]] = times[order[cut - near : cut + near]].mean(axis=0)
    influence[order[n - cut :]] = times[order[n - cut - near : n - cut + near]].mean(axis=0)
    influence -= influence.mean(axis=0)
    return Estimate(times[kept].mean(axis=0), variance(influence * n / len(kept)))


def mean_step(times: Floats) -> Estimate:
    """Return the mean of each column over all steps: 122 ms in the example above."""
    values = times.mean(axis=0)
    return Estimate(values, variance(times - values))


def mean_of_all_steps(
    numbers: npt.NDArray[np.int64],
    times: Floats,
    *,
    means: Floats,
    errors: Floats,
    all_steps: int,
    max_ms: float,
    not_sampled_ms: float = 0.0,
) -> Estimate:
    """Return the means over all steps of a run in which only some steps were timed.

    `means` are the estimates for all steps, and `errors` the half-widths of their 95 % intervals.
    This function adds how much another run of the same program would differ. Timed steps show it:
    their mean varies at least as much as the mean of all steps. There is one exception. If long
    steps recur with a fixed period, equal runs differ by at most one long step, but the timed steps
    contain long steps too often or too rarely.

    Example: 1 of 50 steps takes 60 ms more, and 2000 steps have 40 of them. Another run may have
    41, which shifts the mean by 60 / 2000 = 0.03 ms. That is the standard error of the long steps.

    Args:
        numbers: Numbers of the timed steps.
        times: Times of the timed steps.
        means: Estimate of each column for all steps (in milliseconds).
        errors: Half-widths of the 95 % intervals of `means`.
        all_steps: Number of steps, timed or not.
        max_ms: Time of the longest step.
        not_sampled_ms: See `Estimate`.
    """
    step_ms = times[:, 0]
    is_long = step_ms > LONG_STEP * np.median(step_ms)
    numbers_of_long = numbers[is_long]
    period = np.gcd.reduce(np.diff(numbers_of_long))
    is_periodic = len(numbers_of_long) >= _MIN_LONG_STEPS and period >= _MIN_PERIOD
    usual = times[~is_long].mean(axis=0) if is_periodic else times.mean(axis=0)
    added_ms = max(float(means[0] - usual[0]), 0.0)  # Time above the usual step, per step.
    variances, influence = np.square(errors / _NORMAL_95), times - usual
    if is_periodic:
        excess = influence[is_long]
        # The long steps, timed or not, that explain the added time: 1.2 ms * 2000 / 60 ms = 40.
        long_steps = added_ms * all_steps / excess[:, 0].mean()
        one_more = np.square(np.abs(excess).max(axis=0))
        variances += (one_more + long_steps * excess.var(axis=0)) / all_steps**2
        # `variance` now only covers the other steps, so scale their influence to all timed steps.
        influence[is_long] = 0.0
        influence *= len(times) / np.count_nonzero(~is_long)
    else:
        # Assume that steps of `max_ms` at random places took the added time. Their number k has the
        # variance k (Poisson): 1 ms added to 1000 steps by steps of +100 ms means that k = 10, and
        # a variance of the mean of 10 * (100 / 1000)**2 = 1 ms * 100 ms / 1000.
        variances[0] += added_ms * max(max_ms - float(usual[0]), 0.0) / all_steps
    return Estimate(means, variances + variance(influence), not_sampled_ms)


def variance(influence: Floats) -> Floats:
    """Return the variance of an estimate due to the noise of the steps, for each column.

    Steps that follow each other have similar times, so take the variance from the means of blocks
    of consecutive steps (moving-block bootstrap). The blocks are long, because a slow period may
    last for hundreds of steps. So there are only 12 blocks, and few degrees of freedom for
    `quantile_of_t`. The result is at least that of one more step with the largest influence.

    Example: the means of 12 blocks vary by 1 ms (standard deviation), so the mean of all steps has
    a variance of 1 / (12 - 1) = 0.09, and a standard error of 0.3 ms.

    Args:
        influence: By how much each step shifts the estimate, times the number of steps. Its mean is
            zero. If the estimate is a mean, it is the time of the step minus the mean.
    """
    n_steps = len(influence)
    sums = np.vstack((np.zeros(influence.shape[1]), np.cumsum(influence, axis=0)))
    length = n_steps // _BLOCKS
    half, full = (
        # Means of all overlapping blocks of this length. Divide by the number of independent
        # blocks, minus 1 because their mean is estimated, too.
        ((sums[block:] - sums[:-block]) / block).var(axis=0) / (n_steps / block - 1)
        for block in (length // 2, length)
    )
    # Longer blocks preserve more correlation. Extrapolate: add the growth from half to full length.
    extrapolated = full + np.maximum(full - half, 0)
    # If slow steps recur with a fixed period, all blocks have the same number of slow steps, but
    # another run may have one more.
    one_more = (np.abs(influence).max(axis=0) / n_steps) ** 2
    return np.asarray(np.maximum(extrapolated, one_more))


def differences(
    before: Sequence[Estimate],
    after: Sequence[Estimate],
    *,
    confidence: float | Floats,
    in_turns: bool = False,
    resolution_ms: Sequence[float] = (),
) -> list[Difference]:
    """Return the difference of each column between two sides. Column 0 is the step.

    Example: 10, 11 and 12 ms before, and 11, 12 and 13 ms after. The change is 1 ms. Each side has
    a variance of 1 between its runs, so the change has one of 1 / 3 + 1 / 3, and its 95 % interval
    is 1 ms ± 2.78 * 0.82 ms = 1 ± 2.3 ms.

    Args:
        before: Runs before.
        after: Runs after.
        confidence: Confidence of the intervals; may differ between the columns.
        in_turns: True if the sides alternated. Then each run is compared with its pair.
        resolution_ms: Resolution of the clock, for each column.
    """
    n_before, n_after = len(before), len(after)
    values = [np.array([run.values for run in runs]) for runs in (before, after)]
    noise = [
        np.mean([run.variances for run in runs], axis=0) / len(runs) for runs in (before, after)
    ]
    before_ms, after_ms = (runs.mean(axis=0) for runs in values)
    exists = before_ms > 0
    ratio = np.divide(after_ms, before_ms, out=np.zeros_like(before_ms), where=exists)
    # Time that was not sampled may belong to any phase. The duration of every step is measured.
    not_sampled_ms = np.full_like(
        before_ms, max(np.mean([run.not_sampled_ms for run in runs]) for runs in (before, after))
    )
    not_sampled_ms[0] = 0.0

    def error_of(factor: Floats | float) -> Floats:
        """Return the half-width of the interval of `after - factor * before`."""
        # Noise within the runs.
        freedom = (_BLOCKS - 1) * min(n_before, n_after)
        error = quantile_of_t(freedom, confidence) * np.sqrt(noise[1] + factor**2 * noise[0])
        if n_before + n_after > 2:  # Two runs do not show the spread between runs.
            if in_turns:
                # Spread between pairs: what changes slowly is the same in both runs of a pair.
                freedom = n_before - 1
                variances = (values[1] - factor * values[0]).var(axis=0, ddof=1) / n_before
            else:
                # Spread between the runs of a side, pooled as in Student's test.
                freedom = n_before + n_after - 2
                squares = n_before * values[0].var(axis=0) + n_after * values[1].var(axis=0)
                variances = squares / freedom * (factor**2 / n_before + 1 / n_after)
            between = quantile_of_t(freedom, confidence) * np.sqrt(variances)
            # The spread includes the noise within the runs, but a few runs may be alike by chance.
            error = np.maximum(error, between)
        return np.asarray(error + not_sampled_ms)

    # To first order, the error of after / before is that of after - ratio * before, divided by
    # before: 100 ± 1 ms that become 150 ± 1 ms are 50 % ± sqrt(1 + 1.5**2) / 100 = 50 % ± 1.8 %.
    relative_error = np.divide(
        error_of(np.minimum(ratio, _MAX_RATIO)),
        before_ms,
        out=np.full_like(before_ms, np.nan),
        where=exists,
    )
    resolution = resolution_ms or np.zeros_like(before_ms)
    columns = (before_ms, after_ms, error_of(1.0), relative_error, resolution)
    return [Difference(*row) for row in np.stack(columns, axis=1).tolist()]


def quantile_of_t(freedom: float, confidence: float | Floats) -> Floats:
    """Return the half-width of a confidence interval of Student's t, in standard errors.

    Example: 2.78 for 4 degrees of freedom and 95 %. As torch and NumPy have no such function,
    integrate the density: with t = sqrt(freedom) * tan(angle), it is cos(angle)**(freedom - 1).
    """
    angles = np.linspace(0, np.pi / 2, 4_001)
    density = np.cos(angles) ** (freedom - 1)
    cumulative = np.append(0, np.cumsum(density[1:] + density[:-1]))  # Trapezoidal rule.
    angle = np.interp(confidence, cumulative / cumulative[-1], angles)
    return np.asarray(math.sqrt(freedom) * np.tan(angle))


# A host that other work keeps busy: its speed differs from run to run. Two facts of the runs reduce
# this noise. A short calculation (`trial_ms`), repeated during each run, tells how slow the host
# was. And a busy host makes all phases longer by about the same factor, so the proportions of the
# phases vary less than their times.


@dataclass(frozen=True, slots=True)
class ProportionalStep:
    """Difference of the step on a busy host, which makes all phases longer by the same factor.

    The times of each run are scaled such that one phase takes the same time in all runs: of the
    phases that take at least 10 % of the step, the one that grew least, in percent.
    """

    phase: str  # The phase by which times are scaled.
    step: Difference  # The scaled step. `RunComparison.step` is the step as measured.
    likely_error: float  # Half-width of the 60 % interval of the change of the step, not scaled.

    def outcome(self, bound: float, measured_step: Difference) -> Outcome:
        """Return whether the step is slower by more than a fraction of the time before.

        The scaled step decides if the step as it was measured supports it:

        - It is a regression if the scaled step exceeds the bound, and the measured mean does, too.
        - It passes if the scaled step passes, and the measured step probably (80 %) does, too: all
          phases together may have become slower.

        Else the measured step alone decides.
        """
        outcome = self.step.outcome(bound)
        change = measured_step.relative_change
        if outcome == "regression" and change > bound:
            return outcome
        if outcome == "passed" and change + self.likely_error <= bound:
            return outcome
        return measured_step.outcome(bound)

    def __str__(self) -> str:
        change, error = self.step.relative_change, self.step.relative_error
        return f"in proportion to {self.phase}: {100 * change:+.1f} % ± {100 * error:.1f} %"


def at_equal_speed(
    trials_ms: Sequence[Sequence[float]], estimates: Sides, means: Sides
) -> tuple[Sides, Sides, str] | None:
    """Return the times as if the host had been equally fast in all runs, and a note.

    Return None if that does not explain why the runs of a side differ.

    Example: a run of 12 ms per step in which the trial took 0.24 ms, on average 0.2 ms, becomes one
    of 12 / 1.2 = 10 ms.
    """
    mean_ms = fmean(ms for side in trials_ms for ms in side)
    slowness = [[ms / mean_ms for ms in side] for side in trials_ms]

    def adjusted(sides: Sides) -> Sides:
        return [
            [
                Estimate(run.values / slow, run.variances / slow**2, run.not_sampled_ms / slow)
                for run, slow in zip(*side, strict=True)
            ]
            for side in zip(sides, slowness, strict=True)
        ]

    def spread(sides: Sides) -> float:
        """Return the variance of the step among the runs of a side, relative to the step."""
        return sum(float(np.var([np.log(run.values[0]) for run in side])) for side in sides)

    if spread(adjusted(estimates)) >= spread(estimates):
        return None
    percent = 100 * (max(map(max, slowness)) / min(map(min, slowness)) - 1)
    note = f"times are adjusted for the host, which varied by {percent:.0f} % (`trial_ms`)"
    return adjusted(estimates), adjusted(means), note


def proportional_step(
    phases: Sequence[str],
    estimates: Sides,
    step: Difference,
    rows: Sequence[Difference],
    confidence: float,
) -> ProportionalStep | None:
    """Return the step in proportion to a phase; None if there are not two long phases.

    Example: forward takes 5 and 6 ms in two runs, and the step 15 and 18 ms. Scaled to 5.5 ms of
    forward, both steps take 16.5 ms: the second run was on a slower host.
    """
    changes = {
        row.relative_change: column
        for column, (name, row) in enumerate(zip(phases, rows, strict=True), start=1)
        if "/" not in name and row.before_ms >= _MIN_SCALE_SHARE * step.before_ms
    }
    if len(changes) < 2:
        return None
    column = changes[min(changes)]
    scale_ms = [[run.values[column] for run in side] for side in estimates]
    if not min(map(min, scale_ms)):
        return None
    mean_ms = np.mean(np.concatenate(scale_ms))
    # The noise within the runs is that of all phases together, so use the spread between runs only.
    scaled = [
        [
            Estimate(run.values[:1] * mean_ms / ms, np.zeros(1))
            for run, ms in zip(*side, strict=True)
        ]
        for side in zip(estimates, scale_ms, strict=True)
    ]
    steps = [[Estimate(run.values[:1], run.variances[:1]) for run in side] for side in estimates]
    [scaled_step] = differences(*scaled, confidence=confidence)
    [likely] = differences(*steps, confidence=_LIKELY)
    return ProportionalStep(phases[column - 1], scaled_step, likely.relative_error)
