"""Which steps are timed, by their index alone, so that all ranks agree; and probing."""

import statistics
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal

from lightning_gputime._instrumentation.comm import is_distributed
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.sums import Sums
from lightning_gputime._messages import messages
from lightning_gputime._phases import EVALUATED, EXCLUDED, FIRST_STEPS, StepRecord, in_order
from lightning_gputime._record.clock import Clock

# Successive multiples of it, modulo 1, lie as evenly as can be.
_GOLDEN = 0.6180339887498949
_LOG_TURNS = 8  # 1 of this many blocks covers the steps in which logs are written.

# What becomes of a step.
StepKind = Literal["timed", "probed", "untimed"]
TIMED: StepKind = "timed"  # Its times count.
PROBED: StepKind = "probed"  # It is launched while the device is kept busy, and counts apart.
UNTIMED: StepKind = "untimed"  # It is one of those between the timed steps, or behind a probed one.


@dataclass(frozen=True, slots=True)
class Plan:
    """How many steps are timed: a block of steps in each of `blocks` parts of every window.

    Attributes:
        block: Number of timed steps in a row.
        window: Number of steps between two logs.
        blocks: Number of blocks in a window.
        ends_in_log: Whether logs are written at the end of windows.
        recurrence: Index of a long step and the distance to the next one, on which all ranks agree.
    """

    block: int = 1
    window: int = 1
    blocks: int = 1
    ends_in_log: bool = False
    recurrence: tuple[int, int] | None = None

    @property
    def times_all(self) -> bool:
        return self.block * self.blocks == self.window

    @property
    def every_n_steps(self) -> float:
        """Of how many steps one is timed."""
        return self.window / (self.block * self.blocks)

    def part(self, k: int) -> tuple[int, int]:
        """Return the first step of the k-th part, and the one after its last."""
        window, place = divmod(k, self.blocks)
        edges = (place * self.window // self.blocks, (place + 1) * self.window // self.blocks)
        return window * self.window + edges[0], window * self.window + edges[1]


class Schedule:
    """Which steps are timed, by their index, which counts every step from 0.

    No period of the loop can hide from it, or be overrepresented: blocks lie at offsets that fill
    their part of the window evenly, without a rhythm of their own. Where long steps recur, up to
    every second block is moved onto one. Some blocks cover the end of a window, where logs are
    written. All ranks compute the same offsets.

    Args:
        plan: How many steps are timed.
        probe_every_n_steps: 1 of this many steps is probed; with 0 none is.
        warmup_steps: Number of first steps that are not probed.
        next_long: Returns the index of a long step and the distance to expect to the next ones.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        probe_every_n_steps: int = 0,
        warmup_steps: int = 0,
        next_long: Callable[[], tuple[int, int] | None] = lambda: None,
    ) -> None:
        self.plan = plan
        self._probe_every_n_steps, self.warmup_steps = probe_every_n_steps, warmup_steps
        self._next_long = next_long
        self._first_part = self._next_part = 0
        self._is_chase_due = False  # True from a block at its usual place on.
        self._start = self._stop = 0  # The block that was planned last.
        self.expects_long = False
        """True if that block lies where a long step is expected."""

    @property
    def times_all(self) -> bool:
        """Whether all steps are timed, and all alike."""
        return self.plan.times_all and not self._probe_every_n_steps

    def follow(self, plan: Plan, index: int) -> None:
        """Follow another plan from the step of this index on."""
        self.plan = plan
        self._start = self._stop = index
        part = index // plan.window * plan.blocks
        while plan.part(part)[0] < index:
            part += 1
        self._first_part = self._next_part = part

    def is_timed(self, index: int) -> bool:
        """Return whether the step of this index is timed, if it is not probed."""
        return index == self.next_timed(index)

    def next_timed(self, index: int) -> int:
        """Return the index of the first step from this one on that is timed without a probe.

        Indices must not decrease from call to call.
        """
        if self.plan.times_all:
            return index
        while index >= self._stop:
            self._plan_block()
        return max(index, self._start)

    def _plan_block(self) -> None:
        plan, k = self.plan, self._next_part
        self._next_part += 1
        first, last = plan.part(k)
        # Any step of the part, so that all are timed equally often. Squares: plain multiples of the
        # golden ratio meet some periods twice as often.
        start = first + int((k + 1) ** 2 * _GOLDEN % 1 * (last - first))
        expected = None
        if self._is_chase_due:
            expected = _expected(plan.recurrence or self._next_long(), first)
        self._is_chase_due = expected is None or expected >= last
        self.expects_long = expected is not None and expected < last
        if expected is not None and expected < last:
            start = expected - plan.block // 2
        elif plan.ends_in_log and (k - self._first_part) % _LOG_TURNS == 0:
            # Loggers act at the end of the last step of a window, or at the start of the next.
            start = last + 1 - plan.block
        self._start = max(start, self._stop)
        self._stop = self._start + plan.block

    def is_probed(self, index: int) -> bool:
        """Return whether the step of this index is probed, if nothing prevents it."""
        n = self._probe_every_n_steps
        if not n or index < self.warmup_steps:
            return False
        # Each place as often, but never the last of n: the step after a probed one is not probed.
        return index % n == int((index // n + 1) * _GOLDEN % 1 * (n - 1))


def _expected(recurrence: tuple[int, int] | None, first: int) -> int | None:
    """Return the index of the first long step to expect from step `first` on."""
    if recurrence is None:
        return None
    last, distance = recurrence
    return last + max(-(-(first - last) // distance), 1) * distance


LONGEST_STRETCH = 10  # The host's time is looked at after this many untimed steps.

# What timing may take as a fraction of the time: below 1 %, as it is not measured exactly. What is
# cold in the steps around a block takes nearly as much again (`benchmarks/cold_cost.py`, H200).
_TARGET, _TARGET_IN_BLOCKS = 0.008, 0.005
_BLOCK, _LONGEST_PERIOD = 5, 500
# No mark costs the host less in a loop that works, nor more. What differs by more is chance.
_LEAST_PER_MARK_NS, _MOST_PER_MARK_NS = 3_000, 40_000
_REMEMBERED = 100  # Number of newest timed steps, and stretches of untimed ones, to compare.
_TRIAL = 2  # For two windows 1 of this many steps is timed, to find out what timing costs.
_MOST_BETWEEN = 4096  # At most this many steps pass between two decisions.


class AutoSchedule:
    """Decide how many steps are timed, so that timing takes less than 1 % of the time.

    Where the GPU sets the pace, timing is hidden in the time for which the host waits. Elsewhere
    what it costs is measured in the loop itself: the host's time for a timed step, beside that for
    the untimed ones just before and behind it, as loops have their moods. An empty loop is no
    guide: in a loop that works the code of a hook has left the processor's cache by the next step.
    Each `window` of steps between two logs has a block of timed steps.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self.due = FIRST_STEPS  # Index of the step before which `decide` must be called.
        # What timing costs in a timed step, as a fraction of an untimed one; None if unknown.
        self.share: float | None = None
        # When each began, and how long it took; of untimed stretches, how long a step.
        self._timed_ns: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self._untimed_ns: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self._switches_ns: deque[int] = deque(maxlen=_REMEMBERED)
        # Of the steps that were read: marks, how long the host waited, and what reading took.
        self._read = self._marks = 0
        self._wait_ms = 0.0
        self._reading_ns = 0

    def add_timed(self, steps: Sequence[StepRecord], reading_ns: int) -> None:
        for step in steps:
            start_ns, *_, end_ns = step.host_ns
            self._timed_ns.append((start_ns, end_ns - start_ns))
        self._read += len(steps)
        self._marks += sum(len(step.labels) for step in steps)
        self._wait_ms += sum(step.wait_ms for step in steps)
        self._reading_ns += reading_ns

    def add_untimed(self, start_ns: int, end_ns: int, steps: int) -> None:
        self._untimed_ns.append((start_ns, (end_ns - start_ns) / steps))

    def add_switch(self, ns: int) -> None:
        self._switches_ns.append(ns)

    def decide(self, index: int) -> int:
        """Return of how many steps 1 is to be timed from the step of this index on."""
        # Ranks do in one decision what was wished in the one before: the first ones come often.
        self.due = index + min(max(index // 2, 2 * self._longest_period), _MOST_BETWEEN)
        if not self._read:
            return 1
        marks = self._marks / self._read
        wait_ns = self._wait_ms / self._read * 1e6
        step_ns = statistics.median([ns for _, ns in self._untimed_ns or self._timed_ns])
        most_ns = marks * _MOST_PER_MARK_NS
        if wait_ns >= most_ns or most_ns < _TARGET * step_ns:
            return 1
        added_ns = self._added_ns()
        if not added_ns:
            return _TRIAL
        cost_ns = min(max(statistics.median(added_ns), marks * _LEAST_PER_MARK_NS), most_ns)
        cost_ns += self._reading_ns / self._read
        self.share = cost_ns / step_ns
        return self._smallest_n(cost_ns, step_ns)

    def _added_ns(self) -> list[float]:
        """Return how much longer each timed step took than the untimed ones around it."""
        untimed_ns = [*self._untimed_ns]
        added_ns = []
        for start_ns, took_ns in self._timed_ns:
            place = bisect(untimed_ns, start_ns, key=itemgetter(0))
            if 0 < place < len(untimed_ns):
                (_, before_ns), (_, behind_ns) = untimed_ns[place - 1 : place + 1]
                added_ns.append(took_ns - (before_ns + behind_ns) / 2)
        return added_ns

    def _smallest_n(self, cost_ns: float, step_ns: float) -> int:
        if cost_ns < _TARGET * step_ns:
            return 1
        target_ns = _TARGET_IN_BLOCKS * step_ns
        switch_ns = 2 * statistics.median(self._switches_ns or [0])
        for n in range(2, self._longest_period):
            plan = self.plan(n)
            if plan.block * cost_ns + switch_ns <= plan.block * plan.every_n_steps * target_ns:
                return round(plan.every_n_steps)
        return self._longest_period

    def plan(self, n: int) -> Plan:
        """Return the plan that times 1 of n steps: the same one on all ranks."""
        if n == 1:
            return Plan()
        block = max(min(_BLOCK, self._longest_period // n), 1)
        window = max(self._window, block * n)
        return Plan(block, window, window // (block * n), ends_in_log=window == self._window)

    @property
    def _longest_period(self) -> int:
        return max(min(self._window, _LONGEST_PERIOD), 2)


# The device is kept busy this many times as long as the host usually needs for a step.
_MARGIN, _LARGEST_MARGIN = 1.5, 12.0
# At this rate the first spin is not too short on any device; the later ones go by its length.
_CYCLES_PER_MS = 2e6
_LONGEST_MS = 1000.0
_TRIES = 3


class Probe:
    """Fills the device's queue before some steps, and judges what those steps took.

    A spin kernel keeps the device busy until the host has launched the whole step. Then the step
    runs without a gap, and its phases are the work alone. The host waits for its end, so that no
    later step starts with a full queue. A clock without `spin` probes no step; nor is one probed
    with several ranks, which would wait for each other's spins.
    """

    def __init__(self, clock: Clock, results: Results) -> None:
        self._clock, self._results = clock, results
        self._spin = getattr(clock, "spin", None)
        self._cycles_per_ms, self._margin = _CYCLES_PER_MS, _MARGIN
        self._asked_ms = 0.0
        self._misses = 0  # How often in a row a step could not be probed.
        self._began_ns: int | None = None
        self._launch_ms: deque[float] = deque(maxlen=9)
        if self._spin is None:
            self._give_up("there is no device, or not the current one, whose queue could be filled")
        elif is_distributed():
            self._give_up("ranks would wait for each other's spins; probe a run of one process")

    def is_ready(self) -> bool:
        """Return whether the step that begins can be probed; then call `keep_busy`."""
        if self._results.probes.failure or not self._launch_ms or self._clock.is_capturing():
            return False
        # The median: a host that was slow once must not make the next spin long.
        usual_ms = statistics.median(self._launch_ms)
        if _MARGIN * usual_ms > _LONGEST_MS:
            self._miss(f"the host takes {usual_ms:.0f} ms to launch one")
            return False
        self._asked_ms = min(self._margin * usual_ms, _LONGEST_MS)
        return True

    def step_ends(self, *, usual: bool) -> None:
        """Call first when a step ends: `usual` if not in the warm-up, no probe, nor after one."""
        if self._began_ns is not None and usual:
            self._launch_ms.append((self._clock.host_ns() - self._began_ns) / 1e6)

    def step_begins(self) -> None:
        """Call when all is done that is done between two steps."""
        self._began_ns = self._clock.host_ns()

    def keep_busy(self) -> None:
        try:
            assert self._spin is not None
            self._spin(round(self._asked_ms * self._cycles_per_ms))
        except Exception as error:
            self._give_up(f"the device cannot be kept busy: {error!r}")

    def take(self, steps: Sequence[StepRecord]) -> list[StepRecord]:
        """Take the probed steps out of those that were read, and return the others."""
        for step in steps:
            if step.was_fully_queued is not None and not self._results.probes.failure:
                self._judge(step)
        return [step for step in steps if step.was_fully_queued is None]

    def _judge(self, step: StepRecord) -> None:
        if not {EXCLUDED, EVALUATED}.isdisjoint(step.labels[step.post_spin_index :]):
            self._miss("an evaluation runs inside every one of them")
            return
        # Then the spin was over too early, which says nothing of the step; the next goes by its
        # rate.
        was_short = step.spin_ms < 0.9 * self._asked_ms
        if step.spin_ms > 0:
            self._cycles_per_ms *= self._asked_ms / step.spin_ms
        if step.was_fully_queued:
            self._misses = 0
            self._margin = max(0.75 * self._margin, _MARGIN)
            self._results.add_probed(step)
        elif not was_short and self._may_wait(step):
            self._margin = min(2 * self._margin, _LARGEST_MARGIN)
            self._miss(
                "the host waits for the GPU inside them, in"
                f" `{_held_up(step, self._results.sums)}` (`.item()`, `.cpu()`, a copy from memory"
                " that is not pinned, more launches than the queue holds?)"
            )

    def _may_wait(self, step: StepRecord) -> bool:
        """Return whether the host may have waited for the spin: else it was slow on its own."""
        launch_ms = self._asked_ms / self._margin
        usual = self._results.sums.step
        step_ms = usual.device_ms / max(usual.n, 1)
        host_ms = (step.host_ns[-1] - step.host_ns[step.post_spin_index]) / 1e6
        return host_ms < step.spin_ms + 2 * launch_ms + step_ms

    def _miss(self, why: str) -> None:
        self._misses += 1
        if self._misses == _TRIES:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        probes = self._results.probes
        which = "no step" if probes.newest is None else "no further step"
        probes.fail(f"{which} can be probed: {why}")
        messages.warning("In this loop %s", probes.failure)


def _held_up(step: StepRecord, usual: Sums) -> str:
    """Return the phase that took the host longer than it does in other steps, by most."""
    longer_ms = {name: ms for name, ms in step.times().host_ms.items() if "/" not in name}
    for name in longer_ms.keys() & usual.phases.keys():
        longer_ms[name] -= usual.phases[name].host_ms / usual.phases[name].n
    return max(in_order([*longer_ms]), key=longer_ms.__getitem__)
