"""Why steps were slow: finds them among those that were read, and asks the witnesses."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any

from lightning_gputime._causes.compilation import Compilation
from lightning_gputime._causes.device import Allocator, Clocks, clocks_of, counters_of
from lightning_gputime._causes.garbage import Garbage
from lightning_gputime._causes.places import Callbacks, Loader, Logger, Ranks
from lightning_gputime._causes.preemption import Preemption
from lightning_gputime._causes.scene import Scene
from lightning_gputime._causes.usual import Usual, UsualPassed, falls_behind
from lightning_gputime._causes.witness import Witness
from lightning_gputime._messages import TellOnce
from lightning_gputime._phases import OTHER
from lightning_gputime._record.clock import Clock
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.slow import SlowStep
from lightning_gputime._untraced import untraced

# Steps that are read together are judged so many at a time, each by those before.
_TOGETHER = 25


@untraced
class Inquiry:
    """Judges each step by its neighbourhood, and says why the slow ones were slow.

    What it does for the others is bounded: two readings of counters at the end of each, and a
    comparison when they are read. Nothing here raises: after an error no witness is asked any more.

    Args:
        clock: That of the steps.
        loggers: What the loop logs to.
    """

    def __init__(
        self,
        clock: Clock,
        loggers: Sequence[Any] = (),
    ) -> None:
        now_ns, device = clock.host_ns, getattr(clock, "device", None)
        allocations = counters_of(device)
        self._loader = Loader(now_ns)
        self._logger = Logger(now_ns, loggers)
        self._now_ns = now_ns
        # When the timer itself has read steps: that is no fault of the loop's.
        self._readings: deque[tuple[int, int]] = deque(maxlen=4 * _TOGETHER)
        self._reads_since = 0
        self.read_ns = 0
        """How long that has taken, all in all (in nanoseconds)."""
        # First those that know when; then those that know how much; then those that know where.
        self._know_when: list[Witness] = [Garbage(now_ns), Compilation(now_ns), self._logger]
        self.witnesses: list[Witness] = [
            *self._know_when,
            # The scheduler goes by the system's clock.
            *([Preemption(now_ns)] if now_ns is perf_counter_ns else []),
            self._loader,
            Callbacks(),
            Ranks(),
            *([Allocator(now_ns, allocations)] if allocations is not None else []),
            Clocks(clocks_of(device)),
        ]
        """In the order in which they are asked."""
        self._usual = Usual()
        # The first steps, until there are enough to judge them by.
        self._unjudged: list[StepRecord] = []
        self._unjudged_ms: list[float] = []
        # When the timer itself has made the host wait.
        self._waits: deque[tuple[int, int]] = deque(maxlen=4 * _TOGETHER)
        self._tell_once = TellOnce()
        self.own = self._logger.own
        """Must be told when functions of the user's begin and end."""
        self.loads = self._loader.loads
        """Must be told the loader, and whether `data` has no part for its fetches."""
        self.loader_is_asked = self._loader.is_asked
        """Must be told where it has none, just before each fetch."""
        self.step_ends: Callable[[], None] = _nothing
        """Must be told just before a step ends."""
        self._loop_begins: list[Callable[[], None]] = []
        self._steps_pass: list[Callable[[], None]] = []
        self._steps_were_read: list[Callable[[Usual], None]] = []

    @property
    def judges(self) -> bool:
        """Whether it has judged any step."""
        return self._usual.is_known

    @property
    def host_sets_pace(self) -> bool:
        """Whether what the host takes for a step is what the step takes, as far as is known."""
        return self._usual.host_sets_pace()

    def attach(self) -> None:
        """Lets the witnesses look."""
        for one in self.witnesses:
            try:
                one.attach()
            except Exception as error:
                self._give_up(error)
                return
        ends = self._methods("step_ends")
        # Without a function around it, where there is but one.
        self.step_ends = ends[0] if len(ends) == 1 else partial(_call_all, ends)
        self._loop_begins = self._methods("loop_begins")
        self._steps_pass = self._methods("steps_pass")
        self._steps_were_read = self._methods("steps_were_read")

    def _methods(self, name: str) -> list[Any]:
        return [getattr(one, name) for one in self.witnesses if hasattr(one, name)]

    def remove(self) -> None:
        """Ends that. Safe to call twice."""
        self.step_ends = _nothing
        self._loop_begins, self._steps_pass, self._steps_were_read = [], [], []
        for one in self.witnesses:
            one.remove()

    def loop_begins(self) -> None:
        """Must be told where a loop begins, in its thread."""
        try:
            _call_all(self._loop_begins)
        except Exception as error:
            self._give_up(error)

    def steps_pass(self) -> None:
        """Must be told where steps begin of whose ends it is not told, as they are not timed."""
        _call_all(self._steps_pass)

    def take(self, steps: Sequence[StepRecord], each_ms: Sequence[float]) -> list[SlowStep]:
        """Takes the next steps but those of the warm-up, and returns the slow ones.

        Args:
            steps: What was read, in order.
            each_ms: How long each of them took (in milliseconds).
        """
        try:
            found = []
            for first in range(0, len(steps), _TOGETHER):
                some = slice(first, first + _TOGETHER)
                found += self._take(steps[some], each_ms[some])
            return found
        except Exception as error:
            self._give_up(error)
            return []

    def judge_passed(
        self,
        number: int,
        host_ns: Sequence[int],
        usual_ns: float,
        limit_ns: float,
        recorder: Recorder,
    ) -> list[SlowStep]:
        """Judges a step that was not timed, and returns it with its causes if it was slow.

        Args:
            number: The number of the step.
            host_ns: The host's time when it began, and when it ended (in nanoseconds).
            usual_ns: How long the host usually takes for one (in nanoseconds).
            limit_ns: From which time on it is slow (in nanoseconds).
            recorder: Knows the newest step that was timed, and when the host waited for one.
        """
        took_ms = (host_ns[1] - host_ns[0]) / 1e6
        step = StepRecord(number, (OTHER,), (took_ms,), host_ns, 0.0, 0, False)
        own_ms = self._read_ms(step) + _shared_ms(step, [recorder.blocked_ns])
        if took_ms - own_ms <= limit_ns / 1e6:
            return []
        try:
            # What is usual of the pace is late where that changes, by up to 25 timed steps.
            if falls_behind(*(recorder.newest_ms() or self._usual.newest_ms())):
                return []
            slow = self._explain(step, took_ms, UsualPassed(usual_ns / 1e6), self._know_when)
            return [replace(slow, phase="")]
        except Exception as error:
            self._give_up(error)
            return []

    def reading_begins(self) -> None:
        """Must be told where the timer begins to read steps."""
        self._reads_since = self._now_ns()

    def reading_ends(self) -> None:
        """Must be told where it has, before it calls loggers and functions of the user's."""
        now = self._now_ns()
        self._readings.append((self._reads_since, now))
        self.read_ns += now - self._reads_since
        # What is read together may be handed over in parts.
        self._reads_since = now

    def _take(self, steps: Sequence[StepRecord], each_ms: Sequence[float]) -> list[SlowStep]:
        usual = self._usual
        self._waits += [
            (one.finished_ns - round(one.wait_ms * 1e6), one.finished_ns)
            for one in steps
            if one.finished_ns
        ]
        found = []
        if not usual.is_known:
            self._unjudged += steps
            self._unjudged_ms += each_ms
        elif max(each_ms) > usual.limit_ms:
            found = self._judge(steps, each_ms)
        was_known = usual.is_known
        if usual.add(steps, each_ms):
            if not was_known:
                found = self._judge(self._unjudged, self._unjudged_ms)
                self._unjudged, self._unjudged_ms = [], []
            for tell in self._steps_were_read:
                tell(usual)
        return found

    def _judge(self, steps: Sequence[StepRecord], each_ms: Sequence[float]) -> list[SlowStep]:
        limit_ms = self._usual.limit_ms
        return [
            self._explain(step, ms, self._usual, self.witnesses)
            for step, ms in zip(steps, each_ms, strict=True)
            if ms > limit_ms and ms - self._read_ms(step) > limit_ms
        ]

    def _read_ms(self, step: StepRecord) -> float:
        """Returns how long the timer read others inside a step (in milliseconds)."""
        return _shared_ms(step, self._readings)

    def _explain(
        self,
        step: StepRecord,
        step_ms: float,
        usual: Usual | UsualPassed,
        witnesses: Sequence[Witness],
    ) -> SlowStep:
        scene = Scene(step, step_ms, usual, [*self._waits])
        for one in witnesses:
            one.testify(scene)
        causes = scene.causes()
        return SlowStep(
            step.number, step_ms, usual.step_ms, scene.phase, causes, scene.unexplained_ms
        )

    def _give_up(self, error: Exception) -> None:
        self._tell_once("Why steps are slow is not said any more: %r", error)
        self.remove()
        # What is slow is still found, and unexplained.
        self.witnesses, self._know_when = [], []


@untraced
def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


@untraced
def _nothing() -> None:
    pass


def _shared_ms(step: StepRecord, times: Iterable[tuple[int, int]]) -> float:
    """Returns how much of some times of the host lies in a step (in milliseconds)."""
    begin, end = step.host_ns[0], step.host_ns[-1]
    return sum(max(min(end, b) - max(begin, a), 0) for a, b in times) / 1e6
