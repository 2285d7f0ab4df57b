"""Which steps were slow, and why."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from time import perf_counter_ns

from lightning_gputime._causes.attribution import NOT_SAID, Baseline, Detector, explain
from lightning_gputime._causes.detectors import (
    Allocator,
    HostSpans,
    Loader,
    Preemption,
    allocator_of,
    collect_phases,
    thread_usage,
)
from lightning_gputime._measurement.culprits import CulpritSums
from lightning_gputime._measurement.history import MIN_PACKED_MARKS, pack
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.slow import SlowEvidence, SlowLog, SlowStep
from lightning_gputime._messages import WarnOnce
from lightning_gputime._phases import StepRecord
from lightning_gputime._record.clock import Clock

_TOGETHER = 25  # Number of steps that are judged together, by those before.
# Of shorter steps no CPU time is sampled: beside a GPU that costs some 5 us each (a system call
# whose code is cold).
_WORTH_MS = 2.0


class SlowStepAnalyzer:
    """Judge each step by a baseline of those before, and collect why the slow ones were slow.

    Steps are explained when somebody asks the log for causes. On a noisy host a quarter of short
    steps may be slow: to explain each in the loop would double the cost of the timer.

    Nothing here raises: after an error no evidence is collected any more.
    """

    def __init__(self, clock: Clock, log: SlowLog, culprits: CulpritSums) -> None:
        self._log = log
        now_ns = self._now_ns = clock.host_ns
        self._spans = HostSpans(now_ns, culprits)
        # To call around loggers and functions of the user's, the second with what was called.
        self.start_own_call = partial(self._spans.start, "callback")
        self.end_own_call = partial(self._spans.end, "callback")
        self._culprits = culprits
        self._loader = Loader(culprits.newest_batches)
        self.set_loader = self._loader.set_loader
        self._allocator = Allocator(allocator_of(getattr(clock, "device", None)))
        # Its times are of the system's clock.
        self._preemption = Preemption(thread_usage() if now_ns is perf_counter_ns else None)
        # In the order in which they are asked: first those that know when, last the rarest.
        self.collectors: list[Callable[[Sequence[StepRecord], Baseline], Detector | None]] = [
            self._spans.collect,
            self._loader.collect,
            collect_phases,
            self._allocator.collect,
            self._preemption.collect,
        ]
        self._is_attached = False
        self._sample_usage: Callable[[int], None] | None = None
        # The end of the last step, and how long after it the end of a slow one is at least.
        self._ended_ns = 0
        self._host_threshold_ns = inf
        self._baseline = Baseline()
        # When the timer made the host wait, and when it read steps: no fault of the loop's.
        self._waits: deque[tuple[int, int]] = deque(maxlen=4 * _TOGETHER)
        self._readings: deque[tuple[int, int]] = deque(maxlen=4 * _TOGETHER)
        self._warn_once = WarnOnce()
        # Of the steps that were read last, if somebody follows the log.
        self.newest: Sequence[SlowStep] = ()

    def attach(self) -> None:
        self._is_attached = True
        try:
            self._spans.attach()
        except Exception as error:
            self._give_up(error)

    def remove(self) -> None:
        """Take everything off. Safe to call twice, and in a process that was forked."""
        self._is_attached, self._sample_usage = False, None
        self._host_threshold_ns = inf
        self._spans.remove()

    def loop_begins(self) -> None:
        self._loader.loop_begins(self._now_ns())
        self.timing_resumes()

    def timing_resumes(self) -> None:
        """Call where a step starts after some that were not timed."""
        now_ns = self._ended_ns = self._now_ns()
        if self._sample_usage is not None:
            self._sample_usage(now_ns)
        if self._is_attached:
            self._allocator.sample(now_ns)

    def step_ends(self, now_ns: int) -> None:
        """Call just before the end of a timed step is marked, and the start of one."""
        # Every step pays for this.
        if self._sample_usage is not None:
            self._sample_usage(now_ns)
        if now_ns - self._ended_ns > self._host_threshold_ns:
            self._allocator.sample(now_ns)
        self._ended_ns = now_ns

    def steps_read(self, read: ReadSteps) -> None:
        """Judge the next steps but those of the warm-up; loggers are called next."""
        steps, each_ms = read.measured, read.sums.each_ms[read.warmup :]
        found: list[SlowEvidence] = []
        try:
            self._culprits.look_at_workers()
            for first in range(0, len(steps), _TOGETHER):
                some = slice(first, first + _TOGETHER)
                found += self._judge_next(steps[some], each_ms[some])
        except Exception as error:
            found = []
            self._give_up(error)
        self.newest = self._log.add(found, is_known=self._baseline.is_known)
        now_ns = self._now_ns()
        self._readings.append((read.since_ns, now_ns))
        self.start_own_call()

    def _judge_next(
        self, steps: Sequence[StepRecord], each_ms: Sequence[float]
    ) -> list[SlowEvidence]:
        baseline, found = self._baseline, list[SlowEvidence]()
        self._waits += [
            (one.finished_ns - round(one.wait_ms * 1e6), one.finished_ns)
            for one in steps
            if one.finished_ns
        ]
        was_known = baseline.is_known
        if was_known and max(each_ms) > baseline.slow_threshold_ms:
            found = self._judge(steps, each_ms)
        if baseline.add(steps, each_ms):
            if not was_known:  # It is made of the first steps, all of which it still has.
                found = self._judge([*baseline.steps], [*baseline.each_ms])
            self._baseline_changed()
        return found

    def _baseline_changed(self) -> None:
        if not self._is_attached:
            return
        self._host_threshold_ns = self._baseline.host_threshold_ms * 1e6
        is_long = self._baseline.host_ms >= _WORTH_MS
        is_sampled = is_long and self._preemption.usage is not None
        self._sample_usage = self._preemption.sample if is_sampled else None
        self._spans.attach()  # Dynamo may have been loaded, or reset, since.
        self._allocator.sample(self._now_ns())  # Every 25 steps, as it takes some 70 us.

    def _judge(self, steps: Sequence[StepRecord], each_ms: Sequence[float]) -> list[SlowEvidence]:
        """Return the slow steps of a block, with the evidence of their causes."""
        baseline, slow = self._baseline, []
        threshold_ms = baseline.slow_threshold_ms
        for step, ms in zip(steps, each_ms, strict=True):
            if ms <= threshold_ms:
                continue
            start, end, reading_ns = step.host_ns[0], step.host_ns[-1], 0
            for begun, ended in self._readings:
                if begun < end and start < ended:
                    reading_ns += min(end, ended) - max(start, begun)
            if ms - reading_ns / 1e6 > threshold_ms:
                slow.append((step, ms))
        if not slow:
            return []
        records = [step for step, _ in slow]
        detectors = [one for collect in self.collectors if (one := collect(records, baseline))]
        start, end = records[0].host_ns[0], records[-1].host_ns[-1]
        waits = [wait for wait in self._waits if wait[1] > start and wait[0] < end]
        why = baseline.medians(), waits, detectors, self._warn_once
        found = []
        for step, ms in slow:
            kept = pack(step) if len(step.labels) >= MIN_PACKED_MARKS else step
            call = partial(explain, kept, ms, *why)
            found.append(SlowEvidence(ms - baseline.step_ms, step.number, call))
        return found

    def _give_up(self, error: Exception) -> None:
        self._warn_once(NOT_SAID, error)
        self.remove()
        # Slow steps are still found, and unexplained.
        self.collectors = []
