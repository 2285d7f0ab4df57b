"""The newest steps as a trace for Perfetto and chrome://tracing."""

import json
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from lightning_gputime._phases import OTHER, StepTimes, Timeline

_LANES = {1: "device", 2: "host"}


def trace(steps: Sequence[StepTimes]) -> str:
    """Return a trace in the Trace Event Format, in JSON.

    A step is a slice with its phases inside, on one lane by the device's clock and on one by the
    host's; what no phase covers is `other`, and a validation inside it is `not timed`. Where the
    host waited for a step, the clocks meet, and a counter shows how far the host is ahead; a run of
    steps without a wait is placed as early as its launches allow, and has none.

    Source: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": lane, "name": "process_name", "args": {"name": name}}
        for lane, name in _LANES.items()
    ]
    origin_ns = next((step.timeline.host_ns[0] for step in steps if step.timeline), 0)
    for run in _runs(steps):
        has_met = any(line.finished_ns for _, line in run)
        for step, line, device_us in _placed(run):
            host_us = [(ns - origin_ns) / 1e3 for ns in line.host_ns]
            for lane, times in ((1, [us - origin_ns / 1e3 for us in device_us]), (2, host_us)):
                events.append(_slice(lane, f"step {step.step}", times[0], times[-1]))
                events.extend(_slices(lane, line, times))
            if has_met:
                # The end is the first mark of the next step.
                lead_us = (us - ns / 1e3 for us, ns in zip(device_us, line.host_ns, strict=True))
                events.extend(map(_counter, host_us[:-1], lead_us))
    return json.dumps({"traceEvents": events}, separators=(",", ":"))


def _runs(steps: Sequence[StepTimes]) -> Iterator[list[tuple[StepTimes, Timeline]]]:
    """Split steps where one does not begin at the end of the one before."""
    run: list[tuple[StepTimes, Timeline]] = []
    for step in steps:
        line = step.timeline
        if line is None:
            continue
        if run and run[-1][1].host_ns[-1] != line.host_ns[0]:
            yield run
            run = []
        run.append((step, line))
    if run:
        yield run


def _placed(
    run: Sequence[tuple[StepTimes, Timeline]],
) -> Iterator[tuple[StepTimes, Timeline, list[float]]]:
    """Yield the steps of a run with their device times on the host's clock (in us)."""
    # Summed over the whole run, so that a step ends exactly where the next begins.
    times_ms = (ms for _, line in run for ms in line.device_ms)
    # A clock that is broken must not move all that follows out of sight.
    known = (ms * 1e3 if math.isfinite(ms) else 0.0 for ms in times_ms)
    ends = list(accumulate(known, initial=0.0))
    first = 0
    placed = []
    for step, line in run:
        placed.append((step, line, ends[first : first + len(line.device_ms) + 1]))
        first += len(line.device_ms)
    met = [line.finished_ns / 1e3 - times[-1] for _, line, times in placed if line.finished_ns]
    launched = max(
        host / 1e3 - device
        for _, line, times in placed
        for host, device in zip(line.host_ns, times, strict=True)
    )
    offset = sorted(met)[len(met) // 2] if met else launched
    for step, line, times in placed:
        yield step, line, [offset + us for us in times]


def _slices(lane: int, line: Timeline, times: Sequence[float]) -> Iterator[dict[str, Any]]:
    for names, (start, end) in zip(line.names, pairwise(times), strict=True):
        for name in names or ("not timed",):
            if name != OTHER and end > start:
                yield _slice(lane, name, start, end)


def _counter(host_us: float, lead_us: float) -> dict[str, Any]:
    ms = round(lead_us / 1e3, 3)
    return {"ph": "C", "pid": 2, "ts": round(host_us, 1), "name": "host ahead", "args": {"ms": ms}}


def _slice(lane: int, name: str, start: float, end: float) -> dict[str, Any]:
    # Both ends are rounded to half a microsecond, which binary floats add up exactly: else a slice
    # could reach into the next, and viewers would show that one as its child.
    ts = round(start * 2) / 2
    dur = round(end * 2) / 2 - ts
    return {"ph": "X", "pid": lane, "tid": lane, "ts": ts, "dur": dur, "name": name}
