"""States of a recorder, and the allowed transitions."""

from collections.abc import Mapping
from enum import Enum


class State(Enum):
    """What a recorder does with the time."""

    AT_REST = 0  # No step is timed. Only named phases are followed.
    OPEN = 1  # The time belongs to `Recorder.label`.
    PAUSED = 2  # The time belongs to no step. If a step has no other time, its end drops it.
    LOST = 3  # The step was lost by an error or by the capture of a graph: its end drops it.


# Globals, because every mark looks them up.
AT_REST, OPEN, PAUSED, LOST = State

TRANSITIONS: Mapping[State, frozenset[State]] = {
    AT_REST: frozenset({AT_REST, OPEN}),  # begin
    OPEN: frozenset({AT_REST, OPEN, PAUSED, LOST}),  # rest, begin, pause, error or capture
    PAUSED: frozenset({AT_REST, OPEN, PAUSED, LOST}),  # rest, resume or end, pause, error
    LOST: frozenset({AT_REST, OPEN, LOST}),  # rest, end, error
}
