"""Probing: a step that is launched while the device is kept busy has no launch gaps."""

import statistics
from collections import deque
from collections.abc import Sequence

from lightning_gputime._events import Clock, HostClock, log
from lightning_gputime._exchange import is_distributed
from lightning_gputime._phases import COMM, EXCLUDED, in_order
from lightning_gputime._raw import RawStep, Sums
from lightning_gputime._recorder import Recorder

# How long the device is kept busy: so many times as long as the host usually needs for a step.
_MARGIN, _LARGEST_MARGIN = 1.5, 12.0
# At this rate the first spin is not too short on any device; the later ones go by its length.
_CYCLES_PER_MS = 2e6
_LONGEST_MS = 1000.0
_TRIES = 3
# Successive multiples of it, modulo 1, lie as evenly as can be.
_GOLDEN = 0.6180339887498949


class Probe:
    """Fills the device's queue before one step in so many, and takes what those steps took.

    A spin kernel keeps the device busy until the host has launched the whole step. Then the step
    runs without a gap, and its phases are the work alone. The host waits for its end, so that no
    later step starts with a full queue; the next one, which starts with an empty one, is not timed.

    The steps are chosen by their index alone, so that all ranks choose the same ones, and lie
    unevenly, so that they do not all fall on steps that the loop does something special in. What
    ranks wait for each other in a probed step depends on their spins, and is left out.

    Args:
        clock: That of the timer. Needs `spin`.
        every_n_steps: One step in so many is probed.
        warmup_steps: How many of the first steps are not.
    """

    def __init__(self, clock: Clock, every_n_steps: int, warmup_steps: int) -> None:
        self._clock = clock
        self._spin = getattr(clock, "spin", None)
        self._every_n_steps = every_n_steps
        self._warmup_steps = warmup_steps
        self._has_others = not isinstance(clock, HostClock) and is_distributed()
        self._cycles_per_ms = _CYCLES_PER_MS
        self._margin = _MARGIN
        self._asked_ms = 0.0
        self._misses = self._interrupted = self._too_long = self._seen = 0
        self._left_ns: int | None = None
        self._launch_ms: deque[float] = deque(maxlen=9)
        self.busy = Sums()
        """The sums of the probed steps."""
        self.newest: RawStep | None = None
        """The newest of them."""
        self.failure = ""
        """Why no step is probed any more; empty if they are."""
        if self._spin is None:
            self._give_up("there is no device, or not the current one, whose queue could be filled")

    def is_due(self, index: int) -> bool:
        """Tells whether the step of this index, which begins, is to be probed."""
        if (
            self.failure
            or not self._is_chosen(index)
            or not self._launch_ms
            or self._clock.is_capturing()
        ):
            return False
        usual_ms = statistics.median(self._launch_ms)
        if _MARGIN * usual_ms > _LONGEST_MS:
            self._too_long += 1
            if self._too_long == _TRIES:
                self._give_up(f"the host takes {usual_ms:.0f} ms to launch one")
            return False
        self._too_long = 0
        self._asked_ms = min(self._margin * usual_ms, _LONGEST_MS)
        return True

    def is_others(self, index: int) -> bool:
        """Tells whether other ranks may probe that step, where this one does not."""
        return self._has_others and self._is_chosen(index)

    def _is_chosen(self, index: int) -> bool:
        n = self._every_n_steps
        # Never the last of n: the step after a probed one is not probed.
        place = int((index // n + 1) * _GOLDEN % 1 * (n - 1))
        return index % n == place and self._seen >= self._warmup_steps

    def end_step(self, usual: bool) -> None:
        """Must be called when a step ends, before anything else.

        Args:
            usual: Whether it neither was probed nor follows one that was.
        """
        self._seen += 1
        if self._left_ns is not None and usual and self._seen > self._warmup_steps:
            self._launch_ms.append((self._clock.host_ns() - self._left_ns) / 1e6)

    def leave(self) -> None:
        """Must be called when all is done that is done at the end of a step."""
        self._left_ns = self._clock.host_ns()

    def fill(self, recorder: Recorder) -> None:
        """Keeps the device busy, for the step that has just begun and is due."""
        recorder.fill(self._keep_busy)

    def _keep_busy(self) -> None:
        try:
            assert self._spin is not None
            self._spin(round(self._asked_ms * self._cycles_per_ms))
        except Exception as error:
            self._give_up(f"the device cannot be kept busy: {error!r}")

    def take(self, steps: Sequence[RawStep], normal: Sums) -> list[RawStep]:
        """Takes the probed steps, and returns the others.

        Args:
            steps: Steps that were read.
            normal: The sums of the steps that were not probed.
        """
        for step in steps:
            if step.filled is not None and not self.failure:
                self._judge(step, normal)
        return [step for step in steps if step.filled is None]

    def _judge(self, step: RawStep, normal: Sums) -> None:
        if EXCLUDED in step.labels[step.after_spin :]:
            self._interrupted += 1
            if self._interrupted == _TRIES:
                self._give_up("an evaluation runs inside every one of them")
            return
        self._interrupted = 0
        was_short = step.spun_ms < 0.9 * self._asked_ms
        if step.spun_ms > 0:
            self._cycles_per_ms *= self._asked_ms / step.spun_ms
        if step.filled:
            self._misses = 0
            self._margin = max(0.75 * self._margin, _MARGIN)
            alone = tuple(EXCLUDED if one.endswith(f"/{COMM}") else one for one in step.labels)
            self.newest = step._replace(labels=alone)
            self.busy.merge(Sums([self.newest]))
        elif not was_short and self._may_wait(step, normal):
            self._misses += 1
            self._margin = min(2 * self._margin, _LARGEST_MARGIN)
            if self._misses == _TRIES:
                where = _held_up(step, normal)
                self._give_up(
                    f"the host waits for the GPU inside them, in `{where}` (`.item()`, `.cpu()`, a"
                    " copy from memory that is not pinned, more launches than the queue holds?)"
                )

    def _may_wait(self, step: RawStep, normal: Sums) -> bool:
        """Tells a host that waits until the spin is over from one that was slow on its own."""
        launch_ms = self._asked_ms / self._margin
        step_ms = normal.step.device_ms / max(normal.step.n, 1)
        host_ms = (step.host_ns[-1] - step.host_ns[step.after_spin]) / 1e6
        return host_ms < step.spun_ms + 2 * launch_ms + step_ms

    def _give_up(self, why: str) -> None:
        what = "no step can be probed" if self.newest is None else "no further step can be probed"
        self.failure = f"{what}: {why}"
        log.warning("In this loop %s", self.failure)


def _held_up(step: RawStep, normal: Sums) -> str:
    """Returns the phase that took the host longer than it does in other steps, by most."""
    host_ms = step.times().host_ms
    longer = {name: host_ms[name] - _mean_host_ms(normal, name) for name in in_order([*host_ms])}
    top_level = [name for name in longer if "/" not in name]
    return max(top_level, key=longer.__getitem__)


def _mean_host_ms(sums: Sums, name: str) -> float:
    phase = sums.phases.get(name)
    return phase.host_ms / phase.n if phase is not None else 0.0
