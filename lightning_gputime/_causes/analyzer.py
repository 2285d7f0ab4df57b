"""Which steps were slow, and why."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf
from time import perf_counter_ns
from typing import Any

from lightning_gputime._causes.attribution import ExcessAttribution
from lightning_gputime._causes.baseline import Baseline
from lightning_gputime._causes.counters import (
    Allocator,
    Clocks,
    Preemption,
    allocator_of,
    clocks_of,
)
from lightning_gputime._causes.detectors import (
    Callbacks,
    CauseDetector,
    Compilation,
    Garbage,
    Loader,
    Ranks,
    Spans,
)
from lightning_gputime._messages import TellOnce
from lightning_gputime._record.clock import Clock
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.observers import ReadSteps
from lightning_gputime._results.slow import SlowLog, SlowStep
from lightning_gputime._untraced import untraced

_TOGETHER = 25
"""Number of steps that are judged together, by those before."""


@untraced
class SlowStepAnalyzer:
    """Judges each step by a baseline of those before, and explains the slow ones.

    Nothing here raises: after an error no detector is asked any more.

    Args:
        clock: That of the steps.
        log: Gets the slow steps.
    """

    def __init__(self, clock: Clock, log: SlowLog | None = None) -> None:
        now_ns, device = clock.host_ns, getattr(clock, "device", None)
        allocator = allocator_of(device)
        self._now_ns = now_ns
        self.log = SlowLog() if log is None else log
        """The slow steps: `metrics` and `summary` are its methods."""
        self.metrics, self.summary = self.log.metrics, self.log.summary
        loader = Loader(now_ns)
        self.own_calls = Spans("callback", now_ns)
        """When the timer called loggers, and functions of the user's."""
        self.set_loader, self.fetch_starts = loader.set_loader, loader.fetch_starts
        # First those that know when; then those that know how much; then those that know where.
        self.detectors: list[CauseDetector] = [
            Garbage(now_ns),
            Compilation(now_ns),
            self.own_calls,
            # Its times are of the system's clock.
            *([Preemption()] if now_ns is perf_counter_ns else []),
            loader,
            Callbacks(),
            Ranks(),
            *([Allocator(allocator)] if allocator is not None else []),
            Clocks(clocks_of(device)),
        ]
        """In the order in which they are asked."""
        self._step_ends: list[Callable[[int], None]] = []
        self._counters: list[Callable[[int], None]] = []
        # The end of the last step, and how long after it the end of a slow one is at least.
        self._ended_ns = 0
        self._host_threshold_ns = inf
        self._reads_counters = False
        self._baseline = Baseline()
        # The first steps, until there are enough for a baseline.
        self._first: list[StepRecord] = []
        self._first_ms: list[float] = []
        # When the timer made the host wait, and when it read steps: no fault of the loop's.
        self._waits: deque[tuple[int, int]] = deque(maxlen=4 * _TOGETHER)
        self._readings: deque[tuple[int, int]] = deque(maxlen=4 * _TOGETHER)
        self._reads_since = 0
        self._tell_once = TellOnce()
        self.newest: Sequence[SlowStep] = ()
        """The slow ones among the steps that were read last."""

    def attach(self) -> None:
        """Let the detectors look."""
        try:
            self._call_all("attach")
        except Exception as error:
            self._give_up(error)
        self._step_ends = self._methods("step_ends")
        self._counters = self._methods("read_counters")

    def remove(self) -> None:
        """Take everything off. Safe to call twice, and in a process that was forked."""
        self._step_ends, self._counters = [], []
        self._call_all("remove")

    def _methods(self, name: str) -> list[Any]:
        return [getattr(one, name) for one in self.detectors if hasattr(one, name)]

    def _call_all(self, name: str, *args: Any) -> None:
        for method in self._methods(name):
            method(*args)

    def loop_begins(self) -> None:
        """Call where a loop begins, in its thread."""
        now_ns = self._ended_ns = self._now_ns()
        try:
            self._call_all("loop_begins", now_ns)
            self._call_all("step_ends", now_ns)
            self._call_all("read_counters", now_ns)
        except Exception as error:
            self._give_up(error)

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

    def reading_ends(self) -> None:
        """Call where it has, just before it calls loggers: there a span of its own calls starts."""
        now_ns = self._now_ns()
        self._readings.append((self._reads_since, now_ns))
        # What is read together may be handed over in parts.
        self._reads_since = self.own_calls.started_ns = now_ns

    def timing_resumes(self) -> None:
        """Call where a step starts after some that were not timed."""
        now_ns = self._ended_ns = self._now_ns()
        self._call_all("step_ends", now_ns)
        self._call_all("read_counters", now_ns)

    def steps_read(self, read: ReadSteps) -> None:
        """Judge the next steps but those of the warm-up."""
        steps, each_ms = read.measured, read.sums.each_ms[read.warmup :]
        found: list[SlowStep] = []
        try:
            for first in range(0, len(steps), _TOGETHER):
                some = slice(first, first + _TOGETHER)
                found += self._judge_next(steps[some], each_ms[some])
        except Exception as error:
            found = []
            self._give_up(error)
        self.log.add(found, is_known=self._baseline.is_known)
        self.newest = found
        self.reading_ends()

    def _judge_next(self, steps: Sequence[StepRecord], each_ms: Sequence[float]) -> list[SlowStep]:
        baseline, found = self._baseline, []
        self._waits += [
            (one.finished_ns - round(one.wait_ms * 1e6), one.finished_ns)
            for one in steps
            if one.finished_ns
        ]
        was_known = baseline.is_known
        if not was_known:
            self._first += steps
            self._first_ms += each_ms
        elif max(each_ms) > baseline.slow_threshold_ms:
            found = self._judge(steps, each_ms)
        if baseline.add(steps, each_ms):
            if not was_known:
                found = self._judge(self._first, self._first_ms)
                self._first, self._first_ms = [], []
            self._baseline_changed()
        return found

    def _baseline_changed(self) -> None:
        self._host_threshold_ns = self._baseline.host_threshold_ms * 1e6
        self._call_all("baseline_changed", self._baseline)
        # To read them takes some 70 us.
        self._reads_counters = not self._reads_counters
        if self._reads_counters:
            self._call_all("read_counters", self._now_ns())

    def _judge(self, steps: Sequence[StepRecord], each_ms: Sequence[float]) -> list[SlowStep]:
        threshold_ms = self._baseline.slow_threshold_ms
        return [
            self._explain(step, ms)
            for step, ms in zip(steps, each_ms, strict=True)
            if ms > threshold_ms and ms - _shared_ms(step, self._readings) > threshold_ms
        ]

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


def _shared_ms(step: StepRecord, times: Iterable[tuple[int, int]]) -> float:
    """Return how much of some host times is in a step (in milliseconds)."""
    start, end = step.host_ns[0], step.host_ns[-1]
    return sum(max(min(end, b) - max(start, a), 0) for a, b in times) / 1e6
