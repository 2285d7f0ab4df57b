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
from lightning_gputime._measurement.measurement import Environment
from lightning_gputime._measurement.sums import largest_part
from lightning_gputime._measurement.wall_clock import STEPS
from lightning_gputime._messages import Named, duration, format_value, plain, unit_of
from lightning_gputime._output.summary import PhaseSummary
from lightning_gputime._output.table import Table, Tabular
from lightning_gputime._phases import in_order, of_one_callback
from lightning_gputime._runs.estimates import (
    MIN_RUNS,
    MIN_STEPS,
    OUTCOMES,
    RESOLUTION_MS,
    Difference,
    Estimate,
    Floats,
    Outcome,
    ProportionalStep,
    at_equal_speed,
    differences,
    mean_of_all_steps,
    mean_step,
    proportional_step,
    typical_step,
)
from lightning_gputime._runs.saved import Run, load, runs_in

# Environment fields that determine the work of a step. Compared runs must agree on them.
MUST_AGREE = ("device", "device_type", "world_size", "batch_size", "accumulate_grad_batches")
# Probability that equal runs differ significantly in an interval, or in any phase; 5 % in total.
_FALSE_ALARMS = {"step": 0.02, "mean": 0.005, "phases": 0.025}
_MIN_PHASE_SHARE = 0.01  # Shorter phases get an outcome only if the user names them in a bound.
_MAX_ERROR = 0.1  # With a larger error, as a fraction of the step, the runs are too noisy. Chosen.
_MIN_OUTSIDE_SHARE = 0.05  # Smaller changes outside of the steps are not reported. Chosen.
_MIN_NOT_SAMPLED_SHARE = 0.01  # Below this share, unsampled time hardly widens the intervals.
# Change as a fraction of the step, and number of functions. Chosen: smaller ones are often noise.
_MIN_LINE, _MAX_LINES = 0.02, 5
_MIN_PAIRS = 5  # The spread of fewer pairs is less certain than that of all runs.
_MAX_NEEDED_RUNS = 100  # Per side. Nobody makes more, so their number is not worth a sentence.
_MIN_CLOCK_CHANGE = 0.05  # Smaller changes of the GPU's clock may be errors of its measurement.
MEAN = "the mean of all steps"
_ONE_RUN = "One run per side: the difference may be noise between runs."

Source = Run | str | os.PathLike[str]
_PATHS = (str, os.PathLike)
_SIDES = ("before", "after")


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
        in_turns: True if the runs alternated, so that each is compared with its neighbor.
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
    in_turns: bool = False
    is_sampled: bool = False
    wall_clock: Mapping[str, Difference] = field(default_factory=dict)
    lines: tuple[LineChange, ...] = ()
    proportional: ProportionalStep | None = None

    @property
    def direction(self) -> str:
        """Either "slower" or "faster" if the step changed significantly, else "alike"."""
        return self.step.direction

    @property
    def judged(self) -> list[str]:
        """Phases whose longer time is at least 1 % of `step.before_ms`, without sub-phases."""
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
        known = self._known
        if phase and phase not in known:
            raise ValueError(f"the runs have no phase {phase!r}; they have {', '.join(known)}")
        tolerances_ms = {} if phase else dict.fromkeys(self.judged, bound * self.step.before_ms)
        found = {
            name: known[name].outcome(bound, tolerances_ms.get(name, 0.0))
            for name in ([phase] if phase else ["step", *self.judged])
        }
        if "step" in found and self.proportional is not None:
            found["step"] = self.proportional.outcome(bound, self.step)
        if "step" in found and not self.is_sampled:
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
            return [
                f"Regression: {name} is slower by more than {percent}"
                f"{proportion if name == 'step' else ''}."
                for name in names
            ]
        # The error falls with the square root of the number of runs: if it is twice the distance
        # of the change from the bound, 4 times as many runs are needed. For sides of different
        # size, the harmonic mean of their numbers counts, because their noise adds up.
        runs, needed = 2 / (1 / self.runs[0] + 1 / self.runs[1]), float(MIN_RUNS)
        for row in ({**self._known, MEAN: self.mean}[name] for name in names):
            distance = abs(row.relative_change - bound)
            if math.isfinite(row.relative_error):
                ratio = row.relative_error / distance if distance else math.inf
                needed = max(needed, runs * ratio**2)
        if needed > _MAX_NEEDED_RUNS:
            remedy = f"more than {_MAX_NEEDED_RUNS} runs per side would be needed"
        else:
            about = "at least" if max(self.runs) == 1 else "about"
            remedy = f"{about} {math.ceil(needed)} runs per side would decide"
        are = "is" if len(names) == 1 else "are"
        question = f"whether {', '.join(names)} {are} slower by more than {percent}"
        return [f"Cannot tell {question}: {remedy}."]

    @property
    def _known(self) -> dict[str, Difference]:
        """The step, phases and entries by name. A phase may share its name with an entry."""
        phases = {"step": self.step, **self.rows}
        return phases | {name: row for name, row in self.wall_clock.items() if name not in phases}

    @property
    def sentence(self) -> str:
        """Significant changes of the step, its phases and other time; a caution for single runs."""
        return " ".join([*self._caution, self._finding])

    @property
    def _caution(self) -> list[str]:
        return [_ONE_RUN] if max(self.runs) == 1 else []

    @property
    def _finding(self) -> str:
        """`sentence` without a caution."""
        changes = self._significant_changes()
        error = self.step.error_ms / self.step.before_ms
        digits = 1 if error >= 0.001 else 2
        change = f"{100 * self.step.relative_change:+.{digits}f} % ± {100 * error:.{digits}f} %"
        if self.step.is_significant:
            changes = changes or "no single phase changed significantly"
            claim = f"{change.lstrip('+-')} {self.direction}: {changes}"
            return f"{claim}; {self.outside}" if self.outside else claim
        if changes:
            step = "mean step" if self.is_sampled else "typical step"
            claim = f"{changes}; {step}: no significant change ({change})"
        elif error > _MAX_ERROR:
            claim = f"too noisy to tell ({change}): record longer runs, or more runs per side"
        else:
            claim = f"no significant change of the step: {change}"
        return f"{self.outside}; {claim}" if self.outside else claim

    def _significant_changes(self) -> str:
        """Return the changes of phases, and of the mean of all steps, the largest first."""
        unit = unit_of(self.step.before_ms)
        changes_ms = {name: row.change_ms for name, row in self.rows.items()}
        rows = []
        for name in self.judged:
            # Such as "backward (backward/comm)" if most of the change is in a part.
            part = largest_part(changes_ms, name, sign=changes_ms[name])
            rows.append((name if part == name else f"{name} ({part})", self.rows[name]))
        # The mean includes slow steps. Report it if the typical step did not change, or if slow
        # steps shift the mean by more than the error of the mean.
        change_by_slow_steps = abs(self.mean.relative_change - self.step.relative_change)
        if not self.step.is_significant or change_by_slow_steps > self.mean.relative_error:
            rows.append((MEAN, self.mean))
        rows.sort(key=lambda item: -abs(item[1].change_ms))
        return ", ".join(
            f"{name} {unit.number(abs(row.change_ms))} ± {unit.of(row.error_ms)} {row.direction}"
            for name, row in rows
            if row.is_significant
        )

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts of numbers for JSON, with None for NaN."""
        derived = {
            "direction": self.direction,
            "sentence": self.sentence,
            "step": self.step.to_dict(),
            "mean": self.mean.to_dict(),
            "rows": {name: row.to_dict() for name, row in self.rows.items()},
        }
        result: dict[str, Any] = plain({**asdict(self), **derived})
        return result

    def markdown(self, outcomes: Sequence[str] = ()) -> str:
        """Return Markdown for a pull request, with the sentences of `explain` at its top."""
        lead = [f"**{outcome}**" for outcome in outcomes or (self._finding,)]
        return "\n\n".join(["### Step time", *lead, self._table().markdown()])

    def __repr__(self) -> str:
        return f"<RunComparison: {self.sentence}>"

    def _table(self) -> Table:
        unit = unit_of(self.step.before_ms)
        lines = [("phase", *_SIDES, "change", "95 %", "change in %", "")]
        for name, row in {**self.rows, "step": self.step}.items():
            _, slash, part = name.partition("/")
            is_judged = name in ("step", *self.judged)
            note = row.direction if row.is_significant and is_judged else ""
            relative = row.relative_change
            percent = "" if math.isnan(relative) else f"{relative:+.1%}"
            if slash and not (row.before_ms and row.after_ms):
                # The other side may not have timed it, for example as its code has no such phase.
                note, percent = f"only {_SIDES[0 if row.before_ms else 1]}", ""
            cells = (
                f"  {part}" if slash else name,
                unit.cell(row.before_ms),
                unit.cell(row.after_ms),
                f"{row.change_ms / unit.ms:+.{unit.digits}f}",
                f"± {unit.cell(row.error_ms)}",
                percent,
                note,
            )
            lines.append(cells)
        counts = [
            f"{name} {steps} steps" + (f" of {runs} runs" if runs > 1 else "")
            for name, steps, runs in zip(_SIDES, self.steps, self.runs, strict=True)
        ]
        step = "Mean of all steps" if self.is_sampled else "A typical step"
        alternating = ", alternating" if self.in_turns else ""
        title = f"{step} in {unit.name}: {', '.join(counts)}{alternating}"
        sentences = [*self._caution, self._finding, *map(str, self.lines), *self.notes]
        return Table(title, lines, sentences, drops=("change", "95 %"))


def compare(
    before: Source | Sequence[Source],
    after: Source | Sequence[Source],
    *,
    allow_mismatch: bool = False,
) -> RunComparison:
    """Compare the steps of two runs, or of groups of runs, without their warm-up.

    With several runs per side, the intervals include the spread between runs. With one run per
    side, they include only the noise within the runs, and may be too narrow. If the sides
    alternated at least five times, as in `bench`, each run is compared with its neighbor.

    Args:
        before: One or more runs, files of runs, or a folder with such files.
        after: Runs to compare with `before`.
        allow_mismatch: Also compare runs that differ in device, world size or batch size.

    Raises:
        OSError: If a file cannot be read.
        TypeError: If an argument is neither a run nor a path.
        ValueError: If a file is not a saved run, or the runs cannot be compared.

    Examples:
        >>> print(compare(["b1.json.gz", "b2.json.gz"], ["a1.json.gz", "a2.json.gz"]).sentence)
        4.1 % ± 0.6 % slower: backward 0.51 ± 0.08 ms slower
    """
    return compare_sides(before, after, allow_mismatch=allow_mismatch)


def compare_sides(
    before: Source | Sequence[Source],
    after: Source | Sequence[Source],
    *,
    allow_mismatch: bool = False,
    error_share: float = 1.0,
) -> RunComparison:
    """Compare two sides.

    If the comparison is repeated as runs are added, each has an `error_share`: the fraction of the
    probability of a false alarm that it may use. Smaller fractions widen the intervals.
    """
    before, after = sides = (_load_side("before", before), _load_side("after", after))
    runs = [*before, *after]
    notes = _differing_environments(sides, allow_mismatch)
    in_turns = _took_turns(before, after)
    is_sampled = any(_is_sampled(run.summary()) for run in runs)

    # Keep the order of the files: it is the only order that user-defined phases have.
    known = dict.fromkeys(name for run in runs for name in list_phases(run.history))
    phases = in_order([name for name in known if not of_one_callback(name)])
    estimates = [[_estimate(run, phases, is_sampled) for run in side] for side in sides]
    means = [[mean_step(_times(run, ())) for run in side] for side in sides]

    clocks = [[run.summary().wall_clock for run in side] for side in sides]
    trials_ms = [[clock.trial_ms if clock else 0.0 for clock in side] for side in clocks]
    has_trials = all(map(all, trials_ms)) and min(map(len, sides)) >= MIN_RUNS
    if has_trials and (adjusted := at_equal_speed(trials_ms, estimates, means)) is not None:
        estimates, means, note = adjusted
        notes.append(note)
        # The runs now differ less than their neighbors do, so use all to estimate the spread.
        in_turns = False

    # Phases share a chance: with 5 phases, each has one of 2.5 % / 5 = 0.5 %, and so do sub-phases.
    chance = _FALSE_ALARMS["phases"] / max(sum("/" not in name for name in phases), 1)
    false_alarms = np.array([_FALSE_ALARMS["step"], *[chance] * len(phases)])
    # A step has a boundary at each phase and at its end, and a phase at each of its parts.
    parts = [
        sum(name == phase or name.startswith(f"{phase}/") for name in phases) for phase in phases
    ]
    step, *rows = differences(
        *estimates,
        confidence=1 - error_share * false_alarms,
        in_turns=in_turns,
        resolution_ms=[RESOLUTION_MS * (n + 1) for n in (len(phases), *parts)],
    )
    notes += _compare_clocks(sides, step)
    step_confidence = 1 - error_share * _FALSE_ALARMS["step"]
    proportional = None
    if has_trials:
        proportional = proportional_step(phases, estimates, step, rows, step_confidence)
    mean = step
    if not is_sampled:
        [mean] = differences(
            *means,
            confidence=1 - error_share * _FALSE_ALARMS["mean"],
            in_turns=in_turns,
            resolution_ms=[step.resolution_ms],
        )
    for name, of_side in zip(_SIDES, estimates, strict=True):
        share = np.mean([estimate.not_sampled_ms / estimate.values[0] for estimate in of_side])
        if share > _MIN_NOT_SAMPLED_SHARE:
            unsampled = f"{100 * share:.0f} % of the time was not sampled ({name})"
            notes.append(f"{unsampled}: pass every_n_steps=1")
    # Wall time of each entry of each run (in seconds); empty if it is unknown.
    seconds_by_side = [[clock.entries_s if clock else {} for clock in side] for side in clocks]
    return RunComparison(
        rows=Named(zip(phases, rows, strict=True)),
        step=step,
        mean=mean,
        runs=(len(before), len(after)),
        steps=(sum(map(_count_steps, before)), sum(map(_count_steps, after))),
        notes=tuple(notes),
        outside=_outside(seconds_by_side),
        in_turns=in_turns,
        is_sampled=is_sampled,
        wall_clock=_compare_wall_clocks(seconds_by_side, step_confidence, in_turns),
        lines=_line_changes(sides, min_ms=_MIN_LINE * step.before_ms),
        proportional=proportional,
    )


def _load_side(name: str, group: Source | Sequence[Source]) -> list[Run]:
    """Return the runs of a side in the order of their start. Raise if one cannot be compared."""
    sources: Sequence[Any] = group if isinstance(group, list | tuple) else [group]
    if isinstance(group, _PATHS) and os.path.isdir(group):
        sources = runs_in(Path(group))
    if not sources:
        raise ValueError(f"{name} must be one or more runs, got none in {group}")
    runs = []
    for source in sources:
        if not isinstance(source, (Run, *_PATHS)):
            expected = "a run as load() returns it, its file, or a list of these"
            raise TypeError(f"{name} must be {expected}, got {format_value(source)}")
        run = source if isinstance(source, Run) else load(source)
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
        runs.append(run)
    return sorted(runs, key=lambda run: run.environment.started)


def _differing_environments(sides: Sequence[Sequence[Run]], allow_mismatch: bool) -> list[str]:
    """Return a sentence per field in which the environments differ. Raise if the work differs."""
    notes = {}
    for name in (item.name for item in fields(Environment)):
        if name in ("started", "rank", "options"):
            continue
        # Unknown values do not count as differences.
        values = [{getattr(run.environment, name) for run in side} - {"", None} for side in sides]
        if len(set().union(*values)) > 1:
            of_sides = (
                f"{' or '.join(sorted(map(str, known))) or 'unknown'} ({side})"
                for side, known in zip(_SIDES, values, strict=True)
            )
            notes[name] = f"{name} is {' and '.join(of_sides)}"
    mismatches = [note for name, note in notes.items() if name in MUST_AGREE]
    if mismatches and not allow_mismatch:
        raise ValueError(
            f"the runs cannot be compared: {'; '.join(mismatches)}. Pass allow_mismatch=True"
            " (--allow-mismatch) to compare them anyway"
        )
    return [*notes.values()]


def _took_turns(before: Sequence[Run], after: Sequence[Run]) -> bool:
    """Return True if the runs are pairs, in any order, that each started before the next pair.

    Example: the order a b, b a, a b, a b, b a of five pairs. Equal start times show no order.
    """
    if not len(before) == len(after) >= _MIN_PAIRS:
        return False
    pairs = zip(before, after, strict=True)
    started = [time for pair in pairs for time in sorted(run.environment.started for run in pair)]
    return started == sorted(set(started))


def _compare_clocks(sides: Sequence[Sequence[Run]], step: Difference) -> list[str]:
    """Return a note if the GPU ran at another clock in the runs of the second side.

    Example: 10 ms at 2000 MHz, and 11 ms at 1800 MHz, which would be 9.9 ms at 2000 MHz: -1 %.
    """
    clocks = [[run.summary().measurement.gpu_mhz or 0.0 for run in side] for side in sides]
    if not all(map(all, clocks)):
        return []
    before, after = (fmean(mhz) for mhz in clocks)
    if abs(after / before - 1) < _MIN_CLOCK_CHANGE:
        return []
    change = step.after_ms * after / before / step.before_ms - 1
    return [
        f"the GPU's clock differs: {before:,.0f} MHz before and {after:,.0f} MHz after; at equal"
        f" clocks, a step paced by the GPU would differ by {100 * change:+.1f} %"
    ]


def _line_changes(sides: Sequence[Sequence[Run]], min_ms: float) -> tuple[LineChange, ...]:
    """Return the largest changes of functions that exceed their error and `min_ms`.

    Example: two runs per side, each with an error of 0.2 ms. Each mean has an error of
    sqrt(2 * 0.2**2) / 2 = 0.14 ms, and the change one of sqrt(2) * 0.14 = 0.2 ms.
    """
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


def _is_sampled(summary: PhaseSummary) -> bool:
    return summary.measurement.untimed_steps > 0 or summary.timed_every_n_steps > 1


def _count_steps(run: Run) -> int:
    summary = run.summary()
    if not _is_sampled(summary):
        return len(run.measured)
    return summary.steps + summary.measurement.untimed_steps


def _times(run: Run, phases: Sequence[str]) -> Floats:
    """Return the times of the step and of phases, 0 if absent, of shape (steps, columns)."""
    measured, known = run.measured, list_phases(run.history)
    absent = np.zeros(len(measured))
    columns = [measured[f"{name}_ms"] if name in known else absent for name in phases]
    return np.asarray(np.nan_to_num(np.stack([measured["step_ms"], *columns], axis=1)))


def _compare_wall_clocks(
    seconds_by_side: Sequence[Sequence[Mapping[str, float]]], confidence: float, in_turns: bool
) -> dict[str, Difference]:
    """Return the difference of each entry that all runs have, from its total in each run."""
    seconds = [run for side in seconds_by_side for run in side]
    names = [name for name in seconds[0] if all(name in run for run in seconds)]
    if not names:
        return {}
    no_variance = np.zeros(len(names))
    totals = [
        [Estimate(np.array([1e3 * run[name] for name in names]), no_variance) for run in side]
        for side in seconds_by_side
    ]
    rows = differences(*totals, confidence=confidence, in_turns=in_turns)
    if max(map(len, seconds_by_side)) == 1:  # A single total per side does not show its noise.
        rows = [replace(row, error_ms=math.inf, relative_error=math.inf) for row in rows]
    return Named(zip(names, rows, strict=True))


def _outside(seconds_by_side: Sequence[Sequence[Mapping[str, float]]]) -> str:
    """Return a sentence on the time outside of the steps; empty if it hardly differs."""
    outside_s, wall_s = [], []  # Means over the runs of each side.
    for side in seconds_by_side:
        if not all(side):
            return ""
        wall_s.append(fmean(sum(run.values()) for run in side))
        outside_s.append(wall_s[-1] - fmean(run.get(STEPS, 0.0) for run in side))
    if abs(outside_s[1] - outside_s[0]) < _MIN_OUTSIDE_SHARE * max(wall_s):
        return ""
    before, after = (
        f"{duration(1e3 * outside)} of {duration(1e3 * wall)} ({name})"
        for name, outside, wall in zip(_SIDES, outside_s, wall_s, strict=True)
    )
    return f"time outside of the steps (not tested for significance): {before} and {after}"
