"""Untimed steps without hooks."""

from lightning_gputime._compat.torch_ import has_compiled
from lightning_gputime._instrumentation.boundaries import Boundaries
from lightning_gputime._session.attached import is_alone
from lightning_gputime._session.timing_plan import TimingPlan

_SEARCH_STEPS = 20  # In the first steps, hooks find out what the loop calls and captures.
_MAX_STRETCH_STEPS = 10  # The host time of untimed steps is noted after at most this many.


class HooksOff:
    """When hooks are removed between timing windows, and when they return.

    In an untimed step, hooks would make 24 Python calls (33 under Lightning) and record nothing.
    They are removed at the end of a step if the next timing window is at least one step away. From
    then on, the end of a step only reads the host clock. At `back_at` the hooks return: at the
    first step of the window or, in a plain loop, one step earlier, because calls in eval mode can
    only be judged by the step before. In between, pending timed steps are resolved at `look_at`.

    Hooks stay if removing them would change more than their cost: in the first steps, around
    probes, with compiled code (which guards hooks, and would recompile), with several timers (each
    must see the calls of the other's model), and where `keep_on` was called.

    Args:
        plan: Chooses the steps that are timed.
        boundaries: The hooks.
        lead_in: Number of steps with hooks before a timing window.
        lag: Number of steps after which a pending step is resolved.
    """

    def __init__(self, plan: TimingPlan, boundaries: Boundaries, lead_in: int, lag: int) -> None:
        self._plan, self._boundaries = plan, boundaries
        self._lead_in, self._lag = lead_in, lag
        self._keeps_on = False
        self.back_at = 0
        """Index of the step before which the hooks return."""
        self.look_at = 0
        """Index of the next step with anything to do; at most `back_at`."""
        self._looked_at = 0

    def keep_on(self) -> None:
        """Never remove the hooks again."""
        self._keeps_on = True

    def is_due(self, index: int) -> bool:
        """Return True if the hooks are removed before the step of this index."""
        if index < _SEARCH_STEPS or self._keeps_on or self._plan.probe is not None:
            return False
        if self._plan.next_timed(index) - self._lead_in <= index:
            return False
        return not has_compiled() and is_alone()

    def start(self, index: int, *, counts_updates: bool, is_pending: bool) -> None:
        """Remove the hooks. `is_pending`: timed steps are still to be resolved."""
        self._plan.time_switch(lambda: self._boundaries.suspend(keep_updates=counts_updates), index)
        self.back_at = self._plan.next_timed(index) - self._lead_in
        self._looked_at = index
        max_steps = min(self._lag, _MAX_STRETCH_STEPS) if is_pending else _MAX_STRETCH_STEPS
        self.look_at = min(index + max_steps, self.back_at)

    def look(self, index: int) -> int:
        """Return the number of steps since the last look, and set the next."""
        steps, self._looked_at = index - self._looked_at, index
        self.look_at = min(index + _MAX_STRETCH_STEPS, self.back_at)
        return steps

    def wake(self, index: int) -> None:
        """Let the hooks return at the end of the step of this index."""
        self.back_at = self.look_at = index + 1

    def end(self, index: int) -> None:
        """Attach the hooks again."""
        self._plan.time_switch(self._boundaries.reattach, index)
