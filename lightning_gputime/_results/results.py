"""The times of many steps as numbers: the newest ones one by one, all of them as a summary."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gputime._phases import StepTimes, in_order
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.ranks import RankSummary
from lightning_gputime._results.slow import SlowLog, SlowStep, SlowSteps
from lightning_gputime._results.stats import PhaseStats
from lightning_gputime._results.summary import PhaseSummary
from lightning_gputime._results.sums import PhaseSum, Sums


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
        self._newest: deque[StepRecord] = deque(maxlen=capacity)
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
        self._busy = Sums()
        self.probe_failure = ""
        """Why no step is probed any more; empty if they are."""

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            copied = {"_newest": self._newest.copy(), "sums": self.sums.copy()}
            copied |= {"_busy": self._busy.copy(), "slow": self.slow.copy()}
            # No lock goes into a copy: `ddp_spawn` pickles callbacks.
            return {**self.__dict__, **copied, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=RLock())

    @property
    def last(self) -> StepTimes | None:
        """The newest step, or None."""
        return self._newest[-1].times() if self._newest else None

    def newest(self) -> list[StepTimes]:
        """Returns the steps in the history, oldest first."""
        with self._lock:
            newest = [*self._newest]
        # Outside of the lock, which the thread of the loop may be waiting for.
        return [step.times() for step in newest]

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

    def add_slow(self, steps: Sequence[SlowStep]) -> None:
        """Takes those of the steps that were slow."""
        with self._lock:
            self.slow.add(steps)

    def slowest(self, n: int) -> SlowSteps:
        """Returns the slow steps with the largest excess."""
        with self._lock:
            return SlowSteps(self.slow.slowest(n))

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
        newest = self.newest()
        names = in_order(list({name for times in newest for name in times.phase_ms}))
        fields = ["step_ms", "host_wait_ms", *(f"{name}_ms" for name in names)]
        dtype = np.dtype([("step", np.int64), *((field, np.float64) for field in fields)])
        array = np.empty(len(newest), dtype)
        array["step"] = [times.step for times in newest]
        array["step_ms"] = [times.step_ms for times in newest]
        array["host_wait_ms"] = [times.host_wait_ms for times in newest]
        for name in names:
            array[f"{name}_ms"] = [times.phase_ms.get(name, np.nan) for times in newest]
        return array

    def summary(self) -> PhaseSummary:
        """Returns the statistics of all steps but the warm-up."""
        with self._lock:
            forgotten = self._seen - len(self._newest)
            newest, seen = [*self._newest], self._seen
            sums, busy = self.sums.copy(), self._busy.copy()
            skipped_updates = self._skipped_updates + sums.skipped_updates
            slow = self.slow.copy()
        measured = [one.times() for one in newest[max(self._warmup_steps - forgotten, 0) :]]
        steps, step_ms = sums.step.n, sums.step.device_ms
        return PhaseSummary(
            rows={
                name: _stats(
                    sums.phases[name],
                    [times.phase_ms[name] for times in measured if name in times.phase_ms],
                    step_ms,
                    busy.phases.get(name),
                )
                for name in in_order(list(sums.phases))
            },
            step=_stats(sums.step, [times.step_ms for times in measured], step_ms, busy.step),
            steps=steps,
            warmup_steps=min(seen, self._warmup_steps),
            host_wait_mean_ms=sums.wait_ms / steps if steps else math.nan,
            skipped_updates=skipped_updates,
            on_host_clock=self.on_host_clock,
            ranks=self.ranks,
            run_ahead_mean_ms=_mean_run_ahead_ms(measured),
            probed_steps=busy.step.n,
            probe_failure=self.probe_failure,
            hint="" if seen else self._hint,
            slow=slow.summary(steps, step_ms),
        )

    def summary_to_print(self) -> PhaseSummary:
        """Returns the summary, or that of the warm-up where there was nothing else."""
        with self._lock:
            newest = [*self._newest]
        if self.sums.step.n or not newest:
            return self.summary()
        warmup = Results(len(newest), 0, self.on_host_clock)
        warmup.add(newest)
        return replace(warmup.summary(), is_warmup=True)


def _stats(
    total: PhaseSum, newest_ms: Sequence[float], step_ms: float, busy: PhaseSum | None = None
) -> PhaseStats:
    p50_ms, p95_ms = np.percentile(newest_ms, (50, 95)) if newest_ms else (math.nan, math.nan)
    return PhaseStats(
        n=total.n,
        mean_ms=total.device_ms / total.n if total.n else math.nan,
        p50_ms=float(p50_ms),
        p95_ms=float(p95_ms),
        max_ms=total.max_ms if total.n else math.nan,
        share=total.device_ms / step_ms if step_ms else math.nan,
        host_mean_ms=total.host_ms / total.n if total.n else math.nan,
        busy_mean_ms=busy.device_ms / busy.n if busy is not None and busy.n else None,
    )


def _run_ahead_ms(step: StepTimes) -> list[float] | None:
    """Returns how far the host was ahead of the device at each mark of a step.

    A wait that blocks ends when the device reaches the end of the step: there the clocks meet.

    Returns:
        The time from the host's passing a mark to the device's (in milliseconds); None if the host
        did not block for this step.
    """
    line = step.timeline
    if line is None or not line.finished_ns:
        return None
    first_ms = line.finished_ns / 1e6 - sum(line.device_ms)
    reached_ms = accumulate(line.device_ms, initial=first_ms)
    return [ms - ns / 1e6 for ms, ns in zip(reached_ms, line.host_ns, strict=True)]


def _mean_run_ahead_ms(steps: Sequence[StepTimes]) -> float | None:
    """Returns the mean over all marks of steps; None if the host blocked in less than half."""
    known = [ahead for ahead in map(_run_ahead_ms, steps) if ahead is not None]
    if len(known) < max(len(steps) / 2, 1):
        return None
    return sum(map(sum, known)) / sum(map(len, known))
