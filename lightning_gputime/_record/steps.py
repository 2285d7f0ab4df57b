"""One step as it was read: the record that the numbers are made of."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from lightning_gputime._phases import StepTimes, Timeline, resolve_labels


class StepRecord(NamedTuple):
    """A step that was read. Nothing in it refers to an object: it costs no garbage collection.

    Attributes:
        number: The number that the step is logged under.
        labels: The labels of the step's marks, without the last one, which is its end.
        device_ms: Device time from each mark to the next (in milliseconds).
        host_ns: Host time of each mark (in nanoseconds).
        wait_ms: How long the host waited for the device to finish the step (in milliseconds).
        finished_ns: Host time at which the device finished, where the host waited for that (in
            nanoseconds); else 0.
        skipped_update: Whether no optimizer ran its update.
        was_fully_queued: Whether, in a step that was probed, the device had not begun it when the
            host had launched all of it.
        post_spin_index: The index of the mark behind what kept the device busy; 0 if nothing did.
        work_counts: Its items, the FLOPs of the model, and those of forward and of backward as they
            ran; NaN where that is not known. Of what was not asked for, nothing.
        memory: At each mark, its end included, the peak since the last one and what was allocated
            (in bytes); nothing in a step that was not sampled.
    """

    number: int
    labels: tuple[str, ...]
    device_ms: Sequence[float]
    host_ns: Sequence[int]
    wait_ms: float
    finished_ns: int
    skipped_update: bool
    was_fully_queued: bool | None = None
    post_spin_index: int = 0
    work_counts: tuple[float, ...] = ()
    memory: tuple[tuple[int, int], ...] = ()

    @property
    def spin_ms(self) -> float:
        """How long the device was kept busy before it (in milliseconds)."""
        return self.device_ms[self.post_spin_index - 1] if self.post_spin_index else 0.0

    def times(self) -> StepTimes:
        # Made when somebody asks, and not kept: most steps are only added up, for which the record
        # is enough.
        settled = resolve_labels(self.labels)
        phase_ms: dict[str, float] = {}
        host_ms: dict[str, float] = {}
        step_ms = 0.0
        for names, ms, (start, end) in zip(
            settled, self.device_ms, pairwise(self.host_ns), strict=True
        ):
            if names:
                step_ms += ms
            for name in names:
                phase_ms[name] = phase_ms.get(name, 0.0) + ms
                host_ms[name] = host_ms.get(name, 0.0) + (end - start) / 1e6
        timeline = Timeline(settled, (*self.device_ms,), (*self.host_ns,), self.finished_ns)
        return StepTimes(
            self.number,
            phase_ms,
            host_ms,
            self.wait_ms,
            step_ms,
            self.skipped_update,
            timeline,
        )
