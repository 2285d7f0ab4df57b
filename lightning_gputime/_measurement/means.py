"""Means over the steps since the last log."""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.results import LogWindow, Results
from lightning_gputime._measurement.sums import Sums
from lightning_gputime._measurement.untimed import Estimate
from lightning_gputime._phases import StepRecord


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
    """Write the means since the last log, every n steps.

    Args:
        every_n_steps: Log at steps `n - 1`, `2 n - 1` and so on, as Lightning does, or at the next
            step if that number is skipped. With 0, nothing is logged; with None, only `log_means`
            logs.
        writer: Destination of the means.
    """

    def __init__(self, every_n_steps: int | None, writer: Writer) -> None:
        self.every_n_steps = every_n_steps
        self.writer = writer
        self.newest: int | None = None
        """Number of the newest step that was added; at first, of the step before the first."""
        self.is_due = False
        """True if the step at which a log is due has finished, but has not been read yet."""
        self._results: Results | None = None
        self._is_sampled = False
        self.is_logged = True
        """False if nothing takes the means."""
        self._logged_until: int | None = None  # Number of the last logged step, if sampled.
        self._host_wait_ms = math.nan
        self._sums = Sums()

    def connect(self, results: Results, *, is_sampled: bool, is_logged: bool) -> None:
        """Also log the values of `results`.

        Args:
            results: Facts of the run, which must include the steps that are added here.
            is_sampled: True if some steps are not timed. Then, `take` never logs; call `log_at`.
            is_logged: False if nothing takes the means.
        """
        self._results, self._is_sampled, self.is_logged = results, is_sampled, is_logged

    def start(self, before: int) -> None:
        if self.newest is None:
            self.newest = self._logged_until = before

    def next_due(self, step: int) -> float:
        """Return the number of the first step after `step` at which a log is due."""
        every = self.every_n_steps
        return ((step + 1) // every + 1) * every - 1 if every else math.inf

    def step_finished(self, step: int) -> None:
        """Update `is_due` after the step of this number has finished."""
        before = self._logged_until if self._is_sampled else self.newest
        self.is_due = before is not None and step >= self.next_due(before)

    def log_at(self, step: int) -> None:
        """Log the steps since the last log up to this number."""
        self.newest, self._logged_until, self.is_due = step, step, False
        self.log_means()

    def take(self, steps: ReadSteps) -> bool:
        """Add steps that `results` already includes. Return True if a log was written."""
        if self._is_sampled:
            self._add(steps.records, steps.sums)
            return False
        has_logged = self.add(steps.records, steps.sums)
        self.is_due = self.is_due and not has_logged
        return has_logged

    def add(self, steps: Sequence[StepRecord], sums: Sums | None = None) -> bool:
        """Add the next steps, with their sums if known. Return True if any was logged."""
        due = self.next_due(steps[0].number - 1 if self.newest is None else self.newest)
        first = 0
        if steps[-1].number >= due:
            for i, step in enumerate(steps, 1):
                if step.number >= due:
                    self._add(steps[first:i], sums if i - first == len(steps) else None)
                    self.log_means()
                    first, due = i, self.next_due(step.number)
        if first < len(steps):
            self._add(steps[first:], None if first else sums)
        return first > 0

    def _add(self, steps: Sequence[StepRecord], sums: Sums | None) -> None:
        self._sums.merge(Sums(steps) if sums is None else sums)
        self.newest = steps[-1].number

    def log_means(self, *, only_publish: bool = False) -> None:
        """Log the steps since the last log, if any, under the newest number.

        With `only_publish`, publish the means without a log, and keep the steps for the next log.
        """
        sums, untimed, results = self._sums, Estimate(), self._results
        if not self.is_logged:
            self._sums = Sums()
            if results is not None:
                results.read_memory()
            return
        timed_steps = int(sums.step.n)
        if self._is_sampled and results is not None:
            untimed = results.untimed_since_log(restart=not only_publish, has_timed=timed_steps > 0)
        if only_publish:
            sums = sums.copy()
        else:
            self._sums = Sums()
            if self.every_n_steps == 0:
                return
        if timed_steps:
            self._host_wait_ms = sums.wait_ms / timed_steps
        sums.merge(untimed.sums)
        if not sums.step.n or self.newest is None:
            return
        means_ms = {name: phase.device_ms / phase.n for name, phase in sums.phases.items()}
        steps = sums.step.n + untimed.unsampled_steps
        means_ms["step"] = (sums.step.device_ms + untimed.unsampled_ms) / steps
        if not math.isnan(self._host_wait_ms):
            means_ms["host_wait"] = self._host_wait_ms
        if results is None:
            values, added = {f"{name}_ms": ms for name, ms in means_ms.items()}, dict[str, float]()
        else:
            window = LogWindow(self.newest, timed_steps, sums, means_ms, only_publish)
            values, added = results.log_values(window)
        self.writer.write(values, self.newest, added, only_publish=only_publish)
