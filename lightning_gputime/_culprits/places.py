"""Lines of user code between the marks of located steps.

At each mark of a *located* step, the recorder has stored the frames of user code on the stack, and
whether gradients were enabled.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from lightning_gputime._compat.python_ import Frame, definition_of, user_frames
from lightning_gputime._measurement.culprits import (
    PLACE,
    WITHOUT_GRAD,
    CulpritSums,
    Place,
    Source,
    short_name,
)
from lightning_gputime._measurement.wall_clock import PAUSED, WallClock
from lightning_gputime._phases import (
    AFTER_UPDATE,
    BACKWARD,
    EXCLUDED,
    FORWARD,
    INTERRUPTIONS,
    OPTIMIZER,
    OTHER,
    StepRecord,
    resolve_labels,
)

_INSIDE_FORWARD = f"{FORWARD}/"
# Minimum time between two marks for naming a function that a trainer called between them: a shorter
# time may be that of the trainer's own code.
_MIN_CALLED_MS = 1.0
_MAX_FRAMES = 4  # Maximum number of stack frames that are kept at a mark.

Frames = tuple[Frame, ...]
"""Frames of user code on the stack, innermost first; may be empty."""

frames_here: Callable[[], Frames] = partial(user_frames, _MAX_FRAMES)
"""Return the current frames of user code."""


class Passage(NamedTuple):
    """Lines between two marks.

    Attributes:
        start: Running functions at the first mark.
        end: Running functions at the second mark.
        outside: Functions around the training, such as the caller of `fit`. Their lines do not
            locate a phase.
        enters_calls: True to return the lines of the called function if both marks are on the same
            line of the caller.
        enters_trainer_calls: True to return the lines of a function that a trainer called after the
            first mark.
        updates: Name of the optimizer's function. It is never returned as a function that a trainer
            called, because a trainer may call the model inside it.
    """

    start: Frames
    end: Frames
    outside: Frames = ()
    enters_calls: bool = False
    enters_trainer_calls: bool = False
    updates: str = ""

    def source(self) -> Source | None:
        """Return the lines that ran between the marks; None if they are unknown."""
        outside = {frame.code for frame in self.outside}
        start = [frame for frame in self.start if frame.code not in outside]
        end = [frame for frame in self.end if frame.code not in outside]
        for first in start:
            for last in end:
                if first.code is last.code:
                    return self._between(first, last, start[0])
        if start:  # No function ran at both marks: the innermost at the first mark has returned.
            return _from_running_line(start[0], start[0].last_line)
        # No user code ran at the first mark: a trainer has called these functions since.
        called = [frame for frame in end if short_name(frame.function) != self.updates]
        return _to_running_line(called[-1]) if called and self.enters_trainer_calls else None

    def _between(self, first: Frame, last: Frame, innermost: Frame) -> Source | None:
        """Return the lines of a function that ran at both marks.

        If both marks are on a single line and `enters_calls` is set, return the lines of the
        function that this line calls.

        Args:
            first: The function at the first mark.
            last: The same function at the second mark.
            innermost: Innermost function at the first mark: `first`, or a function that it called.
        """
        if first.loop_line and last.at < first.at and first.lines_after is not None:
            return _after_loop(first)  # The loop has ended, and an outer loop has continued.
        last_line = _last_line_reached(first, last)
        # At the head of a loop, the first line of the body counts as the same line.
        is_single_line = last_line <= first.line + int(first.loop_line > 0)
        if not is_single_line or not self.enters_calls:
            return _from_running_line(first, last_line)
        if innermost is not first:  # The first mark is in the called function, which has returned.
            return _from_running_line(innermost, innermost.last_line)
        if self.end[0] is not last:  # The second mark is in the called function.
            return _to_running_line(self.end[0])
        if last.loop_line and last.line < first.line:
            return None  # The loop starts its next iteration: no line ran.
        return _from_running_line(first, last_line)


class Here(NamedTuple):
    """Place of the running line; at the head of a `for` loop, the lines of the loop."""

    frames: Frames

    def source(self) -> Source | None:
        frame = self.frames[0] if self.frames else None
        return None if frame is None else _from_running_line(frame, frame.loop_line)


class AfterLoop(NamedTuple):
    """Place after a `for` loop that has just ended, up to the next iteration of an outer loop."""

    frames: Frames

    def source(self) -> Source | None:
        return _after_loop(self.frames[0]) if self.frames else None


def _after_loop(frame: Frame) -> Source | None:
    lines = frame.lines_after
    return None if lines is None else Source(frame.file, *lines, short_name(frame.function))


def _last_line_reached(first: Frame, last: Frame) -> int:
    """Return the last line that ran between two places in the same function."""
    if last.loop_line and last.line <= first.line:
        # `last` is at the head of a loop around `first`: the rest of the loop's body has run.
        return max(last.loop_line, first.line)
    return last.line


def _to_running_line(frame: Frame) -> Source:
    """Return the lines of a function from its start to the running line."""
    return Source(frame.file, frame.code.co_firstlineno, frame.line, short_name(frame.function))


def _from_running_line(frame: Frame, last_line: int) -> Source:
    """Return the lines of a function from the running line to `last_line`."""
    return Source(frame.file, frame.line, max(frame.line, last_line), short_name(frame.function))


class PlaceReader:
    """Add the times between the marks of located steps to the sums, with their places in the code.

    Args:
        sums: Sums that the time is added to.
        updates: Name of the function that updates the parameters, such as "Adam.step".
        outside: Functions around the training, such as the caller of `fit`. Their lines do not
            locate a phase.
    """

    def __init__(self, sums: CulpritSums, updates: str, outside: Frames = ()) -> None:
        self._sums, self._updates, self._outside = sums, updates, outside

    def steps_read(self, steps: Iterable[StepRecord]) -> None:
        for step in steps:
            if step.places:
                self._add(step)

    def _add(self, step: StepRecord) -> None:
        # No helper functions, because a step may have hundreds of labels.
        next_labels = (*step.labels[1:], "")
        phases = resolve_labels(step.labels)
        is_trained = BACKWARD in step.labels
        previous = ""
        for i, (label, following, names, ms) in enumerate(
            zip(step.labels, next_labels, phases, step.device_ms, strict=True)
        ):
            if not names or label in INTERRUPTIONS:
                continue
            phase = names[0]
            name = self._updates if label == OPTIMIZER else ""
            # The code at the start of a step follows the update of the step before it.
            if label == AFTER_UPDATE or (label == OTHER and not i):
                name = "after the update"
            elif label == OTHER:
                name = "before backward" if following == BACKWARD else "before forward"
            (start, has_grad), (end, _) = step.places[i : i + 2]
            if phase == FORWARD and is_trained and not has_grad:
                name = WITHOUT_GRAD
            # After a submodule, or an update inside a call, the same call of the model continues.
            is_same_call = previous == OPTIMIZER or previous.startswith(_INSIDE_FORWARD)
            is_new_call = phase != FORWARD or (label == FORWARD and not is_same_call)
            place = Passage(
                start=start,
                end=end,
                outside=self._outside,
                enters_calls=phase == OTHER,
                enters_trainer_calls=phase == OTHER and ms >= _MIN_CALLED_MS,
                updates=self._updates,
            )
            ns = round(1e6 * ms)
            self._sums.add(phase, name, ns, source=place, kind=PLACE, calls=int(is_new_call))
            previous = label


class PlaceTimer:
    """Add the time of code in the training thread to an entry of the wall clock, with its place.

    It can be one of the recorders of a `NamedPhase`, which calls `enter_phase` and `leave_phase`.
    """

    def __init__(self, sums: CulpritSums, now_ns: Callable[[], int], wall_clock: WallClock) -> None:
        self._sums, self._now_ns, self._wall_clock = sums, now_ns, wall_clock
        # Host time of `start` and its place; None if no code is being timed.
        self._open: tuple[int, Place | None] | None = None

    def start(self, place: Place | None) -> None:
        if self._wall_clock.is_here:
            self._open = self._now_ns(), place

    def end(self, entry: str, place: Place | None = None) -> None:
        """Add the time since `start`. `place` locates the code if `start` did not."""
        if self._open is not None:
            start_ns, start_place = self._open
            self._open = None
            ns = self._now_ns() - start_ns
            self._sums.add(entry, "", ns, source=start_place or place, kind=PLACE)

    def enter_phase(self, _: str) -> None:
        self.start(Here(frames_here()))

    def leave_phase(self, name: str) -> None:
        self.end(PAUSED if name == EXCLUDED else name)


def source_of(function: Any) -> Source | None:
    """Return where a function or method is defined; None if that is unknown."""
    found = definition_of(function)
    if found is None:
        return None
    file, line, name = found
    return Source(file, line, line, short_name(name))
