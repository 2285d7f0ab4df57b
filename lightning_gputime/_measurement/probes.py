"""Probed steps: the GPU's work without launch gaps."""

from collections.abc import Mapping
from typing import Any

from lightning_gputime._measurement.sums import Sums
from lightning_gputime._phases import BETWEEN_BATCHES, StepRecord, is_wait


class Probes:
    """Sums over the probed steps."""

    def __init__(self) -> None:
        self.sums = Sums()
        self.newest: StepRecord | None = None
        self.failure = ""
        """Reason why no more steps are probed; empty if none."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "sums": self.sums.copy()}

    def add(self, step: StepRecord) -> None:
        self.newest = step
        self.sums.merge(Sums([step]))

    def fail(self, reason: str) -> None:
        self.failure = reason

    def means_ms(self, means_ms: Mapping[str, float]) -> dict[str, float]:
        """Return GPU busy times of the newest probed step, and the launch gap (in milliseconds).

        The launch gap is the idle time of the GPU in a step that was not probed. The result is
        empty before the first probe, and after a failure.

        Args:
            means_ms: Mean times of the steps that were not probed (in milliseconds).
        """
        if self.newest is None or self.failure:
            return {}
        probed = self.newest.times()
        busy_ms = {**probed.phase_ms, "step": probed.step_ms}
        # Exclude idle time that launches do not cause: between batches, the GPU waits for the
        # loader or callbacks, and in `comm` for other ranks.
        step_ms, busy_step_ms = (
            times_ms["step"] - sum(times_ms.get(name, 0.0) for name in BETWEEN_BATCHES)
            for times_ms in (means_ms, busy_ms)
        )
        comm_ms = sum(
            ms
            for name, ms in means_ms.items()
            if is_wait(name) and name.partition("/")[0] not in BETWEEN_BATCHES
        )
        gap_ms = max(step_ms - comm_ms - busy_step_ms, 0.0)
        busy = {f"{name}_gpu_busy": ms for name, ms in busy_ms.items()}
        return {**busy, "step_launch_gap": gap_ms}
