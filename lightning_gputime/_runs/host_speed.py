"""Comparisons on a host that other work keeps busy: its speed differs from run to run.

Two facts of the runs reduce the noise. A short calculation (`trial_ms`), repeated during each run,
tells how slow the host was. And a busy host makes all phases longer by about the same factor, so
the proportions of the phases vary less than their times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from lightning_gputime._runs.estimates import Difference, Estimate, Outcome, differences

MIN_RUNS = 3  # Minimum number of runs per side, to know their spread.
_MIN_SHARE = 0.1  # Minimum fraction of the step of a phase by which times are scaled.

Sides = list[list[Estimate]]


@dataclass(frozen=True, slots=True)
class ProportionalStep:
    """Difference of the step on a busy host, which makes all phases longer by the same factor.

    The times of each run are scaled such that one phase takes the same time in all runs: of the
    phases that take at least 10 % of the step, the one that changed least, in percent.
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
        # A one-sided bound of 80 % is the end of a two-sided interval of 60 %.
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
    """
    mean_ms = fmean(ms for side in trials_ms for ms in side)
    slowness = [[ms / mean_ms for ms in side] for side in trials_ms]
    adjusted, adjusted_means = (
        [
            [
                Estimate(run.values / slow, run.variances / slow**2, run.not_sampled_ms / slow)
                for run, slow in zip(*side, strict=True)
            ]
            for side in zip(sides, slowness, strict=True)
        ]
        for sides in (estimates, means)
    )

    def spread(sides: Sides) -> float:
        """Return the variance of the step among the runs of a side, relative to the step."""
        return sum(float(np.var([np.log(run.values[0]) for run in side])) for side in sides)

    if spread(adjusted) >= spread(estimates):
        return None
    percent = 100 * (max(map(max, slowness)) / min(map(min, slowness)) - 1)
    note = f"times are adjusted for the host, which varied by {percent:.0f} % (`trial_ms`)"
    return adjusted, adjusted_means, note


def proportional_step(
    phases: Sequence[str],
    estimates: Sides,
    step: Difference,
    rows: Sequence[Difference],
    confidence: float,
) -> ProportionalStep | None:
    """Return the step in proportion to a phase; None if there are not two long phases."""
    changes = {
        row.relative_change: column
        for column, (name, row) in enumerate(zip(phases, rows, strict=True), start=1)
        if "/" not in name and row.before_ms >= _MIN_SHARE * step.before_ms
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
    [likely] = differences(*steps, confidence=0.6)
    return ProportionalStep(phases[column - 1], scaled_step, likely.relative_error)
