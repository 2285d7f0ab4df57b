"""Schedule of the logs."""

from collections import deque

from lightning_gputime._causes.analyzer import SlowStepAnalyzer
from lightning_gputime._measurement.means import MeanLog
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.results import Results
from lightning_gputime._session.rank_comparer import RankComparer


class LogSchedule:
    """Schedule of logs, so that all ranks log means of the same steps.

    A log is written `lag` steps after its last step: by then, every rank has read that step.

    Args:
        means: Writes the logs.
        results: Estimates the untimed steps of a log.
        comparison: Compares the ranks when a log is due.
        analyzer: Receives the time that logging takes, which may make a step slow.
        lag: Number of ended steps that may be unread.
        is_sampled: True if not every step is timed.
    """

    def __init__(
        self,
        means: MeanLog,
        results: Results,
        comparison: RankComparer,
        analyzer: SlowStepAnalyzer,
        *,
        lag: int,
        is_sampled: bool,
    ) -> None:
        self.means, self._results, self._comparison = means, results, comparison
        self._analyzer, self._is_sampled = analyzer, is_sampled
        # Number and index of each of the newest steps. Loggers use the number, which may start at
        # any value; the index counts from 0. The oldest of these steps ended `lag` steps before the
        # newest, so all ranks have read it.
        self._ended: deque[tuple[int, int]] = deque(maxlen=lag + 1)
        self._has_started = False
        self.due_at = 0.0
        """Smallest step number for which `end_step` must be called; 0 until the first call."""

    def end_step(self, number: int, index: int) -> None:
        """End a step. Only needed for the first step, and from `due_at` on."""
        if not self._has_started:
            self._has_started = True
            self.means.start(number - 1)
            self.due_at = self.means.next_due(number - 1)
        self._ended.append((number, index))
        is_full = len(self._ended) == self._ended.maxlen
        oldest, _ = self._ended[0]
        if is_full and oldest >= self.due_at:
            self.due_at = self.means.next_due(oldest)
            self.means.step_finished(oldest)
            self._comparison.log_is_due(oldest)

    def steps_read(self, steps: ReadSteps) -> None:
        """Add steps that were read. If all steps are timed, also write the logs that are due."""
        has_logged = self.means.take(steps)  # Logs only if all steps are timed.
        if has_logged:
            # The analyzer, which reads the steps first, has called `start_callback`.
            self._analyzer.end_callback("the timer's logging")

    def log_finished(self) -> None:
        """Log the steps up to the step at which a log is due, if not every step is timed.

        Call it once the timed steps among them have been read.
        """
        number, index = self._ended[0]
        if self.means.is_logged:
            self._results.settle(number, until=index + 1)
        self._analyzer.start_callback()
        self.means.log_at(number)
        self._analyzer.end_callback("the timer's logging")

    def publish(self, newest: int | None, ended: int) -> None:
        """Publish the means since the last log to other callbacks. Write a log if it is due.

        Args:
            newest: Number of the last step that ended; None before the first.
            ended: Count of all steps that have ended.
        """
        if self._is_sampled and newest is not None:
            self._results.settle(newest, until=ended)
            if self._has_started and newest >= self.due_at:
                # Log now: loggers would add a later log to their row of the next epoch.
                self.due_at = self.means.next_due(newest)
                self.means.log_at(newest)
        self.means.log_means(only_publish=True)

    def finish(self, newest: int | None, index: int) -> None:
        """Log the last steps; see `publish` for the arguments."""
        if newest is not None:
            self._results.settle(newest, until=index)
        if self._is_sampled and newest is not None:
            self.means.log_at(newest)
        else:
            self.means.log_means()
