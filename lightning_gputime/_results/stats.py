"""The statistics of one phase."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PhaseStats:
    """Statistics of one phase over the steps in which it ran.

    Attributes:
        n: Number of those steps.
        mean_ms: Mean device time a step (in milliseconds).
        p50_ms: Median, over the steps in the history (in milliseconds).
        p95_ms: 95th percentile, over the steps in the history (in milliseconds).
        max_ms: Longest (in milliseconds).
        share: Part of the device time of all steps, from 0 to 1.
        host_mean_ms: Mean host time a step between the same marks (in milliseconds).
        busy_mean_ms: Mean device time in the steps that were probed: the work without the gaps in
            which the device waited for launches (in milliseconds). None if none was probed.
        peak_mb: The most memory that was allocated in it, over all sampled steps (in MiB). None if
            it was not measured, see `PhaseSummary.memory`.
        tflops: What its FLOPs are in a second (in TFLOP/s), with those of what is computed again.
            None where they are not known.
    """

    n: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    max_ms: float
    share: float
    host_mean_ms: float
    busy_mean_ms: float | None = None
    peak_mb: float | None = None
    tflops: float | None = None
