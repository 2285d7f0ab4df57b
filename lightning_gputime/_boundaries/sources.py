"""From marks to the lines of the user's code between them."""

import dis
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

from lightning_gputime._compat.python_ import user_frames
from lightning_gputime._measurement.culprits import PLACE, CulpritSums, Source
from lightning_gputime._measurement.wall_clock import PAUSED, WallClock
from lightning_gputime._phases import (
    AFTER_UPDATE,
    EXCLUDED,
    INTERRUPTIONS,
    OPTIMIZER,
    OTHER,
    StepRecord,
    resolve_labels,
)

_PARTS = {OTHER: "before forward", AFTER_UPDATE: "after the update"}  # Parts of `other`.
_MAX_FRAMES = 4  # Number of the user's functions on the stack that are noted at a mark.


class Frame(NamedTuple):
    """A running function of the user. It refers to no frame of Python.

    Attributes:
        file: Path of the file.
        function: Qualified name of the function.
        first_line: Line of its definition.
        last_line: Its last line.
        line: Line that it runs.
        loop_line: Last line of the body of a `for` loop that asks for its next item; else 0.
    """

    file: str
    function: str
    first_line: int
    last_line: int
    line: int
    loop_line: int

    def is_in_function_of(self, other: "Frame") -> bool:
        return self[:3] == other[:3]


Place = tuple[Frame, ...]
"""Functions of the user on the stack, innermost first; empty if there is none."""


def place_here(outside: Collection[Frame] = ()) -> Place:
    """Return the place in the user's code that is running.

    Args:
        outside: Functions around the training, such as the one that calls `fit`. They are left out.
    """
    found = []
    for frame in user_frames(_MAX_FRAMES):
        code = frame.f_code
        last_line, loops = _lines_of(code)
        line = frame.f_lineno or code.co_firstlineno
        loop = loops.get(frame.f_lasti)
        loop_line = loop.body_line if loop is not None else 0
        here = Frame(
            code.co_filename, code.co_qualname, code.co_firstlineno, last_line, line, loop_line
        )
        if not any(here.is_in_function_of(other) for other in outside):
            found.append(here)
    return tuple(found)


class PlaceReader:
    """Add the time between the places of located steps to the sums of culprits.

    Args:
        sums: Where the time is added.
        updates: Name of the function that updates the parameters, such as "Adam.step".
    """

    def __init__(self, sums: CulpritSums, updates: str) -> None:
        self._sums, self._updates = sums, updates

    def steps_read(self, steps: Iterable[StepRecord]) -> None:
        for step in steps:
            if step.places:
                self._add(step)

    def _add(self, step: StepRecord) -> None:
        names = resolve_labels(step.labels)
        for i, (label, phases, ms) in enumerate(
            zip(step.labels, names, step.device_ms, strict=True)
        ):
            if not phases or label in INTERRUPTIONS:
                continue
            entry, ns = phases[0], round(1e6 * ms)
            source = source_between(step.places[i], step.places[i + 1])
            name = self._updates if label == OPTIMIZER else _PARTS.get(label, "")
            self._sums.add_observed(entry, PLACE, ns)
            if source is not None:
                self._sums.add(entry, name, ns, source=source, kind=PLACE)


class PlaceTimer:
    """Add the time of code to an entry of the wall clock, with the place that starts it.

    It is called like a recorder, see `NamedPhase`.
    """

    def __init__(self, sums: CulpritSums, now_ns: Callable[[], int], wall_clock: WallClock) -> None:
        self._sums, self._now_ns, self._wall_clock = sums, now_ns, wall_clock
        self._open: tuple[int, Source | None] | None = None

    def start(self, source: Source | None) -> None:
        if self._wall_clock.is_here:
            self._open = self._now_ns(), source

    def end(self, entry: str, source: Source | None = None) -> None:
        """End the code; `source` is its place, if that was unknown at its start."""
        if self._open is not None:
            (start_ns, known), self._open = self._open, None
            source = known or source
            self._sums.add(entry, "", self._now_ns() - start_ns, source=source, kind=PLACE)

    def enter_phase(self, _: str) -> None:
        self.start(source_here())

    def leave_phase(self, name: str) -> None:
        self.end(PAUSED if name == EXCLUDED else name)


def source_here() -> Source | None:
    """Return the line that runs; at the head of a loop, the lines of the loop."""
    for frame in place_here():
        return _source(frame, frame.loop_line)
    return None


def source_between(start: Place, end: Place) -> Source | None:
    """Return the lines that ran between two places; None if that is unknown."""
    for first in start:
        for last in end:
            if first.is_in_function_of(last):
                return _source(first, _line_reached(first, last))
    if start:  # The function was left.
        return _source(start[0], start[0].last_line)
    return None  # A function that was called since: other code of a trainer ran before it.


def _line_reached(first: Frame, last: Frame) -> int:
    """Return the last line that ran from one place in a function to another one in it."""
    if last.loop_line and last.line <= first.line:
        return max(last.loop_line, first.line)  # The loop starts its next round.
    return last.line


def _source(frame: Frame, last_line: int) -> Source:
    return Source(frame.file, frame.line, max(frame.line, last_line), frame.function)


def source_after_loop() -> Source | None:
    """Return the lines after the innermost `for` loop of the user, which has just ended.

    They reach to the next round of a loop around it, or to the end of the function.
    """
    for frame in user_frames(1):
        loop = _lines_of(frame.f_code)[1].get(frame.f_lasti)
        if loop is not None and loop.lines_after is not None:
            code, (first, last) = frame.f_code, loop.lines_after
            return Source(code.co_filename, first, last, code.co_qualname)
    return None


def source_of(function: Any) -> Source | None:
    """Return where a function, a method or a class is defined; None if that is unknown."""
    try:
        if isinstance(function, type):
            lines, first_line = inspect.getsourcelines(function)
            file = inspect.getsourcefile(function) or ""
            last_line = first_line + len(lines) - 1
            return Source(file, first_line, last_line, function.__qualname__)
        code = inspect.unwrap(getattr(function, "func", function)).__code__
        return Source(code.co_filename, code.co_firstlineno, code.co_firstlineno, code.co_qualname)
    except Exception:  # Written in C, made by `exec`, or an object with any `__getattr__`.
        return None


class _Loop(NamedTuple):
    body_line: int  # Last line of the body.
    lines_after: tuple[int, int] | None  # From the end of the loop to the next round of another.


@lru_cache(maxsize=256)
def _lines_of(code: CodeType) -> tuple[int, dict[int, _Loop]]:
    """Return the last line of a function, and its `for` loops by the offset of their head."""
    found = [*dis.get_instructions(code)]
    last_line = max([*_lines(found), code.co_firstlineno])
    loops = {}
    for instruction in found:
        if instruction.opname == "FOR_ITER":
            head, end = instruction.offset, int(instruction.argval)
            body = [other for other in found if head < other.offset < end]
            after = [*_until_next_round([other for other in found if other.offset >= end], head)]
            for_line = instruction.positions.lineno if instruction.positions else None
            lines = [line for line in _lines(after) if line != for_line]
            loops[head] = _Loop(
                max([*_lines(body), 0]), (min(lines), max(lines)) if lines else None
            )
    return last_line, loops


def _lines(instructions: list[dis.Instruction]) -> Iterator[int]:
    for instruction in instructions:
        if instruction.positions is not None and instruction.positions.lineno is not None:
            yield instruction.positions.lineno


def _until_next_round(instructions: list[dis.Instruction], head: int) -> Iterator[dis.Instruction]:
    for instruction in instructions:
        if instruction.opname.startswith("JUMP_BACKWARD") and int(instruction.argval) < head:
            return
        yield instruction
