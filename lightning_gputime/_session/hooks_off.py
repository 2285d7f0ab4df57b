"""Remove the hooks between timing windows, so that untimed steps only read the host clock.

Hooks that record nothing still cost 24 Python calls per step, and 33 under Lightning. So hooks are
removed at the end of a step if the next timing window is at least one step away, and return at the
first step of that window. In a plain loop they return one step earlier, because only the previous
step shows which calls in eval mode are an evaluation. Without hooks, the end of each step only
reads the clock, and every 10th step also reads the timed steps that are still to be read.

The hooks stay attached:

- in the first 20 steps, which show what the loop calls and captures,
- with compiled code, which would recompile,
- in loops that evaluate the model inside steps, because hooks measure the time of evaluations,
- with several timers or nested loops over `steps()`, which must see all calls of a model.
"""

from functools import partial

from lightning_gputime._compat.torch_ import has_compiled
from lightning_gputime._instrumentation.boundaries import Boundaries
from lightning_gputime._session.attached import is_alone
from lightning_gputime._session.timing_plan import TimingPlan

_MIN_INDEX = 20  # Index of the first step that may run without hooks.
_CHECK_STEPS = 10  # Number of steps between two checks.


class HooksOff:
    """Removal of the hooks between timing windows.

    Args:
        plan: Chooses the steps that are timed.
        boundaries: The hooks.
        margin: Number of untimed steps with hooks before each timing window.
        lag: Number of steps after which a timed step can be read.
    """

    def __init__(self, plan: TimingPlan, boundaries: Boundaries, margin: int, lag: int) -> None:
        self._plan, self._boundaries = plan, boundaries
        self._margin, self._lag = margin, lag
        self._is_allowed = True
        self.returns_at = 0
        """Index of the first step that has hooks again."""
        self.check_at = 0
        """Index of the step before which `check` is due; at most `returns_at`."""
        self._checked_at = 0  # Index of the step before which the last check was.

    def is_due(self, index: int) -> bool:
        """Return True if the hooks should be removed before the step of this index."""
        if not self._is_allowed or index < _MIN_INDEX:
            return False
        is_far = self._plan.next_marked(index) - self._margin > index
        has_evaluated = self._boundaries.forward.evaluation.has_found
        return is_far and not has_evaluated and is_alone() and not has_compiled()

    def remove(self, index: int, *, counts_updates: bool) -> None:
        """Remove the hooks before the step of this index.

        The first check is due when the timed steps before it can be read.

        Args:
            index: Index of the step.
            counts_updates: True to keep the hooks that count optimizer updates.
        """
        suspend = partial(self._boundaries.suspend, keep_updates=counts_updates)
        self._plan.cost.time_switch(suspend, index)
        self.returns_at = self._plan.next_marked(index) - self._margin
        self._checked_at = index
        self.check_at = min(index + self._lag, index + _CHECK_STEPS, self.returns_at)

    def check(self, index: int) -> int:
        """Return the number of steps since the last check, and schedule the next check."""
        steps, self._checked_at = index - self._checked_at, index
        self.check_at = min(index + _CHECK_STEPS, self.returns_at)
        return steps

    def return_at(self, index: int) -> None:
        """Let the hooks return before the step of this index, earlier than planned."""
        self.returns_at = self.check_at = index

    def forbid(self) -> None:
        """Never remove the hooks again."""
        self._is_allowed = False

    def reattach(self, index: int) -> None:
        """Attach the hooks again before the step of this index."""
        self._plan.cost.time_switch(self._boundaries.reattach, index)
