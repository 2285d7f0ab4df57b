"""The times of many steps as numbers: the newest ones one by one, all of them as a summary."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gputime._compat.names import NotMeasured, not_measured
from lightning_gputime._measurement.changes import MIN_STEPS, Slowdown, StepSeries
from lightning_gputime._measurement.culprits import CulpritSums
from lightning_gputime._measurement.history import MIN_PACKED_MARKS, history, pack, unpack
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.memory import MemoryWatch
from lightning_gputime._measurement.observers import ReadSteps, call_safely, methods, sections_of
from lightning_gputime._measurement.ranks import STEP, RankSummary
from lightning_gputime._measurement.setup import TrainingSetup
from lightning_gputime._measurement.slow import SlowLog
from lightning_gputime._measurement.stats import PhaseStats
from lightning_gputime._measurement.sums import Sums, ThroughputReference
from lightning_gputime._measurement.untimed import Estimate, UntimedSteps
from lightning_gputime._measurement.wall_clock import WallClock
from lightning_gputime._messages import Named
from lightning_gputime._phases import StepRecord, StepTimes, in_order


class Results:
    """Keep what the summary and the history need of every step.

    One thread adds steps; any may read. A reader holds the lock only while it copies.

    Args:
        capacity: Number of steps in the history.
        warmup_steps: Number of first steps to leave out of the summary.
        on_host_clock: Whether they are timed without a device.
        hint: What to do if there are no steps.
        culprits: Sums of the code that takes the time; empty by default.
    """

    def __init__(
        self,
        capacity: int,
        warmup_steps: int,
        on_host_clock: bool = False,
        hint: str = "",
        culprits: CulpritSums | None = None,
    ) -> None:
        # Not a plain lock: a signal handler may read in the thread, and in the moment, of an `add`.
        self._lock = RLock()
        self.on_host_clock = on_host_clock
        self._hint = hint
        self._warmup_steps = warmup_steps
        self._newest: deque[StepRecord] = deque(maxlen=capacity)
        self._seen = 0
        self.sums = Sums()  # Of the timed steps, without the warm-up.
        self.untimed = UntimedSteps(warmup_steps, capacity)
        self._busy = Sums()  # Over the steps that were probed.
        self.step_series = StepSeries()
        # Since the newest window of the series: the timed steps, and the untimed ones before it.
        self._window, self._window_totals = Sums(), self.untimed.totals
        self._logged_totals = self.untimed.totals  # The untimed steps before the last log.
        self.finds_changes = False  # Also while training goes on, not in the summary alone.
        self.slowdown: Slowdown | None = None  # As it was last found.
        self._skipped_updates = 0  # In the warm-up.
        self.slow = SlowLog()
        self.ranks: RankSummary | None = None  # As they were last compared.
        # Compares ranks that had not sent their times when training ended: it waits for them.
        self.complete_ranks: Callable[[], None] | None = None
        self.newest_probed: StepRecord | None = None  # Its work alone.
        self.probe_failure = ""  # Why no step is probed any more.
        self.wall_clock: WallClock | None = None  # None for evaluations.
        self.memory: MemoryWatch | None = None
        self.culprits = culprits or CulpritSums()
        self.setup = TrainingSetup()
        self.throughput = ThroughputReference()
        # With `every_n_steps="auto"`, see `PhaseSummary`.
        self.timed_every_n_steps = 1
        self.ended_steps = 0  # Timed or not; 0 where each is timed.
        self.timing_share: float | None = None
        self.each_timed_for = ""
        self.observers: Sequence[Any] = ()  # Those of the user.
        self.libraries: tuple[str, ...] = (
            "torch",
        )  # Those whose missing names concern this training.
        self.mismatches: list[NotMeasured] = []  # Found by the self-check.

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            # No lock goes into a copy: `ddp_spawn` pickles callbacks.
            copied = {"sums": self.sums.copy(), "_busy": self._busy.copy(), "_lock": None}
            newest = self._newest.copy()
        return {**self.__dict__, **copied, "_newest": newest, "complete_ranks": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=RLock())

    @property
    def last(self) -> StepTimes | None:
        newest = self._newest
        return unpack(newest[-1]).times() if newest else None

    def _copy(self) -> tuple[list[StepRecord], int]:
        """Return the steps in the history, and how many of the first ones are warm-up."""
        with self._lock:
            newest, seen = self._newest.copy(), self._seen
        # Outside of the lock, which the thread of the loop may be waiting for.
        return [*map(unpack, newest)], max(self._warmup_steps - (seen - len(newest)), 0)

    def steps_read(self, steps: ReadSteps) -> None:
        # It takes milliseconds: only where somebody listens.
        if self.add(steps.records, steps.sums) and self.finds_changes:
            before, self.slowdown = self.slowdown, self.step_series.find()
            if before is None and self.slowdown is not None:
                calls = methods(self.observers, "on_slowdown")
                call_safely(calls, self.slowdown)

    def add(self, steps: Sequence[StepRecord], sums: Sums | None = None) -> bool:
        """Take the next steps, with their sums if known. Return whether to look for a change."""
        with self._lock:
            many = MIN_PACKED_MARKS
            # Places refer to code, which cannot be pickled.
            kept = [step._replace(places=()) if step.places else step for step in steps]
            self._newest += [pack(step) if len(step.labels) >= many else step for step in kept]
            warmup = max(self._warmup_steps - self._seen, 0)
            self._seen += len(steps)
            if steps[-1].step_index >= 0:
                self.untimed.settle(steps, steps[-1].step_index + 1, warmup=warmup)
            if warmup:
                self._skipped_updates += sum(step.skipped_update for step in steps[:warmup])
            sums = Sums(steps[warmup:]) if warmup or sums is None else sums
            self.sums.merge(sums)
            self._window.merge(sums)
            return self._add_window(self._newest[-1].number)

    def _add_window(self, number: int) -> bool:
        """Add the next steps to the series. Return True if it is time to look for a slowdown."""
        untimed = self.untimed.estimate_since(self._window_totals)
        sums = self._window.plus(untimed.sums)
        n = int(sums.step.n) + untimed.unsampled_steps
        if n < MIN_STEPS:
            return False
        phases_ms = {name: phase.device_ms / n for name, phase in sums.phases.items()}
        self._window, self._window_totals = Sums(), self.untimed.totals
        wall_ms = sums.step.device_ms + untimed.unsampled_ms
        return self.step_series.add(number, n, wall_ms, phases_ms)

    def settle(self, number: int, *, until: int) -> None:
        """Take the steps before index `until` as untimed, as far as none of them was read.

        Args:
            number: The number of the last of them.
            until: The index after it.
        """
        with self._lock:
            self.untimed.settle((), until)
            self._add_window(number)

    def untimed_since_log(self, *, restart: bool, has_timed: bool) -> Estimate:
        """Return the untimed steps since the last log; with `restart` this is the next one.

        Before any step is timed nothing can be logged: these steps are left to a later log.
        """
        with self._lock:
            estimate = self.untimed.estimate_since(self._logged_totals)
            if restart and (has_timed or estimate.sums.step.n):
                self._logged_totals = self.untimed.totals
            return estimate

    def add_probed(self, step: StepRecord) -> None:
        """Take the work alone of a step that was probed; it is in no other statistics."""
        with self._lock:
            self.newest_probed = step
            self._busy.merge(Sums([step]))

    def history_and_warmup(self) -> tuple[npt.NDArray[Any], int]:
        newest, warmup = self._copy()
        return history(newest), warmup

    def measurement(self, stage: str = "") -> Measurement:
        """Return the facts of all steps but the warm-up; of that if there are no others."""
        complete, self.complete_ranks = self.complete_ranks, None
        if complete is not None:
            complete()
        with self._lock:
            steps, warmup = self._copy()
            seen, skipped_updates = self._seen, self._skipped_updates
            sums, busy = self.sums.copy(), self._busy.copy()
        if steps and not sums.step.n:
            return replace(self._measurement_of(steps, Sums(steps), Sums()), is_warmup=True)
        return replace(
            self._measurement_of(steps[warmup:], sums, busy),
            slowdown=self.step_series.find(),
            warmup_steps=min(seen, self._warmup_steps),
            untimed_steps=max(self.ended_steps - seen, 0),
            skipped_updates=skipped_updates + sums.skipped_updates,
            ranks=self.ranks,
            hint="" if seen else self._hint,
            stage=stage,
        )

    def _measurement_of(self, steps: list[StepRecord], sums: Sums, busy: Sums) -> Measurement:
        times, untimed = history(steps), self.untimed
        with self._lock:
            estimate, weights = untimed.estimate(), untimed.weights(len(steps))
            percentiles_ms, max_ms = untimed.percentiles_ms(5, 50, 95), untimed.max_ms
            knows_durations = untimed.knows_durations
            slow_scale = untimed.slow_scale or 1.0
        every = sums.plus(estimate.sums)
        tflops = self.throughput.tflops_of_phases(every)
        rows = _rows(sums, estimate, busy, times, weights, tflops)
        n, step = int(sums.step.n), rows.pop(STEP)
        if estimate.sums.step.n and knows_durations:
            p5_ms, p50_ms, p95_ms = percentiles_ms
            step = replace(step, p5_ms=p5_ms, p50_ms=p50_ms, p95_ms=p95_ms, max_ms=max_ms)
        gaps = [*not_measured(self.libraries), *self.mismatches]
        return Measurement(
            rows=Named(rows),
            step=step,
            steps=n,
            warmup_steps=0,
            host_wait_mean_ms=sums.wait_ms / n if n else math.nan,
            skipped_updates=sums.skipped_updates,
            on_host_clock=self.on_host_clock,
            probed_steps=int(busy.step.n),
            not_sampled_steps=estimate.unsampled_steps,
            not_sampled_share=estimate.unsampled_ms / (every.step.device_ms + estimate.unsampled_ms)
            if estimate.unsampled_ms
            else 0.0,
            probe_failure=self.probe_failure,
            timed_every_n_steps=self.timed_every_n_steps,
            timing_share=self.timing_share,
            each_timed_for=self.each_timed_for,
            slow=self.slow.summary(n, sums.step.device_ms / slow_scale),
            wall_clock=self.wall_clock.summary() if self.wall_clock is not None else None,
            memory=self.memory.summary() if self.memory is not None else None,
            work=self.throughput.summary(every),
            sections=sections_of(self.observers),
            not_measured=tuple(gap.text for gap in gaps),
            blurred=tuple({phase: None for gap in gaps for phase in gap.blurred}),
            culprits=self.culprits.summary(),
        )


def _rows(
    timed: Sums,
    untimed: Estimate,
    busy: Sums,
    times: npt.NDArray[Any],
    weights: npt.NDArray[np.float64],
    tflops: Mapping[str, float],
) -> dict[str, PhaseStats]:
    """Return the statistics of each phase, and of the step, over all steps."""
    every = timed.plus(untimed.sums)
    phases = {name: every.phases[name] for name in in_order([*every.phases])}
    probed = {
        name: phase.mean_ms for name, phase in {**busy.phases, STEP: busy.step}.items() if phase.n
    }
    steps = every.step.n + untimed.unsampled_steps
    all_ms = every.step.device_ms + untimed.unsampled_ms
    rows = {}
    for name, phase in {**phases, STEP: every.step}.items():
        column = f"{name}_ms"
        column_ms = times[column] if column in (times.dtype.names or ()) else ()
        p5_ms, p50_ms, p95_ms = _percentiles(column_ms, weights)
        of_timed = timed.step if name == STEP else timed.phases.get(name)
        error_ms = untimed.errors_ms.get(name, 0.0)
        rows[name] = PhaseStats(
            n=int(of_timed.n) if of_timed is not None else 0,
            mean_ms=all_ms / steps if name == STEP and steps else phase.mean_ms,
            p50_ms=p50_ms,
            p95_ms=p95_ms,
            max_ms=phase.max_ms if phase.n else math.nan,
            share=(all_ms if name == STEP else phase.device_ms) / (all_ms or math.nan),
            host_mean_ms=phase.host_ms / phase.n if phase.n else math.nan,
            gpu_busy_mean_ms=probed.get(name),
            tflops=tflops.get(name),
            error_ms=error_ms / phase.n if phase.n else 0.0,
            share_error=error_ms / all_ms if all_ms and name != STEP else 0.0,
            p5_ms=p5_ms,
            frequency=phase.n / steps if name != STEP and steps else 1.0,
        )
    return rows


def _percentiles(
    times_ms: npt.ArrayLike, weights: npt.NDArray[np.float64]
) -> tuple[float, float, float]:
    """Return percentiles of the steps in which a phase ran; each stands for `weights` steps."""
    every_ms = np.asarray(times_ms)
    has_run = np.isfinite(every_ms)
    ran_ms = every_ms[has_run]
    if not len(ran_ms):
        return math.nan, math.nan, math.nan
    if len(weights) != len(every_ms) or np.ptp(weights) == 0:
        p5_ms, p50_ms, p95_ms = np.percentile(ran_ms, (5, 50, 95)).tolist()
        return p5_ms, p50_ms, p95_ms
    order = np.argsort(ran_ms)
    ends = np.cumsum(weights[has_run][order])
    places = np.searchsorted(ends, np.array([0.05, 0.5, 0.95]) * ends[-1])
    p5_ms, p50_ms, p95_ms = ran_ms[order][np.minimum(places, len(ran_ms) - 1)].tolist()
    return p5_ms, p50_ms, p95_ms
