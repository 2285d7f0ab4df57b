"""The times of many steps as numbers: the newest ones one by one, all of them as a summary."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gputime._phases import StepTimes, in_order
from lightning_gputime._ranks import STEP, RankSummary, Totals
from lightning_gputime._summary import PhaseStats, PhaseSummary


class Results:
    """Keeps what the summary and the history need of every step.

    Args:
        capacity: How many steps the history holds.
        warmup_steps: How many of the first steps the summary leaves out.
        on_host_clock: Whether the steps are timed without a device.
    """

    def __init__(self, capacity: int, warmup_steps: int, on_host_clock: bool = False) -> None:
        self._on_host_clock = on_host_clock
        self._warmup_steps = warmup_steps
        self._newest: deque[StepTimes] = deque(maxlen=capacity)
        self._seen = 0
        self._totals: dict[str, _Total] = {}
        self._step_total = _Total()
        self._host_wait_ms = 0.0
        self._skipped_updates = 0
        self.ranks: RankSummary | None = None
        """All ranks beside each other, as they were last compared."""

    @property
    def last(self) -> StepTimes | None:
        """The newest step, or None."""
        return self._newest[-1] if self._newest else None

    def newest(self) -> list[StepTimes]:
        """Returns the steps in the history, oldest first."""
        return list(self._newest)

    def add(self, times: StepTimes) -> None:
        """Takes the times of the next step."""
        self._newest.append(times)
        self._seen += 1
        self._skipped_updates += times.skipped_update
        if self._seen <= self._warmup_steps:
            return
        host_ms, totals = times.host_ms, self._totals
        for name, ms in times.phase_ms.items():
            total = totals.get(name)
            if total is None:
                total = totals[name] = _Total()
            total.add(ms, host_ms[name])
        self._step_total.add(times.step_ms, 0.0)
        self._host_wait_ms += times.host_wait_ms

    def totals(self) -> Totals:
        """Returns the sums over all steps but the warm-up, to be compared with other ranks."""
        totals = {name: (total.device_ms, total.n) for name, total in self._totals.items()}
        return {**totals, STEP: (self._step_total.device_ms, self._step_total.n)}

    def history(self) -> npt.NDArray[Any]:
        """Returns the newest steps as a structured array; see the timers' `history`."""
        names = in_order(list({name for times in self._newest for name in times.phase_ms}))
        fields = ["step_ms", "host_wait_ms", *(f"{name}_ms" for name in names)]
        dtype = np.dtype([("step", np.int64), *((field, np.float64) for field in fields)])
        array = np.empty(len(self._newest), dtype)
        array["step"] = [times.step for times in self._newest]
        array["step_ms"] = [times.step_ms for times in self._newest]
        array["host_wait_ms"] = [times.host_wait_ms for times in self._newest]
        for name in names:
            array[f"{name}_ms"] = [times.phase_ms.get(name, np.nan) for times in self._newest]
        return array

    def summary(self) -> PhaseSummary:
        """Returns the statistics of all steps but the warm-up."""
        measured = self._after_warmup()
        steps, step_ms = self._step_total.n, self._step_total.device_ms
        top_level = (total for name, total in self._totals.items() if "/" not in name)
        self._step_total.host_ms = sum(total.host_ms for total in top_level)
        return PhaseSummary(
            rows={
                name: self._totals[name].stats(
                    [times.phase_ms[name] for times in measured if name in times.phase_ms], step_ms
                )
                for name in in_order(list(self._totals))
            },
            step=self._step_total.stats([times.step_ms for times in measured], step_ms),
            steps=steps,
            warmup_steps=min(self._seen, self._warmup_steps),
            host_wait_mean_ms=self._host_wait_ms / steps if steps else math.nan,
            skipped_updates=self._skipped_updates,
            on_host_clock=self._on_host_clock,
            ranks=self.ranks,
        )

    def _after_warmup(self) -> list[StepTimes]:
        forgotten = self._seen - len(self._newest)
        return list(self._newest)[max(self._warmup_steps - forgotten, 0) :]


class _Total:
    __slots__ = ("device_ms", "host_ms", "max_ms", "n")

    def __init__(self) -> None:
        self.n = 0
        self.device_ms = self.host_ms = self.max_ms = 0.0

    def add(self, device_ms: float, host_ms: float) -> None:
        self.n += 1
        self.device_ms += device_ms
        self.host_ms += host_ms
        if device_ms > self.max_ms:
            self.max_ms = device_ms

    def stats(self, newest_ms: Sequence[float], step_ms: float) -> PhaseStats:
        p50_ms, p95_ms = np.percentile(newest_ms, (50, 95)) if newest_ms else (math.nan, math.nan)
        return PhaseStats(
            n=self.n,
            mean_ms=self.device_ms / self.n if self.n else math.nan,
            p50_ms=float(p50_ms),
            p95_ms=float(p95_ms),
            max_ms=self.max_ms if self.n else math.nan,
            share=self.device_ms / step_ms if step_ms else math.nan,
            host_mean_ms=self.host_ms / self.n if self.n else math.nan,
        )
