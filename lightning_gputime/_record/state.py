"""States of a recorder, and the allowed transitions."""

from collections.abc import Mapping
from enum import Enum


class State(Enum):
    """State of a recorder."""

    IDLE = 0  # No step is timed. Only named phases are tracked.
    OPEN = 1  # A step is timed: time is attributed to `Recorder.label`.
    PAUSED = 2  # Time is excluded from the step. A step with only such time is dropped at its end.
    LOST = 3  # An error or a graph capture has spoiled the step, which is dropped at its end.


# Globals, because every mark looks them up.
IDLE, OPEN, PAUSED, LOST = State

TRANSITIONS: Mapping[State, frozenset[State]] = {
    IDLE: frozenset({IDLE, OPEN}),  # begin
    OPEN: frozenset({IDLE, OPEN, PAUSED, LOST}),  # stop, begin, pause, error or capture
    PAUSED: frozenset({IDLE, OPEN, PAUSED, LOST}),  # stop, resume or end, pause, error
    LOST: frozenset({IDLE, OPEN, LOST}),  # stop, end, error
}
