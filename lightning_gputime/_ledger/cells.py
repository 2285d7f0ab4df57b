"""Cells: the time of an examined step by line, phase and pace."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_gputime._ledger import FunctionKey, Line
from lightning_gputime._ledger.pace import MAX_IDLE_LAG_MS, Bounds, lags_ms
from lightning_gputime._phases import BACKWARD, EVALUATION_IN_STEP, StepRecord, resolve_labels

GPU, HOST, IDLE = "gpu", "host", "idle"
"""Kinds of time: the device set the pace, the host set it while the line ran, and the host set it
after the line, because the line had waited until the device had nothing left to do."""

# Device time in a wait of the host, as a fraction of the lag before it. Chosen: smaller ones count
# waits after new work as the host's work, larger ones count work after a short lag as a wait.
_MAX_AFTER_WAIT = 0.3
# Smaller amounts of queued work, when the queue runs dry, are ignored. Chosen: smaller ones, near
# the error of a lag, blame lines without a wait; larger ones miss waits in short steps.
_MIN_DRAINED_MS = 0.2


Span = tuple[int, int]
"""Host times of a start and an end (in nanoseconds)."""


class Cell(NamedTuple):
    """Part of an examined step.

    Attributes:
        place: Line that is the reason for the time.
        phase: Phase in which the time passed, with its sub-phase. In an evaluation inside a step,
            `EVALUATION_IN_STEP`. Outside of steps, the entry of the wall clock.
        pace: `GPU` or `HOST`, which set the pace, or `IDLE`.
    """

    place: Line
    phase: str
    pace: str


@dataclass(frozen=True, slots=True)
class ExaminedStep:
    """An examined step, or an examined occurrence of an entry outside of steps.

    Attributes:
        index: Number that the step is logged under, or of the occurrence.
        cells_ms: Time of each cell (in milliseconds), without the time that marks took.
        calls: Number of times that each line started.
        loops: Keys of the functions that contain the loop: they were running at the start, or while
            one phase ended and another began.
        busy_ms: Host time of each line without waits for the device (in milliseconds).
    """

    index: int
    cells_ms: Mapping[Cell, float]
    calls: Mapping[Line, int]
    loops: frozenset[FunctionKey] = frozenset()
    busy_ms: Mapping[Line, float] = field(default_factory=dict)

    @property
    def step_ms(self) -> float:
        """Time of the step, without evaluations (in milliseconds)."""
        return sum(ms for cell, ms in self.cells_ms.items() if cell.phase != EVALUATION_IN_STEP)

    def evaluation(self, entry: str) -> "ExaminedStep | None":
        """Return the evaluation inside this step, as an occurrence of an entry, or None."""
        cells = {
            cell._replace(phase=entry): ms
            for cell, ms in self.cells_ms.items()
            if cell.phase == EVALUATION_IN_STEP
        }
        return replace(self, cells_ms=cells) if cells else None


class _AnyMark(NamedTuple):
    """Mark of a phase or of a line."""

    start_ns: int  # Host time before the mark.
    end_ns: int  # Host time after the mark.
    device_ms: float  # Device time since the start of the step.
    phase: str | None = None  # Phase that starts; None for a line, and at the end of the step.
    line: Line | None = None  # Line that runs from now on; None for a phase.


class _Interval(NamedTuple):
    """Time between two marks of any kind.

    Attributes:
        start_ns: Host time after the first mark.
        end_ns: Host time before the second mark.
        marked_ns: Host time after the second mark.
        start_ms: Device time of the first mark, since the start of the step.
        end_ms: Device time of the second mark.
        phase: Phase of the time; empty if it is in no step.
        line: Line that runs.
    """

    start_ns: int
    end_ns: int
    marked_ns: int
    start_ms: float
    end_ms: float
    phase: str
    line: Line

    @property
    def host_ms(self) -> float:
        return max(self.end_ns - self.start_ns, 0) / 1e6


_Paced = tuple[_Interval, tuple[float, float]]
"""An interval, and the device's lag at its start and end (in milliseconds)."""


def examined_step(step: StepRecord, waits: Sequence[Span], *, on_host_clock: bool) -> ExaminedStep:
    """Return the cells of a step that was examined. `waits` are those of the timer in it."""
    lines = sorted(step.lines or (), key=lambda line: line.end_ns)
    calls: dict[Line, int] = defaultdict(int)
    for line in lines:
        calls[line.line] += line.starts
    intervals = [*_intervals(step)]
    busy_ms: Mapping[Line, float] = {}
    if on_host_clock:
        cells: dict[Cell, float] = defaultdict(float)
        for interval in intervals:
            cells[Cell(interval.line, interval.phase, HOST)] += interval.host_ms
    else:
        device_ms = [intervals[0].start_ms, *(interval.end_ms for interval in intervals)]
        host_ns = [intervals[0].start_ns, *(interval.marked_ns for interval in intervals)]
        reached = [(device_ms[-1], step.reached_ns)] if step.reached_ns else []
        lags = lags_ms(device_ms, host_ns, Bounds(device_ms, host_ns, reached).offset_ms)
        paced = [*zip(intervals, pairwise(lags), strict=True)]
        busy_ms, cells = _busy_ms(paced, waits), _paced_cells(paced)
    in_steps = {cell: ms for cell, ms in cells.items() if cell.phase}
    loops = {*functions_around(lines[0].line)} if lines else set()  # Running at the first mark.
    for before, after in pairwise(intervals):
        phases = {before.phase.partition("/")[0], after.phase.partition("/")[0]}
        # In backward, the lines are those of forward, which have already returned.
        if len(phases) > 1 and BACKWARD not in phases:
            loops |= functions_around(before.line) & functions_around(after.line)
    return ExaminedStep(step.number, in_steps, calls, frozenset(loops), busy_ms)


def functions_around(line: Line) -> frozenset[FunctionKey]:
    """Return the keys of the functions that lead to a line."""
    return frozenset(function.key for function, _ in line.path)


def _intervals(step: StepRecord) -> Iterator[_Interval]:
    """Yield the intervals of a step, in order."""
    phases = []
    for label, names in zip(step.labels, resolve_labels(step.labels), strict=True):
        if names:
            phases.append(names[-1])
        else:  # The time is in no phase.
            phases.append(EVALUATION_IN_STEP if label == EVALUATION_IN_STEP else "")
    marks_ms = accumulate(step.device_ms, initial=0.0)
    # The last mark only ends the step, so it starts no phase.
    starts = zip(step.host_ns, marks_ms, [*phases, None], strict=True)
    marks = [_AnyMark(ns, ns, ms, phase=phase) for ns, ms, phase in starts]
    marks += [
        _AnyMark(line.start_ns, line.end_ns, line.device_ms, line=line.line)
        for line in step.lines or ()
    ]
    marks.sort(key=lambda mark: (mark.end_ns, mark.device_ms))  # Host times may be equal.
    phase: str | None = phases[0]
    # The first line mark follows the first mark of the step.
    running = next((mark.line for mark in marks if mark.line is not None), None)
    for first, second in pairwise(marks):
        if first.line is None:
            phase = first.phase
        else:
            running = first.line
        if running is not None and phase is not None:
            yield _Interval(
                start_ns=first.end_ns,
                end_ns=second.start_ns,
                marked_ns=second.end_ns,
                start_ms=first.device_ms,
                end_ms=second.device_ms,
                phase=phase,
                line=running,
            )


def _busy_ms(paced: Sequence[_Paced], waits: Sequence[Span]) -> dict[Line, float]:
    """Return the host time of each line without waits for the device, by the timer or the line."""
    busy_ms: dict[Line, float] = defaultdict(float)
    for interval, (lag_before, lag_after) in paced:
        ms = interval.end_ms - interval.start_ms
        # The line has waited if the device has caught up, although it had little new work.
        has_waited = lag_after < MAX_IDLE_LAG_MS and ms < _MAX_AFTER_WAIT * lag_before
        waited_ms = lag_before if has_waited else 0.0
        for start_ns, end_ns in waits:
            if interval.start_ns < end_ns <= interval.marked_ns:
                waited_ms = max(waited_ms, (end_ns - start_ns) / 1e6)
        busy_ms[interval.line] += max(interval.host_ms - waited_ms, 0.0)
    return busy_ms


def _paced_cells(paced: Sequence[_Paced]) -> dict[Cell, float]:
    """Return the cells of a step on a device.

    For example, 14 ms of work are queued, and a line waits for its end, as `.item()` does. If the
    next line then takes the host 2 ms, the device idles for 2 ms. Without the wait, it would still
    have had work, so these 2 ms are time of the waiting line. They are called `IDLE`. After 14 ms
    of idle time, the queue would have been empty even without the wait.
    """
    waiting: Line | None = None  # Line that has waited until the device had no work left.
    # Idle time that the wait may still explain: at first, the work in the queue.
    avoidable_ms = 0.0
    # Twice, because a queue that is empty at the end of a step explains the start of the next. The
    # second pass starts with the state at the end of the first, whose cells are dropped.
    for _ in range(2):
        cells: dict[Cell, float] = defaultdict(float)
        for interval, (lag_before, lag_after) in paced:
            ms = max(interval.end_ms - interval.start_ms, 0.0)
            if lag_after >= MAX_IDLE_LAG_MS:
                cells[Cell(interval.line, interval.phase, GPU)] += ms
                waiting = None
                continue
            # The device waited for the second mark, whose own time is not the line's.
            ms = max(ms - (interval.marked_ns - interval.end_ns) / 1e6, 0.0)
            if waiting is not None:
                idle_ms = min(ms, avoidable_ms)
                avoidable_ms -= idle_ms
                ms -= idle_ms
                cells[Cell(waiting, interval.phase, IDLE)] += idle_ms
            if ms:
                cells[Cell(interval.line, interval.phase, HOST)] += ms
            if lag_before >= _MIN_DRAINED_MS:
                waiting, avoidable_ms = interval.line, lag_before
    return cells
