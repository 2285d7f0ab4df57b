"""What slow steps cost the steps of one log."""

from collections.abc import Sequence

from lightning_gputime._results.slow import Passed, SlowStep


class SlowWindow:
    """The slow steps that are not logged yet."""

    def __init__(self) -> None:
        self._steps: list[SlowStep] = []
        self._is_known = False
        self.passed = Passed()
        """The steps that were judged, and not timed."""
        # How many of them were in a window before.
        self._passed_before = 0
        # The number of the last step that is in a window before.
        self._logged = -1
        # The kinds that were logged once: loggers such as CSV want a constant set of keys.
        self._kinds: list[str] = []

    def add(self, steps: Sequence[SlowStep], *, known: bool) -> None:
        """Takes slow steps.

        Args:
            steps: The steps, in order.
            known: Whether any step was judged yet.
        """
        # The first ten are judged late: a window of fewer is logged, and the next is not theirs.
        self._steps += [step for step in steps if step.step >= self._logged]
        self._is_known = known

    def means(self, newest: int, n: int, *, keep: bool = False) -> dict[str, float]:
        """Returns their excess a step, and of that the part of each kind of cause.

        Args:
            newest: The number of the last step of the window.
            n: How many steps it has that were timed.
            keep: Whether the next window has them, too.
        """
        if not keep:
            self._logged = newest
        if not self._is_known:
            return {}
        due = [step for step in self._steps if step.step <= newest]
        passed = self.passed.n
        n += passed - self._passed_before
        if not keep:
            self._passed_before = passed
            self._steps = [step for step in self._steps if step.step > newest]
        causes = [cause for step in due for cause in step.causes]
        self._kinds += dict.fromkeys(
            cause.kind for cause in causes if cause.kind not in self._kinds
        )
        means = {"slow": sum(step.excess_ms for step in due) / n}
        for kind in self._kinds:
            ms = sum(cause.reached_ms for cause in causes if cause.kind == kind)
            means[f"slow/{kind}"] = ms / n
        return means
