"""From marks to the lines of the user's code between them."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from lightning_gputime._compat.python_ import Frame, definition_of, user_frames
from lightning_gputime._measurement.culprits import PLACE, CulpritSums, Source, short_name
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

Place = tuple[Frame, ...]
"""Functions of the user on the stack, innermost first; empty if there is none."""


def place_here(outside: Collection[Frame] = ()) -> Place:
    """Return the place in the user's code that is running.

    Args:
        outside: Functions around the training, such as the one that calls `fit`. They are left out.
    """
    frames = user_frames(_MAX_FRAMES)
    return tuple(frame for frame in frames if not any(map(frame.is_in_function_of, outside)))


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
    return Source(frame.file, frame.line, max(frame.line, last_line), short_name(frame.function))


def source_after_loop() -> Source | None:
    """Return the lines after the innermost `for` loop of the user, which has just ended.

    They reach to the next round of a loop around it, or to the end of the function.
    """
    for frame in user_frames(1):
        if frame.lines_after is not None:
            return Source(frame.file, *frame.lines_after, short_name(frame.function))
    return None


def source_of(function: Any) -> Source | None:
    """Return where a function or method is defined; None if that is unknown."""
    found = definition_of(function)
    if found is None:
        return None
    file, line, name = found
    return Source(file, line, line, short_name(name))
