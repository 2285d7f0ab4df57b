"""Probes: steps that run behind a spin kernel, and therefore without launch gaps."""

import statistics
from collections import deque
from collections.abc import Sequence

from lightning_gputime._instrumentation.comm import is_distributed
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.sums import Sums
from lightning_gputime._messages import messages
from lightning_gputime._phases import EVALUATED, EXCLUDED, StepRecord, in_order
from lightning_gputime._record.clock import Clock
from lightning_gputime._session.schedule import GOLDEN

# Length of the spin, as a multiple of the host's usual time to launch a step.
_MIN_MARGIN, _MAX_MARGIN = 1.5, 12.0
# Long enough for the first spin on any device. Later spins use the measured rate.
_FIRST_CYCLES_PER_MS = 2e6
_MAX_SPIN_MS = 1000.0
_MAX_MISSES = 3  # Probing stops after this many consecutive failures.


class Probe:
    """Launch of some steps behind a spin kernel, and a check of their times.

    A spin kernel keeps the device busy until the host has launched the entire step. The step then
    runs without launch gaps, so its phases contain only GPU work. The host waits for the step to
    end, so that the next step does not start with a full queue. No step is probed if the clock has
    no `spin`, or if there are several ranks, which would wait for each other's spins.

    Args:
        clock: Clock of the device, with the function `spin`.
        results: Receives the probed steps.
        every_n_steps: 1 of this many steps is probed.
        warmup_steps: Number of first steps that are not probed.
    """

    def __init__(
        self, clock: Clock, results: Results, every_n_steps: int, warmup_steps: int
    ) -> None:
        self._clock, self._results = clock, results
        self._every_n_steps, self._warmup_steps = every_n_steps, warmup_steps
        self._spin = getattr(clock, "spin", None)
        self._cycles_per_ms = _FIRST_CYCLES_PER_MS
        # Length of the next spin, as a multiple of the host's usual time to launch a step.
        self._margin = _MIN_MARGIN
        self._spin_ms = 0.0  # Requested length of the newest spin.
        self._misses = 0  # Number of consecutive failures.
        self._began_ns: int | None = None  # Host time at the start of the open step.
        self._launch_ms: deque[float] = deque(maxlen=9)  # Host time of the newest usual steps.
        if self._spin is None:
            self._give_up("probes need a GPU, and it must be the current device")
        elif is_distributed():
            self._give_up("ranks would wait for each other's spins; probe a run of one process")

    def is_scheduled(self, index: int) -> bool:
        """Return True if the step of this index should be probed."""
        return index >= self._warmup_steps and is_probed(index, self._every_n_steps)

    def is_ready(self) -> bool:
        """Choose the length of the spin. Return True if the next step can be probed.

        If so, call `keep_busy` at the start of the step.
        """
        if self._results.probes.failure or not self._launch_ms or self._clock.is_capturing():
            return False
        # Use the median: a single slow step must not make the next spin long.
        usual_ms = statistics.median(self._launch_ms)
        if _MIN_MARGIN * usual_ms > _MAX_SPIN_MS:
            self._miss(f"the host takes {usual_ms:.0f} ms to launch a step")
            return False
        self._spin_ms = min(self._margin * usual_ms, _MAX_SPIN_MS)
        return True

    def step_ends(self, index: int, *, is_probed: bool) -> bool:
        """End a step. Return False if it is probed, or if a probe was scheduled just before it."""
        is_usual = not is_probed and not self.is_scheduled(index - 1)
        if self._began_ns is not None and is_usual and index >= self._warmup_steps:
            self._launch_ms.append((self._clock.host_ns() - self._began_ns) / 1e6)
        return is_usual

    def step_begins(self) -> None:
        """Start a step, after everything that the timer does between two steps."""
        self._began_ns = self._clock.host_ns()

    def keep_busy(self) -> None:
        """Launch the spin kernel."""
        try:
            assert self._spin is not None
            self._spin(round(self._spin_ms * self._cycles_per_ms))
        except Exception as error:
            self._give_up(f"the device cannot be kept busy: {error!r}")

    def take(self, steps: Sequence[StepRecord]) -> list[StepRecord]:
        """Check the probed steps among `steps`. Return the other steps."""
        for step in steps:
            if step.was_fully_queued is not None and not self._results.probes.failure:
                self._check(step)
        return [step for step in steps if step.was_fully_queued is None]

    def _check(self, step: StepRecord) -> None:
        """Add a probed step to the results if it was launched in time. Adjust the next spin."""
        if not {EXCLUDED, EVALUATED}.isdisjoint(step.labels[step.post_spin_index :]):
            self._miss("an evaluation runs inside every probed step")
            return
        # A spin that was too short proves nothing, but its length corrects the next spin.
        was_short = step.spin_ms < 0.9 * self._spin_ms
        if step.spin_ms > 0:
            self._cycles_per_ms *= self._spin_ms / step.spin_ms
        if step.was_fully_queued:
            self._misses = 0
            self._margin = max(0.75 * self._margin, _MIN_MARGIN)
            self._results.add_probed(step)
        elif not was_short and self._may_wait(step):
            self._margin = min(2 * self._margin, _MAX_MARGIN)
            phase = _waiting_phase(step, self._results.sums)
            self._miss(
                f"the host waits for the GPU inside probed steps, in `{phase}`, for example in"
                " `.item()`, `.cpu()`, a copy from unpinned memory, or a full launch queue"
            )

    def _may_wait(self, step: StepRecord) -> bool:
        """Return True if the host may have waited for the spin; False if it was slow itself."""
        usual_launch_ms = self._spin_ms / self._margin
        usual = self._results.sums.step
        usual_device_ms = usual.device_ms / max(usual.n, 1)
        launch_ms = (step.host_ns[-1] - step.host_ns[step.post_spin_index]) / 1e6
        return launch_ms < step.spin_ms + 2 * usual_launch_ms + usual_device_ms

    def _miss(self, why: str) -> None:
        """Count a failure. After several in a row, stop probing for the reason `why`."""
        self._misses += 1
        if self._misses == _MAX_MISSES:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        probes = self._results.probes
        which = "no step" if probes.newest is None else "no further step"
        probes.fail(f"{which} can be probed: {why}")
        messages.warning("In this loop %s", probes.failure)


def is_probed(index: int, n: int) -> bool:
    """Return True if the step of this index is the probed step among its `n` steps."""
    group, place = divmod(index, n)
    # Spread the places evenly. Never choose the last place, because the first step of the next
    # group may be probed, and a step after a probe is not timed.
    return place == int((group + 1) * GOLDEN % 1 * (n - 1))


def _waiting_phase(step: StepRecord, usual: Sums) -> str:
    """Return the phase whose host time exceeds its mean over the usual steps most."""
    excess_ms = {name: ms for name, ms in step.times().host_ms.items() if "/" not in name}
    for name in excess_ms.keys() & usual.phases.keys():
        excess_ms[name] -= usual.phases[name].host_ms / usual.phases[name].n
    return max(in_order([*excess_ms]), key=excess_ms.__getitem__)
