"""Slowdowns: lasting changes of the step time since the start of a run.

`StepSeries` keeps the mean step time of segments of 25 steps or more. `StepSeries.find` drops the
warm-up, clips outliers, and fits a jump, a trend (gradual change) and a stretch (change that has
ended) by weighted least squares. It reports the best fit if the change is large, and far more
likely than correlated noise alone (AR(1)).

Positions are indices of segments. `edges` are the numbers of steps before each segment and after
the last.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_gputime._measurement.sums import largest_part
from lightning_gputime._messages import duration

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Chosen: smaller ones report changes by chance, larger ones find changes later. Simulated runs fail
# if either is frequent (`test_steady_runs_have_no_slowdown`, `test_planted_slowdowns_are_found`).
MIN_STEPS = 25  # Smallest number of steps in a segment.
_MIN_SEGMENTS = 7  # Runs with fewer segments are not searched.
_SHORT_RUN = 10  # Runs with fewer segments need a larger change.
# Minimum length of the levels after the start: number of segments, and fraction of the run.
_MIN_LEVEL, _MIN_LEVEL_SHARE = 3, 0.1
_NOISE_FLOOR = 1e-3  # Minimum relative noise of a series.
_GRID = 40  # Number of positions in the coarse search for the start and the end of a change.
_CORRELATIONS = np.linspace(0.0, 0.95, 20)  # Of neighbors in noise, from which the best is taken.


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Lasting change of the step time relative to the start of the run.

    Usually steps got slower. If they got faster, `change` is negative.
    """

    # "jump" between two levels, "trend" if the change is gradual, "stretch" if it has ended.
    kind: str
    since_step: int  # Number of the first step of the change.
    change: float  # Relative to the step time before: 0.5 for +50 %, negative if steps got faster.
    error: float  # Half the width of the 95 % interval of `change`.
    before_ms: float  # Mean step time at the start, after the warm-up.
    phase: str = ""  # Phase with the largest part of the change; empty if unknown.
    phase_change_ms: float = 0.0  # Change of that phase per step.
    until_step: int | None = None  # Number of the first step after a stretch; else None.
    since_epoch: int | None = None  # Epoch of `since_step`, as the trainer counts it.
    # Time above the level before the change, as a fraction of the time of all steps, from 0 to 1.
    lost_share: float = 0.0
    detail: str = ""  # Cause inside the phase, such as a worker of the loader; empty if unknown.
    reason: str = ""  # What changed outside of the loop at the same time; empty if unknown.

    @property
    def after_ms(self) -> float:
        """Mean step time after a jump, in a stretch, or at the end of a trend (in milliseconds)."""
        return self.before_ms * (1.0 + self.change)

    @property
    def is_most_in_phase(self) -> bool:
        """True if most of the change is in `phase`."""
        return abs(self.phase_change_ms) >= 0.5 * abs(self.change * self.before_ms)

    def __str__(self) -> str:
        slower = "slower" if self.change > 0 else "faster"
        before, after = duration(self.before_ms), duration(self.after_ms)
        digits = 0 if self.error >= 0.01 else 1
        size = f"({100 * self.change:+.{digits}f} % ± {100 * self.error:.{digits}f} %)"
        if self.error >= abs(self.change):  # The change is certain, its size is not.
            size = f"(about {100 * self.change:+.0f} %)"
        since = f"step {self.since_step:,}"
        if self.since_epoch is not None:
            since += f" (epoch {self.since_epoch:,})"
        if self.until_step is not None:
            found = (
                f"steps were {slower} from {since} to {self.until_step:,}: {after} instead of"
                f" {before} {size}"
            )
        else:
            gradually = "gradually " if self.kind == "trend" else ""
            found = (
                f"steps got {slower}: from {before} at the start to {after} {size},"
                f" {gradually}since {since}"
            )
        if self.reason:
            found += f": {self.reason}"
        if not self.phase:
            return found
        is_most = self.is_most_in_phase
        detail = f" ({self.detail})" if self.detail else ""
        return f"{found}, {'most' if is_most else 'part'} of it in `{self.phase}`{detail}"


class _Segment(NamedTuple):
    """Consecutive steps."""

    first_step: int
    epoch: int | None  # Epoch of the first step.
    steps: int
    wall_ms: float  # Time of all steps.
    phases_ms: Mapping[str, float]  # Mean per step; empty if no step was timed.

    @property
    def mean_ms(self) -> float:
        return self.wall_ms / self.steps

    def merge(self, later: "_Segment") -> "_Segment":
        # If only one segment has timed steps, they represent both.
        phases_ms = {**later.phases_ms, **self.phases_ms}
        if self.phases_ms and later.phases_ms:
            share = self.steps / (self.steps + later.steps)
            phases_ms = {
                name: share * self.phases_ms.get(name, 0.0)
                + (1.0 - share) * later.phases_ms.get(name, 0.0)
                for name in phases_ms
            }
        steps, wall_ms = self.steps + later.steps, self.wall_ms + later.wall_ms
        return self._replace(steps=steps, wall_ms=wall_ms, phases_ms=phases_ms)


class StepSeries:
    """Step times of a run as a series of segments, in bounded memory."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []  # Segments with enough steps, in order.
        self._open: _Segment | None = None  # Newest segment, while it has too few steps.
        self._min_steps = MIN_STEPS  # Minimum number of steps in a segment; grows with the run.
        self._next_step: int | None = None  # Number of the next step; None at first.
        self._epoch: int | None = None  # Epoch of the first step that was added last.
        # First step and number of the epochs that start later, in order.
        self._later_epochs: list[tuple[int, int]] = []
        self._steps = 0  # Approximate number of steps in `_segments`.
        self._find_at = 0  # Value of `_steps` at which the next search is due.

    def start_epoch(self, first_step: int, epoch: int) -> None:
        """Record that an epoch starts with this step, which may not have been added yet."""
        self._later_epochs.append((first_step, epoch))

    def add(self, number: int, steps: int, wall_ms: float, phases_ms: Mapping[str, float]) -> bool:
        """Add a segment of steps, timed or not. Return True if a search is due.

        Then call `find`, which takes milliseconds. `number` is the number of the last step,
        `phases_ms` the mean time of each phase per step; empty if no step was timed.
        """
        # Steps since the last segment that were left out belong to this one.
        first_step = number - steps + 1 if self._next_step is None else self._next_step
        self._next_step = number + 1
        while self._later_epochs and self._later_epochs[0][0] <= first_step:
            self._epoch = self._later_epochs.pop(0)[1]
        if len(phases_ms) > 64:  # Drop sub-phases.
            phases_ms = {name: ms for name, ms in phases_ms.items() if "/" not in name}
        segment = _Segment(first_step, self._epoch, steps, wall_ms, phases_ms=dict(phases_ms))
        if self._open is not None:
            segment = self._open.merge(segment)
        if segment.steps < self._min_steps:
            self._open = segment
            return False
        self._open = None
        self._segments.append(segment)
        if len(self._segments) > 256:
            self._halve_resolution()
        self._steps += segment.steps
        if len(self._segments) < _SHORT_RUN or self._steps < self._find_at:
            return False
        # Searches get rarer, so that their cost stays a constant fraction of the run.
        self._find_at = int(self._steps * 1.25)
        return True

    def _halve_resolution(self) -> None:
        """Merge each segment with its neighbor. Later segments have twice as many steps, too."""
        last = self._segments[-1]
        # In a new list, because another thread may be reading the old list.
        pairs = zip(self._segments[::2], self._segments[1::2], strict=False)
        self._segments = [first.merge(second) for first, second in pairs]
        self._min_steps = sum(segment.steps for segment in self._segments) // len(self._segments)
        self._open = last  # The number of segments was odd: the last has no neighbor.

    def find(self) -> Slowdown | None:
        """Return the lasting change of the step time, or None.

        Any thread may call it while another thread adds segments.
        """
        # Segments of similar size, without the warm-up and outliers
        all_segments = self._segments.copy()
        segments = _merge_small(all_segments)
        if len(segments) < _MIN_SEGMENTS:
            return None
        # Drop first segments that get much faster, such as compilation: at most 40 % of the run.
        max_warmup = max(1, min(int(0.4 * len(segments)), len(segments) - _MIN_SEGMENTS))
        n = 0
        while n < max_warmup and segments[n].mean_ms > 1.25 * segments[n + 1].mean_ms:
            n += 1
        segments = segments[n:]
        values_ms = np.array([segment.mean_ms for segment in segments])
        if values_ms.min() <= 0.0:
            return None
        values_ms = _clip_outliers(values_ms, _local_medians(values_ms))

        # The change that fits best
        steps = np.array([segment.steps for segment in segments], dtype=float)
        edges = np.append(0.0, np.cumsum(steps))
        found = _fit(edges, values_ms)
        if not _is_certain(edges, values_ms, found):
            return None
        changes_ms = _changes_of_phases(segments, found.shape)
        phase = largest_part(changes_ms, sign=found.change_ms)
        lost_ms = found.change_ms * float(found.shape @ steps)
        start = segments[found.start]
        return Slowdown(
            kind=found.kind,
            since_step=start.first_step,
            change=found.change_ms / found.before_ms,
            error=_relative_error(values_ms, found),
            before_ms=found.before_ms,
            phase=phase,
            phase_change_ms=changes_ms.get(phase, 0.0),
            until_step=segments[found.until].first_step if found.kind == "stretch" else None,
            since_epoch=start.epoch,
            lost_share=max(lost_ms / sum(segment.wall_ms for segment in all_segments), 0.0),
        )


def _merge_small(segments: Sequence[_Segment]) -> Sequence[_Segment]:
    """Merge small segments with the segments after them, up to 0.8 times the median size.

    The median size is that of the segment that contains the middle step.

    Segments are smaller while every step is timed. A small segment often contains no outlier, so
    clipping outliers would bias the means of small and large segments differently.
    """
    if not segments:
        return segments
    sizes = np.sort([segment.steps for segment in segments])
    ends = np.cumsum(sizes)
    min_size = 0.8 * sizes[np.searchsorted(ends, ends[-1] / 2)]
    merged = [segments[0]]
    for segment in segments[1:]:
        if merged[-1].steps < min_size:
            merged[-1] = merged[-1].merge(segment)
        else:
            merged.append(segment)
    return merged


def _changes_of_phases(segments: Sequence[_Segment], shape: Floats) -> dict[str, float]:
    """Return by how much each phase changes per step, if it changes in the same way as the step.

    Empty if too few segments with timed steps cover the change.
    """
    timed = [i for i, segment in enumerate(segments) if segment.phases_ms]
    shape_of_timed = shape[timed]
    if len(timed) < 5 or np.ptp(shape_of_timed) < 0.5:
        return {}
    steps = np.array([float(segments[i].steps) for i in timed])
    changes_ms: dict[str, float] = {}
    for name in dict.fromkeys(name for i in timed for name in segments[i].phases_ms):
        values_ms = np.array([segments[i].phases_ms.get(name, 0.0) for i in timed])
        before_ms, change_ms = _levels(values_ms, shape_of_timed, steps)
        values_ms = _clip_outliers(values_ms, before_ms + change_ms * shape_of_timed)
        _, changes_ms[name] = _levels(values_ms, shape_of_timed, steps)
    return changes_ms


def _local_medians(values: Floats) -> Floats:
    """Return the running median over five segments.

    Example: 1, 9, 3, 4, 5, 6 become 2, 3, 4, 5, 5, 6. The medians of five are 4 and 5, those of the
    first and the last three are 3 and 5, and both ends continue the median rise of 1.
    """
    medians = np.median(np.lib.stride_tricks.sliding_window_view(values, 5), axis=1)
    # At the ends, the median of three preserves a level of two segments. The outermost values
    # continue the slope of five segments.
    first, last = np.median(values[:3]), np.median(values[-3:])
    first_rise, last_rise = (np.median(np.diff(part)) for part in (values[:5], values[-5:]))
    return np.concatenate([[first - first_rise, first], medians, [last, last + last_rise]])


def _clip_outliers(values: Floats, expected: Floats) -> Floats:
    """Clip values to 3.8 standard deviations around the expected values."""
    away = values - expected
    # 80 % of normal noise is within 1.28 standard deviations, so 3 of this quantile are 3.8 of
    # them. The median would be zero if most segments are equal.
    max_away = 3.0 * float(np.quantile(np.abs(away), 0.8))
    clipped: Floats = expected + np.clip(away, -max_away, max_away)
    return clipped


class _Change(NamedTuple):
    """Change of the step time, as fitted to the segments."""

    start: int  # First segment of the change.
    full: int  # First segment in which the change is complete.
    until: int  # First segment after the change; the number of segments if it lasts.
    shape: Floats  # Fraction of the change in each segment.
    weights: Floats
    before_ms: float
    change_ms: float

    @property
    def kind(self) -> str:
        n = len(self.shape)
        if self.until < n:
            return "stretch"
        return "jump" if self.full - self.start <= max(3, 0.1 * n) else "trend"

    @property
    def fitted(self) -> Floats:
        """Step time of each segment."""
        return self.before_ms + self.change_ms * self.shape


def _fit(edges: Floats, values: Floats) -> _Change:
    """Return the jump, trend or stretch with the best fit, significant or not."""
    n, steps = len(values), np.diff(edges)
    weights = steps
    # First search a coarse grid.
    firsts = lasts = np.unique(np.linspace(0, n, min(n, _GRID) + 1).astype(int))
    spacing = n // _GRID + 1
    near = np.arange(-spacing, spacing + 1)
    for _ in range(2):
        candidates, shapes = _candidates(edges, firsts, lasts)
        best = int(np.argmin(_criterion(values, weights, candidates, shapes)))
        start, full, until = candidates[:, best].tolist()
        levels = _levels(values, shapes[best], weights)
        change = _Change(start, full, until, shapes[best], weights, *levels)
        # Then search all positions near the best change: where it starts, and where a stretch ends
        # or a trend is complete. `_candidates` drops positions outside of the run. Weight segments
        # by the levels of the first search, because noise grows with the step time.
        weights = steps / np.maximum(change.fitted, _NOISE_FLOOR * change.fitted.max()) ** 2
        firsts, lasts = start + near, near + (until if until < n else full)
    return change


def _candidates(edges: Floats, firsts: Ints, lasts: Ints) -> tuple[Ints, Floats]:
    """Return changes as columns of start, full and until, and as rows of shapes.

    Return all jumps, and the trends and stretches from one of `firsts` to one of `lasts`.
    """
    n = len(edges) - 1
    min_start = max(2, math.ceil(0.05 * n))
    min_level = max(_MIN_LEVEL, math.ceil(_MIN_LEVEL_SHARE * n))
    # Also fit changes that are too recent to report. Without them, the best fit to such a change
    # would be at an earlier position, and would be reported.
    jumps = np.arange(min_start, n - _MIN_LEVEL + 1)
    # All pairs of a start and an end inside the run.
    start, end = (positions.ravel() for positions in np.meshgrid(firsts, lasts))
    is_inside = (start >= 0) & (end <= n)
    start, end = start[is_inside], end[is_inside]
    is_trend = (end - start >= 2) & ((start + end) / 2 <= n - _MIN_LEVEL)
    # A trend may start at once if it is long. A short one would be the end of the warm-up.
    is_trend &= (start >= min_start) | (end - start >= 0.25 * n)
    is_stretch = (start >= min_start) & (end <= n - min_level)
    # A shorter stretch may be an outlier.
    is_stretch &= (end - start >= max(min_level, 6)) & (n >= 20)
    candidates = np.concatenate(
        [
            (jumps, jumps, np.full_like(jumps, n)),
            (start[is_trend], end[is_trend], np.full(is_trend.sum(), n)),
            (start[is_stretch], start[is_stretch], end[is_stretch]),
        ],
        axis=1,
    )
    return candidates, _shapes(edges, candidates)


def _shapes(edges: Floats, candidates: Ints) -> Floats:
    """Return for each change (row) its fraction in each segment (column).

    For example, with four equal segments, a jump at the second is 0, 1, 1 and 1, and a trend over
    the second and third is 0, 0.25, 0.75 and 1.
    """
    # Numbers of steps, as a column: one row per change.
    start, full, until = (edges[position][:, None] for position in candidates)
    # A change grows linearly from 0 at `start` to 1 at `full`, and falls back to 0 at `until`. Its
    # mean in a segment is the growth of its integral from one edge to the next. Before `full`, the
    # integral is a parabola; between `full` and `until`, it grows by 1 per step.
    rise = np.maximum(full - start, 1e-9)  # Length of the growth; a jump has none.
    until_full = np.clip(edges - start, 0.0, rise) ** 2 / (2.0 * rise)
    after_full = np.maximum(edges - full, 0.0) - np.maximum(edges - until, 0.0)
    shapes: Floats = np.diff(until_full + after_full, axis=1) / np.diff(edges)
    return shapes


def _criterion(values: Floats, weights: Floats, candidates: Ints, shapes: Floats) -> Floats:
    """Return a number for each change that is smallest for the best, as with Akaike's criterion.

    It is minus twice the log likelihood, `n log(variance of the noise)`, plus 6 for each position
    that is free to choose. For example, in 40 segments, a jump that explains half of the variance
    gains 40 log 2 = 28 for a penalty of 6. A stretch pays 28 more, so it must explain three
    quarters: a few outliers look like one.
    """
    n, (start, full, until) = len(values), candidates
    weights = weights / weights.sum()
    # Subtract the means, which the level before the change explains.
    shapes = shapes - (shapes @ weights)[:, None]
    centered = values - values @ weights
    # Variance that each change explains, and the rest, which is noise.
    explained = (shapes @ (weights * centered)) ** 2 / (shapes**2 @ weights)
    noise = np.maximum(weights @ centered**2 - explained, 0.0)
    floor = _NOISE_FLOOR**2 * float(weights @ values**2)
    # The start is free, unless it is that of the run, and so is the end of a trend.
    free_positions = (start > 0).astype(float) + ((full > start) & (full < n))
    is_stretch = until < n
    found: Floats = n * np.log(noise + floor) + 6.0 * free_positions + n * math.log(2) * is_stretch
    return found


def _levels(values: Floats, shape: Floats, weights: Floats) -> tuple[float, float]:
    """Return the level before a change and the change, by weighted least squares."""
    weights = weights / weights.sum()
    middle = float(shape @ weights)
    change = float((weights * (shape - middle)) @ values / (weights @ (shape - middle) ** 2))
    return float(values @ weights) - change * middle, change


def _relative_error(values: Floats, found: _Change) -> float:
    """Return half the width of the 95 % interval of the change relative to the level before.

    For example, with levels of 10 and 13 ms, each from 20 segments with a noise of 0.5 ms that do
    not correlate: the error of a level is 0.5 / sqrt(20) = 0.11 ms, that of the ratio 1.3 is
    0.11 / 10 * sqrt(1 + 1.3²) = 0.018, and half the width is 1.96 * 0.018 * (1 + 6 / 40) = 0.04.
    """
    n, weights = len(values), found.weights
    residuals = np.sqrt(weights) * (values - found.fitted)
    squares = float(residuals @ residuals)
    # Correlated neighbors increase the error of the mean. The second term corrects the bias of the
    # estimate in short runs.
    correlation = float(residuals[1:] @ residuals[:-1]) / squares if squares else 0.0
    correlation = min(max(correlation + (1.0 + 3.0 * correlation) / n, 0.0), 0.95)
    # Three degrees of freedom are used up: both levels, and the start.
    variance = squares / (n - 3) * (1.0 + correlation) / (1.0 - correlation)
    design = np.stack([np.ones(n), found.shape], axis=1)
    covariance = np.linalg.inv(design.T * weights @ design)
    # Gradient of `change_ms / before_ms` with respect to the two levels.
    gradient = np.array([-found.change_ms / found.before_ms, 1.0]) / found.before_ms
    error = math.sqrt(variance * float(gradient @ covariance @ gradient))
    # The positions of a change are estimates, too: a trend has two.
    return 1.96 * error * (1.0 + 6.0 / n) * (1.2 if found.kind == "trend" else 1.0)


def _is_certain(edges: Floats, values: Floats, found: _Change) -> bool:
    """Return True if the change is large, and more likely than correlated noise."""
    n, shape, fitted = len(values), found.shape, found.fitted
    if (found.start + found.full) / 2.0 > n * (1.0 - _MIN_LEVEL_SHARE):
        return False  # Too recent.
    # Logarithms require positive step times.
    if min(found.before_ms, found.before_ms + found.change_ms, fitted.min(), values.min()) <= 0.0:
        return False
    before, after = values[shape <= 0.25], values[shape >= 0.75]
    if not len(before) or not len(after):  # The change is a single segment in a few.
        return False

    # Size, as a logarithm, and the fraction of pairs of segments before and after it that are
    # ordered like the two levels.
    size = math.log(after.mean() / before.mean())
    ordered = np.mean(np.sign(size) * (after[:, None] - before) > 0.0)
    # A GPU that warms up gets a few percent slower or faster, so a change in the first 15 minutes
    # must be larger.
    full_at_ms = float(np.diff(edges)[: found.full] @ values[: found.full])
    min_size, min_ordered = 0.1 if full_at_ms < 900e3 else 0.05, 0.85
    if n < _SHORT_RUN:
        min_size, min_ordered = 0.6, 1.0  # A few segments of noise may be ordered by chance.
    if abs(size) < min_size or ordered < min_ordered:
        return False

    # Twice the log likelihood ratio of the change with noise to noise alone. Below the minimum are
    # simulated steady runs (`tests/simulated_runs.py`). Correlated noise drifts by up to 4.5 / n in
    # n segments, and at most by 0.19.
    is_within_drift = abs(size) < min(0.19, 4.5 / n)
    min_ratio = 28.0 if is_within_drift else min(6.0 + 0.5 * n, 22.0)
    logs = np.log(values)
    ratio = _autoregressive_cost(logs) - _autoregressive_cost(logs - np.log(fitted))
    return ratio >= min_ratio


def _autoregressive_cost(values: Floats) -> float:
    """Return minus twice the log likelihood of values as a constant plus AR(1) noise."""
    n, rho = len(values), _CORRELATIONS[:, None]
    first = np.sqrt(1.0 - rho**2)
    # Whitened values, and the coefficients of the mean in them.
    noise = np.concatenate([first * values[0], values[1:] - rho * values[:-1]], axis=1)
    mean = np.concatenate([first, np.repeat(1.0 - rho, n - 1, axis=1)], axis=1)
    noise -= mean * ((noise * mean).sum(axis=1) / (mean**2).sum(axis=1))[:, None]
    variance = np.maximum((noise**2).mean(axis=1), _NOISE_FLOOR**2)
    return float((n * np.log(variance) - np.log(1.0 - _CORRELATIONS**2)).min())
