"""The comparison of runs: by how much their steps differ, in which phase, and whether by chance."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gputime._measurement.history import list_phases
from lightning_gputime._measurement.stats import largest_part
from lightning_gputime._measurement.summary import plain
from lightning_gputime._measurement.table import Table, Tabular, Unit, duration, unit_of
from lightning_gputime._measurement.wall_time import STEPS
from lightning_gputime._messages import Named, format_value
from lightning_gputime._phases import in_order, of_one_callback
from lightning_gputime._saved_runs.environment import Environment
from lightning_gputime._saved_runs.saved import Run, load

# Fields of the environment in which runs must agree: else their steps are not the same work.
MUST_AGREE = ("device", "device_type", "world_size", "batch_size", "accumulate_grad_batches")
_OWN = ("started", "rank", "options")  # Fields that differ from run to run, and mean nothing.
# By chance a comparison of equal runs may show any change at all in 5 %: the chance is split.
_CHANCES = {"step": 0.02, "mean": 0.005, "phases": 0.025}
_MIN_SHARE = 0.01  # The fraction of the step from which on a phase is judged.
_NOISY = 0.1  # An interval of more than this fraction of the step tells little.
_MIN_OUTSIDE = 0.05  # From this fraction of the wall clock on a change outside of steps is told.
_MIN_PAIRS = 5  # With fewer, what pairs gain is less than what it costs to know them so badly.
_MIN_STEPS = 24  # With fewer steps the error of an estimate is not known.
# The fraction of the steps left out at each end: what is left is the interquartile mean.
_TRIMMED = 0.25
_MOST_FACTOR = 2.0
_BLOCKS = 12  # The number of blocks of neighbouring steps that a run is cut into.
_DROPS = ("change", "95 %")  # What goes first where the table is too wide.

Floats = npt.NDArray[np.float64]
_PATHS = (str, os.PathLike)
Given = Run | str | os.PathLike[str]
Side = tuple[str, Sequence[Run]]  # The name of a group, and its runs.


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of one phase, or of the step, between two sides.

    Attributes:
        before_ms: The time before (in milliseconds).
        after_ms: The time after (in milliseconds).
        error_ms: Half the width of the interval of their difference (in milliseconds).
        relative_error: The same as a fraction of the time before. For a time that has more than
            doubled it is that of twice the time before.
    """

    before_ms: float
    after_ms: float
    error_ms: float
    relative_error: float

    @property
    def change_ms(self) -> float:
        """How much longer it takes after than before (in milliseconds)."""
        return self.after_ms - self.before_ms

    @property
    def relative_change(self) -> float:
        """The same as a fraction of the time before; NaN where that is zero."""
        return self.change_ms / self.before_ms if self.before_ms else math.nan

    @property
    def is_significant(self) -> bool:
        """Whether the change is significant: zero lies outside of its interval."""
        return abs(self.change_ms) > self.error_ms

    @property
    def verdict(self) -> str:
        """Is "slower" or "faster" where the change is significant, else "alike"."""
        if not self.is_significant:
            return "alike"
        return "slower" if self.change_ms > 0 else "faster"

    def is_above(self, bound: float) -> bool:
        """Return whether all of its interval lies above a fraction of the time before."""
        # What is new lies above any.
        is_more = not self.before_ms or self.relative_change - self.relative_error > bound
        return is_more and self.is_significant


@dataclass(frozen=True, slots=True, repr=False)
class RunComparison(Tabular):
    """What differs between two sides of one run or several each; `print` shows it as a table.

    The times of `step` and `rows` are those of a typical step, the mean over the middle half of the
    steps by their length. The phases add up to the step, and their changes to its change. The
    intervals of `step`, `mean` and the phases hold together with 95 % confidence.

    Attributes:
        rows: Each phase, in the order of a step; a phase that did not run takes 0 ms.
        step: The typical step.
        mean: The mean over all steps, slow ones included.
        runs: How many runs the sides have, before and after.
        steps: How many steps they have.
        notes: What else differs, such as the version of torch.
        outside: How the time outside of the steps differs, which is not judged; else empty.
        names: What the sides are called.
        in_turns: Whether the runs took turns, and each is compared with its neighbour.
        others: The comparisons of further groups with the same runs before.
    """

    rows: Mapping[str, Difference]
    step: Difference
    mean: Difference
    runs: tuple[int, int]
    steps: tuple[int, int]
    notes: tuple[str, ...] = ()
    outside: str = ""
    names: tuple[str, str] = ("before", "after")
    in_turns: bool = False
    others: tuple["RunComparison", ...] = ()

    @property
    def verdict(self) -> str:
        """Is "slower" or "faster" where that is significant of the step, else "alike"."""
        return self.step.verdict

    @property
    def judged(self) -> list[str]:
        """The phases that take 1 % of the step or more, before or after, without sub-phases."""
        return [
            name
            for name, row in self.rows.items()
            if "/" not in name
            and max(row.before_ms, row.after_ms) >= _MIN_SHARE * self.step.before_ms
        ]

    @property
    def sentence(self) -> str:
        """Which changes are significant, of the step and of its phases; what changed outside."""
        found = [self._claim, self.outside]
        # First what is known to differ.
        return "; ".join(filter(None, found if self.step.is_significant else reversed(found)))

    @property
    def _claim(self) -> str:
        unit = unit_of(self.step.before_ms)
        changed = [(self._most(one), self.rows[one]) for one in self.judged]
        # What slow steps add.
        differs = abs(self.mean.relative_change - self.step.relative_change)
        if not self.step.is_significant or differs > self.mean.relative_error:
            changed.append(("the mean of all steps", self.mean))
        told = ", ".join(
            f"{name} {unit.number(abs(row.change_ms))} ± {unit.of(row.error_ms)} {row.verdict}"
            for name, row in sorted(changed, key=lambda one: -abs(one[1].change_ms))
            if row.is_significant
        )
        if self.step.is_significant:
            percent = _percent(self.step).removeprefix("+").removeprefix("-")
            claim = f"{percent} {self.verdict}: {told or 'no single phase significantly'}"
        elif told:
            claim = f"{told}; a typical step: no significant change ({_percent(self.step)})"
        elif self.step.error_ms > _NOISY * self.step.before_ms:
            return (
                f"too noisy to tell ({_percent(self.step)}): compare longer runs, or more of each"
            )
        else:
            claim = f"no significant change of the step: {_percent(self.step)}"
        if min(self.runs) > 1:
            return claim
        return f"{claim}; with one run a side this may be chance: save three or more of each"

    def _most(self, name: str) -> str:
        """Return the name of a phase, with the part that is most of its change."""
        parts = {part: row.change_ms for part, row in self.rows.items()}
        part = largest_part(parts, name, sign=parts[name])
        return name if part == name else f"{name} ({part})"

    def is_above(self, bound: float, phase: str = "") -> bool:
        """Return whether it is significantly slower by more than a fraction of the time before.

        Args:
            bound: Such as 0.02 for 2 %. The whole interval must lie above it.
            phase: Of what: a phase, or the "step", typical or mean; if empty, the step or any of
                the phases that are `judged`. What did not run before lies above any bound.
        """
        asked = self._asked(phase)
        asked += [self.mean] if phase in ("", "step") else []
        return any(one.is_above(bound) for one in asked)

    def is_below(self, bound: float, phase: str = "") -> bool:
        """Return whether all that `is_above` asks of, but the mean, lies significantly below."""
        return all(one.relative_change + one.relative_error < bound for one in self._asked(phase))

    def _asked(self, phase: str) -> list[Difference]:
        known = {"step": self.step, **self.rows}
        if phase and phase not in known:
            raise ValueError(f"the runs have no phase {phase!r}; they have {', '.join(known)}")
        return [known[name] for name in ([phase] if phase else ["step", *self.judged])]

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts of numbers, ready for JSON; None where there is no number."""
        told = {"verdict": self.verdict, "sentence": self.sentence}
        others = [one.to_dict() for one in self.others]
        found: dict[str, Any] = plain({**asdict(self), **told, "others": others})
        return found

    def _table(self) -> Table:
        unit = unit_of(self.step.before_ms)
        lines = [["phase", self.names[0]]]
        for name, row in {**self.rows, "step": self.step}.items():
            _, slash, part = name.partition("/")
            lines.append([f"  {part}" if slash else name, unit.cell(row.before_ms)])
        counts, sentences = [self._count(0)], []
        for one in (self, *self.others):
            for line, cells in zip(lines, one._cells(unit), strict=True):
                line += cells
            counts.append(one._count(1))
            about = f"{one.names[1]}: " if self.others else ""
            sentences += [f"{about}{sentence}" for sentence in (one.sentence, *one.notes)]
        title = f"A typical step in {unit.name}: {', '.join(counts)}"
        drops = [name for name in _DROPS for _ in counts[1:]]
        return Table(title, [tuple(line) for line in lines], sentences, drops=drops)

    def _cells(self, unit: Unit) -> Iterator[tuple[str, ...]]:
        """Yield the columns of what comes after, from the header down."""
        yield self.names[1], "change", "95 %", "change in %", ""
        for name, row in [*self.rows.items(), ("", self.step)]:
            word = row.verdict if row.is_significant and (not name or name in self.judged) else ""
            percent = "" if math.isnan(row.relative_change) else f"{row.relative_change:+.1%}"
            if "/" in name and not (row.before_ms and row.after_ms):
                # It may not have been timed: other `modules`.
                word, percent = f"only {self.names[not row.before_ms]}", ""
            yield (
                unit.cell(row.after_ms),
                f"{row.change_ms / unit.ms:+.{unit.digits}f}",
                f"± {unit.cell(row.error_ms)}",
                percent,
                word,
            )

    def _count(self, side: int) -> str:
        runs = f" of {self.runs[side]} runs" if self.runs[side] > 1 else ""
        turns = ", in turns" if side and self.in_turns else ""
        return f"{self.names[side]} {self.steps[side]} steps{runs}{turns}"


def _percent(one: Difference) -> str:
    # The interval that tells whether it is significant, and not that of `is_above`.
    error = one.error_ms / one.before_ms
    digits = 1 if error >= 0.001 else 2
    return f"{100 * one.relative_change:+.{digits}f} % ± {100 * error:.{digits}f} %"


def compare(
    before: Given | Sequence[Given],
    after: Given | Sequence[Given],
    *more: Given | Sequence[Given],
    allow_mismatch: bool = False,
) -> RunComparison:
    """Compare the steps of two runs, or of groups of runs, without their warm-up.

    An interval allows for the noise within the runs, where neighbouring steps are not independent;
    with several runs on a side also for the spread between runs. With one run a side that is not
    seen, and the comparison holds for these runs only. Where the sides took turns at least five
    times, as in `bench`, each run is compared with its neighbour.

    Args:
        before: A run, or several: as `load` returns them, their files, or their folder.
        after: The others.
        more: Further groups, each compared with the first one, too.
        allow_mismatch: Whether to compare runs that differ in device, world size or batch, too.

    Raises:
        OSError: If a file cannot be read.
        TypeError: If something else is given.
        ValueError: If a file is none of a run, or the runs cannot be compared.

    Examples:
        >>> print(compare(["b1.json.gz", "b2.json.gz"], ["a1.json.gz", "a2.json.gz"]).sentence)
        4.1 % ± 0.6 % slower: backward 0.51 ± 0.08 ms slower
    """
    return compare_groups([before, after, *more], allow_mismatch=allow_mismatch)


def compare_groups(
    groups: Sequence[Given | Sequence[Given]], *, allow_mismatch: bool = False, looks: int = 1
) -> RunComparison:
    """Compare each group with the first; runs are added, and this is done, `looks` times in all."""
    names = ["before", "after"]
    if len(groups) > 2:
        names = [str(g) if isinstance(g, _PATHS) else f"group {i}" for i, g in enumerate(groups, 1)]
    base, *others = zip(names, map(_runs_of, names, groups), strict=True)
    runs = [run for _, side in (base, *others) for run in side]
    for run in runs:
        if len(run.measured) < _MIN_STEPS:
            raise ValueError(
                f"{run.name or 'a run'} has {len(run.measured)} steps after its warm-up; at least"
                f" {_MIN_STEPS} are needed to separate a difference from noise"
            )
        if not np.median(run.measured["step_ms"]):
            raise ValueError(
                f"most steps of {run.name or 'a run'} take 0 ms, and no change can be given in"
                " percent of that: save a run whose steps were timed"
            )
    # In the order of the files: the user's own phases have no other.
    found = dict.fromkeys(name for run in runs for name in list_phases(run.history))
    phases = in_order([name for name in found if not of_one_callback(name)])
    tries = looks * len(others)
    first, *more = (_compare_two((base, one), phases, tries, allow_mismatch) for one in others)
    return replace(first, others=tuple(more))


def _compare_two(
    sides: Sequence[Side], phases: Sequence[str], tries: int, allow_mismatch: bool
) -> RunComparison:
    notes = _notes(sides)
    refused = [note for name, note in notes.items() if name in MUST_AGREE]
    if refused and not allow_mismatch:
        raise ValueError(
            f"the runs cannot be compared: {'; '.join(refused)}. Pass"
            " allow_mismatch=True (--allow-mismatch) to compare them all the same"
        )
    (first, before), (second, after) = sides
    times = [[_times(run, phases) for run in side] for side in (before, after)]
    of_phase = _CHANCES["phases"] / max(sum("/" not in name for name in phases), 1)
    chances = np.array([_CHANCES["step"], *[of_phase] * len(phases)]) / tries
    in_turns = _took_turns(before, after)
    step, *rows = differences(*times, how=typical, confidence=1 - chances, in_turns=in_turns)
    chance = _CHANCES["mean"] / tries
    wholes = [[one[:, :1] for one in side] for side in times]
    [mean] = differences(*wholes, how=mean_of_all, confidence=1 - chance, in_turns=in_turns)
    return RunComparison(
        rows=Named(zip(phases, rows, strict=True)),
        step=step,
        mean=mean,
        runs=(len(before), len(after)),
        steps=(sum(map(len, times[0])), sum(map(len, times[1]))),
        notes=tuple(notes.values()),
        outside=_outside(sides),
        names=(first, second),
        in_turns=in_turns,
    )


def _took_turns(before: Sequence[Run], after: Sequence[Run]) -> bool:
    """Return whether the runs, in the order in which they started, are pairs of both sides."""
    pairs = zip(before, after, strict=False)
    started = [one for pair in pairs for one in sorted(run.environment.started for run in pair)]
    return len(before) == len(after) >= _MIN_PAIRS and started == sorted(set(started))


def _runs_of(name: str, given: Given | Sequence[Given]) -> list[Run]:
    """Return the runs of a side, in the order in which they started."""
    several: Sequence[Any] = given if isinstance(given, list | tuple) else [given]
    if isinstance(given, _PATHS) and os.path.isdir(given):
        several = sorted(Path(given).glob("*.json*"))
    if not several:
        raise ValueError(f"{name} must be a run or several, got none in {given}")
    for one in several:
        if not isinstance(one, (Run, *_PATHS)):
            what = "a run as load() returns it, its file, or a list of these"
            raise TypeError(f"{name} must be {what}, got {format_value(one)}")
    runs = [one if isinstance(one, Run) else load(one) for one in several]
    return sorted(runs, key=lambda run: run.environment.started)


def _notes(sides: Sequence[Side]) -> dict[str, str]:
    """Return a sentence on each field in which the environments differ."""
    found = {}
    for name in (field.name for field in fields(Environment) if field.name not in _OWN):
        # What is not known of one run is no difference.
        of_sides = {
            side: {getattr(run.environment, name) for run in runs} - {"", None}
            for side, runs in sides
        }
        if len(set().union(*of_sides.values())) > 1:
            told = (
                f"{' or '.join(sorted(map(str, values))) or 'unknown'} ({side})"
                for side, values in of_sides.items()
            )
            found[name] = f"{name} is {' and '.join(told)}"
    return found


def _outside(sides: Sequence[Side]) -> str:
    """Return a sentence on the time outside of the steps, where it differs."""
    outside_s, wall_s = [], []
    for _, runs in sides:
        spent = [one for run in runs if (one := run.summary().wall_time) is not None]
        if len(spent) < len(runs):
            return ""
        in_steps = [one.entries_s.get(STEPS, 0.0) for one in spent]
        wall_s.append(sum(one.wall_s for one in spent) / len(runs))
        outside_s.append(wall_s[-1] - sum(in_steps) / len(runs))
    if abs(outside_s[1] - outside_s[0]) < _MIN_OUTSIDE * max(wall_s):
        return ""
    told = (
        f"{duration(1e3 * one)} of {duration(1e3 * whole)} ({side})"
        for (side, _), one, whole in zip(sides, outside_s, wall_s, strict=True)
    )
    return f"outside of the steps {' and '.join(told)}, not judged"


def _times(run: Run, names: Sequence[str]) -> Floats:
    """Return the times of the steps, and of their phases, as columns."""
    measured, known = run.measured, list_phases(run.history)
    # A phase that did not run takes no time of the step.
    absent = np.zeros(len(measured))
    phases = [measured[f"{name}_ms"] if name in known else absent for name in names]
    return np.asarray(np.nan_to_num(np.stack([measured["step_ms"], *phases], axis=1)))


# How long a step typically takes, and how sure that is: steps are not independent

# The estimate of each column of one run; and for each step and column its influence: how far the
# estimate would move by it, times the number of steps. The mean of that is zero, and the error of
# that mean is the estimate's.
Estimate = tuple[Floats, Floats]


def mean_of_all(times: Floats) -> Estimate:
    """Return the mean of each column of times, of shape (steps, columns)."""
    values = times.mean(axis=0)
    return values, times - values


def typical(times: Floats) -> Estimate:
    """Return the mean of each column over the middle half of the steps.

    The first column, the whole step, decides which steps these are: so the others add up to it as
    they do in each step. A step of a second moves it no more than one that is a little slow.
    """
    n = len(times)
    cut = int(n * _TRIMMED)
    order = np.argsort(times[:, 0], kind="stable")
    kept = order[cut : n - cut]
    influence = np.empty_like(times)
    influence[kept] = times[kept]
    # Where a step that is cut lies does not matter, but on which side does: it moves the border,
    # as far as the columns are long there. On both sides of it: where steps have two speeds, the
    # gap may lie on either side of the border by chance.
    near = max(cut // 5, 1)
    influence[order[:cut]] = times[order[cut - near : cut + near]].mean(axis=0)
    influence[order[n - cut :]] = times[order[n - cut - near : n - cut + near]].mean(axis=0)
    influence -= influence.mean(axis=0)
    return times[kept].mean(axis=0), influence * n / len(kept)


def variance(influence: Floats) -> Floats:
    """Return the variance of the mean of each column, by the moving-block bootstrap.

    It draws blocks of neighbouring steps, so that what is alike stays together. The variance of
    the mean of drawn blocks is that of all blocks, divided by their number: nothing must be drawn.
    The blocks are as long as they can be, because what slows steps down may last for hundreds of
    them; the interval is wider for their small number, see `quantile_of_t`.
    """
    block = len(influence) // _BLOCKS
    whole, half = _variance_of(influence, block), _variance_of(influence, block // 2)
    # Where slow steps recur at a fixed distance, blocks have all the same number of them: it is
    # never less than one more, or one fewer, of the longest steps makes.
    one = (np.abs(influence).max(axis=0) / len(influence)) ** 2
    # What longer blocks show more than shorter ones, still longer ones would show again.
    return np.asarray(np.maximum(whole + np.maximum(whole - half, 0), one))


def _variance_of(influence: Floats, block: int) -> Floats:
    sums = np.vstack((np.zeros(influence.shape[1]), np.cumsum(influence, axis=0)))
    means = (sums[block:] - sums[:-block]) / block
    # As with a sample, one is lost: the mean of the blocks is known only as well as they are.
    return np.asarray(means.var(axis=0) / (len(influence) / block - 1))


def differences(
    before: Sequence[Floats],
    after: Sequence[Floats],
    *,
    how: Callable[[Floats], Estimate],
    confidence: float | Floats,
    in_turns: bool = False,
) -> list[Difference]:
    """Return by how much the steps of two sides differ, in each column of their times.

    The times of each run have shape (steps, columns). The interval is the wider one of two: by the
    noise within the runs, and by the spread between them, if a side has several.

    Args:
        before: The times of each run of one side.
        after: Those of the other.
        how: `typical` or `mean_of_all`.
        confidence: That of the intervals, or of the interval of each column.
        in_turns: Whether the runs of the two sides are pairs, one after the other.
    """
    values, noise = [], []
    for runs in (before, after):
        found, influences = zip(*map(how, runs), strict=True)
        values.append(np.array(found))
        noise.append(np.sum([variance(one) for one in influences], axis=0) / len(runs) ** 2)
    before_ms, after_ms = (one.mean(axis=0) for one in values)
    is_there = before_ms > 0
    ratio = np.divide(after_ms, before_ms, out=np.zeros_like(before_ms), where=is_there)
    n, m = len(before), len(after)

    def error_of(factor: Floats | float) -> Floats:
        """Return half the interval of the time after minus a multiple of that before."""
        within = quantile_of_t((_BLOCKS - 1) * min(n, m), confidence) * np.sqrt(
            noise[1] + factor**2 * noise[0]
        )
        if n + m == 2:
            return np.asarray(within)
        if in_turns:
            freedom, square = n - 1, (values[1] - factor * values[0]).var(axis=0, ddof=1) / n
        else:
            freedom = n + m - 2
            pooled = (n * values[0].var(axis=0) + m * values[1].var(axis=0)) / freedom
            square = pooled * (factor**2 / n + 1 / m)
        return np.asarray(np.maximum(within, quantile_of_t(freedom, confidence) * np.sqrt(square)))

    # The noise of the time before counts as often as the bound that it is held against, which is no
    # more than twice that time; and not as often as a short phase has grown.
    factor = np.minimum(ratio, _MOST_FACTOR)
    relative_error = np.divide(
        error_of(factor), before_ms, out=np.full_like(before_ms, np.nan), where=is_there
    )
    rows = np.stack((before_ms, after_ms, error_of(1.0), relative_error), axis=1)
    return [Difference(*row) for row in rows.tolist()]


def quantile_of_t(freedom: int, confidence: float | Floats) -> Floats:
    """Return how many standard errors half an interval of Student's t is wide."""
    # Of t = sqrt(freedom) tan(angle) the angle has this density, without its constant.
    angles = np.linspace(0, np.pi / 2, 4_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.cumsum(density[1:] + density[:-1])
    angle = np.interp(confidence, np.append(0, below) / below[-1], angles)
    return np.asarray(math.sqrt(freedom) * np.tan(angle))
