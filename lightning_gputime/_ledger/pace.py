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
from itertools import accumulate

from lightning_gputime._phases import BETWEEN_BATCHES, StepRecord, resolve_labels

MAX_IDLE_LAG_MS = 0.08
"""Below this lag at a mark, the device had caught up with the host."""
_MAX_GAP_MS = 0.1  # Maximum distance of the two bounds if the device was idle at some mark.
_MAX_BLOCK_NS = 1e9  # Maximum length of a block of steps.
_COMPLETE_NS = 10e9  # After this time without complete bounds, the host waits for a step's end.


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


class PaceSums:
    """Bounds of the host-paced time of each phase, over the timed steps.

    A phase has few marks, so its host-paced time has two bounds. If the device has work left at the
    end of an interval, the host may have launched it in time, and the device set the pace. Or the
    host was late, and launched all of this work at the end. Examined steps, which have a mark at
    each line, decide between the two.
    """

    def __init__(self) -> None:
        self.steps = 0
        """Number of steps whose pace is known."""
        self.all_ms: dict[str, float] = {}
        """Device time of each phase in these steps."""
        self.least_ms: dict[str, float] = {}
        """Time that the host set the pace of, at least."""
        self.most_ms: dict[str, float] = {}
        """Time that the host set the pace of, at most."""
        self.wants_wait = False
        """True if the host should wait for the end of the next timed step, to bound the offset."""
        # In the newest block whose bounds are complete, and the host time of its end.
        self._was_idle, self._complete_ns = True, 0

    def add(self, steps: Sequence[StepRecord]) -> None:
        """Add timed steps that were read together, in order."""
        block: list[StepRecord] = []
        for step in steps:
            is_next = block and block[-1].host_ns[-1] == step.host_ns[0]  # They share a mark.
            is_long = block and step.host_ns[-1] - block[0].host_ns[0] > _MAX_BLOCK_NS
            if block and (is_long or not is_next):
                self._add_block(block)
                block = []
            block.append(step)
        if block:
            self._add_block(block)

    def _add_block(self, steps: Sequence[StepRecord]) -> None:
        """Add consecutive steps. Examined steps only help to set the clocks side by side."""
        device_ms, host_ns = [0.0], [steps[0].host_ns[0]]
        reached = []
        for step in steps:
            device_ms += [*accumulate(step.device_ms, initial=device_ms[-1])][1:]
            host_ns += step.host_ns[1:]
            if step.reached_ns:
                reached.append((device_ms[-1], step.reached_ns))
        bounds = Bounds(device_ms, host_ns, reached)
        if bounds.is_complete:
            self._was_idle, self._complete_ns = bounds.was_idle, host_ns[-1]
        self.wants_wait = host_ns[-1] - self._complete_ns > _COMPLETE_NS
        if not (bounds.is_complete or self._was_idle):
            return  # The device may be far behind, so the lower bound may be far off.
        lags = lags_ms(device_ms, host_ns, bounds.offset_ms)
        mark = 0
        for step in steps:
            first, mark = mark, mark + len(step.device_ms)
            if step.lines is None:
                self._add_step(step, lags[first : mark + 1])

    def _add_step(self, step: StepRecord, lags: Sequence[float]) -> None:
        self.steps += 1
        all_ms, least_ms, most_ms = self.all_ms, self.least_ms, self.most_ms
        for names, ms, lag in zip(
            resolve_labels(step.labels), step.device_ms, lags[1:], strict=True
        ):
            least = ms if lag < MAX_IDLE_LAG_MS else 0.0
            most = max(ms - max(lag, 0.0), least)
            for name in names:
                all_ms[name] = all_ms.get(name, 0.0) + ms
                least_ms[name] = least_ms.get(name, 0.0) + least
                most_ms[name] = most_ms.get(name, 0.0) + most

    def share(self, phase: str, examined: float | None) -> float:
        """Return the host-paced fraction of a phase.

        Args:
            phase: The phase.
            examined: Its host-paced fraction in examined steps; None if unknown.
        """
        ms = self.all_ms.get(phase, 0.0)
        if not ms:
            return 1.0 if examined is None else examined
        least, most = self.least_ms[phase] / ms, self.most_ms[phase] / ms
        if examined is None:
            # A fetch ends with a copy to the device, while a forward launches work all the time.
            examined = most if phase.partition("/")[0] in BETWEEN_BATCHES else least
        return min(max(examined, least), most)
