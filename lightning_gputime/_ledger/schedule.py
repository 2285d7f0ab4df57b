"""Schedule of the examined steps."""

import math
from collections.abc import Callable

_FIRST = (12, 15, 18)  # Indices of the first examined steps. They follow the warm-up.
_GROWTH = 1.6  # Later, a step is examined each time the run has grown by this factor.
_MORE, _DISTANCE = 3, 3  # Number of steps that `examine_more` adds, and their distance.
# Examined steps may lengthen a run by this fraction, or by this fraction of its first steps.
_MAX_SHARE, _SHORT_RUN = 0.002, 1_000
_MAX_LONG = 3  # Number of examined steps that are expected to be long.


class ExaminationSchedule:
    """Choice of the steps that are examined, by their index, which counts all steps from 0.

    Args:
        next_long: Returns the index of a long step and the expected distance to the next; None if
            no long step is expected.
        is_distributed: True if all ranks must examine the same steps. Then only the index decides.
    """

    def __init__(
        self, next_long: Callable[[], tuple[int, int] | None], *, is_distributed: bool
    ) -> None:
        self._next_long, self._is_distributed = next_long, is_distributed
        self._more = 0  # Number of steps to examine soon.
        # Cost of the newest examined step that was not expected to be long, and of all.
        self._cost = self._costs = 0.0
        self._long = 0  # Number of steps that were examined because they are expected to be long.
        self.expects_long = False
        """True if the next examined step is expected to be long."""
        self.next_index: float = _FIRST[0]
        """Index of the first step that may be examined next; infinity if there is none."""

    def stop(self) -> None:
        """Examine no further steps."""
        self.next_index = math.inf

    def examine_more(self) -> None:
        """Examine three more steps soon."""
        if not self._is_distributed and self.next_index < math.inf:
            self._more, self.next_index = _MORE, 0
            self.expects_long = False

    def step_examined(self, index: int, cost: float) -> None:
        """Choose the next step, after that of this index was examined.

        Args:
            index: Index of the examined step.
            cost: Time that examining it took, as a fraction of a usual step.
        """
        if self.expects_long:
            self._long += 1
            self.expects_long = False
        else:
            self._cost = cost
        self._costs += self._cost
        if self._more:
            self._more -= 1
        if self._more:
            self.next_index = index + _DISTANCE
        else:
            later = [first for first in _FIRST if first > index]
            self.next_index = later[0] if later else self._next_after(index)

    def _next_after(self, index: int) -> int:
        following = int(index * _GROWTH) + 1
        if self._is_distributed:
            return following
        if self._costs + self._cost > _MAX_SHARE * max(following, _SHORT_RUN):
            # Wait until the next examined step costs no more than allowed.
            return max(following, int((self._costs + self._cost) / _MAX_SHARE) + 1)
        recurrence = self._next_long()
        if recurrence is not None and self._long < _MAX_LONG:
            last, distance = recurrence
            rounds = max(math.ceil((index + 2 - last) / max(distance, 1)), 1)
            long_step = last + rounds * distance
            if long_step < following:
                self.expects_long = True
                return long_step
        return following
