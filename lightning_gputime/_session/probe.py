"""Probing: a step that is launched while the device is kept busy has no launch gaps."""

import statistics
from collections import deque
from collections.abc import Sequence

from lightning_gputime._boundaries.comm import is_distributed
from lightning_gputime._messages import messages
from lightning_gputime._phases import EXCLUDED, StepRecord, in_order
from lightning_gputime._record.clock import Clock
from lightning_gputime._results.results import Results
from lightning_gputime._results.sums import Sums

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
        if self._results.probe_failure or not self._launch_ms or self._clock.is_capturing():
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
            if step.was_fully_queued is not None and not self._results.probe_failure:
                self._judge(step)
        return [step for step in steps if step.was_fully_queued is None]

    def _judge(self, step: StepRecord) -> None:
        if EXCLUDED in step.labels[step.post_spin_index :]:
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
        which = "no step" if self._results.newest_probed is None else "no further step"
        self._results.probe_failure = f"{which} can be probed: {why}"
        messages.warning("In this loop %s", self._results.probe_failure)


def _held_up(step: StepRecord, usual: Sums) -> str:
    """Return the phase that took the host longer than it does in other steps, by most."""
    longer_ms = {name: ms for name, ms in step.times().host_ms.items() if "/" not in name}
    for name in longer_ms.keys() & usual.phases.keys():
        longer_ms[name] -= usual.phases[name].host_ms / usual.phases[name].n
    return max(in_order([*longer_ms]), key=longer_ms.__getitem__)
