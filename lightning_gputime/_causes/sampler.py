"""Samples at the ends of steps: CPU time of the thread, and counters of the allocator."""

from collections.abc import Callable
from math import inf

from lightning_gputime._causes.attribution import Baseline
from lightning_gputime._causes.detectors import Allocator, Preemption

_MIN_SAMPLED_MS = 2.0
"""Minimum host time of steps whose CPU time is sampled. A sample takes about 5 us, because the code
of the system call is not in the caches of a CPU that drives a GPU."""


class StepEndSampler:
    """Sampler at the ends of steps. What it samples depends on the newest baseline.

    Args:
        allocator: Sampled after steps with a long host time, and every 25 steps.
        preemption: Sampled after every step, if steps are long.
    """

    def __init__(self, allocator: Allocator, preemption: Preemption) -> None:
        self._allocator, self._preemption = allocator, preemption
        self._sample_usage: Callable[[int], None] | None = None  # None while steps are short.
        self._ended_ns = 0  # Host time of the end of the last step.
        self._threshold_ns = inf  # The allocator is sampled after steps with a longer host time.

    def start(self, now_ns: int) -> None:
        """Sample at the start of a timed step that does not follow a timed step."""
        self._ended_ns = now_ns
        if self._sample_usage is not None:
            self._sample_usage(now_ns)
        self._allocator.sample(now_ns)

    def end_step(self, now_ns: int) -> None:
        """Sample just before the mark between two steps. Keep it cheap: it runs in every step."""
        if self._sample_usage is not None:
            self._sample_usage(now_ns)
        if now_ns - self._ended_ns > self._threshold_ns:
            self._allocator.sample(now_ns)
        self._ended_ns = now_ns

    def follow(self, baseline: Baseline, now_ns: int) -> None:
        """Choose what to sample from a new baseline."""
        self._threshold_ns = baseline.host_threshold_ms * 1e6
        is_long = baseline.host_ms >= _MIN_SAMPLED_MS
        self._sample_usage = self._preemption.sample if is_long else None
        self._allocator.sample(now_ns)

    def stop(self) -> None:
        self._sample_usage, self._threshold_ns = None, inf
