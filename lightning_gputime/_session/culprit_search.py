"""Searches for the code that takes the time. Each search covers only a few steps.

To locate a mark is to record the line that runs at the mark, in the code that called torch.
"""

from collections.abc import Callable

from lightning_gputime._causes.analyzer import SlowStepAnalyzer
from lightning_gputime._culprits.blocking import BlockingCalls
from lightning_gputime._measurement.results import Results
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.watcher import LOCATED_STEPS

_MIN_STEPS = 50  # Number of timed steps before the search for calls that block the CPU.
_MAX_LOCATED_WINDOWS = 10  # Maximum number of timing windows whose marks are located.


class CulpritSearch:
    """Scheduler of searches. Starts a search when the steps so far require it.

    Args:
        results: Statistics of the steps so far.
        recorder: Locates marks in the code.
        blocking: Records calls that block the CPU until the GPU is done.
        blocks: Returns True if the CPU blocks on the GPU inside steps.
        analyzer: Receives the time that starting a search takes, which may make a step slow.
    """

    def __init__(
        self,
        results: Results,
        recorder: Recorder,
        blocking: BlockingCalls,
        blocks: Callable[[], bool],
        analyzer: SlowStepAnalyzer,
    ) -> None:
        self._results, self._recorder, self._blocking = results, recorder, blocking
        self._blocks, self._analyzer = blocks, analyzer
        self._windows_left = _MAX_LOCATED_WINDOWS
        self._has_located_slowdown = False
        self._has_searched_calls = False

    def locate_long_steps(self, steps: int) -> None:
        """Locate the marks of the next timing window if a long step is expected in it.

        Args:
            steps: Number of steps in that window; 0 if no long step is expected.
        """
        if steps and self._windows_left:
            self._windows_left -= 1
            self._recorder.watcher.locate_next(steps)

    def steps_read(self, _: object) -> None:
        """After the first slowdown, locate marks. After 50 steps, search for blocking calls."""
        if self._results.slowdowns.found is not None and not self._has_located_slowdown:
            self._has_located_slowdown = True
            self._recorder.watcher.locate_next(LOCATED_STEPS)
        if not self._has_searched_calls and self._results.sums.step.n >= _MIN_STEPS:
            self._has_searched_calls = True
            self._analyzer.start_callback()
            if self._blocks():
                self._blocking.start()
            self._analyzer.end_callback("the timer's search for blocking calls")
