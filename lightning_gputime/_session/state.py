"""States of a session, and the allowed transitions."""

from enum import Enum


class State(Enum):
    """State of a session, which includes the state of its open step."""

    NEW = "not attached"
    IDLE = "attached, no step is open"
    TIMED = "the step is timed"
    PROBED = "the step is timed behind a spin kernel"
    UNTIMED = "the step is counted"
    OFF = "the step is counted, without hooks"
    ENDED = "removed"


# Globals, because every step compares states.
NEW, IDLE, TIMED, PROBED, UNTIMED, OFF, ENDED = State

NOT_ATTACHED = (NEW, ENDED)

TRANSITIONS = {
    NEW: {IDLE},
    IDLE: {TIMED, UNTIMED, ENDED},
    TIMED: {TIMED, PROBED, UNTIMED, ENDED},
    PROBED: {TIMED, UNTIMED, ENDED},  # The step after a probe is never probed.
    UNTIMED: {TIMED, PROBED, UNTIMED, OFF, ENDED},
    OFF: {TIMED, UNTIMED, ENDED},
    ENDED: set[State](),
}
"""States that may follow each state."""
