"""Host time that the timer itself takes. It must not make a step count as slow."""

from collections import deque
from collections.abc import Sequence

from lightning_gputime._causes.attribution import overlapping
from lightning_gputime._phases import StepRecord

# Number of newest spans to keep: more than the 50 steps that are at most examined together.
_MAX_SPANS = 100


class TimerTime:
    """Newest spans in which the timer blocked the host or read steps."""

    def __init__(self) -> None:
        # Start and end of each span on the host clock (in nanoseconds).
        self._waits: deque[tuple[int, int]] = deque(maxlen=_MAX_SPANS)
        self._readings: deque[tuple[int, int]] = deque(maxlen=_MAX_SPANS)

    def add_waits(self, steps: Sequence[StepRecord]) -> None:
        """Add the spans in which the host waited for the device to finish these steps."""
        self._waits += [
            (step.finished_ns - round(step.wait_ms * 1e6), step.finished_ns)
            for step in steps
            if step.finished_ns
        ]

    def add_reading(self, start_ns: int, end_ns: int) -> None:
        """Add a span in which steps were read."""
        self._readings.append((start_ns, end_ns))

    def waits_in(self, start_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """Return the waits that overlap with a span."""
        return overlapping(self._waits, start_ns, end_ns)

    def reading_ms(self, step: StepRecord) -> float:
        """Return the time inside a step in which earlier steps were read (in milliseconds)."""
        start_ns, end_ns = step.host_ns[0], step.host_ns[-1]
        reading_ns = 0
        for start, end in self._readings:
            if start < end_ns and start_ns < end:
                reading_ns += min(end_ns, end) - max(start_ns, start)
        return reading_ns / 1e6
