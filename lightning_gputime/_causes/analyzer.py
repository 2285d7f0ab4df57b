"""Slow steps: find them by a running baseline, and collect evidence of their causes."""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns

from lightning_gputime._causes.attribution import NOT_EXPLAINED, Baseline, Detector, explain
from lightning_gputime._causes.detectors import (
    Allocator,
    HostSpans,
    Loader,
    Preemption,
    allocator_of,
    collect_phases,
    thread_usage,
)
from lightning_gputime._causes.sampler import StepEndSampler
from lightning_gputime._causes.timer_time import TimerTime
from lightning_gputime._measurement.culprits import CulpritSums
from lightning_gputime._measurement.history import MIN_PACKED_MARKS, pack
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.slow import SlowEvidence, SlowLog, SlowStep
from lightning_gputime._messages import WarnOnce
from lightning_gputime._phases import StepRecord
from lightning_gputime._record.clock import Clock

_BLOCK_STEPS = 25  # Number of steps that are compared with the same baseline.


class SlowStepAnalyzer:
    """Compare each step with a baseline of earlier steps, and collect evidence on slow steps.

    The log explains slow steps on request. On a noisy host, a quarter of short steps may be slow:
    explaining each of them in the loop would double the cost of the timer.

    Nothing here raises. After an error, slow steps are still found, but no longer explained.
    """

    def __init__(self, clock: Clock, log: SlowLog, culprits: CulpritSums) -> None:
        self._log = log
        now_ns = self._now_ns = clock.host_ns
        self._spans = HostSpans(now_ns, culprits)
        # Call these before and after loggers and observers run. `end_callback` takes their name.
        self.start_callback = partial(self._spans.start, "callback")
        self.end_callback = partial(self._spans.end, "callback")
        self._culprits = culprits
        self._loader = Loader(culprits.newest_batches)
        self.set_loader = self._loader.set_loader
        allocator = Allocator(allocator_of(getattr(clock, "device", None)))
        # CPU time can only be compared with the system clock.
        preemption = Preemption(thread_usage() if now_ns is perf_counter_ns else None)
        self.sampler = StepEndSampler(allocator, preemption)
        # Detectors run in this order, and each explains only what the detectors before it did not.
        # So spans with known times come first, the allocator's counters and CPU time last.
        self.collectors: list[Callable[[Sequence[StepRecord], Baseline], Detector | None]] = [
            self._spans.collect,
            self._loader.collect,
            collect_phases,
            allocator.collect,
            preemption.collect,
        ]
        self._is_attached = False
        self._baseline = Baseline()
        self._timer_time = TimerTime()
        self._warn_once = WarnOnce()
        self.newest: Sequence[SlowStep] = ()
        """Slow steps in the newest batch of read steps; empty unless the log `is_followed`."""

    def attach(self) -> None:
        self._is_attached = True
        try:
            self._spans.attach()
        except Exception as error:
            self._give_up(error)

    def remove(self) -> None:
        """Stop collecting evidence. Safe to call twice, and in a forked process."""
        self._is_attached = False
        self.sampler.stop()
        self._spans.remove()

    def loop_begins(self) -> None:
        self._loader.loop_begins(self._now_ns())
        self.timing_resumes()

    def timing_resumes(self) -> None:
        """Call at the start of a timed step that does not follow a timed step."""
        if self._is_attached:
            self.sampler.start(self._now_ns())

    def steps_read(self, read: ReadSteps) -> None:
        """Find slow steps after the warm-up. Then start a "callback" span: loggers run next."""
        steps, each_ms = read.measured, read.sums.each_ms[read.warmup :]
        found: list[SlowEvidence] = []
        try:
            for workers in self._culprits.workers:
                workers.look()
            for first in range(0, len(steps), _BLOCK_STEPS):
                block = slice(first, first + _BLOCK_STEPS)
                found += self._examine_block(steps[block], each_ms[block])
        except Exception as error:
            found = []
            self._give_up(error)
        self.newest = self._log.add(found, has_baseline=self._baseline.is_ready)
        self._timer_time.add_reading(read.since_ns, self._now_ns())
        self.start_callback()

    def _examine_block(
        self, steps: Sequence[StepRecord], each_ms: Sequence[float]
    ) -> list[SlowEvidence]:
        """Find the slow steps of a block, then add the block to the baseline."""
        baseline = self._baseline
        found: list[SlowEvidence] = []
        self._timer_time.add_waits(steps)
        was_ready = baseline.is_ready
        if was_ready and max(each_ms) > baseline.slow_threshold_ms:
            found = self._find_slow(steps, each_ms)
        if baseline.add(steps, each_ms):
            if not was_ready:  # The first baseline contains all steps so far: examine them now.
                found = self._find_slow([*baseline.steps], [*baseline.each_ms])
            if self._is_attached:
                self._spans.attach()  # Dynamo may have been imported or reset meanwhile.
                self.sampler.follow(baseline, self._now_ns())
        return found

    def _find_slow(
        self, steps: Sequence[StepRecord], each_ms: Sequence[float]
    ) -> list[SlowEvidence]:
        """Return the slow steps of a block, with the evidence of their causes."""
        baseline = self._baseline
        threshold_ms = baseline.slow_threshold_ms
        slow = [
            (step, ms)
            for step, ms in zip(steps, each_ms, strict=True)
            # Most steps fail the first condition, which is cheap.
            if ms > threshold_ms
            and step.lines is None
            and ms - self._timer_time.reading_ms(step) > threshold_ms
        ]
        if not slow:
            return []
        records = [step for step, _ in slow]
        collected = [collect(records, baseline) for collect in self.collectors]
        detectors = [detector for detector in collected if detector is not None]
        waits = self._timer_time.waits_in(records[0].host_ns[0], records[-1].host_ns[-1])
        medians = baseline.medians()
        found = []
        for step, ms in slow:
            # Pack long steps to save memory.
            kept = pack(step) if len(step.labels) >= MIN_PACKED_MARKS else step
            call = partial(explain, kept, ms, medians, waits, detectors, self._warn_once)
            found.append(SlowEvidence(ms - baseline.step_ms, call))
        return found

    def _give_up(self, error: Exception) -> None:
        self._warn_once(NOT_EXPLAINED, error)
        self.remove()
        self.collectors = []
