"""Probing: a step that is launched while the device is kept busy has no launch gaps."""

import math
from collections.abc import Sequence

from lightning_gputime._events import Clock, log
from lightning_gputime._exchange import is_distributed
from lightning_gputime._phases import EXCLUDED, in_order
from lightning_gputime._raw import RawStep, Sums
from lightning_gputime._recorder import Recorder

# How long the device is kept busy: so many times as long as the host has lately needed for a step.
_MARGIN = 1.5
# At this rate the first spin is not too short on any device; the later ones go by its length.
_CYCLES_PER_MS = 2e6
_LONGEST_MS = 1000.0
_TRIES = 3


class Probe:
    """Fills the device's queue before one step in so many, and takes what those steps took.

    A spin kernel keeps the device busy until the host has launched the whole step. Then the step
    runs without a gap, and its phases are the work alone. The host waits for its end, so that no
    later step starts with a full queue; the next one, which starts with an empty one, is not timed.

    The steps are chosen by their number alone, so that all ranks probe the same ones.

    Args:
        clock: That of the timer. Needs `spin`.
        every_n_steps: One step in so many is probed.
        warmup_steps: How many of the first steps are not.
        log_every_n_steps: How often the loop logs. It then waits for what it logs, at the start of
            the next step: those are not probed, where that can be avoided.
    """

    def __init__(
        self, clock: Clock, every_n_steps: int, warmup_steps: int, log_every_n_steps: int
    ) -> None:
        self._clock = clock
        self._spin = getattr(clock, "spin", None)
        self._every_n_steps = every_n_steps
        self._first = every_n_steps // 2
        common = math.gcd(every_n_steps, log_every_n_steps)
        if common > 1 and self._first % common == 0:
            self._first += 1
        self._warmup_steps = warmup_steps
        self._cycles_per_ms = _CYCLES_PER_MS
        self._margin = _MARGIN
        self._asked_ms = self._launch_ms = 0.0
        self._misses = self._seen = 0
        self._has_others = self._spin is not None and is_distributed()
        self._left_ns: int | None = None
        self.number = -2
        """The step that was last probed; at first none, and neither is the one after it."""
        self.busy = Sums()
        """The sums of the probed steps."""
        self.newest: RawStep | None = None
        """The newest of them."""
        self.failure = ""
        """Why no step is probed any more; empty if they are."""
        if self._spin is None:
            self._give_up("this device has no queue that could be filled")

    def is_due(self, number: int) -> bool:
        """Tells whether the step `number` is to be probed."""
        return self._is_chosen(number) and not self.failure

    def leaves_out(self, number: int) -> bool:
        """Tells whether the step `number` is not probed, but disturbed by a probe."""
        if number == self.number + 1:
            return True
        # Other ranks may still probe, when this one has found that it cannot.
        return bool(self.failure) and self._has_others and self._is_chosen(number)

    def _is_chosen(self, number: int) -> bool:
        return number % self._every_n_steps == self._first and self._seen > self._warmup_steps

    def enter(self, number: int) -> None:
        """Must be called when the step `number` ends, before anything else."""
        self._seen += 1
        is_usual = number not in (self.number, self.number + 1)
        if self._left_ns is not None and self._seen > self._warmup_steps and is_usual:
            launch_ms = (self._clock.host_ns() - self._left_ns) / 1e6
            # One slow step (a checkpoint) is soon forgotten.
            self._launch_ms = max(launch_ms, 0.9 * self._launch_ms)

    def leave(self) -> None:
        """Must be called when all is done that is done at the end of a step."""
        self._left_ns = self._clock.host_ns()

    def interrupt(self) -> None:
        """Must be called where what precedes the end of the next step is not all its own."""
        self._left_ns = None

    def fill(self, recorder: Recorder, number: int) -> None:
        """Keeps the device busy, for the step `number`, which has just begun."""
        asked_ms = self._margin * self._launch_ms
        if self._spin is None or not asked_ms or self._clock.is_capturing():
            return
        if asked_ms > _LONGEST_MS:
            self._give_up(f"the host takes {self._launch_ms:.0f} ms to launch one")
            return
        label = recorder.label
        if label is None:
            return
        recorder.pause()
        self._spin(round(asked_ms * self._cycles_per_ms))
        recorder.resume(label)
        self._asked_ms = asked_ms
        self.number = number

    def take(self, steps: Sequence[RawStep], normal: Sums) -> list[RawStep]:
        """Takes the probed steps, and returns the others.

        Args:
            steps: Steps that were read.
            normal: The sums of the steps that were not probed.
        """
        for step in steps:
            if step.filled is not None:
                self._judge(step, normal)
        return [step for step in steps if step.filled is None]

    def _judge(self, step: RawStep, normal: Sums) -> None:
        if step.labels.count(EXCLUDED) > 1:
            return  # A validation lies inside.
        spun_ms = step.device_ms[0]
        was_short = spun_ms < 0.9 * self._asked_ms
        if spun_ms > 0:
            self._cycles_per_ms *= self._asked_ms / spun_ms
        if step.filled:
            self._misses = 0
            self._margin = max(0.75 * self._margin, _MARGIN)
            self.busy.add([step])
            self.newest = step
        elif not was_short:
            # The host was slow this time, or it waits for the device, however long that takes.
            self._misses += 1
            self._margin *= 2
            if self._misses == _TRIES:
                where = _held_up(step, normal)
                self._give_up(
                    f"the host waits for the GPU inside them, in `{where}` (`.item()`, `.cpu()`, a"
                    " copy from memory that is not pinned?)"
                )

    def _give_up(self, why: str) -> None:
        self.failure = f"no step can be probed: {why}"
        log.warning("No step can be probed: %s", why)


def _held_up(step: RawStep, normal: Sums) -> str:
    """Returns the phase that took the host longer than it does in other steps, by most."""
    host_ms = step.times().host_ms
    longer = {name: host_ms[name] - _mean_host_ms(normal, name) for name in in_order([*host_ms])}
    top_level = [name for name in longer if "/" not in name]
    return max(top_level, key=longer.__getitem__)


def _mean_host_ms(sums: Sums, name: str) -> float:
    phase = sums.phases.get(name)
    return phase.host_ms / phase.n if phase is not None else 0.0
