"""Collected facts of one run, and the `Measurement` made from them."""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, NamedTuple

import numpy.typing as npt

from lightning_gputime._compat.names import NotMeasured, not_measured
from lightning_gputime._measurement.changes import Slowdown, SlowdownSearch
from lightning_gputime._measurement.culprits import CulpritSums
from lightning_gputime._measurement.history import StepLog, history
from lightning_gputime._measurement.loader import describe_slowdown
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.memory import MemoryWatch
from lightning_gputime._measurement.observers import (
    ReadSteps,
    call_safely,
    methods,
    metrics_of,
    sections_of,
)
from lightning_gputime._measurement.probes import Probes
from lightning_gputime._measurement.ranks import STEP, RankSummary
from lightning_gputime._measurement.rows import phase_rows
from lightning_gputime._measurement.setup import TrainingSetup
from lightning_gputime._measurement.slow import SlowLog
from lightning_gputime._measurement.sums import Sums, ThroughputReference
from lightning_gputime._measurement.untimed import Estimate, UntimedSteps
from lightning_gputime._measurement.wall_clock import WallClock
from lightning_gputime._messages import Named
from lightning_gputime._phases import CALLBACK_WAIT, CALLBACKS, DATA, FETCH, StepRecord, StepTimes


@dataclass(frozen=True, slots=True)
class Sampling:
    """Facts about which steps were timed; see `Measurement`.

    Attributes:
        every_n_steps: 1 of this many steps is timed now.
        timing_share: Cost of timing every step, as a fraction of the step; None if unknown.
        added_share: The same for timing 1 of `every_n_steps` steps.
        each_timed_for: Option that requires that every step is timed; empty if none.
        ended_steps: Number of steps that have ended, timed or not; 0 if every step is timed.
    """

    every_n_steps: int = 1
    timing_share: float | None = None
    added_share: float | None = None
    each_timed_for: str = ""
    ended_steps: int = 0


class LogWindow(NamedTuple):
    """Steps since the last log.

    Attributes:
        newest: Number of the newest step.
        timed_steps: Number of timed steps.
        every: Sums over all steps; untimed steps are estimated.
        means_ms: Mean time per step, by name (in milliseconds).
        is_kept: True if the next log includes these steps, too.
    """

    newest: int
    timed_steps: int
    every: Sums
    means_ms: dict[str, float]
    is_kept: bool


class Results:
    """Collect the facts of a run.

    One thread adds steps, and any thread may read. Readers keep the lock only while they copy.

    Args:
        capacity: Number of steps in the history.
        warmup_steps: Number of first steps to exclude from the summary.
        on_host_clock: True if the steps are timed on the host clock.
        hint: Advice if no step was timed.
        culprits: Time of calls and places in the code; empty by default.
        libraries: Libraries whose missing private names affect this run.
        wall_clock: Wall clock of the training run; None for evaluations.
        setup: Known setup of the training run, which `update_setup` completes.
        throughput: Reference for work per second; empty by default.
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
        throughput: ThroughputReference | None = None,
    ) -> None:
        # Reentrant, because a signal handler may read in the thread that has the lock.
        self._lock = RLock()
        self._constants = _Constants(on_host_clock, hint, libraries)
        self._steps = StepLog(capacity, warmup_steps)
        self.untimed = UntimedSteps(warmup_steps, capacity)
        self._logged_totals = self.untimed.totals  # Untimed steps before the last log.
        self.slowdowns = SlowdownSearch(self.untimed)
        self.slow = SlowLog()
        self.probes = Probes()
        self.ranks = RankResults()
        self.culprits = culprits or CulpritSums()
        self.wall_clock = wall_clock
        self.setup = setup or TrainingSetup()
        self._sampling = Sampling()
        self._sources = _Sources(throughput or ThroughputReference())
        self._mismatches: list[NotMeasured] = []  # Found by the self-check.

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            # `ddp_spawn` pickles callbacks, and a lock cannot be pickled.
            copied = {"_steps": copy(self._steps), "probes": copy(self.probes), "_lock": None}
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
        """Add a session's other measurements: everything except its steps.

        Args:
            throughput: Reference for work per second.
            observers: The user's observers.
            logs_slow_steps: True if slow steps and slowdowns are logged.
            memory: Peak memory of the device; None if it is not measured.
        """
        self._sources = _Sources(throughput, tuple(observers), memory)
        takers = [methods(observers, name) for name in ("on_slow_step", "metrics")]
        if logs_slow_steps or any(takers):
            self.slow.follow()
        if logs_slow_steps or methods(observers, "on_slowdown"):
            self.slowdowns.follow()

    def update_setup(self, **known: Any) -> None:
        """Replace fields of the `TrainingSetup`."""
        self.setup = replace(self.setup, **known)

    def update_sampling(self, **known: Any) -> None:
        """Replace fields of the `Sampling`."""
        self._sampling = replace(self._sampling, **known)

    def add_mismatch(self, gap: NotMeasured) -> None:
        """Add something that cannot be measured according to the self-check."""
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
        if self.add(steps.records, steps.sums) and self.slowdowns.search_followed():
            call_safely(methods(self._sources.observers, "on_slowdown"), self.slowdowns.found)

    def add(self, steps: Sequence[StepRecord], sums: Sums | None = None) -> bool:
        """Add the next steps. Return True if a search for a slowdown is due."""
        with self._lock:
            warmup, measured = self._steps.add(steps, sums)
            is_settled = steps[-1].step_index < 0 or self.untimed.add_timed(steps, warmup)
            return self.slowdowns.add(steps[-1].number, measured, is_settled=is_settled)

    def settle(self, number: int, *, until: int) -> None:
        """Count all steps before the index `until` as untimed, unless they were read.

        Args:
            number: Number of the last of these steps.
            until: Index of the step after it.
        """
        with self._lock:
            self.untimed.settle(until)
            self.slowdowns.add(number, Sums())

    def add_probed(self, step: StepRecord) -> None:
        """Add the work of a probed step, which no other statistic includes."""
        with self._lock:
            self.probes.add(step)

    # Logs

    def untimed_since_log(self, *, restart: bool, has_timed: bool) -> Estimate:
        """Return the untimed steps since the last log. With `restart`, start the next log.

        Nothing can be logged before the first timed step, so a later log includes these steps.
        """
        with self._lock:
            estimate = self.untimed.estimate_since(self._logged_totals)
            if restart and (has_timed or estimate.sums.step.n):
                self._logged_totals = self.untimed.totals
            return estimate

    def log_values(self, window: LogWindow) -> tuple[dict[str, float], dict[str, float]]:
        """Return the values to log by name, and the values that observers add."""
        sources, n = self._sources, window.timed_steps or 1
        means_ms = {**window.means_ms, **self.probes.means_ms(window.means_ms)}
        if self.slow.is_followed:
            means_ms |= self.slow.metrics(window.newest, n, keep=window.is_kept)
        if (change := self.slowdowns.found) is not None:
            means_ms["lasting_change"] = change.change * change.before_ms
        values = {f"{name}_ms": ms for name, ms in means_ms.items() if _is_logged(name)}
        values |= sources.throughput.metrics(window.every)
        if not window.is_kept:
            self.read_memory()
        return values, metrics_of(sources.observers, values)

    def read_memory(self) -> None:
        """Read the peak memory, which the loop may reset."""
        if self._sources.memory is not None:
            self._sources.memory.read()

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
            log, busy = copy(self._steps), self.probes.sums.copy()
        steps = log.unpacked()
        if steps and not log.sums.step.n:
            return replace(self._measurement_of(steps, Sums(steps), Sums()), is_warmup=True)
        return replace(
            self._measurement_of(steps[log.warmup_in_history :], log.sums, busy),
            slowdown=self._slowdown(),
            warmup_steps=log.warmup_steps,
            untimed_steps=max(self._sampling.ended_steps - log.n, 0),
            skipped_updates=log.skipped_warmup_updates + log.sums.skipped_updates,
            ranks=ranks,
            hint="" if log.n else self._constants.hint,
            stage=stage,
        )

    def _slowdown(self) -> Slowdown | None:
        found = self.slowdowns.find()
        if found is None or found.until_step is not None or found.phase not in (DATA, FETCH):
            return found
        return replace(found, detail=describe_slowdown(self.culprits.loaders()))

    def _measurement_of(self, steps: list[StepRecord], sums: Sums, busy: Sums) -> Measurement:
        times, untimed = history(steps), self.untimed
        sources, sampling = self._sources, self._sampling
        with self._lock:
            estimate, weights = untimed.estimate(), untimed.weights(len(steps))
            percentiles_ms = untimed.durations.percentiles_ms(5, 50, 95)
            max_ms = untimed.durations.max_ms
            knows_durations = untimed.knows_durations
            slow_scale = untimed.slow_scale or 1.0
        every = sums.plus(estimate.sums)
        tflops = sources.throughput.tflops_of_phases(every)
        rows = phase_rows(sums, estimate, busy, times, weights, tflops)
        n, step = int(sums.step.n), rows.pop(STEP)
        if estimate.sums.step.n and knows_durations:
            p5_ms, p50_ms, p95_ms = percentiles_ms
            step = replace(step, p5_ms=p5_ms, p50_ms=p50_ms, p95_ms=p95_ms, max_ms=max_ms)
        gaps = [*not_measured(self._constants.libraries), *self._mismatches]
        return Measurement(
            rows=Named(rows),
            step=step,
            steps=n,
            warmup_steps=0,
            host_wait_mean_ms=sums.wait_ms / n if n else math.nan,
            skipped_updates=sums.skipped_updates,
            on_host_clock=self._constants.on_host_clock,
            probed_steps=int(busy.step.n),
            not_sampled_steps=estimate.unsampled_steps,
            not_sampled_share=estimate.unsampled_ms / (every.step.device_ms + estimate.unsampled_ms)
            if estimate.unsampled_ms
            else 0.0,
            probe_failure=self.probes.failure,
            timed_every_n_steps=sampling.every_n_steps,
            timing_share=sampling.timing_share,
            added_share=sampling.added_share,
            each_timed_for=sampling.each_timed_for,
            slow=self.slow.summary(n, sums.step.device_ms / slow_scale),
            wall_clock=self.wall_clock.summary() if self.wall_clock is not None else None,
            memory=sources.memory.summary() if sources.memory is not None else None,
            work=sources.throughput.summary(every),
            sections=sections_of(sources.observers),
            not_measured=tuple(gap.text for gap in gaps),
            blurred=tuple({phase: None for gap in gaps for phase in gap.blurred}),
            culprits=self.culprits.summary(),
            loaders=self.culprits.loaders(),
        )


class _Constants(NamedTuple):
    """Facts that do not change; see `Results`."""

    on_host_clock: bool
    hint: str
    libraries: tuple[str, ...]


class _Sources(NamedTuple):
    """Measurements other than steps; see `Results.connect`."""

    throughput: ThroughputReference
    observers: tuple[Any, ...] = ()
    memory: MemoryWatch | None = None


class RankResults:
    """Newest comparison of the ranks."""

    def __init__(self) -> None:
        self._summary: RankSummary | None = None
        self._complete: Callable[[], object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_complete": None}

    def add(self, summary: RankSummary | None) -> None:
        self._summary = summary

    def complete_later(self, complete: Callable[[], object]) -> None:
        """Set a function that waits for late ranks and adds them. The next `complete` calls it."""
        self._complete = complete

    def complete(self) -> RankSummary | None:
        """Return the comparison, after waiting for late ranks if necessary."""
        complete, self._complete = self._complete, None
        if complete is not None:
            complete()
        return self._summary


def _is_logged(name: str) -> bool:
    """Return False for sub-phases of `callbacks` that time a single callback."""
    return not name.startswith(f"{CALLBACKS}/") or name == CALLBACK_WAIT
