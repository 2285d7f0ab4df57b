"""The comparison of runs: which can be compared, and what comes of it."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from lightning_gputime._messages import shown
from lightning_gputime._phases import in_order, of_one_callback
from lightning_gputime._runs import statistics
from lightning_gputime._runs.comparison import Difference, RunComparison
from lightning_gputime._runs.environment import Environment
from lightning_gputime._runs.saved import Run, load
from lightning_gputime._runs.statistics import Estimate, Floats

MUST_AGREE = ("device", "device_type", "world_size", "batch_size", "accumulate_grad_batches")
"""What two runs must agree in: else their steps are not the same work."""

# What differs from run to run, and says nothing.
_OWN = ("started", "rank", "options")


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is compared: its estimate, and the variance of that."""

    estimate: Callable[[Floats], Estimate]
    variance: Callable[[Floats], tuple[Floats, int]]


_TYPICAL = _Kind(statistics.typical, statistics.variance)
_MEAN = _Kind(statistics.mean, statistics.variance_of_mean)

Given = Run | str | os.PathLike[str]


def compare(
    before: Given | Sequence[Given], after: Given | Sequence[Given], *, anyway: bool = False
) -> RunComparison:
    """Compares the steps of two runs, or of two groups of runs, without their warm-up.

    A difference has a 95 % interval: from blocks of neighbouring steps, because these are not
    independent; with several runs on a side it is never narrower than the spread between runs
    says. With one run a side that spread is not seen: what differs by chance between equal runs,
    such as a machine that others use, is then taken for a difference.

    Args:
        before: A run, or several: as `load` returns them, or their files.
        after: The others.
        anyway: Whether to compare runs that differ in device, world size or batch, too.

    Raises:
        OSError: If a file cannot be read.
        TypeError: If something else is given.
        ValueError: If a file is none of a run, or the runs cannot be compared.

    Example:
        >>> print(compare("before.json.gz", "after.json.gz").sentence)
        4.1 % ± 0.6 % slower: backward explains 83 %
    """
    sides = _runs_of("before", before), _runs_of("after", after)
    notes = _differences(*sides)
    refused = [note for name, note in notes.items() if name in MUST_AGREE]
    if refused and not anyway:
        raise ValueError(
            f"the runs cannot be compared: {'; '.join(refused)}. Pass anyway=True (--anyway) to"
            " compare them all the same"
        )
    for run in (*sides[0], *sides[1]):
        if len(run.measured) < statistics.LEAST_STEPS:
            raise ValueError(
                f"{run.name or 'a run'} has {len(run.measured)} steps after its warm-up; at least"
                f" {statistics.LEAST_STEPS} are needed to tell a difference from noise"
            )
    names = _phases_of([*sides[0], *sides[1]])
    typical = _differences_of(sides, names, _TYPICAL, 0.95)
    [mean, *_] = _differences_of(sides, names, _MEAN, 0.995)
    return RunComparison(
        rows=dict(zip(names, typical[1:], strict=True)),
        step=typical[0],
        mean=mean,
        runs=(len(sides[0]), len(sides[1])),
        steps=(_steps(sides[0]), _steps(sides[1])),
        notes=tuple(notes.values()),
    )


def _runs_of(name: str, given: Given | Sequence[Given]) -> list[Run]:
    several = given if isinstance(given, list | tuple) else [given]
    if not several:
        raise ValueError(f"{name} must be a run or several, got none")
    runs = []
    for one in several:
        if not isinstance(one, Run | str | os.PathLike):
            raise TypeError(
                f"{name} must be a run as load() returns it, its file, or a list of these, got"
                f" {shown(one)}"
            )
        runs.append(one if isinstance(one, Run) else load(one))
    return runs


def _differences(before: Sequence[Run], after: Sequence[Run]) -> dict[str, str]:
    """Returns a sentence on each field in which the environments differ."""
    found = {}
    for name in (field.name for field in fields(Environment)):
        sides = [_values(runs, name) for runs in (before, after)]
        # What is not known of one run is no difference.
        if name not in _OWN and len(sides[0] | sides[1]) > 1:
            first, second = (" and ".join(sorted(side)) or "unknown" for side in sides)
            found[name] = f"{name} is {first} before and {second} after"
    return found


def _values(runs: Iterable[Run], name: str) -> set[str]:
    values: list[Any] = [getattr(run.environment, name) for run in runs]
    return {str(value) for value in values if value not in ("", None)}


def _phases_of(runs: Iterable[Run]) -> list[str]:
    # In the order of the files: the user's own phases have no other.
    columns = dict.fromkeys(name for run in runs for name in run.history.dtype.names or ())
    others = {"step", "step_ms", "host_wait_ms"}
    names = [name.removesuffix("_ms") for name in columns if name not in others]
    return in_order([name for name in names if not of_one_callback(name)])


def _steps(runs: Iterable[Run]) -> int:
    return sum(len(run.measured) for run in runs)


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """The estimates of several runs: their means, and the variances of these.

    Attributes:
        values: Of shape (runs, columns).
        within: The variance of each column's mean that the noise of the steps makes.
        freedom: Its degrees of freedom.
    """

    values: Floats
    within: Floats
    freedom: int

    @property
    def mean(self) -> Floats:
        means: Floats = self.values.mean(axis=0)
        return means

    @property
    def squares(self) -> Floats:
        """The squares of how far the runs are from their mean, added up."""
        squares: Floats = ((self.values - self.mean) ** 2).sum(axis=0)
        return squares


def _side(runs: Sequence[Run], names: Sequence[str], kind: _Kind) -> _Side:
    estimates = [kind.estimate(_times(run, names)) for run in runs]
    variances, freedoms = zip(*(kind.variance(one.influence) for one in estimates), strict=True)
    values = np.array([one.values for one in estimates])
    return _Side(values, np.sum(variances, axis=0) / len(runs) ** 2, sum(freedoms))


def _times(run: Run, names: Sequence[str]) -> Floats:
    measured = run.measured
    columns = [measured["step_ms"]]
    for name in names:
        # A phase that did not run takes no time of the step.
        is_there = f"{name}_ms" in (measured.dtype.names or ())
        columns.append(np.nan_to_num(measured[f"{name}_ms"]) if is_there else 0 * columns[0])
    return np.stack(columns, axis=1)


def _differences_of(
    runs: tuple[Sequence[Run], Sequence[Run]],
    names: Sequence[str],
    kind: _Kind,
    confidence: float,
) -> list[Difference]:
    """Returns the difference of the step, and then those of the phases."""
    before, after = (_side(side, names, kind) for side in runs)
    wide = partial(statistics.quantile_of_t, confidence=confidence)
    ratios = np.divide(
        after.mean, before.mean, out=np.zeros_like(after.mean), where=before.mean > 0
    )

    def half(of_before: Floats, of_after: Floats, freedom: int) -> tuple[Floats, Floats]:
        # The error of the quotient, in milliseconds of the time before.
        errors_ms = np.sqrt(of_before + of_after) * wide(freedom)
        return errors_ms, np.sqrt(of_before * ratios**2 + of_after) * wide(freedom)

    errors = half(before.within, after.within, min(before.freedom, after.freedom))
    counts = len(before.values), len(after.values)
    freedom = sum(counts) - 2
    if freedom:
        pooled = (before.squares + after.squares) / freedom
        spread = half(pooled / counts[0], pooled / counts[1], freedom)
        errors = np.maximum(errors[0], spread[0]), np.maximum(errors[1], spread[1])
    return [
        Difference(
            float(before_ms),
            float(after_ms),
            float(error_ms),
            float(error_of_ratio / before_ms) if before_ms else math.nan,
        )
        for before_ms, after_ms, error_ms, error_of_ratio in zip(
            before.mean, after.mean, *errors, strict=True
        )
    ]
