"""Comparison of saved runs: changes of the step and its phases, with their uncertainty."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from lightning_gputime._measurement.history import list_phases
from lightning_gputime._measurement.plain import plain
from lightning_gputime._measurement.setup import Environment
from lightning_gputime._measurement.stats import largest_part
from lightning_gputime._measurement.units import duration, unit_of
from lightning_gputime._measurement.wall_clock import STEPS
from lightning_gputime._messages import Named, format_value
from lightning_gputime._output.summary import PhaseSummary
from lightning_gputime._output.table import Table, Tabular
from lightning_gputime._phases import in_order, of_one_callback
from lightning_gputime._runs.estimates import (
    MAX_RUNS,
    MIN_STEPS,
    OUTCOMES,
    RESOLUTION_MS,
    Difference,
    Estimate,
    Floats,
    Outcome,
    at_equal_speed,
    differences,
    mean_of_all_steps,
    mean_step,
    runs_needed,
    typical_step,
)
from lightning_gputime._runs.saved import Run, load

# Environment fields that determine the work of a step. Compared runs must agree on them.
MUST_AGREE = ("device", "device_type", "world_size", "batch_size", "accumulate_grad_batches")
# Probability that equal runs differ significantly in an interval, or in any phase; 5 % in total.
_FALSE_ALARMS = {"step": 0.02, "mean": 0.005, "phases": 0.025}
_MIN_PHASE_SHARE = 0.01  # Shorter phases get an outcome only if the user names them in a bound.
_MAX_ERROR = 0.1  # With a larger error, as a fraction of the step, the runs are too noisy.
_MIN_OUTSIDE_SHARE = 0.05  # Smaller changes outside of the steps are not reported.
_MIN_NOT_SAMPLED_SHARE = 0.01
_MIN_LINE, _MAX_LINES = 0.02, 5  # Change as a fraction of the step, and number of functions.
_MIN_PAIRS = 5  # Minimum number of pairs to estimate their spread.
_MIN_RUNS_TO_ADJUST = 3  # Minimum number of runs per side to adjust for the speed of the host.
_MIN_SCALING_SHARE = 0.1  # Times are scaled by a phase that takes this fraction of the step.
_DROPPED_COLUMNS = ("change", "95 %")  # Dropped in a narrow terminal, in this order.
MEAN = "the mean of all steps"
_ONE_RUN = "One run per side: the difference may be noise between runs."

Source = Run | str | os.PathLike[str]
_PATHS = (str, os.PathLike)


@dataclass(frozen=True, slots=True)
class LineChange:
    """Change of the time of a function, from the examined steps of both sides."""

    function: str
    file: str  # Empty for a function of a library or of a trainer.
    before_ms: float  # Time per step on the first side (in milliseconds).
    after_ms: float
    error_ms: float  # Half the width of the 95 % interval of the change.

    def __str__(self) -> str:
        where = f" ({self.file})" if self.file else ""
        name = f"`{self.function}`{where}" if self.function != "<module>" else f"`{self.file}`"
        before, after = duration(self.before_ms), duration(self.after_ms)
        return f"{name} takes {after} per step instead of {before}"


@dataclass(frozen=True, slots=True)
class ProportionalStep:
    """Difference of the step on a busy host, which makes all phases longer by the same factor.

    The times of each run are scaled such that one phase takes the same time in all runs: of the
    phases that take at least 10 % of the step, the one that changed least, in percent.
    """

    phase: str  # The phase by which times are scaled.
    step: Difference  # Difference of the scaled step.
    likely_error: float  # Half-width of the 60 % interval of the change of the step, not scaled.

    def outcome(self, bound: float, step: Difference) -> Outcome:
        """Return whether `step` is slower by more than a fraction of the time before.

        A regression is certain if the scaled step exceeds the bound, unless the step does not. The
        step passes if the scaled step does and if it is likely (80 %) that all phases together have
        not become slower by more than the bound.
        """
        outcome = self.step.outcome(bound)
        if outcome == "regression" and step.relative_change > bound:
            return outcome
        if outcome == "passed" and step.relative_change + self.likely_error <= bound:
            return outcome
        return step.outcome(bound)

    def __str__(self) -> str:
        change, error = self.step.relative_change, self.step.relative_error
        return f"in proportion to {self.phase}: {100 * change:+.1f} % ± {100 * error:.1f} %"


@dataclass(frozen=True, slots=True, repr=False)
class RunComparison(Tabular):
    """Differences between two sides, each of one or more runs; `print` shows them as a table.

    `step` and `rows` describe a typical step: the mean over the middle half of the timed steps by
    duration. For sampled runs, they describe the mean of all steps, timed or not. The phases add up
    to the step.

    The intervals of `step`, `mean` and the phases are simultaneous, with 95 % confidence. With
    several runs per side, they include the spread between runs. With one run per side, they include
    only the noise within the two runs.

    Attributes:
        rows: Difference of each phase, in the order of a step; 0 ms if a phase did not run.
        step: Difference of the typical step, or of the mean step if steps were sampled.
        mean: Difference of the mean over all steps, including slow steps. Its error is infinite if
            steps were sampled without an estimate for the other steps.
        runs: Number of runs on each side.
        steps: Number of steps on each side, timed or not.
        notes: Further differences, such as the version of torch.
        outside: Sentence on the time outside of the steps; empty if it hardly differs.
        names: Names of the sides.
        in_turns: True if the runs alternated, so that each is compared with its neighbor.
        others: Comparisons of further groups with the same first side.
        is_sampled: True if the times are estimates for all steps, timed or not.
        wall_clock: Total time of each entry of the wall clock that both sides have, such as
            "validation". Entries get an outcome only if `phase` names them and there are several
            runs.
        lines: Functions whose time changed by more than its error, and by 2 % of the step; the
            largest changes first.
        proportional: The step on a host that is shared with other work, if the model is on the CPU
            and each side has three or more runs. It decides what `step` leaves open.
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
    is_sampled: bool = False
    wall_clock: Mapping[str, Difference] = field(default_factory=dict)
    lines: tuple[LineChange, ...] = ()
    proportional: ProportionalStep | None = None

    @property
    def verdict(self) -> str:
        """Either "slower" or "faster" if the step changed significantly, else "alike"."""
        return self.step.verdict

    @property
    def judged(self) -> list[str]:
        """Phases of at least 1 % of `step.before_ms` on either side, without sub-phases."""
        return [
            name
            for name, row in self.rows.items()
            if "/" not in name
            and max(row.before_ms, row.after_ms) >= _MIN_PHASE_SHARE * self.step.before_ms
        ]

    def outcome(self, bound: float, phase: str = "") -> Outcome:
        """Return whether the step or a phase is slower by more than a bound.

        Args:
            bound: Maximum slowdown, as a fraction of the time before, such as 0.02 for 2 %.
            phase: Phase, "step" (typical and mean), or entry of `wall_clock`; if empty, the step
                and all `judged` phases.

        Returns:
            "regression" if a quantity certainly exceeds the bound, "passed" if all are certainly
            within it, else "cannot tell". If `phase` is empty, a phase also passes if it certainly
            adds less than `bound` times the step time. The mean of all steps passes if its estimate
            is within the bound, even if its interval is not.
        """
        found = self.outcomes(bound, phase).values()
        return next(outcome for outcome in OUTCOMES if outcome in found)

    def outcomes(self, bound: float, phase: str = "") -> dict[str, Outcome]:
        """Return the outcome of each quantity that `outcome` considers, by name.

        The mean of all steps is included only if it does not pass, and not with the step's outcome.
        """
        tolerances_ms = {} if phase else dict.fromkeys(self.judged, bound * self.step.before_ms)
        chosen = self._chosen(phase)
        found = {
            name: row.outcome(bound, tolerances_ms.get(name, 0.0)) for name, row in chosen.items()
        }
        if "step" in chosen and self.proportional is not None:
            found["step"] = self.proportional.outcome(bound, self.step)
        if "step" in chosen and not self.is_sampled:
            outcome = self.mean.outcome(bound)
            # Single slow steps make the mean uncertain in most runs, so a "cannot tell" passes if
            # the estimate is within the bound.
            is_exceeded = outcome == "regression" or self.mean.relative_change > bound
            if is_exceeded and outcome not in ("passed", found["step"]):
                found[MEAN] = outcome
        return found

    def explain(self, bound: float, phase: str = "") -> list[str]:
        """Return the outcome as sentences: one per regression, otherwise a single sentence."""
        outcome, percent = self.outcome(bound, phase), f"{100 * bound:g} %"
        names = [name for name, found in self.outcomes(bound, phase).items() if found == outcome]
        proportion = ""
        if self.proportional is not None and phase in ("", "step"):
            proportion = f" ({self.proportional})"
        if outcome == "passed":
            return [
                f"Passed: {phase or 'the step'} is not slower by more than {percent}{proportion}."
            ]
        if outcome == "regression":
            of = {"step": proportion}
            return [
                f"Regression: {name} is slower by more than {percent}{of.get(name, '')}."
                for name in names
            ]
        needed = self.runs_needed(bound, phase)
        about = "at least" if max(self.runs) == 1 else "about"
        remedy = f"{about} {needed} runs per side would decide"
        if needed is None:
            remedy = f"more than {MAX_RUNS} runs per side would be needed"
        are = "is" if len(names) == 1 else "are"
        question = f"whether {', '.join(names)} {are} slower by more than {percent}"
        return [f"Cannot tell {question}: {remedy}."]

    def runs_needed(self, bound: float, phase: str = "") -> int | None:
        """Return the runs per side after which no outcome would be "cannot tell".

        This is so in four of five cases, if the spread between runs stays as observed. At least 3;
        None if more than 100 would be needed, or if no outcome is "cannot tell".
        """
        chosen = {MEAN: self.mean, **self._chosen(phase)}
        confidence = 1 - _FALSE_ALARMS["step"]
        needed = [
            runs_needed(chosen[name], bound, self.runs, confidence, self.in_turns)
            for name, outcome in self.outcomes(bound, phase).items()
            if outcome == "cannot tell"
        ]
        if not all(needed):  # None: more than 100.
            return None
        return max(filter(None, needed), default=None)

    def _chosen(self, phase: str) -> dict[str, Difference]:
        """Return the named phase or entry; if `phase` is empty, the step and `judged` phases."""
        phases = {"step": self.step, **self.rows}
        # A phase may share its name with an entry of the wall clock: use the phase.
        known = phases | {name: row for name, row in self.wall_clock.items() if name not in phases}
        if phase and phase not in known:
            raise ValueError(f"the runs have no phase {phase!r}; they have {', '.join(known)}")
        names = [phase] if phase else ["step", *self.judged]
        return {name: known[name] for name in names}

    @property
    def sentence(self) -> str:
        """Significant changes of the step, its phases and other time; a caution for single runs."""
        return f"{_ONE_RUN} {self._finding}" if max(self.runs) == 1 else self._finding

    @property
    def _finding(self) -> str:
        unit = unit_of(self.step.before_ms)
        changes_ms = {name: row.change_ms for name, row in self.rows.items()}
        changed = []
        for name in self.judged:
            # Such as "backward (backward/comm)" if most of the change is in a part.
            part = largest_part(changes_ms, name, sign=changes_ms[name])
            changed.append((name if part == name else f"{name} ({part})", self.rows[name]))
        # The mean includes slow steps. Report it if the typical step did not change, or if slow
        # steps shift the mean by more than the error of the mean.
        change_by_slow_steps = abs(self.mean.relative_change - self.step.relative_change)
        if not self.step.is_significant or change_by_slow_steps > self.mean.relative_error:
            changed.append((MEAN, self.mean))
        phases = ", ".join(
            f"{name} {unit.number(abs(row.change_ms))} ± {unit.of(row.error_ms)} {row.verdict}"
            for name, row in sorted(changed, key=lambda item: -abs(item[1].change_ms))
            if row.is_significant
        )
        error = self.step.error_ms / self.step.before_ms
        digits = 1 if error >= 0.001 else 2
        change = f"{100 * self.step.relative_change:+.{digits}f} % ± {100 * error:.{digits}f} %"
        if self.step.is_significant:
            phases = phases or "no single phase changed significantly"
            claim = f"{change.lstrip('+-')} {self.verdict}: {phases}"
            return f"{claim}; {self.outside}" if self.outside else claim
        claim = f"no significant change of the step: {change}"
        if phases:
            step = "mean step" if self.is_sampled else "typical step"
            claim = f"{phases}; {step}: no significant change ({change})"
        elif error > _MAX_ERROR:
            claim = f"too noisy to tell ({change}): record longer runs, or more runs per side"
        return f"{self.outside}; {claim}" if self.outside else claim

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts of numbers for JSON, with None for NaN."""
        derived = {"verdict": self.verdict, "sentence": self.sentence}
        others = [other.to_dict() for other in self.others]
        result: dict[str, Any] = plain({**asdict(self), **derived, "others": others})
        return result

    def markdown(self, outcomes: Sequence[str] = ()) -> str:
        """Return Markdown for a pull request, with the sentences of `explain` at its top."""
        lead = [f"**{outcome}**" for outcome in outcomes or (self._finding,)]
        return "\n\n".join(["### Step time", *lead, self._table().markdown()])

    def __repr__(self) -> str:
        return f"<RunComparison: {self.sentence}>"

    def _table(self) -> Table:
        unit = unit_of(self.step.before_ms)
        compared = (self, *self.others)  # Comparisons with the same first side.
        header, counts = ["phase", self.names[0]], [self._count(0)]
        sentences = [_ONE_RUN] if any(max(other.runs) == 1 for other in compared) else []
        for other in compared:
            header += [other.names[1], "change", "95 %", "change in %", ""]
            counts.append(f"{other._count(1)}{', alternating' if other.in_turns else ''}")
            prefix = f"{other.names[1]}: " if self.others else ""
            found = (other._finding, *map(str, other.lines), *other.notes)
            sentences += [f"{prefix}{sentence}" for sentence in found]
        lines = [tuple(header)]
        for name, row in {**self.rows, "step": self.step}.items():
            _, slash, part = name.partition("/")
            cells = [f"  {part}" if slash else name, unit.cell(row.before_ms)]
            for other in compared:
                row = other.step if name == "step" else other.rows[name]
                is_judged = name in ("step", *other.judged)
                note = row.verdict if row.is_significant and is_judged else ""
                relative = row.relative_change
                percent = "" if math.isnan(relative) else f"{relative:+.1%}"
                if slash and not (row.before_ms and row.after_ms):
                    # The other side may not have timed it, for example with different `modules`.
                    note, percent = f"only {other.names[0 if row.before_ms else 1]}", ""
                change = f"{row.change_ms / unit.ms:+.{unit.digits}f}"
                error = f"± {unit.cell(row.error_ms)}"
                cells += [unit.cell(row.after_ms), change, error, percent, note]
            lines.append(tuple(cells))
        step = "Mean of all steps" if self.is_sampled else "A typical step"
        drops = [name for name in _DROPPED_COLUMNS for _ in compared]
        title = f"{step} in {unit.name}: {', '.join(counts)}"
        return Table(title, lines, sentences, drops=drops)

    def _count(self, side: int) -> str:
        runs = f" of {self.runs[side]} runs" if self.runs[side] > 1 else ""
        return f"{self.names[side]} {self.steps[side]} steps{runs}"


def compare(
    before: Source | Sequence[Source],
    after: Source | Sequence[Source],
    *more: Source | Sequence[Source],
    allow_mismatch: bool = False,
) -> RunComparison:
    """Compare the steps of two runs, or of groups of runs, without their warm-up.

    With several runs per side, the intervals include the spread between runs. With one run per
    side, they include only the noise within the runs, and may be too narrow. If the sides
    alternated at least five times, as in `bench`, each run is compared with its neighbor.

    Args:
        before: One or more runs, files of runs, or a folder with such files.
        after: Runs to compare with `before`.
        more: Further groups of runs, each compared with `before`.
        allow_mismatch: Also compare runs that differ in device, world size or batch size.

    Raises:
        OSError: If a file cannot be read.
        TypeError: If an argument is neither a run nor a path.
        ValueError: If a file is not a saved run, or the runs cannot be compared.

    Examples:
        >>> print(compare(["b1.json.gz", "b2.json.gz"], ["a1.json.gz", "a2.json.gz"]).sentence)
        4.1 % ± 0.6 % slower: backward 0.51 ± 0.08 ms slower
    """
    return compare_groups([before, after, *more], allow_mismatch=allow_mismatch)


def compare_groups(
    groups: Sequence[Source | Sequence[Source]],
    *,
    allow_mismatch: bool = False,
    error_share: float = 1.0,
) -> RunComparison:
    """Compare each group with the first.

    If the comparison is repeated as runs are added, each has an `error_share`: the fraction of the
    probability of a false alarm that it may use. Smaller fractions widen the intervals.
    """
    names = ["before", "after"]
    if len(groups) > 2:
        names = [
            str(group) if isinstance(group, _PATHS) else f"group {i}"
            for i, group in enumerate(groups, 1)
        ]
    sides = []
    for name, group in zip(names, groups, strict=True):
        sources: Sequence[Any] = group if isinstance(group, list | tuple) else [group]
        if isinstance(group, _PATHS) and os.path.isdir(group):
            sources = sorted(Path(group).glob("*.json*"))
        if not sources:
            raise ValueError(f"{name} must be one or more runs, got none in {group}")
        for source in sources:
            if not isinstance(source, (Run, *_PATHS)):
                expected = "a run as load() returns it, its file, or a list of these"
                raise TypeError(f"{name} must be {expected}, got {format_value(source)}")
        loaded = [source if isinstance(source, Run) else load(source) for source in sources]
        sides.append(sorted(loaded, key=lambda run: run.environment.started))
    runs = [run for side in sides for run in side]
    for run in runs:
        if len(run.measured) < MIN_STEPS:
            raise ValueError(
                f"{run.name or 'a run'} has {len(run.measured)} timed steps after its warm-up; at"
                f" least {MIN_STEPS} are needed: record a longer run"
            )
        if not np.median(run.measured["step_ms"]):
            raise ValueError(
                f"most steps of {run.name or 'a run'} take 0 ms, so a change in percent is"
                " undefined: save a run whose steps were timed"
            )
    # Keep the order of the files: it is the only order that user-defined phases have.
    found = dict.fromkeys(name for run in runs for name in list_phases(run.history))
    phases = in_order([name for name in found if not of_one_callback(name)])
    tests = (len(sides) - 1) / error_share
    first, *more = (
        _compare_two((names[0], name), (sides[0], side), phases, tests, allow_mismatch)
        for name, side in zip(names[1:], sides[1:], strict=True)
    )
    return replace(first, others=tuple(more))


def _compare_two(
    names: tuple[str, str],
    sides: tuple[Sequence[Run], Sequence[Run]],
    phases: Sequence[str],
    tests: float,
    allow_mismatch: bool,
) -> RunComparison:
    """Compare two sides. Divide the probability of an error among this number of `tests`."""
    notes = {}  # A sentence on each field in which the environments differ, by field.
    for name in (item.name for item in fields(Environment)):
        if name in ("started", "rank", "options"):
            continue
        # Unknown values do not count as differences.
        values = [{getattr(run.environment, name) for run in side} - {"", None} for side in sides]
        if len(set().union(*values)) > 1:
            of_sides = (
                f"{' or '.join(sorted(map(str, known))) or 'unknown'} ({side})"
                for side, known in zip(names, values, strict=True)
            )
            notes[name] = f"{name} is {' and '.join(of_sides)}"
    mismatches = [note for name, note in notes.items() if name in MUST_AGREE]
    if mismatches and not allow_mismatch:
        raise ValueError(
            f"the runs cannot be compared: {'; '.join(mismatches)}. Pass allow_mismatch=True"
            " (--allow-mismatch) to compare them anyway"
        )
    before, after = sides
    in_turns = False
    if len(before) == len(after) >= _MIN_PAIRS:
        pairs = zip(*([run.environment.started for run in side] for side in sides), strict=True)
        started = [time for pair in pairs for time in sorted(pair)]
        # The pairs, of runs in any order, took turns if each started before the next pair.
        in_turns = started == sorted(set(started))
    is_sampled = any(_is_sampled(run.summary()) for side in sides for run in side)
    chance = _FALSE_ALARMS["phases"] / max(sum("/" not in name for name in phases), 1)
    false_alarms = np.array([_FALSE_ALARMS["step"], *[chance] * len(phases)])
    # A step has a boundary at each phase and at its end, and a phase at each of its parts.
    parts = [
        sum(name == phase or name.startswith(f"{phase}/") for name in phases) for phase in phases
    ]
    estimates = [[_estimate(run, phases, is_sampled) for run in side] for side in sides]
    means = [[mean_step(_times(run, ())) for run in side] for side in sides]
    found = [*notes.values()]
    # Duration of a short calculation in each run: how slow the host was.
    clocks = [[run.summary().wall_clock for run in side] for side in sides]
    trials_ms = [[clock.trial_ms if clock else 0.0 for clock in side] for side in clocks]
    has_trials = all(map(all, trials_ms)) and min(map(len, sides)) >= _MIN_RUNS_TO_ADJUST
    if has_trials:
        mean_ms = fmean(ms for side in trials_ms for ms in side)
        slowness = [[ms / mean_ms for ms in side] for side in trials_ms]
        adjusted, adjusted_means = (
            [at_equal_speed(*side) for side in zip(runs, slowness, strict=True)]
            for runs in (estimates, means)
        )
        # Only adjust the times if that explains why the runs of a side differ.
        if _spread(adjusted) < _spread(estimates):
            estimates, means = adjusted, adjusted_means
            spread = 100 * (max(map(max, slowness)) / min(map(min, slowness)) - 1)
            found.append(
                f"times are adjusted for the host, which varied by {spread:.0f} % (`trial_ms`)"
            )
            # The runs differ less than their neighbors do, so use all to estimate the spread.
            in_turns = False
    step, *rows = differences(
        *estimates,
        confidence=1 - false_alarms / tests,
        in_turns=in_turns,
        resolution_ms=[RESOLUTION_MS * (n + 1) for n in (len(phases), *parts)],
    )
    proportional = None
    if has_trials:
        confidence = 1 - _FALSE_ALARMS["step"] / tests
        proportional = _proportional(phases, estimates, step, rows, confidence)
    mean = step
    if not is_sampled:
        [mean] = differences(
            *means,
            confidence=1 - _FALSE_ALARMS["mean"] / tests,
            in_turns=in_turns,
            resolution_ms=[step.resolution_ms],
        )
    for name, of_side in zip(names, estimates, strict=True):
        share = np.mean([estimate.not_sampled_ms / estimate.values[0] for estimate in of_side])
        if share > _MIN_NOT_SAMPLED_SHARE:
            unsampled = f"{100 * share:.0f} % of the time was not sampled ({name})"
            found.append(f"{unsampled}: pass every_n_steps=1")
    # Wall time of each entry of each run (in seconds); empty if it is unknown.
    entries = [[clock.entries_s if clock else {} for clock in side] for side in clocks]
    return RunComparison(
        rows=Named(zip(phases, rows, strict=True)),
        step=step,
        mean=mean,
        runs=(len(before), len(after)),
        steps=(sum(map(_count_steps, before)), sum(map(_count_steps, after))),
        notes=tuple(found),
        outside=_outside(names, entries),
        names=names,
        in_turns=in_turns,
        is_sampled=is_sampled,
        wall_clock=_compare_wall_clocks(entries, tests, in_turns),
        lines=_line_changes(sides, min_ms=_MIN_LINE * step.before_ms),
        proportional=proportional,
    )


def _line_changes(sides: Sequence[Sequence[Run]], min_ms: float) -> tuple[LineChange, ...]:
    """Return the largest changes of functions that are larger than `min_ms`."""
    found = [[_functions_of(run) for run in side] for side in sides]
    if not all(functions for side in found for functions in side):
        return ()  # A run without examined steps.
    changes = []
    for key in dict.fromkeys(key for side in found for functions in side for key in functions):
        means, squares = [], 0.0
        for side in found:
            each = [functions.get(key, (0.0, 0.0)) for functions in side]
            means.append(fmean(ms for ms, _ in each))
            squares += sum(error_ms**2 for _, error_ms in each) / len(each) ** 2
        if abs(means[1] - means[0]) > max(math.sqrt(squares), min_ms):
            changes.append(LineChange(key[0], key[1], means[0], means[1], math.sqrt(squares)))
    changes.sort(key=lambda change: -abs(change.after_ms - change.before_ms))
    return tuple(changes[:_MAX_LINES])


def _functions_of(run: Run) -> dict[tuple[str, str], tuple[float, float]]:
    """Return time per step and its error of each function, by name and file."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for row in run.summary().lines:
        if row.function and not row.entry:
            key = row.function, Path(row.file).name if not row.is_library else ""
            ms, error_ms = found.get(key, (0.0, 0.0))
            found[key] = ms + row.ms, math.hypot(error_ms, row.error_ms)
    return found


def _estimate(run: Run, phases: Sequence[str], is_any_sampled: bool) -> Estimate:
    """Return the typical step of a run, or its mean step if any of the compared runs is sampled."""
    times = _times(run, phases)
    summary = run.summary()
    if not is_any_sampled:
        return typical_step(times)
    if not _is_sampled(summary):
        return mean_step(times)
    # Use shares, which refer to all steps: `mean_ms` refers to the steps in which a phase ran.
    step, rows = summary.step, [summary.rows.get(name) for name in phases]
    shares = np.nan_to_num([1.0, *(row.share if row else 0.0 for row in rows)])
    share_errors = np.array([0.0, *(row.share_error if row else 0.0 for row in rows)])
    top_shares = [share for name, share in zip(phases, shares[1:], strict=True) if "/" not in name]
    return mean_of_all_steps(
        run.measured["step"],
        times,
        means=step.mean_ms * shares,
        errors=np.hypot(step.mean_ms * share_errors, step.error_ms * shares),
        all_steps=_count_steps(run),
        max_ms=step.max_ms,
        not_sampled_ms=step.mean_ms * max(1.0 - sum(top_shares), 0.0),
    )


def _proportional(
    phases: Sequence[str],
    estimates: Sequence[Sequence[Estimate]],
    step: Difference,
    rows: Sequence[Difference],
    confidence: float,
) -> ProportionalStep | None:
    min_ms = _MIN_SCALING_SHARE * step.before_ms
    changes = {
        row.relative_change: column
        for column, (name, row) in enumerate(zip(phases, rows, strict=True), start=1)
        if "/" not in name and row.before_ms >= min_ms
    }
    if len(changes) < 2:
        return None
    column = changes[min(changes)]
    scale = [[run.values[column] for run in side] for side in estimates]
    mean_ms = np.mean(np.concatenate(scale))
    if not min(map(min, scale)):
        return None
    # The noise within the runs is that of all phases together, so use the spread between runs only.
    scaled = [
        [
            Estimate(run.values[:1] * mean_ms / ms, np.zeros(1))
            for run, ms in zip(side, of, strict=True)
        ]
        for side, of in zip(estimates, scale, strict=True)
    ]
    [scaled_step] = differences(*scaled, confidence=confidence)
    [likely] = differences(
        *([Estimate(run.values[:1], run.variances[:1]) for run in side] for side in estimates),
        confidence=0.6,
    )
    return ProportionalStep(phases[column - 1], scaled_step, likely.relative_error)


def _spread(estimates: Sequence[Sequence[Estimate]]) -> float:
    """Return the variance of the step among the runs of the same side, relative to the step."""
    return sum(float(np.var([np.log(run.values[0]) for run in side])) for side in estimates)


def _is_sampled(summary: PhaseSummary) -> bool:
    return summary.untimed_steps > 0 or summary.timed_every_n_steps > 1


def _count_steps(run: Run) -> int:
    summary = run.summary()
    if not _is_sampled(summary):
        return len(run.measured)
    return summary.steps + summary.untimed_steps


def _times(run: Run, phases: Sequence[str]) -> Floats:
    """Return the times of the step and of phases, 0 if absent, of shape (steps, columns)."""
    measured, known = run.measured, list_phases(run.history)
    absent = np.zeros(len(measured))
    columns = [measured[f"{name}_ms"] if name in known else absent for name in phases]
    return np.asarray(np.nan_to_num(np.stack([measured["step_ms"], *columns], axis=1)))


def _compare_wall_clocks(
    entries: Sequence[Sequence[Mapping[str, float]]], tests: float, in_turns: bool
) -> dict[str, Difference]:
    names = [name for name in entries[0][0] if all(name in run for side in entries for run in side)]
    if not names:
        return {}
    no_variance = np.zeros(len(names))
    totals = [
        [Estimate(np.array([1e3 * run[name] for name in names]), no_variance) for run in side]
        for side in entries
    ]
    rows = differences(*totals, confidence=1 - _FALSE_ALARMS["step"] / tests, in_turns=in_turns)
    if max(map(len, entries)) == 1:
        # A single total per side does not show its noise, so the error is unknown.
        rows = [replace(row, error_ms=math.inf, relative_error=math.inf) for row in rows]
    return Named(zip(names, rows, strict=True))


def _outside(names: Sequence[str], entries: Sequence[Sequence[Mapping[str, float]]]) -> str:
    """Return a sentence on the time outside of the steps; empty if it hardly differs."""
    outside_s, wall_s = [], []  # Means over the runs of each side.
    for side in entries:
        if not all(side):
            return ""
        wall_s.append(fmean(sum(run.values()) for run in side))
        outside_s.append(wall_s[-1] - fmean(run.get(STEPS, 0.0) for run in side))
    if abs(outside_s[1] - outside_s[0]) < _MIN_OUTSIDE_SHARE * max(wall_s):
        return ""
    before, after = (
        f"{duration(1e3 * outside)} of {duration(1e3 * wall)} ({name})"
        for name, outside, wall in zip(names, outside_s, wall_s, strict=True)
    )
    return f"time outside of the steps (not tested for significance): {before} and {after}"
