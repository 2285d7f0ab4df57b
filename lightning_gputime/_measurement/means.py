"""Means over the steps since the last log."""

import math
from collections.abc import Mapping
from typing import Protocol

from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.sums import Sums
from lightning_gputime._measurement.untimed import Estimate


class Writer(Protocol):
    """Destination of the means; see `LogWriter`."""

    @property
    def has_destination(self) -> bool: ...

    def begin(self) -> None: ...

    def write(
        self,
        values: Mapping[str, float],
        step: int,
        added: Mapping[str, float] = ...,
        *,
        only_publish: bool = ...,
    ) -> None: ...


class MeanLog:
    """Write the means since the last log, every n steps. Call `connect` before all other methods.

    It logs at steps `n - 1`, `2 n - 1` and so on, as Lightning does, or at the next step if that
    number is skipped. If n is 0, nothing is logged; if it is None, only `log_means` logs.
    """

    def __init__(self, every_n_steps: int | None, writer: Writer) -> None:
        self.every_n_steps, self.writer = every_n_steps, writer
        self.newest: int | None = None
        """Number of the newest step that was added; at first, of the step before the first."""
        self.is_due = False
        """True if the step at which a log is due has finished, but has not been read yet."""
        self.is_logged = True
        """False if no logger, observer or other destination receives the means."""
        self._due_at = math.inf  # Number of the step at which the next log is due.
        # Mean host wait of the newest log with timed steps. Logs without timed steps repeat it.
        self._host_wait_ms = math.nan
        self._sums = Sums()  # Timed steps since the last log.

    def connect(self, results: Results, *, is_sampled: bool, is_logged: bool) -> None:
        """Set the facts to log. Steps must be added to them before they are added here.

        `is_sampled` is True if some steps are not timed. Then, `take` never logs; call `log_at`.
        """
        self._results, self._is_sampled, self.is_logged = results, is_sampled, is_logged
        self._untimed_before = results.untimed.totals  # Untimed steps until the last log.

    def start(self, before: int) -> None:
        """Set the number of the step before the first, unless a step was added."""
        if self.newest is None:
            self.newest, self._due_at = before, self.next_due(before)

    def next_due(self, step: int) -> float:
        """Return the number of the first step after `step` at which a log is due."""
        every = self.every_n_steps
        return ((step + 1) // every + 1) * every - 1 if every else math.inf

    def step_finished(self, step: int) -> None:
        """Update `is_due` after the step of this number has finished."""
        self.is_due = step >= self._due_at

    def log_at(self, step: int) -> None:
        """Log the steps since the last log up to this number."""
        self.newest, self._due_at, self.is_due = step, self.next_due(step), False
        self.log_means()

    def take(self, steps: ReadSteps) -> bool:
        """Add steps that `results` already includes. Return True if a log was written."""
        records, n_logged = steps.records, 0
        if not self._is_sampled:
            self.start(records[0].number - 1)
            if records[-1].number >= self._due_at:
                for n, step in enumerate(records, 1):
                    if step.number >= self._due_at:
                        is_all = n_logged == 0 and n == len(records)
                        self._sums.merge(steps.sums if is_all else Sums(records[n_logged:n]))
                        self.log_at(step.number)
                        n_logged = n
        if n_logged < len(records):
            self._sums.merge(Sums(records[n_logged:]) if n_logged else steps.sums)
            self.newest = records[-1].number
        return n_logged > 0

    def log_means(self, *, only_publish: bool = False) -> None:
        """Log the means over the steps since the last log, under the number of the newest step.

        With `only_publish`, publish the means without a log, and keep the steps for the next log.
        """
        sums, results, untimed = self._sums, self._results, Estimate()
        if not only_publish:
            self._sums = Sums()
            results.read_memory()
        if not self.is_logged or (self.every_n_steps == 0 and not only_publish):
            return
        timed_steps = int(sums.step.n)
        if self._is_sampled:
            untimed, totals = results.untimed_since(self._untimed_before)
            # Untimed steps before the first timed step cannot be estimated yet, so a later log
            # includes them.
            if not only_publish and (timed_steps or untimed.sums.step.n):
                self._untimed_before = totals
        every = sums.plus(untimed.sums)
        if self.newest is None or not every.step.n:
            return
        if timed_steps:
            self._host_wait_ms = sums.wait_ms / timed_steps
        means_ms = {name: phase.device_ms / phase.n for name, phase in every.phases.items()}
        steps = every.step.n + untimed.unsampled_steps
        means_ms["step"] = (every.step.device_ms + untimed.unsampled_ms) / steps
        if not math.isnan(self._host_wait_ms):
            means_ms["host_wait"] = self._host_wait_ms
        values, added = results.log_values(
            self.newest, timed_steps, every, means_ms, keep=only_publish
        )
        if self._is_sampled:  # In all rows, because a CSV file has the columns of its first row.
            values["estimated"] = float(not timed_steps)
        self.writer.write(values, self.newest, added, only_publish=only_publish)
