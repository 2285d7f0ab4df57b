"""The times of many steps as numbers: the newest ones one by one, all of them as a summary."""

import math
from collections.abc import Sequence
from dataclasses import replace
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gputime._memory import PhaseMemory
from lightning_gputime._phases import StepTimes, in_order
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.advice import Setup, advise
from lightning_gputime._results.history import Newest, history, mean_run_ahead_ms
from lightning_gputime._results.ledger import WallTimeRecorder
from lightning_gputime._results.observers import ReadSteps, sections_of
from lightning_gputime._results.ranks import RankSummary
from lightning_gputime._results.slow import SlowLog, SlowSteps
from lightning_gputime._results.stats import PhaseStats
from lightning_gputime._results.summary import PhaseSummary
from lightning_gputime._results.sums import PhaseSum, Sums
from lightning_gputime._results.throughput import ThroughputReference


class Results:
    """Keeps what the summary and the history need of every step.

    One thread adds steps; any may read. A reader holds the lock only while it copies.

    Args:
        capacity: How many steps the history holds.
        warmup_steps: How many of the first steps the summary leaves out.
        on_host_clock: Whether they are timed without a device.
        hint: What to do if there are no steps.
    """

    def __init__(
        self, capacity: int, warmup_steps: int, on_host_clock: bool = False, hint: str = ""
    ) -> None:
        # Not a plain lock: a signal handler may read in the thread, and in the moment, of an `add`.
        self._lock = RLock()
        self.on_host_clock = on_host_clock
        """Whether the steps are timed without a device."""
        self._hint = hint
        self._warmup_steps = warmup_steps
        self._newest = Newest(capacity)
        self._seen = 0
        self.sums = Sums()
        """The sums over all steps but the warm-up."""
        self._skipped_updates = 0
        self.slow = SlowLog()
        """The slow steps."""
        self.ranks: RankSummary | None = None
        """All ranks beside each other, as they were last compared."""
        self.newest_probed: StepRecord | None = None
        """The newest step that was probed, its work alone."""
        self.books: WallTimeRecorder | None = None
        """The ledger of a fit, where a trainer tells it."""
        self.peaks = PhaseMemory()
        """The memory of phases."""
        self.setup = Setup()
        """How the training is set up."""
        self.yardstick = ThroughputReference()
        """What the work of the steps is held against."""
        self.timed_every_n_steps = 1
        """1 of this many steps is timed now, with `every_n_steps="auto"`."""
        self.timing_share: float | None = None
        """What timing each step would take, as a fraction of the step; None if unknown."""
        self.observers: Sequence[Any] = ()
        """Those of the user, which add sections to the summary."""
        self._busy = Sums()
        self.probe_failure = ""
        """Why no step is probed any more; empty if they are."""

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            copied = {"_newest": self._newest.copy(), "sums": self.sums.copy()}
            copied |= {"_busy": self._busy.copy()}
            # No lock goes into a copy: `ddp_spawn` pickles callbacks.
            return {**self.__dict__, **copied, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=RLock())

    @property
    def last(self) -> StepTimes | None:
        """The newest step, or None."""
        return self._newest.last().times() if len(self._newest) else None

    def newest(self) -> list[StepTimes]:
        """Returns the steps in the history, oldest first."""
        with self._lock:
            newest = self._newest.copy()
        # Outside of the lock, which the thread of the loop may be waiting for.
        return [step.times() for step in newest.steps()]

    def steps_read(self, steps: ReadSteps) -> None:
        """Take the next steps."""
        self.add(steps.records, steps.sums)

    def add(self, steps: Sequence[StepRecord], sums: Sums | None = None) -> Sequence[StepRecord]:
        """Takes the next steps, and returns those that are no warm-up.

        Args:
            steps: What was read, in order.
            sums: The sums over these steps, if they are known.
        """
        with self._lock:
            self._newest.extend(steps)
            warmup = max(self._warmup_steps - self._seen, 0)
            self._seen += len(steps)
            self._skipped_updates += sum(step.skipped_update for step in steps[:warmup])
            measured = steps[warmup:]
            self.sums.merge(Sums(measured) if warmup or sums is None else sums)
        return measured

    def slowest(self, n: int) -> SlowSteps:
        """Returns the slow steps with the largest excess."""
        return self.slow.slowest(n)

    def add_probed(self, step: StepRecord) -> None:
        """Takes a step that was probed; it is in no other statistics.

        Args:
            step: The work alone, without what kept the device busy.
        """
        with self._lock:
            self.newest_probed = step
            self._busy.merge(Sums([step]))

    def history(self) -> npt.NDArray[Any]:
        """Returns the newest steps as a structured array; see the timers' `history`."""
        return self.history_and_warmup()[0]

    def history_and_warmup(self) -> tuple[npt.NDArray[Any], int]:
        """Returns `history`, and how many of its first steps are warm-up."""
        with self._lock:
            newest, seen = self._newest.copy(), self._seen
        return history(newest.steps()), max(self._warmup_steps - (seen - len(newest)), 0)

    def summary(self) -> PhaseSummary:
        """Returns the statistics of all steps but the warm-up."""
        with self._lock:
            forgotten = self._seen - len(self._newest)
            newest, seen = self._newest.copy(), self._seen
            sums, busy = self.sums.copy(), self._busy.copy()
            skipped_updates = self._skipped_updates + sums.skipped_updates
        measured = newest.steps()[max(self._warmup_steps - forgotten, 0) :]
        times = history(measured)
        steps, step_ms = sums.step.n, sums.step.device_ms
        tflops = sums.work.tflops(self.yardstick.parts)
        memory = self.peaks.summary()
        peaks_mb = memory.peak_mb if memory is not None else {}
        highest_mb = max(peaks_mb.values(), default=None)
        rows = {
            name: _stats(
                sums.phases[name],
                times[f"{name}_ms"] if f"{name}_ms" in (times.dtype.names or ()) else (),
                step_ms,
                busy.phases.get(name),
                peaks_mb.get(name),
                tflops.get(name),
            )
            for name in in_order(list(sums.phases))
        }
        step = _stats(sums.step, times["step_ms"], step_ms, busy.step, highest_mb)
        summary = PhaseSummary(
            rows=rows,
            step=step,
            steps=steps,
            warmup_steps=min(seen, self._warmup_steps),
            host_wait_mean_ms=sums.wait_ms / steps if steps else math.nan,
            skipped_updates=skipped_updates,
            on_host_clock=self.on_host_clock,
            ranks=self.ranks,
            run_ahead_mean_ms=mean_run_ahead_ms(measured),
            probed_steps=busy.step.n,
            probe_failure=self.probe_failure,
            timed_every_n_steps=self.timed_every_n_steps,
            timing_share=self.timing_share,
            sections=sections_of(self.observers),
            hint="" if seen else self._hint,
            slow=self.slow.summary(steps, step_ms),
            work=self.yardstick.summary(sums.work, rows, step, busy.step.n > 0),
            ledger=self.books.summary() if self.books is not None else None,
            memory=memory,
        )
        return replace(summary, advice=advise(summary, self.setup))

    def in_short(self) -> str:
        """Returns the mean verdict so far in some words, for a progress bar; it costs little."""
        with self._lock:
            sums, busy = self.sums.copy(), self._busy.copy()
        if not sums.step.n:
            return ""
        step_ms = sums.step.device_ms
        bare = PhaseSummary(
            rows={
                name: _stats(one, (), step_ms, busy.phases.get(name))
                for name, one in sums.phases.items()
            },
            step=_stats(sums.step, (), step_ms),
            steps=sums.step.n,
            warmup_steps=0,
            host_wait_mean_ms=sums.wait_ms / sums.step.n,
            on_host_clock=self.on_host_clock,
            probed_steps=busy.step.n,
        )
        return bare._judged().in_short

    def summary_to_print(self) -> PhaseSummary:
        """Returns the summary, or that of the warm-up where there was nothing else."""
        with self._lock:
            newest = self._newest.copy()
        if self.sums.step.n or not len(newest):
            return self.summary()
        warmup = Results(len(newest), 0, self.on_host_clock)
        warmup.yardstick = self.yardstick
        warmup.add(newest.steps())
        warmup.peaks = self.peaks
        warmup.books = self.books
        return replace(warmup.summary(), is_warmup=True)


def _stats(
    total: PhaseSum,
    newest_ms: npt.ArrayLike,
    step_ms: float,
    busy: PhaseSum | None = None,
    peak_mb: float | None = None,
    tflops: float | None = None,
) -> PhaseStats:
    ran_ms = np.asarray(newest_ms)
    ran_ms = ran_ms[np.isfinite(ran_ms)]
    p50_ms, p95_ms = np.percentile(ran_ms, (50, 95)) if len(ran_ms) else (math.nan, math.nan)
    return PhaseStats(
        n=total.n,
        mean_ms=total.device_ms / total.n if total.n else math.nan,
        p50_ms=float(p50_ms),
        p95_ms=float(p95_ms),
        max_ms=total.max_ms if total.n else math.nan,
        share=total.device_ms / step_ms if step_ms else math.nan,
        host_mean_ms=total.host_ms / total.n if total.n else math.nan,
        busy_mean_ms=busy.device_ms / busy.n if busy is not None and busy.n else None,
        peak_mb=peak_mb,
        tflops=tflops,
    )
