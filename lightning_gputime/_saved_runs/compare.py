"""The comparison of runs: by how much their steps differ, how sure that is, and in which phase."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from lightning_gputime._messages import format_value
from lightning_gputime._phases import in_order, of_one_callback
from lightning_gputime._results.files import plain
from lightning_gputime._results.history import list_phases
from lightning_gputime._results.table import Table, Tabular, Unit, unit_of
from lightning_gputime._saved_runs import statistics
from lightning_gputime._saved_runs.environment import Environment
from lightning_gputime._saved_runs.saved import Run, load

# Fields of the environment in which runs must agree: else their steps are not the same work.
MUST_AGREE = ("device", "device_type", "world_size", "batch_size", "accumulate_grad_batches")
_OWN = ("started", "rank", "options")  # Fields that differ from run to run, and mean nothing.
_MOST = 0.8  # Of a phase's difference: from there on a part of it is named in its place.
_FEW_STEPS = 200  # With fewer a side it is not known how long what slows steps down lasts.
_DROPS = ("explains", "change", "95 %")  # What goes first where the table is too wide.
_ONE_RUN = "One run a side: by how much equal runs differ is not seen. Give several a side."
_SHORT_RUNS = (
    f"With fewer than {_FEW_STEPS} steps a side, runs are called different too often where slow"
    " steps follow each other."
)

Given = Run | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of one phase, or of the step, between two sides.

    Attributes:
        before_ms: The time before (in milliseconds).
        after_ms: The time after (in milliseconds).
        error_ms: Half the width of the 95 % interval of their difference (in milliseconds).
        error_ratio: The same for the difference as a fraction of the time before.
    """

    before_ms: float
    after_ms: float
    error_ms: float
    error_ratio: float

    @property
    def change_ms(self) -> float:
        """How much longer it takes after than before (in milliseconds)."""
        return self.after_ms - self.before_ms

    @property
    def ratio(self) -> float:
        """The same as a fraction of the time before; NaN where that is zero."""
        return self.change_ms / self.before_ms if self.before_ms else math.nan

    @property
    def is_certain(self) -> bool:
        """Whether zero lies outside of the interval."""
        return abs(self.change_ms) > self.error_ms

    def is_above(self, bound: float) -> bool:
        """Return whether it is certainly longer by more than a fraction of the time before."""
        return self.ratio - self.error_ratio > bound and self.is_certain


@dataclass(frozen=True, slots=True)
class RunComparison(Tabular):
    """What differs between two sides of one run or several each; `print` shows it as a table.

    The times of `step` and `rows` are those of a typical step, the mean over the middle half of the
    steps by their length. The phases add up to the step, and their changes to its change.

    Attributes:
        rows: Each phase, in the order of a step; a phase that did not run takes 0 ms.
        step: The typical step.
        mean: The mean over all steps, slow ones included, with an interval of 99.5 %.
        runs: How many runs the sides have, before and after.
        steps: How many steps they have.
        notes: What else differs, such as the version of torch.
    """

    rows: Mapping[str, Difference]
    step: Difference
    mean: Difference
    runs: tuple[int, int]
    steps: tuple[int, int]
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Is "slower" or "faster" where that is certain, else "alike"."""
        if not self.step.is_certain:
            return "alike"
        return "slower" if self.step.change_ms > 0 else "faster"

    @property
    def explains(self) -> dict[str, float]:
        """The fraction of the step's change that each phase explains; they add up to 1.

        Without sub-phases, whose parts are in their parents'. Empty where nothing is certain.
        """
        if not self.step.is_certain:
            return {}
        changes = {name: row.change_ms for name, row in self.rows.items()}
        return {name: ms / self.step.change_ms for name, ms in changes.items() if "/" not in name}

    @property
    def sentence(self) -> str:
        """One sentence: by how much they differ, how sure that is, and which phase explains it."""
        if not self.step.is_certain:
            return f"no difference is certain: {_amount(self.step, sign=True)}"
        explains = self.explains
        most = name = max(explains, key=explains.__getitem__)
        for part, row in self.rows.items():
            if part.startswith(f"{name}/") and row.change_ms / self.rows[name].change_ms >= _MOST:
                most = part
        share = f"{100 * explains[name]:.0f} %"
        return f"{_amount(self.step)} {self.verdict}: {most} explains {share}"

    @property
    def mean_sentence(self) -> str:
        """What slow steps add to it; empty where that is not certain."""
        mean, step = self.mean, self.step
        if not mean.is_certain or abs(mean.ratio - step.ratio) <= mean.error_ratio:
            return ""
        word = "longer" if mean.change_ms > 0 else "shorter"
        return f"with the slowest and fastest steps the mean is {_amount(mean)} {word}"

    def is_above(self, bound: float) -> bool:
        """Return whether it is certainly slower by more than a fraction of the time before.

        Args:
            bound: Such as 0.02 for 2 %. The whole interval, of the typical step or of the mean,
                must lie above it.
        """
        return self.step.is_above(bound) or self.mean.is_above(bound)

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts of numbers, ready for JSON; None where there is no number."""
        told = {"verdict": self.verdict, "explains": self.explains, "sentence": self.sentence}
        found: dict[str, Any] = plain({**asdict(self), **told})
        return found

    def _table(self) -> Table:
        shares = {name: f"{share:.0%}" for name, share in self.explains.items()}
        unit = unit_of(self.step.before_ms)
        header = ("phase", "before", "after", "change", "95 %", "change in %", "explains")
        body = [_cells(name, row, unit, shares.get(name, "")) for name, row in self.rows.items()]
        several = [f" of {n} runs" if n > 1 else "" for n in self.runs]
        before, after = (f"{n} steps{of}" for n, of in zip(self.steps, several, strict=True))
        title = f"A typical step in {unit.name}: {before} before, {after} after"
        whole = _cells("step", self.step, unit, "100%" if shares else "")
        return Table(title, [header, *body, whole], self._sentences(), drops=_DROPS)

    def _sentences(self) -> list[str]:
        told = [self.sentence, self.mean_sentence, *self.notes]
        told += [_ONE_RUN] if sum(self.runs) == 2 else []
        told += [_SHORT_RUNS] if min(self.steps) < _FEW_STEPS else []
        return [one for one in told if one]


def _amount(one: Difference, *, sign: bool = False) -> str:
    digits = 1 if one.error_ratio >= 0.001 else 2
    ratio = f"{100 * one.ratio:+.{digits}f}"
    return f"{ratio if sign else ratio[1:]} % ± {100 * one.error_ratio:.{digits}f} %"


def _cells(name: str, row: Difference, unit: Unit, explains: str) -> tuple[str, ...]:
    _, slash, part = name.partition("/")
    return (
        f"  {part}" if slash else name,
        unit.cell(row.before_ms),
        unit.cell(row.after_ms),
        f"{row.change_ms / unit.ms:+.{unit.digits}f}",
        f"± {unit.cell(row.error_ms)}",
        "" if math.isnan(row.ratio) else f"{row.ratio:+.1%}",
        explains,
    )


def compare(
    before: Given | Sequence[Given], after: Given | Sequence[Given], *, anyway: bool = False
) -> RunComparison:
    """Compare the steps of two runs, or of two groups of runs, without their warm-up.

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
    notes = _notes(*sides)
    refused = [note for name, note in notes.items() if name in MUST_AGREE]
    if refused and not anyway:
        raise ValueError(
            f"the runs cannot be compared: {'; '.join(refused)}. Pass anyway=True (--anyway) to"
            " compare them all the same"
        )
    runs = [*sides[0], *sides[1]]
    for run in runs:
        if len(run.measured) < statistics.MIN_STEPS:
            raise ValueError(
                f"{run.name or 'a run'} has {len(run.measured)} steps after its warm-up; at least"
                f" {statistics.MIN_STEPS} are needed to tell a difference from noise"
            )
    # In the order of the files: the user's own phases have no other.
    phases = dict.fromkeys(name for run in runs for name in list_phases(run.history))
    names = in_order([name for name in phases if not of_one_callback(name)])
    times = [[_times(run, names) for run in side] for side in sides]
    found = statistics.difference(*times, how=statistics.TYPICAL)
    step, *rows = [Difference(*row) for row in found.tolist()]
    wholes = [[one[:, :1] for one in side] for side in times]
    [mean] = statistics.difference(*wholes, how=statistics.MEAN).tolist()
    return RunComparison(
        rows=dict(zip(names, rows, strict=True)),
        step=step,
        mean=Difference(*mean),
        runs=(len(sides[0]), len(sides[1])),
        steps=(sum(map(len, times[0])), sum(map(len, times[1]))),
        notes=tuple(notes.values()),
    )


def _runs_of(name: str, given: Given | Sequence[Given]) -> list[Run]:
    several: Sequence[Any] = given if isinstance(given, list | tuple) else [given]
    if not several:
        raise ValueError(f"{name} must be a run or several, got none")
    for one in several:
        if not isinstance(one, Run | str | os.PathLike):
            what = "a run as load() returns it, its file, or a list of these"
            raise TypeError(f"{name} must be {what}, got {format_value(one)}")
    return [one if isinstance(one, Run) else load(one) for one in several]


def _notes(before: Sequence[Run], after: Sequence[Run]) -> dict[str, str]:
    """Return a sentence on each field in which the environments differ."""
    found = {}
    for name in (field.name for field in fields(Environment) if field.name not in _OWN):
        # What is not known of one run is no difference.
        first, second = (
            {getattr(run.environment, name) for run in side} - {"", None}
            for side in (before, after)
        )
        if len(first | second) > 1:
            were, are = (" and ".join(sorted(map(str, of))) or "unknown" for of in (first, second))
            found[name] = f"{name} is {were} before and {are} after"
    return found


def _times(run: Run, names: Sequence[str]) -> statistics.Floats:
    """Return the times of the steps, and of their phases, as columns."""
    measured, known = run.measured, list_phases(run.history)
    # A phase that did not run takes no time of the step.
    absent = np.zeros(len(measured))
    phases = [measured[f"{name}_ms"] if name in known else absent for name in names]
    return np.asarray(np.nan_to_num(np.stack([measured["step_ms"], *phases], axis=1)))
