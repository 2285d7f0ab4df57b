"""What slow steps cost the steps of one log."""

from collections.abc import Iterable, Sequence

from lightning_gputime._results.slow import Passed, SlowStep

# So many steps are kept one by one: where nothing is logged, a window is as long as the run.
_MOST = 1_000

_ALL = "slow"


class SlowWindow:
    """The slow steps that are not logged yet."""

    def __init__(self) -> None:
        self._steps: list[SlowStep] = []
        # Of those before them in this window: their excess, and of that the part of each kind of
        # cause (in milliseconds).
        self._before_ms: dict[str, float] = {}
        self._is_known = False
        self.passed = Passed()
        """The steps that were judged, and not timed."""
        # How many of them were in a window before.
        self._passed_before = 0
        # The number of the last step that is in a window before.
        self._logged = -1
        # Those that were logged once: loggers such as CSV want a constant set.
        self._keys = [_ALL]

    def add(self, steps: Sequence[SlowStep], *, known: bool) -> None:
        """Takes slow steps.

        Args:
            steps: The steps, in order.
            known: Whether any step was judged yet.
        """
        # The first ten are judged late: a window of fewer is logged, and the next is not theirs.
        self._steps += [step for step in steps if step.step >= self._logged]
        self._is_known = known
        if len(self._steps) > _MOST:
            half = _MOST // 2
            _add(self._before_ms, self._steps[:half])
            del self._steps[:half]

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
        sums_ms = {**self._before_ms}
        _add(sums_ms, due)
        if not keep:
            self._passed_before = passed
            self._steps = [step for step in self._steps if step.step > newest]
            self._before_ms.clear()
        self._keys += [key for key in sums_ms if key not in self._keys]
        return {key: sums_ms.get(key, 0.0) / n for key in self._keys}


def _add(sums_ms: dict[str, float], steps: Iterable[SlowStep]) -> None:
    for step in steps:
        causes = ((f"{_ALL}/{cause.kind}", cause.reached_ms) for cause in step.causes)
        for key, ms in ((_ALL, step.excess_ms), *causes):
            sums_ms[key] = sums_ms.get(key, 0.0) + ms
