"""How far the host is ahead of the device, where their clocks meet."""

from collections.abc import Sequence
from itertools import accumulate

from lightning_gputime._phases import StepTimes


def run_ahead_ms(step: StepTimes) -> list[float] | None:
    """Returns how far the host was ahead of the device at each mark of a step.

    A wait that blocks ends when the device reaches the end of the step: there the clocks meet.

    Returns:
        The time from the host's passing a mark to the device's (in milliseconds); None if the host
        did not block for this step.
    """
    line = step.timeline
    if line is None or not line.met_ns:
        return None
    first_ms = line.met_ns / 1e6 - sum(line.device_ms)
    reached_ms = accumulate(line.device_ms, initial=first_ms)
    return [ms - ns / 1e6 for ms, ns in zip(reached_ms, line.host_ns, strict=True)]


def mean_run_ahead_ms(steps: Sequence[StepTimes]) -> float | None:
    """Returns the mean over all marks of steps; None if the host blocked in less than half."""
    known = [ahead for ahead in map(run_ahead_ms, steps) if ahead is not None]
    if len(known) < max(len(steps) / 2, 1):
        return None
    return sum(map(sum, known)) / sum(map(len, known))
