"""Search for the code that takes the time, in a few steps."""

from collections.abc import Callable

from lightning_gputime._causes.analyzer import SlowStepAnalyzer
from lightning_gputime._culprits.blocking import BlockingCalls
from lightning_gputime._measurement.results import Results
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.watcher import LOCATED_STEPS

_PACE_STEPS = 50  # Number of timed steps before the search for calls that block the CPU.
_MAX_LOCATED_BLOCKS = 10  # Number of timing windows around recurring long steps that are located.


class CulpritSearch:
    """Start searches once the steps so far give a reason.

    Args:
        results: Statistics of the steps so far.
        recorder: Locates the marks of the next steps in the code.
        blocking: Notes calls that wait for the GPU.
        blocks: Return True if the CPU blocks on the GPU inside steps.
        analyzer: Is told of the time that the start of a search takes.
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
        self._blocks_left = _MAX_LOCATED_BLOCKS
        self._is_slowdown_located = self._is_pace_known = False

    def expect_long_steps(self, steps: int) -> None:
        """Locate the next steps, which are expected to be long. With 0 steps, do nothing."""
        if steps and self._blocks_left:
            self._blocks_left -= 1
            self._recorder.watcher.locate_next(steps)

    def steps_read(self, _: object) -> None:
        """Start the searches that are due after steps were read."""
        if self._results.slowdown is not None and not self._is_slowdown_located:
            self._is_slowdown_located = True
            self._recorder.watcher.locate_next(LOCATED_STEPS)
        if not self._is_pace_known and self._results.sums.step.n >= _PACE_STEPS:
            self._is_pace_known = True
            self._analyzer.start_callback()
            if self._blocks():
                self._blocking.start()
            self._analyzer.end_callback("the timer's search for blocking calls")
