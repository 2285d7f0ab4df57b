"""Collected facts of one run, and the `Measurement` made from them."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from statistics import median
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gputime._compat import NotMeasured, not_measured
from lightning_gputime._ledger.ledger import Ledger
from lightning_gputime._ledger.rows import LONG_STEP, LineRow
from lightning_gputime._loader import CulpritSums, describe_slowdown
from lightning_gputime._measurement.changes import MIN_STEPS, Slowdown, StepSeries
from lightning_gputime._measurement.history import StepLog, history, list_phases
from lightning_gputime._measurement.measurement import Measurement, TrainingSetup
from lightning_gputime._measurement.memory import MemoryWatch
from lightning_gputime._measurement.observers import (
    ReadSteps,
    call_safely,
    methods,
    metrics_of,
    sections_of,
)
from lightning_gputime._measurement.slow import SlowLog
from lightning_gputime._measurement.sums import STEP, PhaseStats, Sums, ThroughputReference
from lightning_gputime._measurement.untimed import (
    Estimate,
    Percentiles,
    UntimedSteps,
    percentiles,
)
from lightning_gputime._measurement.wall_clock import EVALUATION, WallClock
from lightning_gputime._messages import Named
from lightning_gputime._phases import (
    AFTER_BACKWARD,
    DATA,
    FETCH,
    StepRecord,
    StepTimes,
    in_order,
    of_one_callback,
)
from lightning_gputime._ranks.comparison import RankResults


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
        self.on_host_clock = on_host_clock
        self._facts = Measurement(on_host_clock=on_host_clock, hint=hint)
        self._libraries = libraries
        self._steps = StepLog(capacity, warmup_steps)
        self.untimed = UntimedSteps(warmup_steps, capacity)
        self.series = StepSeries()
        self._segment_sums = Sums()  # Timed steps since the newest segment of `series`.
        # Totals and number of the untimed steps until the end of that segment.
        self._segment_totals, self._segment_untimed = self.untimed.totals, 0
        self._follows_slowdowns = False  # True if searches run during training.
        self._slowdown: Slowdown | None = None  # Result of the newest search during training.
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
        self._explain: Callable[[Measurement], Measurement] | None = None
        self._not_measured: list[NotMeasured] = []  # Found by the self-check.

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            # `ddp_spawn` pickles callbacks, and a lock cannot be pickled.
            copied = {"_steps": copy(self._steps), "untimed": copy(self.untimed), "_lock": None}
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
        explain: Callable[[Measurement], Measurement] | None = None,
    ) -> None:
        """Connect the sources of all results that do not follow from the times of steps.

        Collect slow steps and slowdowns only if they are logged or an observer receives them.
        `explain` adds causes outside of the loop.
        """
        self._explain = explain
        self._throughput, self._observers, self._memory = throughput, tuple(observers), memory
        receivers = [*methods(observers, "on_slow_step"), *methods(observers, "metrics")]
        if logs_slow_steps or receivers:
            self.slow.follow()
        if logs_slow_steps or methods(observers, "on_slowdown"):
            self._follows_slowdowns = True

    def update_setup(self, **known: Any) -> None:
        self.setup = replace(self.setup, **known)

    def update_facts(self, **known: Any) -> None:
        """Replace fields of the `Measurement` that do not depend on the steps."""
        self._facts = replace(self._facts, **known)

    def set_ended(self, steps: int) -> None:
        """Set the number of steps that have ended and, if they were timed, have been read."""
        self._ended_steps = steps

    def add_not_measured(self, found: NotMeasured) -> None:
        self._not_measured.append(found)

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
        if is_search_due and self._follows_slowdowns:
            is_first = self._slowdown is None
            self._slowdown = self.series.find()
            if is_first and self._slowdown is not None:
                call_safely(methods(self._observers, "on_slowdown"), self._slowdown)

    def add(self, steps: Sequence[StepRecord], sums: Sums | None = None) -> bool:
        """Add the next steps. Return True if a search for a slowdown is due."""
        with self._lock:
            warmup, measured = self._steps.add(steps, sums)
            # Without indices, every step is timed.
            self._segment_sums.merge(measured)
            if steps[-1].step_index >= 0 and not self.untimed.add_timed(steps, warmup):
                return False  # The untimed steps before these are not settled yet.
            return self._extend_series(steps[-1].number)

    def settle(self, number: int, *, until: int) -> None:
        """Count all steps before the index `until` as untimed, unless they were read.

        The last of these steps has this number.
        """
        with self._lock:
            self._extend_series(number, until)

    def _extend_series(self, number: int, until: int = 0) -> bool:
        """Add the steps up to this number as a segment of `series`, unless they are few.

        First count the steps before the index `until` as untimed, unless they were read. Return
        True if a search for a slowdown is due.
        """
        untimed, timed = self.untimed, self._segment_sums
        if until:
            untimed.settle(until)
        n = int(timed.step.n) + untimed.n - self._segment_untimed
        if n < MIN_STEPS:  # Wait for more steps.
            return False
        estimate = untimed.estimate_since(self._segment_totals)
        self._segment_totals, self._segment_untimed = untimed.totals, untimed.n
        self._segment_sums = Sums()
        timed.merge(estimate.sums)
        wall_ms = timed.step.device_ms + estimate.unsampled_ms
        phases_ms = {name: phase.device_ms / n for name, phase in timed.phases.items()}
        return self.series.add(number, n, wall_ms, phases_ms)

    # Logs

    def log_untimed(
        self, number: int, until: int, *, has_timed: bool, only_publish: bool
    ) -> Estimate:
        """Log the untimed steps since the last log. Return the estimate for them.

        Args:
            number: Number of the newest step.
            until: Index of the first step after the log; 0 if all these steps are settled.
            has_timed: True if a step since the last log was timed.
            only_publish: True if the next log includes these steps, too.
        """
        with self._lock:
            untimed = self.untimed
            # The fast path: between timed steps, steps can often be logged without settling them.
            unsettled = None if has_timed else untimed.log_unsettled(until)
            if unsettled is not None:
                return Estimate(unsettled)
            if until:
                self._extend_series(number, until)
            estimate = untimed.estimate_since(untimed.logged)
            # Untimed steps before the first timed step cannot be estimated yet, so a later log
            # includes them.
            if not only_publish and (has_timed or estimate.sums.step.n):
                untimed.log_settled()
            return estimate

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
        if (change := self._slowdown) is not None:
            means_ms["lasting_change"] = change.change * change.before_ms
        values = {f"{name}_ms": ms for name, ms in means_ms.items() if not of_one_callback(name)}
        values |= self._throughput.metrics(every)
        return values, metrics_of(self._observers, values)

    def line_rows(self) -> tuple[LineRow, ...]:
        """Return the lines of the timed steps. It is faster than a `measurement`."""
        with self._lock:
            self.ledger.evaluate()
            n = self.sums.step.n
            phases_ms = {name: phase.device_ms / n for name, phase in self.sums.phases.items() if n}
            return self.ledger.rows(phases_ms, median_ms=0.0, long_share=0.0, evaluation=EVALUATION)

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
        slowdown, work_change = self.series.find(), ""
        if slowdown is not None and slowdown.until_step is None:  # The change lasts.
            if slowdown.phase in (DATA, FETCH):
                slowdown = replace(slowdown, detail=describe_slowdown(self.culprits.loader_times()))
            work_change = self._work_change(steps, slowdown.since_step)
        found = replace(
            self._measurement_of(steps[log.warmup_in_history :], log.sums),
            slowdown=slowdown,
            work_change=work_change,
            warmup_steps=log.warmup_steps,
            untimed_steps=max(self._ended_steps - log.n, 0),
            skipped_updates=log.skipped_warmup_updates + log.sums.skipped_updates,
            ranks=ranks,
            stage=stage,
        )
        return found if self._explain is None else self._explain(found)

    def _measurement_of(self, steps: list[StepRecord], sums: Sums) -> Measurement:
        times, untimed = history(steps), self.untimed
        with self._lock:
            estimate, weights = untimed.estimate(), untimed.weights(len(steps))
            durations_ms = untimed.durations_ms()
            slow_correction = untimed.slow_correction or 1.0
            self.ledger.evaluate()
        every = sums.plus(estimate.sums)
        all_ms = every.step.device_ms + estimate.unsampled_ms
        tflops = self._throughput.tflops_of_phases(every)
        rows = phase_rows(sums, estimate, times, weights, tflops)
        n, step = int(sums.step.n), rows.pop(STEP)
        if estimate.sums.step.n:
            step = replace(step, **durations_ms)
        missing = [*not_measured(self._libraries), *self._not_measured]
        is_long = times["step_ms"] >= LONG_STEP * step.p50_ms
        represented = weights if len(weights) else np.ones(len(is_long))  # Number of steps.
        # Times per step that add up to those of the phases.
        lines = self.ledger.rows(
            {name: row.share * step.mean_ms for name, row in rows.items()},
            median_ms=step.p50_ms,
            long_share=float(represented[is_long].sum() / (represented.sum() or 1.0)),
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
            not_measured=tuple(found.text for found in missing),
            blurred=tuple(dict.fromkeys(phase for found in missing for phase in found.blurred)),
            culprits=self.culprits.summary(),
            loaders=self.culprits.loader_times(),
        )

    def _work_change(self, steps: Sequence[StepRecord], since: int) -> str:
        """Return how the work of a step has grown at step `since`; empty if it has not."""
        before = [step for step in steps if step.number < since]
        after = [step for step in steps if step.number >= since]
        if before and after:
            counts: dict[str, Callable[[StepRecord], float]] = {
                "backwards": lambda step: step.labels.count(AFTER_BACKWARD),
                "items": lambda step: step.items,
            }
            for name, count in counts.items():
                old, new = median(map(count, before)), median(map(count, after))
                if new > old > 0:
                    return f"a step has {new:.0f} {name} since then, and {old:.0f} before"
        trained_before, trained_after = list[int](), list[int]()
        for number, tensors in self.ledger.trained_tensors.items():
            (trained_before if number < since else trained_after).append(tensors)
        # Each step may train other tensors, as in a GAN, so all steps must train more.
        if trained_before and trained_after and min(trained_after) > max(trained_before):
            change = f"{trained_after[-1]} tensors since then, and {trained_before[-1]} before"
            return f"backward computes gradients of {change}"
        return ""


def phase_rows(
    timed: Sums,
    untimed: Estimate,
    times: npt.NDArray[Any],
    weights: npt.NDArray[np.float64],
    tflops: Mapping[str, float],
) -> dict[str, PhaseStats]:
    """Return the statistics of each phase and of "step".

    Args:
        timed: Sums over the timed steps.
        untimed: Estimate for the untimed steps.
        times: History of the timed steps.
        weights: Number of steps that each step of the history represents.
        tflops: TFLOP/s of each phase, if known.
    """
    every = timed.plus(untimed.sums)
    phases = {name: every.phases[name] for name in in_order([*every.phases])}
    steps = every.step.n + untimed.unsampled_steps
    all_ms = every.step.device_ms + untimed.unsampled_ms
    rows = {}
    for name, phase in {**phases, STEP: every.step}.items():
        column = f"{name}_ms"
        column_ms = times[column] if column in (times.dtype.names or ()) else ()
        p5_ms, p50_ms, p95_ms = _percentiles(column_ms, weights)
        timed_phase = timed.step if name == STEP else timed.phases.get(name)
        error_ms = untimed.errors_ms.get(name, 0.0)
        rows[name] = PhaseStats(
            n=int(timed_phase.n) if timed_phase is not None else 0,
            mean_ms=all_ms / steps if name == STEP and steps else phase.mean_ms,
            p50_ms=p50_ms,
            p95_ms=p95_ms,
            max_ms=phase.max_ms if phase.n else math.nan,
            share=(all_ms if name == STEP else phase.device_ms) / (all_ms or math.nan),
            host_mean_ms=phase.host_ms / phase.n if phase.n else math.nan,
            tflops=tflops.get(name),
            error_ms=error_ms / phase.n if phase.n else 0.0,
            share_error=error_ms / all_ms if all_ms and name != STEP else 0.0,
            p5_ms=p5_ms,
            frequency=phase.n / steps if name != STEP and steps else 1.0,
        )
    return rows


def least_shares(times: npt.NDArray[Any], weights: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return the fraction of the step that each phase takes in the half in which it takes less.

    For example, if `data` takes 30 % of the first half of the run and 10 % of the second, 10 %.
    Empty with fewer than 10 timed steps per half. The arguments are those of `phase_rows`.
    """
    half = len(times) // 2
    if half < 10:  # A single long step would decide.
        return {}
    if not len(weights):
        weights = np.ones(len(times))

    def shares(steps: slice) -> dict[str, float]:
        all_ms = float(np.sum(times["step_ms"][steps] * weights[steps])) or math.nan
        return {
            name: float(np.nansum(times[f"{name}_ms"][steps] * weights[steps])) / all_ms
            for name in list_phases(times)
        }

    first, second = shares(slice(half)), shares(slice(half, None))
    return {name: min(first[name], second[name]) for name in first}


def _percentiles(times_ms: npt.ArrayLike, weights: npt.NDArray[np.float64]) -> Percentiles:
    """Return the percentiles over the steps in which a phase ran (NaN in all other steps)."""
    every_ms = np.asarray(times_ms)
    has_run = np.isfinite(every_ms)
    ran_ms = every_ms[has_run]
    if not len(ran_ms):
        return math.nan, math.nan, math.nan
    if len(weights) == len(every_ms) and np.ptp(weights):
        return percentiles(ran_ms, weights[has_run])
    p5_ms, p50_ms, p95_ms = np.percentile(ran_ms, (5, 50, 95)).tolist()
    return p5_ms, p50_ms, p95_ms
