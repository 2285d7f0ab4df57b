"""Collected facts of one run, and the `Measurement` made from them."""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from operator import attrgetter
from statistics import median
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gputime._compat.names import NotMeasured, not_measured
from lightning_gputime._ledger.ledger import Ledger
from lightning_gputime._ledger.rows import LONG_STEP
from lightning_gputime._loader import describe_slowdown
from lightning_gputime._measurement.changes import SlowdownSearch
from lightning_gputime._measurement.culprits import CulpritSums
from lightning_gputime._measurement.history import StepLog, history
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.memory import MemoryWatch
from lightning_gputime._measurement.observers import (
    ReadSteps,
    call_safely,
    methods,
    metrics_of,
    sections_of,
)
from lightning_gputime._measurement.ranks import STEP, RankResults
from lightning_gputime._measurement.rows import least_shares, phase_rows
from lightning_gputime._measurement.setup import TrainingSetup
from lightning_gputime._measurement.slow import SlowLog
from lightning_gputime._measurement.sums import Sums, ThroughputReference
from lightning_gputime._measurement.untimed import Estimate, Totals, UntimedSteps
from lightning_gputime._measurement.wall_clock import EVALUATION, WallClock
from lightning_gputime._messages import Named
from lightning_gputime._phases import (
    AFTER_BACKWARD,
    DATA,
    FETCH,
    StepRecord,
    StepTimes,
    of_one_callback,
)


class Results:
    """Collect the facts of a run.

    One thread adds steps, and any thread may read. Readers keep the lock only while they copy.

    Args:
        capacity: Number of steps in the history.
        warmup_steps: Number of first steps to exclude from the summary.
        on_host_clock: True if the steps are timed on the host clock.
        hint: Advice if no step was timed.
        culprits: Time of code that runs in no line of the user.
        libraries: Libraries whose missing private names affect this run.
        wall_clock: Wall clock of the training run; None for evaluations.
        setup: Known setup, which `update_setup` completes.
        ledger: Pace and lines of the steps; without lines by default.
    """

    def __init__(
        self,
        capacity: int,
        warmup_steps: int,
        on_host_clock: bool = False,
        hint: str = "",
        culprits: CulpritSums | None = None,
        *,
        libraries: tuple[str, ...] = ("torch",),
        wall_clock: WallClock | None = None,
        setup: TrainingSetup | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        # Reentrant, because a signal handler may read in the thread that has the lock.
        self._lock = RLock()
        # Facts that do not depend on the steps.
        self._facts = Measurement(on_host_clock=on_host_clock, hint=hint)
        self._libraries = libraries
        self._steps = StepLog(capacity, warmup_steps)
        self.untimed = UntimedSteps(warmup_steps, capacity)
        self.slowdowns = SlowdownSearch(self.untimed)
        self.slow = SlowLog()
        self.ranks = RankResults()
        self.culprits = culprits or CulpritSums()
        self.wall_clock = wall_clock
        self.setup = setup or TrainingSetup()
        self.ledger = ledger or Ledger(on_host_clock=on_host_clock)
        # Number of ended steps, timed or not; remains 0 if every step is timed.
        self._ended_steps = 0
        # See `connect`.
        self._throughput, self._observers = ThroughputReference(), tuple[Any, ...]()
        self._memory: MemoryWatch | None = None
        self._mismatches: list[NotMeasured] = []  # Found by the self-check.

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            # `ddp_spawn` pickles callbacks, and a lock cannot be pickled.
            copied = {"_steps": copy(self._steps), "_lock": None}
        return {**self.__dict__, **copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=RLock())

    # Facts of the session

    def connect(
        self,
        throughput: ThroughputReference,
        *,
        observers: Sequence[Any] = (),
        logs_slow_steps: bool = False,
        memory: MemoryWatch | None = None,
    ) -> None:
        """Connect the sources of all results that do not follow from the times of steps.

        Collect slow steps and slowdowns only if they are logged or an observer receives them.
        """
        self._throughput, self._observers, self._memory = throughput, tuple(observers), memory
        receivers = [*methods(observers, "on_slow_step"), *methods(observers, "metrics")]
        if logs_slow_steps or receivers:
            self.slow.follow()
        if logs_slow_steps or methods(observers, "on_slowdown"):
            self.slowdowns.follow()

    def update_setup(self, **known: Any) -> None:
        self.setup = replace(self.setup, **known)

    def update_facts(self, **known: Any) -> None:
        """Replace fields of the `Measurement` that do not depend on the steps."""
        self._facts = replace(self._facts, **known)

    def count_ended(self, steps: int) -> None:
        """Set the number of steps that have ended and, if they were timed, have been read."""
        self._ended_steps = steps

    def add_mismatch(self, gap: NotMeasured) -> None:
        self._mismatches.append(gap)

    # Steps

    @property
    def sums(self) -> Sums:
        """Sums over the timed steps, without the warm-up."""
        return self._steps.sums

    @property
    def last(self) -> StepTimes | None:
        return self._steps.last

    def steps_read(self, steps: ReadSteps) -> None:
        """Add the next steps, and report the first slowdown to observers."""
        is_search_due = self.add(steps.records, steps.sums)
        if is_search_due and self.slowdowns.search():
            call_safely(methods(self._observers, "on_slowdown"), self.slowdowns.found)

    def add(self, steps: Sequence[StepRecord], sums: Sums | None = None) -> bool:
        """Add the next steps. Return True if a search for a slowdown is due."""
        with self._lock:
            warmup, measured = self._steps.add(steps, sums)
            # Without indices, every step is timed.
            has_indices = steps[-1].step_index >= 0
            is_settled = self.untimed.add_timed(steps, warmup) if has_indices else True
            return self.slowdowns.add(steps[-1].number, measured, is_settled=is_settled)

    def settle(self, number: int, *, until: int) -> None:
        """Count all steps before the index `until` as untimed, unless they were read.

        The last of these steps has this number.
        """
        with self._lock:
            self.untimed.settle(until)
            self.slowdowns.add(number, Sums())

    # Logs

    def untimed_since(self, totals: Totals) -> tuple[Estimate, Totals]:
        """Return the estimate for untimed steps since `totals` were taken, and the totals now."""
        with self._lock:
            return self.untimed.estimate_since(totals), self.untimed.totals

    def log_values(
        self, newest: int, timed_steps: int, every: Sums, means_ms: dict[str, float], *, keep: bool
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the values to log by name, and the values that observers add.

        Args:
            newest: Number of the newest step since the last log.
            timed_steps: Number of timed steps since the last log.
            every: Sums over all steps since the last log; untimed steps are estimated.
            means_ms: Mean time per step, by name (in milliseconds).
            keep: True if the next log includes these steps, too.
        """
        if self.slow.is_followed:
            means_ms |= self.slow.metrics(newest, timed_steps or 1, keep=keep)
        if (change := self.slowdowns.found) is not None:
            means_ms["lasting_change"] = change.change * change.before_ms
        values = {f"{name}_ms": ms for name, ms in means_ms.items() if not of_one_callback(name)}
        values |= self._throughput.metrics(every)
        return values, metrics_of(self._observers, values)

    def read_memory(self) -> None:
        if self._memory is not None:
            self._memory.read()

    # Readings

    def history_and_warmup(self) -> tuple[npt.NDArray[Any], int]:
        """Return the history, and the number of its steps that are warm-up."""
        with self._lock:
            log = copy(self._steps)
        return history(log.unpacked()), log.warmup_in_history  # Slow, so outside of the lock.

    def measurement(self, stage: str = "") -> Measurement:
        """Return the facts of all steps after the warm-up, or of the warm-up if no step follows."""
        ranks = self.ranks.complete()
        with self._lock:
            self.untimed.settle()
            log = copy(self._steps)
        steps = log.unpacked()
        if steps and not log.sums.step.n:
            return replace(self._measurement_of(steps, Sums(steps)), is_warmup=True)
        slowdown, work_change = self.slowdowns.series.find(), ""
        if slowdown is not None and slowdown.until_step is None:  # The change lasts.
            if slowdown.phase in (DATA, FETCH):
                slowdown = replace(slowdown, detail=describe_slowdown(self.culprits.loader_times()))
            work_change = self._work_change(steps, slowdown.since_step)
        return replace(
            self._measurement_of(steps[log.warmup_in_history :], log.sums),
            slowdown=slowdown,
            work_change=work_change,
            warmup_steps=log.warmup_steps,
            untimed_steps=max(self._ended_steps - log.n, 0),
            skipped_updates=log.skipped_warmup_updates + log.sums.skipped_updates,
            ranks=ranks,
            stage=stage,
        )

    def _measurement_of(self, steps: list[StepRecord], sums: Sums) -> Measurement:
        times, untimed = history(steps), self.untimed
        with self._lock:
            estimate, weights = untimed.estimate(), untimed.weights(len(steps))
            durations_ms = untimed.durations.statistics_ms() if untimed.knows_durations else {}
            slow_correction = untimed.slow_correction or 1.0
            self.ledger.evaluate()
        every = sums.plus(estimate.sums)
        all_ms = every.step.device_ms + estimate.unsampled_ms
        tflops = self._throughput.tflops_of_phases(every)
        rows = phase_rows(sums, estimate, times, weights, tflops)
        n, step = int(sums.step.n), rows.pop(STEP)
        if estimate.sums.step.n:
            step = replace(step, **durations_ms)
        gaps = [*not_measured(self._libraries), *self._mismatches]
        is_long = times["step_ms"] >= LONG_STEP * step.p50_ms
        of_steps = weights if len(weights) else np.ones(len(is_long))
        # Times per step that add up to those of the phases.
        lines = self.ledger.rows(
            {name: row.share * step.mean_ms for name, row in rows.items()},
            median_ms=step.p50_ms,
            long_share=float(of_steps[is_long].sum() / (of_steps.sum() or 1.0)),
            evaluation=EVALUATION,
        )
        return replace(
            self._facts,
            rows=Named(rows),
            step=step,
            steps=n,
            least_shares=Named(least_shares(times, weights)),
            host_wait_mean_ms=sums.wait_ms / n if n else math.nan,
            skipped_updates=sums.skipped_updates,
            hint="" if n else self._facts.hint,
            host_paced=Named(self.ledger.host_shares()),
            examined_steps=self.ledger.n,
            lines_unavailable=self.ledger.unavailable,
            lines=(*lines, *(row for loader in self.culprits.loaders for row in loader.lines())),
            not_sampled_steps=estimate.unsampled_steps,
            not_sampled_share=estimate.unsampled_ms / (all_ms or 1.0),
            slow=self.slow.summary(n, sums.step.device_ms / slow_correction),
            wall_clock=self.wall_clock.summary() if self.wall_clock is not None else None,
            memory=self._memory.summary() if self._memory is not None else None,
            work=self._throughput.summary(every),
            sections=sections_of(self._observers),
            not_measured=tuple(gap.text for gap in gaps),
            blurred=tuple(dict.fromkeys(phase for gap in gaps for phase in gap.blurred)),
            culprits=self.culprits.summary(),
            loaders=self.culprits.loader_times(),
        )

    def _work_change(self, steps: Sequence[StepRecord], since: int) -> str:
        """Return how the work of a step has changed at step `since`; empty if it has not."""
        before = [step for step in steps if step.number < since]
        after = [step for step in steps if step.number >= since]
        works: tuple[tuple[str, Callable[[StepRecord], float]], ...] = (
            ("backwards", lambda step: step.labels.count(AFTER_BACKWARD)),
            ("items", attrgetter("items")),
        )
        for name, work_of in works if before and after else ():
            first, last = median(map(work_of, before)), median(map(work_of, after))
            if last > first > 0:
                return f"a step has {last:.0f} {name} since then, and {first:.0f} before"
        counts = self.ledger.trained_tensors
        fewer = [n for number, n in counts.items() if number < since]
        more = [n for number, n in counts.items() if number >= since]
        # Each step may train other tensors, as in a GAN.
        if fewer and more and min(more) > max(fewer):
            change = f"{more[-1]} tensors since then, and {fewer[-1]} before"
            return f"backward computes gradients of {change}"
        return ""
