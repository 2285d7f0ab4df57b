"""What a recorder does with the time."""

from enum import Enum


class State(Enum):
    """What a recorder does with the time.

    ======= ============================== =====================================================
    state   the time belongs to            leaves it by
    ======= ============================== =====================================================
    AT_REST nobody                         `begin`; `starts_in_capture`
    OPEN    `label`                        `pause`, `hold`, `exclude_since`; `rest`; an error
    PAUSED  no step                        `resume`, `release`; `end_step`, which drops a step that
                                           has nothing else; `rest`
    LOST    nobody, after an error         `end_step`, which drops the step; `rest`
    ======= ============================== =====================================================
    """

    AT_REST, OPEN, PAUSED, LOST = range(4)


# As globals: they are looked up at every mark.
AT_REST, OPEN, PAUSED, LOST = State
