"""States of a session, and the allowed transitions."""

from enum import Enum


class State(Enum):
    """State of a session, which includes the state of its open step."""

    NEW = "not attached"
    IDLE = "attached, no step is open"
    TIMED = "the step is timed"
    EXAMINED = "the step is timed, with a mark at each line of the user's code"
    UNTIMED = "the step is counted"
    OFF = "the step is counted, without hooks"
    ENDED = "removed"


# Globals, because every step compares states.
NEW, IDLE, TIMED, EXAMINED, UNTIMED, OFF, ENDED = State

NOT_ATTACHED = (NEW, ENDED)

TRANSITIONS = {
    NEW: {IDLE},
    IDLE: {TIMED, EXAMINED, UNTIMED, ENDED},
    TIMED: {TIMED, EXAMINED, UNTIMED, ENDED},
    EXAMINED: {TIMED, EXAMINED, UNTIMED, ENDED},
    UNTIMED: {TIMED, EXAMINED, UNTIMED, OFF, ENDED},
    OFF: {TIMED, EXAMINED, UNTIMED, ENDED},
    ENDED: set[State](),
}
"""States that may follow each state."""
