"""Pace: whether the host or the device determined how long the time between two marks was.

A mark has a host time, at which the host recorded it, and a device time, at which the device
reached it. The *lag* is the device time minus the host time, with both clocks set side by side. If
the device reached a mark without a lag, it had caught up and waited for the host, so the host set
the pace until this mark. Otherwise the device set the pace.

The clocks are set side by side without a synchronization. Their offset has two bounds:

- The device reaches no mark before the host has recorded it. This bound is tight if the device was
  idle.
- When a wait for an event returns, the device has reached the event. This bound is tight if the
  host had to wait.

The clocks drift by 25 us per second, as measured on an H100, and each bound is within 30 us of the
truth. So a block of steps for which the offset is estimated spans at most a second.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

from lightning_gputime._phases import BETWEEN_BATCHES, StepRecord, resolve_labels

MAX_IDLE_LAG_MS = 0.08
"""Below this lag at a mark, the device had caught up with the host, as measured on an H100. With it
the pace of 23 of 24 programs is right (`benchmarks/results/answers_gpu.json`)."""
# Maximum distance of the two bounds if the device was idle at some mark, from the errors above.
_MAX_GAP_MS = 0.1
_MAX_BLOCK_NS = 1e9  # Maximum length of a block of steps, from the drift above.


def lags_ms(device_ms: Sequence[float], host_ns: Sequence[int], offset_ms: float) -> list[float]:
    """Return the lag of the device at each mark (in milliseconds).

    Args:
        device_ms: Device time of each mark, from any origin.
        host_ns: Host time of each mark.
        offset_ms: Offset of the clocks, from `Bounds.offset_ms`.
    """
    return [ms + offset_ms - ns / 1e6 for ms, ns in zip(device_ms, host_ns, strict=True)]


class Bounds:
    """Bounds of the offset between the host's clock and the device's.

    Args:
        device_ms: Device time of each mark, from any origin.
        host_ns: Host time of each mark.
        reached: Device time of an event, and the host time at which a wait for it returned.
    """

    def __init__(
        self,
        device_ms: Sequence[float],
        host_ns: Sequence[int],
        reached: Iterable[tuple[float, int]] = (),
    ) -> None:
        self._low = max(ns / 1e6 - ms for ms, ns in zip(device_ms, host_ns, strict=True))
        self._high = min((ns / 1e6 - ms for ms, ns in reached), default=None)

    @property
    def is_complete(self) -> bool:
        """True if the host has waited for an event, so that the upper bound is known."""
        return self._high is not None

    @property
    def was_idle(self) -> bool:
        """True if the device was certainly idle at a mark, so that the lower bound is tight."""
        return self._high is not None and self._high - self._low <= _MAX_GAP_MS

    @property
    def offset_ms(self) -> float:
        """The bound that is tight. Without an upper bound, the device is taken to have idled."""
        return self._low if self._high is None or self.was_idle else self._high


class _Sums(NamedTuple):
    """Times of a phase."""

    device_ms: float = 0.0
    min_host_ms: float = 0.0  # Lower bound of the host-paced part.
    max_host_ms: float = 0.0  # Upper bound.


_NOTHING = _Sums()


class PaceSums:
    """Bounds of the host-paced time of each phase, over the timed steps.

    A phase has few marks, so its host-paced time has two bounds. If the device has work left at the
    end of an interval, the host may have launched it in time, and the device set the pace. Or the
    host was late, and launched all of this work at the end. Examined steps, which have a mark at
    each line, decide between the two.
    """

    def __init__(self) -> None:
        self.phases: dict[str, _Sums] = {}
        """Sums over the steps that were not examined."""
        self._examined: dict[str, _Sums] = {}  # Sums over the examined steps.
        # `Bounds.was_idle` of the newest block whose bounds are complete. Before the first, the
        # host has never waited for the device, which therefore has kept up with the host.
        self._was_idle = True

    def add(self, steps: Sequence[StepRecord]) -> None:
        """Add timed steps that were read together, in order."""
        block: list[StepRecord] = []
        for step in steps:
            if block:
                # Consecutive steps share a mark.
                is_next = block[-1].host_ns[-1] == step.host_ns[0]
                is_long = step.host_ns[-1] - block[0].host_ns[0] > _MAX_BLOCK_NS
                if is_long or not is_next:
                    self._add_block(block)
                    block = []
            block.append(step)
        if block:
            self._add_block(block)

    def _add_block(self, steps: Sequence[StepRecord]) -> None:
        """Add consecutive steps, for which the clocks have one offset."""
        device_ms, host_ns = [0.0], [steps[0].host_ns[0]]
        reached = []
        for step in steps:
            device_ms += [*accumulate(step.device_ms, initial=device_ms[-1])][1:]
            host_ns += step.host_ns[1:]
            if step.reached_ns:
                reached.append((device_ms[-1], step.reached_ns))
        bounds = Bounds(device_ms, host_ns, reached)
        if bounds.is_complete:
            self._was_idle = bounds.was_idle
        if not (bounds.is_complete or self._was_idle):
            return  # The device may be far behind, so the lower bound may be far off.
        # Lags at the ends of the intervals: at all marks of the block except the first.
        lags = iter(lags_ms(device_ms, host_ns, bounds.offset_ms)[1:])
        for step in steps:
            sums = self.phases if step.lines is None else self._examined
            labels, step_lags = resolve_labels(step.labels), islice(lags, len(step.labels))
            for names, ms, lag in zip(labels, step.device_ms, step_lags, strict=True):
                min_host_ms = ms if lag < MAX_IDLE_LAG_MS else 0.0
                max_host_ms = max(ms - max(lag, 0.0), min_host_ms)
                for name in names:
                    before = sums.get(name, _NOTHING)
                    sums[name] = _Sums(
                        before.device_ms + ms,
                        before.min_host_ms + min_host_ms,
                        before.max_host_ms + max_host_ms,
                    )

    def share(self, phase: str, examined_ms: float | None) -> float:
        """Return the host-paced fraction of a phase.

        For example, of 10 ms in a phase, between 2 and 6 ms are host-paced. In examined steps,
        these bounds are 3 and 7 ms, and the marks of lines show 4 ms: a quarter of the way. So the
        result is (2 + 0.25 * 4) / 10 = 0.3.

        Args:
            phase: The phase.
            examined_ms: Its host-paced time in the examined steps; None if there are none.
        """
        sums, examined = self.phases.get(phase, _NOTHING), self._examined.get(phase, _NOTHING)
        if not sums.device_ms:
            return 1.0
        # Position between the two bounds: 0 at the lower, 1 at the upper. Without examined steps, a
        # fetch is at the upper bound, because it only launches a copy at its end; other phases are
        # at the lower bound, because they launch work all the time.
        position = 1.0 if phase.partition("/")[0] in BETWEEN_BATCHES else 0.0
        if examined_ms is not None and examined.max_host_ms > examined.min_host_ms:
            width_ms = examined.max_host_ms - examined.min_host_ms
            position = (examined_ms - examined.min_host_ms) / width_ms
        position = min(max(position, 0.0), 1.0)
        host_ms = sums.min_host_ms + position * (sums.max_host_ms - sums.min_host_ms)
        return host_ms / sums.device_ms
