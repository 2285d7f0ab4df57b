"""The marks of one step, and their reading."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_gputime._events import TimingEvent
from lightning_gputime._phases import StepTimes, Timeline, settle


@dataclass(slots=True)
class Marks:
    """Marks of one step or graph: `labels[i]` names the time from `events[i]` to the next one.

    A step has one event more than labels, its end; a graph has not, and no host times.
    """

    labels: list[str]
    events: list[TimingEvent]
    host_ns: list[int]
    number: int = -1
    skipped_update: bool = False
    owns_end: bool = False
    """Whether the last event is this step's alone, and not also the first of the next."""


def read(step: Marks, graphs: Sequence[Marks], wait_ms: float, read_ns: int) -> StepTimes:
    """Returns the times of a step that the device has finished.

    Args:
        step: Its marks.
        graphs: The marks of captured graphs, which may have been replayed in it.
        wait_ms: How long the host waited for it (in milliseconds).
        read_ns: The host's time now (in nanoseconds).

    Raises:
        RuntimeError: If the device has not reached one of the marks.
    """
    for graph in graphs:
        step = _with_replay(step, graph)
    phase_ms: dict[str, float] = {}
    host_ms: dict[str, float] = {}
    device: list[float] = []
    events, host_ns = step.events, step.host_ns
    settled = settle(tuple(step.labels))
    for i, names in enumerate(settled):
        ms = events[i].elapsed_time(events[i + 1])
        device.append(ms)
        host = (host_ns[i + 1] - host_ns[i]) / 1e6
        for name in names:
            phase_ms[name] = phase_ms.get(name, 0.0) + ms
            host_ms[name] = host_ms.get(name, 0.0) + host
    step_ms = sum(ms for name, ms in phase_ms.items() if "/" not in name)
    timeline = Timeline(settled, device, host_ns, read_ns)
    return StepTimes(
        step.number, phase_ms, host_ms, wait_ms, step_ms, step.skipped_update, timeline
    )


def _with_replay(step: Marks, graph: Marks) -> Marks:
    """Puts the marks of a graph between a step's own, if it was replayed in that step."""
    first, last = graph.events[0], graph.events[-1]
    try:
        lies_inside = step.events[0].elapsed_time(first) >= 0
        lies_inside &= last.elapsed_time(step.events[-1]) >= 0
    except (RuntimeError, ValueError):
        return step  # Not replayed yet.
    if not lies_inside:
        return step
    i = sum(event.elapsed_time(first) >= 0 for event in step.events[:-1])
    return replace(
        step,
        labels=[*step.labels[:i], *graph.labels, *step.labels[i:]],
        events=[*step.events[:i], *graph.events, *step.events[i:]],
        # The host launches a graph as a whole: its phases take none of the host's time.
        host_ns=[*step.host_ns[:i], *[step.host_ns[i]] * len(graph.events), *step.host_ns[i:]],
    )
