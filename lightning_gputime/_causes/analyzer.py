"""Which steps were slow, and why."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf
from time import perf_counter_ns
from typing import Any

from lightning_gputime._causes.attribution import Baseline, ExcessAttribution
from lightning_gputime._causes.detectors import (
    Allocator,
    CauseDetector,
    Clocks,
    Compilation,
    Garbage,
    Loader,
    Phases,
    Preemption,
    Spans,
    allocator_of,
    clocks_of,
)
from lightning_gputime._messages import TellOnce
from lightning_gputime._record.clock import Clock
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.observers import ReadSteps, methods
from lightning_gputime._results.slow import SlowLog, SlowStep
from lightning_gputime._untraced import untraced

_TOGETHER = 25
"""Number of steps that are judged together, by those before."""


@untraced
class SlowStepAnalyzer:
    """Judges each step by a baseline of those before, and explains the slow ones, for a log.

    Nothing here raises: after an error no detector is asked any more.
    """

    def __init__(self, clock: Clock, log: SlowLog) -> None:
        self._log = log
        now_ns = self._now_ns = clock.host_ns
        loader = Loader(now_ns)
        self.own_calls = Spans("callback", now_ns)
        """When the timer called loggers, and functions of the user's."""
        self.set_loader, self.fetch_starts = loader.set_loader, loader.fetch_starts
        device = getattr(clock, "device", None)
        allocator, clocks = allocator_of(device), clocks_of(device)
        # First those that know when; then those that know how much; then those that know where.
        self.detectors: list[CauseDetector] = [
            Garbage(now_ns),
            Compilation(now_ns),
            self.own_calls,
            # Its times are of the system's clock.
            *([Preemption()] if now_ns is perf_counter_ns else []),
            loader,
            Phases(),
            *([Allocator(allocator)] if allocator is not None else []),
            *([Clocks(clocks)] if clocks is not None else []),
        ]
        """In the order in which they are asked."""
        self._is_attached = False
        self._step_ends: list[Callable[..., Any]] = []
        self._counters: list[Callable[..., Any]] = []
        # The end of the last step, and how long after it the end of a slow one is at least.
        self._ended_ns = 0
        self._host_threshold_ns = inf
        self._reads_counters = False
        self._baseline = Baseline()
        # When the timer made the host wait, and when it read steps: no fault of the loop's.
        self._waits: deque[tuple[int, int]] = deque(maxlen=4 * _TOGETHER)
        self._readings: deque[tuple[int, int]] = deque(maxlen=4 * _TOGETHER)
        self._reads_since = 0
        self._tell_once = TellOnce()
        self.newest: Sequence[SlowStep] = ()
        """The slow ones among the steps that were read last."""

    def attach(self) -> None:
        """Let the detectors look."""
        self._is_attached = True
        self._call_all("attach")
        self._step_ends = methods(self.detectors, "step_ends")
        self._counters = methods(self.detectors, "read_counters")

    def remove(self) -> None:
        """Take everything off. Safe to call twice, and in a process that was forked."""
        self._is_attached = False
        self._step_ends, self._counters = [], []
        for remove in methods(self.detectors, "remove"):
            remove()

    def _call_all(self, name: str, *args: Any) -> None:
        try:
            for method in methods(self.detectors, name):
                method(*args)
        except Exception as error:
            self._give_up(error)

    def loop_begins(self) -> None:
        """Call where a loop begins, in its thread."""
        self._call_all("loop_begins", self._now_ns())
        self.timing_resumes()

    def timing_resumes(self) -> None:
        """Call where a step starts after some that were not timed."""
        now_ns = self._ended_ns = self._now_ns()
        self._call_all("step_ends", now_ns)
        self._call_all("read_counters", now_ns)

    def step_ends(self, now_ns: int) -> None:
        """Call just before the end of a timed step is marked, and the start of one."""
        # Every step pays for this.
        for sample in self._step_ends:
            sample(now_ns)
        if now_ns - self._ended_ns > self._host_threshold_ns:
            for read in self._counters:
                read(now_ns)
        self._ended_ns = now_ns

    def reading_begins(self) -> None:
        """Call where the timer begins to read steps."""
        self._reads_since = self._now_ns()

    def steps_read(self, read: ReadSteps) -> None:
        """Judge the next steps but those of the warm-up; loggers are called next."""
        steps, each_ms = read.measured, read.sums.each_ms[read.warmup :]
        found: list[SlowStep] = []
        try:
            for first in range(0, len(steps), _TOGETHER):
                some = slice(first, first + _TOGETHER)
                found += self._judge_next(steps[some], each_ms[some])
        except Exception as error:
            found = []
            self._give_up(error)
        self._log.add(found, is_known=self._baseline.is_known)
        self.newest = found
        now_ns = self._now_ns()
        self._readings.append((self._reads_since, now_ns))
        # What is read together may be handed over in parts; and a span of own calls starts.
        self._reads_since = self.own_calls.started_ns = now_ns

    def _judge_next(self, steps: Sequence[StepRecord], each_ms: Sequence[float]) -> list[SlowStep]:
        baseline, found = self._baseline, []
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
                found = self._judge(baseline.steps, baseline.each_ms)
            self._baseline_changed()
        return found

    def _baseline_changed(self) -> None:
        self._host_threshold_ns = self._baseline.host_threshold_ms * 1e6
        if self._is_attached:
            self._call_all("baseline_changed", self._baseline)
        # To read them takes some 70 us.
        self._reads_counters = not self._reads_counters
        if self._reads_counters:
            self._call_all("read_counters", self._now_ns())

    def _judge(self, steps: Iterable[StepRecord], each_ms: Iterable[float]) -> list[SlowStep]:
        threshold_ms = self._baseline.slow_threshold_ms
        return [
            self._explain(step, ms)
            for step, ms in zip(steps, each_ms, strict=True)
            if ms > threshold_ms and ms - self._reading_ms(step) > threshold_ms
        ]

    def _reading_ms(self, step: StepRecord) -> float:
        """Return for how long the timer read steps in a step."""
        start, end = step.host_ns[0], step.host_ns[-1]
        return sum(max(min(end, b) - max(start, a), 0) for a, b in self._readings) / 1e6

    def _explain(self, step: StepRecord, step_ms: float) -> SlowStep:
        attribution = ExcessAttribution(step, step_ms, self._baseline, [*self._waits])
        for one in self.detectors:
            one.detect(attribution)
        return SlowStep(
            step.number,
            step_ms,
            self._baseline.step_ms,
            attribution.phase,
            attribution.causes(),
            attribution.unexplained_ms,
        )

    def _give_up(self, error: Exception) -> None:
        self._tell_once("Why steps are slow is not said any more: %r", error)
        self.remove()
        # Slow steps are still found, and unexplained.
        self.detectors = []
