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
from lightning_gputime._measurement.advice import TrainingSetup, find_losses
from lightning_gputime._measurement.changes import MIN_STEPS, Slowdown, StepSeries
from lightning_gputime._measurement.history import MIN_PACKED_MARKS, history, pack, unpack
from lightning_gputime._measurement.observers import ReadSteps, call_safely, methods, sections_of
from lightning_gputime._measurement.ranks import STEP, RankSummary
from lightning_gputime._measurement.slow import SlowLog
from lightning_gputime._measurement.stats import PhaseStats
from lightning_gputime._measurement.summary import PhaseSummary
from lightning_gputime._measurement.sums import Sums, ThroughputReference
from lightning_gputime._measurement.wall_time import WallTimeRecorder
from lightning_gputime._memory import PhaseMemory
from lightning_gputime._messages import Named
from lightning_gputime._phases import DATA, StepRecord, StepTimes, in_order


class Results:
    """Keep what the summary and the history need of every step.

    One thread adds steps; any may read. A reader holds the lock only while it copies.

    Args:
        capacity: Number of steps in the history.
        warmup_steps: Number of first steps to leave out of the summary.
        on_host_clock: Whether they are timed without a device.
        hint: What to do if there are no steps.
    """

    def __init__(
        self, capacity: int, warmup_steps: int, on_host_clock: bool = False, hint: str = ""
    ) -> None:
        # Not a plain lock: a signal handler may read in the thread, and in the moment, of an `add`.
        self._lock = RLock()
        self.on_host_clock = on_host_clock
        self._hint = hint
        self._warmup_steps = warmup_steps
        self._newest: deque[StepRecord] = deque(maxlen=capacity)
        self._seen = 0
        self.sums = Sums()  # Without the warm-up.
        self._busy = Sums()  # Over the steps that were probed.
        self.step_series = StepSeries()
        self._window = Sums()  # Since the newest window of the series, which ended with
        self._window_end: int | None = None  # the step of this number.
        self.finds_changes = False  # Also while training goes on, not in the summary alone.
        self.slowdown: Slowdown | None = None  # As it was last found.
        self._skipped_updates = 0  # In the warm-up.
        self.slow = SlowLog()
        self.ranks: RankSummary | None = None  # As they were last compared.
        # Compares ranks that had not sent their times when training ended: it waits for them.
        self.complete_ranks: Callable[[], None] | None = None
        self.newest_probed: StepRecord | None = None  # Its work alone.
        self.probe_failure = ""  # Why no step is probed any more.
        self.books: WallTimeRecorder | None = None  # Of a fit, where a trainer tells it.
        self.peaks: PhaseMemory | None = None
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
            self._newest += [pack(one) if len(one.labels) >= many else one for one in steps]
            warmup = max(self._warmup_steps - self._seen, 0)
            self._seen += len(steps)
            if warmup:
                self._skipped_updates += sum(step.skipped_update for step in steps[:warmup])
            sums = Sums(steps[warmup:]) if warmup or sums is None else sums
            self.sums.merge(sums)
            if self._window.step.n:
                self._window.merge(sums)
            else:
                self._window = sums if sums.step.n >= MIN_STEPS else sums.copy()
            return self._add_window(self._newest[-1].number)

    def _add_window(self, number: int) -> bool:
        """Add the next steps to the series. Return True if it is time to look for a slowdown."""
        n, step_ms = self._window.step.n, self._window.step.device_ms
        if n < MIN_STEPS:
            return False
        before, self._window_end = self._window_end, number
        # With untimed steps between, the timed ones may all be those in which a loop is slow.
        if before is not None and number - before > n:
            self._window = Sums()
            return False
        phases_ms = {name: phase.device_ms / n for name, phase in self._window.phases.items()}
        self._window = Sums()
        return self.step_series.add(number, n, step_ms, phases_ms)

    def add_probed(self, step: StepRecord) -> None:
        """Take the work alone of a step that was probed; it is in no other statistics."""
        with self._lock:
            self.newest_probed = step
            self._busy.merge(Sums([step]))

    def history_and_warmup(self) -> tuple[npt.NDArray[Any], int]:
        newest, warmup = self._copy()
        return history(newest), warmup

    def summary(self, stage: str = "") -> PhaseSummary:
        """Return the statistics of all steps but the warm-up; of that where there are no others."""
        complete, self.complete_ranks = self.complete_ranks, None
        if complete is not None:
            complete()
        with self._lock:
            steps, warmup = self._copy()
            seen, skipped_updates = self._seen, self._skipped_updates
            sums, busy = self.sums.copy(), self._busy.copy()
        if steps and not sums.step.n:
            return replace(self._summary_of(steps, Sums(steps), Sums()), is_warmup=True)
        later = max(self.ended_steps - 1, 0)  # Than the first step.
        all_ms = self.books.steps_ms if self.books is not None and later else 0.0
        summary = replace(
            self._summary_of(steps[warmup:], sums, busy),
            slowdown=self.step_series.find(),
            warmup_steps=min(seen, self._warmup_steps),
            untimed_steps=max(self.ended_steps - seen, 0),
            all_steps_mean_ms=all_ms / later if all_ms else math.nan,
            skipped_updates=skipped_updates + sums.skipped_updates,
            ranks=self.ranks,
            hint="" if seen else self._hint,
            stage=stage,
        )
        return replace(summary, losses=find_losses(summary, self.setup))

    def _summary_of(self, steps: list[StepRecord], sums: Sums, busy: Sums) -> PhaseSummary:
        times = history(steps)
        memory = self.peaks.summary() if self.peaks is not None else None
        tflops = self.throughput.tflops_of_phases(sums)
        rows = _rows(sums, busy, times, {} if memory is None else memory.peak_mib, tflops)
        n, step = sums.step.n, rows.pop(STEP)
        gaps = [*not_measured(self.libraries), *self.mismatches]
        return PhaseSummary(
            rows=Named(rows),
            step=step,
            steps=n,
            warmup_steps=0,
            host_wait_mean_ms=sums.wait_ms / n if n else math.nan,
            skipped_updates=sums.skipped_updates,
            on_host_clock=self.on_host_clock,
            probed_steps=busy.step.n,
            probe_failure=self.probe_failure,
            timed_every_n_steps=self.timed_every_n_steps,
            timing_share=self.timing_share,
            each_timed_for=self.each_timed_for,
            slow=self.slow.summary(n, sums.step.device_ms),
            wall_time=self.books.summary() if self.books is not None else None,
            memory=memory,
            is_uneven=not self.setup.has_loader and DATA in rows and rows[DATA].is_uneven,
            work=self.throughput.summary(sums),
            sections=sections_of(self.observers),
            not_measured=tuple(gap.text for gap in gaps),
            blurred=tuple({phase: None for gap in gaps for phase in gap.blurred}),
        )


def _rows(
    sums: Sums,
    busy: Sums,
    times: npt.NDArray[Any],
    peaks_mib: Mapping[str, float],
    tflops: Mapping[str, float],
) -> dict[str, PhaseStats]:
    """Return the statistics of each phase, and of the step."""
    phases = {name: sums.phases[name] for name in in_order([*sums.phases])}
    probed = {name: one.mean_ms for name, one in {**busy.phases, STEP: busy.step}.items() if one.n}
    peaks_mib = {**peaks_mib, STEP: max(peaks_mib.values())} if peaks_mib else {}
    all_ms = sums.step.device_ms or math.nan
    rows = {}
    for name, one in {**phases, STEP: sums.step}.items():
        column = f"{name}_ms"
        p50_ms, p95_ms = _percentiles(times[column] if column in (times.dtype.names or ()) else ())
        rows[name] = PhaseStats(
            n=one.n,
            mean_ms=one.mean_ms,
            p50_ms=p50_ms,
            p95_ms=p95_ms,
            max_ms=one.max_ms if one.n else math.nan,
            share=one.device_ms / all_ms,
            host_mean_ms=one.host_ms / one.n if one.n else math.nan,
            gpu_busy_mean_ms=probed.get(name),
            peak_mib=peaks_mib.get(name),
            tflops=tflops.get(name),
        )
    return rows


def _percentiles(times_ms: npt.ArrayLike) -> tuple[float, float]:
    """Return the median and the 95th percentile of the steps in which a phase ran."""
    ran_ms = np.asarray(times_ms)
    ran_ms = ran_ms[np.isfinite(ran_ms)]
    if not len(ran_ms):
        return math.nan, math.nan
    p50_ms, p95_ms = np.percentile(ran_ms, (50, 95)).tolist()
    return p50_ms, p95_ms
