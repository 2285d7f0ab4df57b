"""Slowdowns: lasting changes of the step time since the start of a run.

`StepSeries` keeps the mean step time of windows of 25 steps or more. `StepSeries.find` drops the
warm-up, clips outliers, and fits a jump, a trend (gradual change) and a stretch (change that has
ended) by weighted least squares. It reports the best fit if the change is large, and far more
likely than correlated noise alone (AR(1)).

Positions are indices of windows. `edges` are the numbers of steps before each window and after the
last.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_gputime._measurement.sums import largest_part
from lightning_gputime._messages import duration

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MIN_STEPS = 25  # Smallest number of steps in a window.
_MIN_WINDOWS = 7  # Runs with fewer windows are not searched.
_SHORT_RUN = 10  # Runs with fewer windows need a larger change.
# Minimum length of the levels after the start: number of windows, and fraction of the run.
_MIN_LEVEL, _MIN_LEVEL_SHARE = 3, 0.1
_GRID = 40  # Number of positions in the coarse search for the start and the end of a change.
_NOISE_FLOOR = 1e-3  # Minimum relative noise of a series.
_CORRELATIONS = np.linspace(0.0, 0.95, 20)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Lasting change of the step time relative to the start of the run."""

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


class _Window(NamedTuple):
    """Consecutive steps."""

    first_step: int
    epoch: int | None  # Epoch of the first step.
    steps: int
    wall_ms: float  # Time of all steps.
    phases_ms: Mapping[str, float]  # Mean per step; empty if no step was timed.

    def merge(self, later: "_Window") -> "_Window":
        # If only one window has timed steps, they represent both.
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
    """Step times of a run as a series of windows, in bounded memory."""

    def __init__(self) -> None:
        self._windows: list[_Window] = []  # Windows with enough steps, in order.
        self._open: _Window | None = None  # Newest window, while it has too few steps.
        self._min_steps = MIN_STEPS  # Minimum number of steps in a window; grows with the run.
        self._next_step: int | None = None  # Number of the next step; None at first.
        self._epoch: int | None = None  # Epoch of the first step that was added last.
        # First step and number of the epochs that start later, in order.
        self._later_epochs: list[tuple[int, int]] = []
        self._steps = 0  # Approximate number of steps in `_windows`.
        self._find_at = 0  # Value of `_steps` at which the next search is due.

    def start_epoch(self, first_step: int, epoch: int) -> None:
        """Record that an epoch starts with this step, which may not have been added yet."""
        self._later_epochs.append((first_step, epoch))

    def add(self, number: int, steps: int, wall_ms: float, phases_ms: Mapping[str, float]) -> bool:
        """Add a window of steps, timed or not. Return True if a search is due.

        Then call `find`, which takes milliseconds. `number` is the number of the last step,
        `phases_ms` the mean time of each phase per step; empty if no step was timed.
        """
        first_step = number - steps + 1 if self._next_step is None else self._next_step
        self._next_step = number + 1
        while self._later_epochs and self._later_epochs[0][0] <= first_step:
            self._epoch = self._later_epochs.pop(0)[1]
        if len(phases_ms) > 64:  # Drop sub-phases.
            phases_ms = {name: ms for name, ms in phases_ms.items() if "/" not in name}
        window = _Window(first_step, self._epoch, steps, wall_ms, phases_ms=dict(phases_ms))
        if self._open is not None:
            window = self._open.merge(window)
        if window.steps < self._min_steps:
            self._open = window
            return False
        self._open = None
        self._windows.append(window)
        if len(self._windows) > 256:
            self._halve_resolution()
        self._steps += window.steps
        if len(self._windows) < _SHORT_RUN or self._steps < self._find_at:
            return False
        self._find_at = int(self._steps * 1.25)
        return True

    def _halve_resolution(self) -> None:
        """Merge each window with its neighbor. Later windows have twice as many steps, too."""
        last = self._windows[-1]
        # In a new list, because another thread may be reading the old list.
        pairs = zip(self._windows[::2], self._windows[1::2], strict=False)
        self._windows = [first.merge(second) for first, second in pairs]
        self._min_steps = sum(window.steps for window in self._windows) // len(self._windows)
        self._open = last  # The number of windows was odd: the last has no neighbor.

    def find(self) -> Slowdown | None:
        """Return the lasting change of the step time, or None.

        Any thread may call it while another thread adds windows.
        """
        if not (all_windows := self._windows.copy()):
            return None
        # Merge small windows with their neighbors, up to about the median size (weighted by steps).
        # Windows are smaller while every step is timed. A small window often contains no outlier,
        # so clipping outliers would bias the means of small and large windows differently.
        sizes = np.sort([window.steps for window in all_windows])
        ends = np.cumsum(sizes)
        min_size = 0.8 * sizes[np.searchsorted(ends, ends[-1] / 2)]
        windows = all_windows[:1]
        for window in all_windows[1:]:
            if windows[-1].steps < min_size:
                windows[-1] = windows[-1].merge(window)
            else:
                windows.append(window)
        if len(windows) < _MIN_WINDOWS:
            return None

        # Drop the warm-up, such as compilation: at most 40 % of the run.
        means_ms = [window.wall_ms / window.steps for window in windows]
        max_n = max(1, min(int(0.4 * len(windows)), len(windows) - _MIN_WINDOWS))
        n = 0
        while n < max_n and means_ms[n] > 1.25 * means_ms[n + 1]:
            n += 1
        windows, values_ms = windows[n:], np.array(means_ms[n:])
        if values_ms.min() <= 0.0:
            return None
        values_ms = _clip_outliers(values_ms, _local_medians(values_ms))
        steps = np.array([window.steps for window in windows], dtype=float)
        edges = np.append(0.0, np.cumsum(steps))
        found = _fit(edges, values_ms)
        if not _is_certain(edges, values_ms, found):
            return None

        # Name the phase that changed most, if enough windows with timed steps cover the change.
        timed = [i for i, window in enumerate(windows) if window.phases_ms]
        shape, changes_ms = found.shape[timed], dict[str, float]()
        if len(timed) >= 5 and np.ptp(shape) >= 0.5:
            for name in dict.fromkeys(name for i in timed for name in windows[i].phases_ms):
                of_phase = np.array([windows[i].phases_ms.get(name, 0.0) for i in timed])
                before_ms, change_ms = _levels(of_phase, shape, steps[timed])
                of_phase = _clip_outliers(of_phase, before_ms + change_ms * shape)
                _, changes_ms[name] = _levels(of_phase, shape, steps[timed])
        phase = largest_part(changes_ms, sign=found.change_ms)
        lost_ms = found.change_ms * float(found.shape @ steps)
        start = windows[found.start]
        return Slowdown(
            kind=found.kind,
            since_step=start.first_step,
            change=found.change_ms / found.before_ms,
            error=_relative_error(values_ms, found),
            before_ms=found.before_ms,
            phase=phase,
            phase_change_ms=changes_ms.get(phase, 0.0),
            until_step=windows[found.until].first_step if found.kind == "stretch" else None,
            since_epoch=start.epoch,
            lost_share=max(lost_ms / sum(window.wall_ms for window in all_windows), 0.0),
        )


def _local_medians(values: Floats) -> Floats:
    """Return the running median over five windows."""
    medians = np.median(np.lib.stride_tricks.sliding_window_view(values, 5), axis=1)
    # At the ends, the median of three preserves a level of two windows. The outermost values
    # continue the slope of five windows.
    first, last = np.median(values[:3]), np.median(values[-3:])
    first_rise, last_rise = (np.median(np.diff(part)) for part in (values[:5], values[-5:]))
    return np.concatenate([[first - first_rise, first], medians, [last, last + last_rise]])


def _clip_outliers(values: Floats, expected: Floats) -> Floats:
    """Clip values to four standard deviations around the expected values."""
    away = values - expected
    # The 80 % quantile of normal noise is about 1.3 standard deviations. The median would be zero
    # if most windows are equal.
    max_away = 4.0 * 0.75 * float(np.quantile(np.abs(away), 0.8))
    clipped: Floats = expected + np.clip(away, -max_away, max_away)
    return clipped


class _Change(NamedTuple):
    """Change of the step time, as fitted to the windows."""

    start: int  # First window of the change.
    full: int  # First window in which the change is complete.
    until: int  # First window after the change; the number of windows if it lasts.
    shape: Floats  # Fraction of the change in each window.
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
        """Step time of each window."""
        return self.before_ms + self.change_ms * self.shape


def _fit(edges: Floats, values: Floats) -> _Change:
    """Return the jump, trend or stretch with the best fit, significant or not."""
    n, steps = len(values), np.diff(edges)
    weights = steps
    # Search a coarse grid, then all positions near the best change. The second search weights
    # windows by the levels of the first, because noise grows with the step time.
    firsts = lasts = np.unique(np.linspace(0, n, min(n, _GRID) + 1).astype(int))
    near = np.arange(-(n // _GRID) - 1, n // _GRID + 2)
    for _ in range(2):
        candidates, shapes = _candidates(edges, firsts, lasts)
        best = int(np.argmin(_costs(values, weights, candidates, shapes)))
        start, full, until = candidates[:, best].tolist()
        levels = _levels(values, shapes[best], weights)
        change = _Change(start, full, until, shapes[best], weights, *levels)
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
    start, end = (positions.ravel() for positions in np.meshgrid(firsts, lasts))
    start, end = (positions[(start >= 0) & (end <= n)] for positions in (start, end))
    is_trend = (end - start >= 2) & ((start + end) / 2 <= n - _MIN_LEVEL)
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
    """Return for each change (row) its fraction in each window (column)."""
    start, full, until = (edges[at][:, None] for at in candidates)
    # Integral, up to each edge, of a change that grows from `start` to `full` and ends at `until`.
    rise = np.maximum(full - start, 1e-9)
    integral = np.clip(edges - start, 0.0, rise) ** 2 / (2.0 * rise)
    integral += np.maximum(edges - full, 0.0) - np.maximum(edges - until, 0.0)
    shapes: Floats = np.diff(integral, axis=1) / np.diff(edges)
    return shapes


def _costs(values: Floats, weights: Floats, candidates: Ints, shapes: Floats) -> Floats:
    """Return minus twice the log likelihood of each change, plus penalties.

    The penalties are per free position, and for a stretch per window of the run.
    """
    n, (start, full, until) = len(values), candidates
    weights = weights / weights.sum()
    shapes = shapes - (shapes @ weights)[:, None]
    centered = values - values @ weights
    # Variance that each change explains, and the rest, which is noise.
    explained = (shapes @ (weights * centered)) ** 2 / (shapes**2 @ weights)
    noise = np.maximum(weights @ centered**2 - explained, 0.0)
    floor = _NOISE_FLOOR**2 * float(weights @ values**2)
    free_positions = (start > 0).astype(float) + ((full > start) & (full < n))
    costs: Floats = n * np.log(noise + floor) + 6.0 * free_positions
    costs += n * math.log(2.0) * (until < n)
    return costs


def _levels(values: Floats, shape: Floats, weights: Floats) -> tuple[float, float]:
    """Return the level before a change and the change, by weighted least squares."""
    weights = weights / weights.sum()
    middle = float(shape @ weights)
    change = float((weights * (shape - middle)) @ values / (weights @ (shape - middle) ** 2))
    return float(values @ weights) - change * middle, change


def _relative_error(values: Floats, found: _Change) -> float:
    """Return half the width of the 95 % interval of the change relative to the level before."""
    n, weights = len(values), found.weights
    residuals = np.sqrt(weights) * (values - found.fitted)
    squares = float(residuals @ residuals)
    # Correlated neighbors increase the error of the mean. The second term corrects the bias of the
    # estimate in short runs.
    correlation = float(residuals[1:] @ residuals[:-1]) / squares if squares else 0.0
    correlation = min(max(correlation + (1.0 + 3.0 * correlation) / n, 0.0), 0.95)
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
    if not len(before) or not len(after):  # The change is a single window in a few.
        return False
    size = math.log(after.mean() / before.mean())
    # A GPU that warms up gets a few percent slower or faster, so a change in the first 15 minutes
    # must be larger.
    full_at_ms = float(np.diff(edges)[: found.full] @ values[: found.full])
    min_size, min_ordered = 0.1 if full_at_ms < 900e3 else 0.05, 0.85
    if n < _SHORT_RUN:
        min_size, min_ordered = 0.6, 1.0
    # Compare each window before the change with each window after it.
    is_ordered = np.sign(size) * (after[:, None] - before) > 0.0
    if abs(size) < min_size or np.mean(is_ordered) < min_ordered:
        return False
    # Minimum of twice the log likelihood ratio of a change with noise to noise alone. Correlated
    # noise drifts by up to 4.5 / n in n windows, and at most by 0.19.
    min_ratio = 28.0 if abs(size) < min(0.19, 4.5 / n) else min(6.0 + 0.5 * n, 22.0)
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
