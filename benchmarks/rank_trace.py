"""The waits for other ranks in a kernel trace: what `ranks.py` holds `<phase>/comm` against."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kernels import Event, end_of, of_categories

GAP_US = 20.0
"""From here on a pause of a stream is more than the time between two kernels."""

DELIMITER = "erfinv"


class Waits(NamedTuple):
    """What a stream did in a window of a step beside its own work (in milliseconds).

    Attributes:
        wait_ms: It waited while another stream was at work, or ran a collective.
        idle_ms: It paused while no stream was at work: for a launch of the host.
    """

    wait_ms: float
    idle_ms: float


Span = tuple[float, float]
"""A start and an end (in microseconds)."""


def in_trace(
    events: list[Event], windows: Sequence[str], strategy: str
) -> Iterator[dict[str, Waits]]:
    """Yields the waits of each step but the first, by window.

    Args:
        events: The trace.
        windows: What follows each delimiter of a step; the last one is part of the next step.
        strategy: How the ranks share the work.
    """
    activities = of_categories(events, "kernel", "gpu_memcpy", "gpu_memset")
    delimiters = [one for one in activities if DELIMITER in one["name"]]
    stream = delimiters[0]["args"]["stream"]
    own = [one for one in activities if one["args"]["stream"] == stream]
    busy = merged(one for one in activities if one["args"]["stream"] != stream)
    n = len(windows)
    assert len(delimiters) % n == 0, f"{len(delimiters)} delimiters"
    for first in range(n, len(delimiters), n):
        found = {}
        for place, window in zip(range(first - 1, first + n - 1), _turned(windows), strict=True):
            begin, end = delimiters[place : place + 2]
            inside = [one for one in own if begin["ts"] < one["ts"] < end["ts"]]
            found[window] = _waits((end_of(begin), end["ts"]), inside, busy, (strategy, window))
        yield found


def _turned(windows: Sequence[str]) -> list[str]:
    return [windows[-1], *windows[:-1]]


def _waits(window: Span, own: list[Event], busy: list[Span], of: tuple[str, str]) -> Waits:
    strategy, name = of
    if name == "backward" and is_ddp(strategy):
        return _after_own_work(window, own)
    if name == "data" and strategy.startswith("lightning"):
        return _around_copies(own)
    return _in_gaps(window, own, busy)


def is_ddp(strategy: str) -> bool:
    """Tells whether DDP reduces the gradients."""
    return "ddp" in strategy or strategy == "syncbn"


def _in_gaps(window: Span, own: list[Event], busy: list[Span]) -> Waits:
    """Returns the pauses of the stream, and the collectives that run on it.

    A pause is a wait as far as another stream is at work in it: a collective, or what comes before
    and after it.
    """
    wait = sum(one["dur"] for one in own if is_collective(one))
    idle, until = 0.0, window[0]
    for start, end in [*((one["ts"], end_of(one)) for one in own), (window[1], window[1])]:
        if start - until > GAP_US:
            waited = sum(
                max(min(start, one_end) - max(until, one_start), 0.0) for one_start, one_end in busy
            )
            wait += waited
            idle += start - until - waited
        until = max(until, end)
    return Waits(wait / 1e3, idle / 1e3)


def _after_own_work(window: Span, own: list[Event]) -> Waits:
    """Returns how long backward went on after its last kernel, and the collectives before.

    DDP copies out of its buckets, which is communication. These are copies, and no kernels.
    """
    kernels = [one for one in own if one["cat"] == "kernel"]
    ends = [end_of(one) for one in kernels if not is_collective(one)]
    last = max(ends, default=window[0])
    before = sum(one["dur"] for one in kernels if is_collective(one) and one["ts"] < last)
    return Waits((window[1] - last + before) / 1e3, 0.0)


def _around_copies(own: list[Event]) -> Waits:
    """Returns the time between the copies before and after a broadcast of Lightning's."""
    copies = [one for one in own if one["cat"] == "gpu_memcpy"]
    if not copies:
        return Waits(0.0, 0.0)
    return Waits((max(map(end_of, copies)) - copies[0]["ts"]) / 1e3, 0.0)


def is_collective(kernel: Event) -> bool:
    """Tells whether other ranks take part in a kernel."""
    return "nccl" in kernel["name"].lower()


def merged(activities: Iterator[Event]) -> list[Span]:
    """Returns when any of some activities was running, in the order of their starts."""
    spans: list[Span] = []
    for one in activities:
        start, end = one["ts"], end_of(one)
        if spans and start - spans[-1][1] < GAP_US:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        else:
            spans.append((start, end))
    return spans
