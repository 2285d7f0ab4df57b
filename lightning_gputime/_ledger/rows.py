"""Rows of the ledger: lines and functions of the user's code, with their time per step."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from lightning_gputime._ledger import Function, FunctionKey, Line, Operations, lines_in
from lightning_gputime._ledger.cells import GPU, HOST, IDLE, Cell, ExaminedStep
from lightning_gputime._phases import BACKWARD, EVALUATION_IN_STEP, FORWARD, of_one_callback

# Thresholds of `_RowChoice`, chosen for tables of about ten rows. Smaller ones split the time into
# more rows and deeper functions, larger ones end at callers, which name no culprit.
_MIN_ROW = 0.04  # A line or function with this fraction of the time has its own row.
_MIN_DEEPER = 0.7  # A function that takes this fraction of its caller explains the caller's time.
_MIN_LINE = 0.6  # A line that takes this fraction of a function stands for the function.
_MAX_ROWS = 60  # Limits the size of results.
_MIN_MS = 0.0005  # Shorter times would be shown as 0.

# Examined steps must show this fraction of a phase's time to divide all of it. Chosen: smaller ones
# scale lines by more than 2, with larger ones more time is "(not examined)".
_MIN_EVIDENCE = 0.5
LONG_STEP = 1.5
"""A step is long if it takes at least this multiple of the median. Chosen: smaller ones take noise
for long steps, larger ones mix steps whose phases differ (`benchmarks/sampling.py`)."""

# Thresholds of `_growth`. Chosen: smaller ones report noise as growth, larger ones report it later.
_N_FIRST, _N_LAST = 3, 2  # Number of the first and of the last examined steps to compare.
_MIN_GROWTH = 1.25  # Each of the last steps has this multiple of the longest of the first.
_MIN_RANK_CORRELATION = 0.7  # Of the time and the number of the step, over all examined steps.

# Quantiles of Student's t for a 95 % interval, from 1 degree of freedom on.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


def t95(freedom: int) -> float:
    """Return half the width of a 95 % interval, in standard errors: 12.71, 4.30, ..., 1.96."""
    return _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.5 / freedom


@dataclass(frozen=True, slots=True)
class PhasePart:
    """Time of a row in a phase, per step (in milliseconds).

    Attributes:
        gpu_ms: Time in which the GPU set the pace.
        host_ms: Time in which the host set the pace.
        idle_ms: Part of `host_ms` in which the GPU had no work left, because the host had waited
            for it in this row, as in `.item()`.
    """

    gpu_ms: float = 0.0
    host_ms: float = 0.0
    idle_ms: float = 0.0

    @property
    def ms(self) -> float:
        return self.gpu_ms + self.host_ms


@dataclass(frozen=True, slots=True)
class LineRow:
    """A line or a function of the user's code, with the time for which it is the reason.

    Time of other code counts for the line of the user's code that called it.

    Attributes:
        function: Qualified name of the function; "<module>" outside of functions. A hook or a stage
            of a trainer if no code of the user ran; empty for time that no examined step shows.
        file: Path of the file; empty if no code of the user ran.
        line: The line, or the first line of a range; 0 if unknown.
        last_line: The last line of a range.
        phases: Time per step, by phase or sub-phase. Backward is the time of the operations that
            this line ran in forward.
        entry: Entry of the time breakdown if the code ran outside of steps; else empty. Then the
            times are those of one occurrence.
        error_ms: Half the width of the 95 % interval of the time per step (in milliseconds), from
            the differences between the examined steps, without the error of the phases' times.
        calls: Number of times that the line ran per step.
        path: Lines that led to this one, the outermost first, such as "main (train.py:12)".
        modules: Modules whose forward this is, such as "8 x Block" or "blocks.3.att".
        is_library: True for a function of a library.
        is_rest: True for the lines of a training loop that are too short for a row each, and for
            time in which a trainer ran no code of the user.
        is_recomputed: True for time in which backward runs these lines of forward again, because of
            activation checkpointing. It is estimated from their time in forward.
        is_forward: True for the forward of a module.
        operations: Number of differentiable operations per step; None if unknown.
        busy_ms: Host time per step without waits for the GPU (in milliseconds).
        convolves: True if the line runs convolutions.
        multiplies_float32: True if the line multiplies matrices in float32, without autocast.
        grew_from_ms: Time in the first examined steps, if it has certainly grown since then, and
            by more than the rest of the step; else 0.0.
        grew_to_ms: Time in the last examined steps, if it has certainly grown; else 0.0.
    """

    function: str
    file: str = ""
    line: int = 0
    last_line: int = 0
    phases: Mapping[str, PhasePart] = field(default_factory=dict)
    entry: str = ""
    error_ms: float = 0.0
    calls: float = 0.0
    path: tuple[str, ...] = ()
    modules: str = ""
    is_library: bool = False
    is_rest: bool = False
    is_recomputed: bool = False
    is_forward: bool = False
    operations: int | None = None
    busy_ms: float = 0.0
    convolves: bool = False
    multiplies_float32: bool = False
    grew_from_ms: float = 0.0
    grew_to_ms: float = 0.0

    @property
    def ms(self) -> float:
        """Time per step (in milliseconds)."""
        return sum(part.ms for part in self.phases.values())

    @property
    def gpu_ms(self) -> float:
        """Part of it in which the GPU set the pace."""
        return sum(part.gpu_ms for part in self.phases.values())

    @property
    def host_ms(self) -> float:
        """Part of it in which the host set the pace."""
        return sum(part.host_ms for part in self.phases.values())

    @property
    def idle_ms(self) -> float:
        """Part of `host_ms` after the host had waited for the GPU in this row."""
        return sum(part.idle_ms for part in self.phases.values())

    @property
    def main_phase(self) -> str:
        """Phase or sub-phase with most of the time in which the code ran."""
        return max(
            self.phases,
            key=lambda name: self.phases[name].ms - self.phases[name].idle_ms,
            default="",
        )

    @property
    def where(self) -> str:
        """Lines, such as "train.py:63-70"; empty if unknown."""
        return lines_in(self.file, self.line, self.last_line) if self.file else ""

    def __str__(self) -> str:
        """Return the code, such as "`EMA.update` (ema.py:12)"."""
        if self.function == "<module>":
            return f"`{self.where}`"
        where = self.where
        if self.is_library:
            where = f"called by {self.path[-1]}" if self.path else ""
        details = ", ".join(filter(None, (self.modules, where)))
        text = f"`{self.function}` ({details})" if details else f"`{self.function}`"
        return f"recomputation of {text}" if self.is_recomputed else text


class Targets(NamedTuple):
    """Times per step that the rows are scaled to (in milliseconds), by phase without sub-phases."""

    gpu_ms: Mapping[str, float]
    host_ms: Mapping[str, float]


_NO_TARGETS = Targets({}, {})


def line_rows(
    steps: Sequence[ExaminedStep],
    targets: Targets = _NO_TARGETS,
    *,
    trainer: str,
    median_ms: float = 0.0,
    long_share: float = 0.0,
    outside: frozenset[tuple[str, str]] = frozenset(),
    modules: Mapping[tuple[str, int], str] | None = None,
    operations: Mapping[Line, Operations] | None = None,
    busy_functions: AbstractSet[FunctionKey] = frozenset(),
    entry: str = "",
) -> tuple[LineRow, ...]:
    """Return the rows of the examined steps, scaled to the times of all steps, the longest first.

    Args:
        steps: Examined steps, or occurrences of `entry`.
        targets: Mean times per step over all steps; none for an entry.
        trainer: Name of the trainer, for time in which it ran none of the user's code.
        median_ms: Median time of a step; 0 if all `steps` count alike.
        long_share: Fraction of all steps that take at least 1.5 times the median.
        outside: File and name of the functions around the training, such as the caller of `fit`.
        modules: Modules by file and first line of their forward.
        operations: Differentiable operations of each line.
        busy_functions: Keys of functions with lines that run too often to be followed.
        entry: Entry of the time breakdown outside of steps; empty for steps.
    """
    # Scale the examined steps to the times of all steps, and take their mean.
    weights = _weights(steps, median_ms, long_share)
    factors, not_shown = _factors(steps, weights, targets)
    scaled: list[dict[Cell, float]] = []
    mean_ms: dict[Cell, float] = defaultdict(float)
    for step, weight in zip(steps, weights, strict=True):
        cells_ms = {
            cell: ms * factors.get(_paced_phase(cell), 1.0)
            for cell, ms in step.cells_ms.items()
            if cell.phase != EVALUATION_IN_STEP
        }
        scaled.append(cells_ms)
        for cell, ms in cells_ms.items():
            mean_ms[cell] += weight * ms
    _move_recomputation(mean_ms)

    # Choose the row of each cell.
    loops = frozenset().union(*(step.loops for step in steps))
    choice = _RowChoice(mean_ms, loops, busy_functions)
    drafts: dict[_RowKey, _Draft] = {}
    keys: dict[Cell, _RowKey] = {}
    for cell, ms in mean_ms.items():
        function, number = choice.choose(cell.place)
        if function is None or (function.file, function.name) in outside:
            function, key = None, _RowKey(of_one_callback(cell.phase) or trainer)
            is_rest = key.trainer == trainer
        else:
            key = _RowKey("", function.key, number, _is_recomputed(cell))
            is_all_lines = number == 0
            is_rest = choice.is_loop(function) and not function.is_library and is_all_lines
        if key not in drafts:
            drafts[key] = _Draft(key, function, entry, is_rest)
        drafts[key].add(cell, ms)
        keys[cell] = key

    _add_each_step(drafts, keys, mean_ms, steps, scaled)
    steps_ms = [sum(cells.values()) for cells in scaled]
    calls = _mean([step.calls for step in steps], weights)
    busy_ms = _mean([step.busy_ms for step in steps], weights)
    rows = [
        draft.row(calls, busy_ms, _growth(draft.own_ms, steps_ms), modules or {}, operations or {})
        for draft in drafts.values()
    ]
    rows += [
        LineRow("", phases={phase: PhasePart(gpu_ms, host_ms)})
        for phase, (gpu_ms, host_ms) in not_shown.items()
    ]
    rows = [row for row in rows if row.phases]
    return tuple(sorted(rows, key=lambda row: -row.ms)[:_MAX_ROWS])


class _RowKey(NamedTuple):
    """Identity of a row."""

    trainer: str  # Name of the trainer or its hook, if no code of the user ran; else empty.
    function: FunctionKey | None = None
    line: int = 0  # Number of the line; 0 for all lines of the function.
    is_recomputed: bool = False


_PacedPhase = tuple[str, bool]
"""A phase, and True for the part of it in which the GPU set the pace."""


def _paced_phase(cell: Cell) -> _PacedPhase:
    return cell.phase, cell.pace == GPU


def _add_each_step(
    drafts: Mapping[_RowKey, "_Draft"],
    keys: Mapping[Cell, _RowKey],
    mean_ms: Mapping[Cell, float],
    steps: Sequence[ExaminedStep],
    scaled: Sequence[Mapping[Cell, float]],
) -> None:
    """Add the time in each examined step to the rows, for their error and growth.

    Args:
        drafts: The rows.
        keys: The row of each cell.
        mean_ms: Mean of `scaled`, over the steps.
        steps: The examined steps.
        scaled: Their times, scaled to the times of all steps.
    """
    mean_phases_ms: dict[_PacedPhase, float] = defaultdict(float)
    for cell, ms in mean_ms.items():
        mean_phases_ms[_paced_phase(cell)] += ms
    key_of_place = {cell.place: key for cell, key in keys.items()}
    for step, cells in zip(steps, scaled, strict=True):
        phases_ms: dict[_PacedPhase, float] = defaultdict(float)
        for cell, ms in cells.items():
            phases_ms[_paced_phase(cell)] += ms
        # The time of a phase has its own error. Here, only the row's fraction of it matters.
        deviations_ms: dict[_RowKey, float] = defaultdict(float)
        for cell, ms in mean_ms.items():
            phase = _paced_phase(cell)
            mean_phase_ms = mean_phases_ms[phase]
            usual_ms = ms * phases_ms[phase] / mean_phase_ms if mean_phase_ms else 0.0
            deviations_ms[keys[cell]] += cells.get(cell, 0.0) - usual_ms
        # For growth, take the host's time without waits (`busy_ms`; unknown on the host's clock) in
        # place of host-paced time. How long a line keeps the device waiting depends on other lines.
        own_ms: dict[_RowKey, float] = defaultdict(float)
        for cell, ms in cells.items():
            if cell in keys and (cell.pace == GPU or not step.busy_ms):
                own_ms[keys[cell]] += ms
        for place, ms in step.busy_ms.items():
            if place in key_of_place:
                own_ms[key_of_place[place]] += ms
        for key, draft in drafts.items():
            draft.deviations_ms.append(deviations_ms[key])
            draft.own_ms.append(own_ms[key])


def _growth(each_ms: Sequence[float], steps_ms: Sequence[float]) -> tuple[float, float]:
    """Return the time of a row in the first and in the last steps if it has certainly grown.

    For example, a row takes 4, 5, 4, 6, 8 and 9 ms in six examined steps, and the rest of each step
    30 ms. The means are 4.3 and 8.5 ms. It has grown, because 8 ms exceed 1.25 times 5 ms.

    Args:
        each_ms: Time of the row in each examined step.
        steps_ms: Time of each examined step.

    Returns:
        The two times (in milliseconds); zeros if the time has not grown by more than the rest.
    """
    if len(each_ms) < _N_FIRST + _N_LAST or not min(each_ms) > 0:
        return 0.0, 0.0
    first, last = each_ms[:_N_FIRST], each_ms[-_N_LAST:]
    first_ms, last_ms = fmean(first), fmean(last)
    is_large = last_ms - first_ms >= _MIN_ROW * fmean(steps_ms[-_N_LAST:])
    # It has grown by more than the rest of the step.
    rest_ms = [step_ms - ms for step_ms, ms in zip(steps_ms, each_ms, strict=True)]
    first_rest_ms, last_rest_ms = fmean(rest_ms[:_N_FIRST]), fmean(rest_ms[-_N_LAST:])
    rest_growth = max(last_rest_ms / first_rest_ms, 1.0) if first_rest_ms > 0 else 1.0
    has_grown = min(last) >= _MIN_GROWTH * rest_growth * max(first)
    # It has grown from step to step: its rank correlates with the number of the step.
    ranks = np.argsort(np.argsort(each_ms))
    is_steady = np.corrcoef(ranks, np.arange(len(ranks)))[0, 1] >= _MIN_RANK_CORRELATION
    return (first_ms, last_ms) if has_grown and is_large and is_steady else (0.0, 0.0)


def _is_checkpoint(function: Function) -> bool:
    return function.name == "checkpoint" and function.is_library


def _is_recomputed(cell: Cell) -> bool:
    function = cell.place.function
    is_checkpoint = function is not None and _is_checkpoint(function)
    return is_checkpoint and cell.phase.partition("/")[0] == BACKWARD


def _move_recomputation(cells_ms: dict[Cell, float]) -> None:
    """Move time of backward to where activation checkpointing runs forward again.

    Backward runs each checkpointed function a second time, which takes as long as in forward. The
    marks in backward do not tell this time from that of its gradients, nor by which of several
    checkpoints a function runs. For example, a block takes 3 ms in forward and 9 ms in backward: 3
    of these 9 ms are moved.
    """
    # Time in forward of each function inside a checkpoint, by its outermost checkpoint.
    forward_ms: dict[FunctionKey, dict[Line, float]] = defaultdict(lambda: defaultdict(float))
    for cell, ms in cells_ms.items():
        if cell.phase.partition("/")[0] == FORWARD and cell.place.function is not None:
            around = (function for function, _ in cell.place.path if _is_checkpoint(function))
            if (outermost := next(around, None)) is not None:
                forward_ms[cell.place.function.key][outermost.whole] += ms
    backward = defaultdict[FunctionKey, list[Cell]](list)
    for cell in cells_ms:
        if cell.phase.partition("/")[0] == BACKWARD and cell.place.function is not None:
            backward[cell.place.function.key].append(cell)
    # Move as much time as in forward: from all cells of the function, to its checkpoints.
    for key, by_checkpoint in forward_ms.items():
        backward_ms = sum(cells_ms[cell] for cell in backward[key])
        all_ms = sum(by_checkpoint.values())
        if not backward_ms or not all_ms:
            continue
        moved_share = min(all_ms / backward_ms, 1.0)
        for cell in backward[key]:
            moved_ms = moved_share * cells_ms[cell]
            cells_ms[cell] -= moved_ms
            for checkpoint, ms in by_checkpoint.items():
                moved = cell._replace(place=checkpoint)
                cells_ms[moved] = cells_ms.get(moved, 0.0) + moved_ms * ms / all_ms


def _weights(steps: Sequence[ExaminedStep], median_ms: float, long_share: float) -> list[float]:
    """Return the weight of each examined step, which add up to 1.

    Steps that are expected to be long are examined more often than they occur.
    """
    each_ms = [step.step_ms for step in steps]
    if median_ms and len(steps) >= _N_FIRST + _N_LAST:
        have_grown = min(each_ms[-_N_LAST:]) >= LONG_STEP * fmean(each_ms[:_N_FIRST])
        if have_grown:  # Early steps, which are examined more often, are not like later steps.
            return _weights_by_distance([step.index for step in steps])
    is_long = [step.step_ms >= LONG_STEP * median_ms > 0 for step in steps]
    n_long = sum(is_long)
    if n_long in (0, len(steps)):
        return [1 / len(steps)] * len(steps)
    of_long, of_ordinary = long_share / n_long, (1 - long_share) / (len(steps) - n_long)
    return [of_long if long else of_ordinary for long in is_long]


def _weights_by_distance(indices: Sequence[int]) -> list[float]:
    """Return the weights of examined steps if each counts for the steps around it.

    Two neighbors share the steps between them. The first and the last step count for as many steps
    on their outer side as on their inner side. For example, the steps 10, 20 and 40 count for the
    steps from 5 to 15, 15 to 30 and 30 to 50, with the weights 10/45, 15/45 and 20/45.
    """
    middles = [(a + b) / 2 for a, b in pairwise(indices)]
    start = indices[0] - (indices[1] - indices[0]) / 2
    end = indices[-1] + (indices[-1] - indices[-2]) / 2
    limits = [start, *middles, end]
    return [(b - a) / (end - start) for a, b in pairwise(limits)]


def _factors(
    steps: Sequence[ExaminedStep], weights: Sequence[float], targets: Targets
) -> tuple[dict[_PacedPhase, float], dict[str, tuple[float, float]]]:
    """Return the factors that scale examined times to the times of all steps.

    For example, `forward` takes 10 ms per step, of which the GPU paces 8 and the host 2. If
    examined steps show 9 and 3 ms, the factors are 8/9 and 2/3. If they show 3 and 9 ms, too little
    of it is GPU-paced, and both factors are 10/12.

    Returns:
        The factors. And for each phase, the time that no examined step shows: GPU-paced and
        host-paced.
    """
    examined: dict[_PacedPhase, float] = defaultdict(float)
    for step, weight in zip(steps, weights, strict=True):
        for cell, ms in step.cells_ms.items():
            examined[_paced_phase(cell)] += weight * ms
    factors: dict[_PacedPhase, float] = {}
    not_shown: dict[str, tuple[float, float]] = {}
    for phase in dict.fromkeys([*targets.gpu_ms, *targets.host_ms]):
        gpu_ms, host_ms = targets.gpu_ms.get(phase, 0.0), targets.host_ms.get(phase, 0.0)
        examined_gpu_ms, examined_host_ms = examined[phase, True], examined[phase, False]
        shows_both = (
            examined_gpu_ms >= _MIN_EVIDENCE * gpu_ms
            and examined_host_ms >= _MIN_EVIDENCE * host_ms
        )
        if shows_both:
            factors[phase, True] = gpu_ms / examined_gpu_ms if examined_gpu_ms else 0.0
            factors[phase, False] = host_ms / examined_host_ms if examined_host_ms else 0.0
            continue
        # Marks slow the host down, so time that is GPU-paced in other steps may be host-paced in
        # examined steps. Scale both by the same factor.
        ms, examined_ms = gpu_ms + host_ms, examined_gpu_ms + examined_host_ms
        factor = min(ms / examined_ms, 1 / _MIN_EVIDENCE) if examined_ms else 0.0
        factors[phase, True] = factors[phase, False] = factor
        missing_ms = max(ms - factor * examined_ms, 0.0)
        if missing_ms:
            share = missing_ms / ms
            not_shown[phase] = share * gpu_ms, share * host_ms
    return factors, not_shown


def _mean(values: Sequence[Mapping[Line, float]], weights: Sequence[float]) -> dict[Line, float]:
    """Return the weighted mean of a number of each line."""
    means: dict[Line, float] = defaultdict(float)
    for by_line, weight in zip(values, weights, strict=True):
        for line, value in by_line.items():
            means[line] += weight * value
    return means


class _RowChoice:
    """Choice of the function and the line that a row names, for the time of each line.

    From the training loop inwards, functions have rows until the first that needs none: its time,
    and that of the functions that it calls, belongs to the line that calls it. A function needs a
    row if

    - it is the loop, however short: a function in which one phase ends and another begins,
    - or it takes enough time, and the loop calls it,
    - or it takes enough time, and it is part of the model,
    - or it takes enough time, and most of the time of its caller.

    For example, `main` calls `train` (99 % of its time), which calls `model.forward` (60 %) and
    `log` (1 %). `train` is the loop, `forward` has a row, and `log` belongs to its line in `train`.

    Each line of a loop or a model with enough time has its own row. All other lines of a function
    share a row, which names the function's longest line if that takes most of its time.

    Args:
        cells_ms: Time of each cell.
        loops: Functions that contain the loop, or parts of more than one phase.
        busy: Functions with lines that run too often to be followed.
    """

    def __init__(
        self,
        cells_ms: Mapping[Cell, float],
        loops: AbstractSet[FunctionKey],
        busy: AbstractSet[FunctionKey],
    ) -> None:
        self._loops, self._busy = loops, busy
        self._min_row_ms = _MIN_ROW * sum(cells_ms.values())
        # Times of functions, including the functions that they call, in all contexts.
        self._ms: dict[FunctionKey, float] = defaultdict(float)
        # The same, without backward; and the part of it in forward.
        self._before_backward_ms: dict[FunctionKey, float] = defaultdict(float)
        self._forward_ms: dict[FunctionKey, float] = defaultdict(float)
        # Time of a function when a caller calls it, by the keys of the caller and the function.
        self._called_ms: dict[tuple[FunctionKey, FunctionKey], float] = defaultdict(float)
        # Functions that have a backward: in their context, and in any context.
        self._trained, self._trained_keys = set[Function](), set[FunctionKey]()
        for cell, ms in cells_ms.items():
            phase = cell.phase.partition("/")[0]
            functions = [function for function, _ in cell.place.path]
            keys = [function.key for function in functions]
            if phase == BACKWARD and ms:
                self._trained.update(functions)
                self._trained_keys.update(keys)
            for key in {*keys}:  # A function that calls itself counts once.
                self._ms[key] += ms
                if phase != BACKWARD:
                    self._before_backward_ms[key] += ms
                if phase == FORWARD:
                    self._forward_ms[key] += ms
            for caller, called in pairwise(keys):
                self._called_ms[caller, called] += ms
        # Time of each function that has a row, by its lines. It needs the sums above.
        self._lines_ms: dict[FunctionKey, dict[int, float]]
        self._lines_ms = defaultdict(lambda: defaultdict(float))
        for cell, ms in cells_ms.items():
            function, number = self._innermost_with_row(cell.place)
            if function is not None:
                self._lines_ms[function.key][number] += ms

    def choose(self, place: Line) -> tuple[Function | None, int]:
        """Return the function and the line that the time at a place belongs to.

        The line is 0 for all lines of the function.
        """
        function, number = self._innermost_with_row(place)
        if function is None:
            return None, 0
        lines_ms = self._lines_ms[function.key]
        longest = max(lines_ms, key=lines_ms.__getitem__)
        names_longest = lines_ms[longest] >= _MIN_LINE * sum(lines_ms.values())
        # In a busy function, some lines have the time of other lines.
        if function.key not in self._busy and (self.is_loop(function) or self._is_model(function)):
            if lines_ms[number] >= self._min_row_ms:
                return function, number
            # A loop's short lines share one row. A model's join the longest line if it has a row.
            if self.is_loop(function) or lines_ms[longest] < self._min_row_ms:
                names_longest = False
        return function, longest if names_longest else 0

    def _innermost_with_row(self, place: Line) -> tuple[Function | None, int]:
        """Return the innermost function with a row, and its line that leads to a place."""
        found: Function | None = None
        number = 0
        for function, line in place.path:
            if _is_checkpoint(function):
                continue
            # A model that elsewhere has a backward, but not here: in an evaluation, for example.
            is_evaluated = function.key in self._trained_keys and function not in self._trained
            if found is not None and (is_evaluated or not self._needs_row(function, found)):
                break
            found, number = function, line
        return found, number

    def _needs_row(self, function: Function, caller: Function) -> bool:
        # The rules are in the docstring of the class.
        if self.is_loop(function):
            return True
        if self._ms[function.key] < self._min_row_ms:
            return False
        if self.is_loop(caller) or self._is_model(function):
            return True
        called_ms = self._called_ms[caller.key, function.key]
        return called_ms >= _MIN_DEEPER * self._ms[caller.key]

    def is_loop(self, function: Function) -> bool:
        """Return True if a function contains the loop, or parts of more than one phase."""
        return function.key in self._loops

    def _is_model(self, function: Function) -> bool:
        """Return True if at least half of a function's time without backward is in forward."""
        return self._forward_ms[function.key] >= 0.5 * self._before_backward_ms[function.key] > 0


class _Draft:
    """A row that is being added up. See `LineRow` for `entry` and `is_rest`."""

    def __init__(self, key: _RowKey, function: Function | None, entry: str, is_rest: bool) -> None:
        self._key, self._function, self._entry, self._is_rest = key, function, entry, is_rest
        self._paces_ms: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._places: dict[Line, float] = defaultdict(float)
        self.deviations_ms: list[float] = []
        """Time in each examined step, minus the usual fraction of the phases in this step. Only for
        the error."""
        self.own_ms: list[float] = []
        """Sum of the device-paced time and the host's time without waits, in each examined step."""

    def add(self, cell: Cell, ms: float) -> None:
        self._paces_ms[cell.phase][cell.pace] += ms
        self._places[cell.place] += ms

    def row(
        self,
        calls: Mapping[Line, float],
        busy_ms: Mapping[Line, float],
        growth: tuple[float, float],
        modules: Mapping[tuple[str, int], str],
        operations: Mapping[Line, Operations],
    ) -> LineRow:
        """Return the row. See `ExaminedStep`, `_growth` and `line_rows` for the arguments."""
        phases = {
            phase: PhasePart(ms[GPU], ms[HOST] + ms[IDLE], idle_ms=ms[IDLE])
            for phase, ms in self._paces_ms.items()
            if sum(ms.values()) >= _MIN_MS
        }
        n = len(self.deviations_ms)
        error_ms = t95(n - 1) * stdev(self.deviations_ms) / math.sqrt(n) if n > 1 else 0.0
        key, function = self._key, self._function
        if function is None:
            return LineRow(
                key.trainer,
                phases=phases,
                entry=self._entry,
                error_ms=error_ms,
                is_rest=self._is_rest,
            )
        numbers = [key.line] if key.line else []  # Lines that the row covers.
        for place in self._places if not key.line else ():
            numbers += [n for called, n in place.path if called.key == function.key and n]
        longest = max(self._places, key=self._places.__getitem__)
        path = []
        for caller, line in longest.path:
            if caller.key == function.key:
                break
            path.append(f"{caller.name} ({Path(caller.file).name}:{line})" if line else caller.name)
        runs = {
            place: n
            for place, n in calls.items()
            if place.function is not None and place.function.key == function.key
        }
        # A function runs as often as its first line.
        number = key.line or min((place.number for place in runs), default=0)
        kinds = [operations[place] for place in self._places if place in operations]
        return LineRow(
            function.name,
            function.file,
            min(numbers, default=function.first_line),
            max(numbers, default=function.first_line),
            phases,
            entry=self._entry,
            error_ms=error_ms,
            calls=sum(n for place, n in runs.items() if place.number == number),
            path=tuple(path),
            modules=modules.get((function.file, function.first_line), ""),
            is_library=function.is_library,
            is_rest=self._is_rest,
            is_recomputed=key.is_recomputed,
            is_forward=(function.file, function.first_line) in modules,
            operations=sum(kind.all for kind in kinds) if operations else None,
            busy_ms=sum(busy_ms.get(place, 0.0) for place in self._places),
            convolves=any(kind.convolutions for kind in kinds),
            multiplies_float32=any(kind.float32_products for kind in kinds),
            grew_from_ms=growth[0],
            grew_to_ms=growth[1],
        )
