"""The phases of steps by a trace of torch.profiler alone, as the documentation defines them.

A boundary is where the host crossed it: a range of the profiler for an update and for zero_grad,
and a range of `drive.py` for a model call, for a run of autograd's engine and for the loop itself.
The stream reaches a boundary when it has done all that was launched before, but not before the host
crossed it. A trace does not say what a stream waits for: with CUDA 12.9 or later Kineto writes -1.
DDP and FSDP let a backward end with a wait for its collectives, so it ends with all that was
launched on any stream.

The timer marks a boundary by an event, and is not at once there. With `marked=True` a boundary is
where the trace has the nearest recording of an event: that leaves out for how long the timer itself
holds up the host, and what a range of the profiler costs.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from kernels import Event, end_of, of_categories

Phases = dict[str, float]

STARTS = {"call": "forward", "backward": "backward", "update": "optimizer", "zero_grad": "other"}
PREFIXES = {
    "foreign/": "",
    "Optimizer.step#": "update",
    "Optimizer.zero_grad#": "zero_grad",
}


class Boundary(NamedTuple):
    """A place of the loop: what begins or ends there, and when the host crossed it."""

    host_us: float
    name: str
    is_end: bool


class Stream:
    """The timed stream: when it reached what the host had crossed."""

    def __init__(self, events: Sequence[Event]) -> None:
        calls = of_categories([*events], "cuda_runtime", "cuda_driver")
        launched = {call["args"].get("correlation"): call["ts"] for call in calls}
        self._records = [call["ts"] for call in calls if call["name"].startswith("cudaEventRecord")]
        done = of_categories([*events], "kernel", "gpu_memcpy", "gpu_memset")
        done = [one for one in done if one["args"].get("correlation") in launched]
        self._of: dict[int, list[tuple[float, float]]] = {}
        for one in done:
            at = launched[one["args"]["correlation"]]
            self._of.setdefault(one["args"]["stream"], []).append((at, end_of(one)))
        # The timed stream is the one that most is launched on, but for collectives.
        work = [one["args"]["stream"] for one in done if "nccl" not in one["name"].lower()]
        self._timed = max(set(work), key=work.count) if work else -1
        for stream, ends in self._of.items():
            self._of[stream] = self._latest(sorted(ends))

    def reached(self, host_us: float, *, is_backward_end: bool = False) -> float:
        """Return when the stream reached what the host crossed at `host_us`."""
        streams = self._of if is_backward_end else (self._timed,)
        return max([host_us, *(self._end(stream, host_us) for stream in streams)])

    def marked(self, host_us: float) -> float:
        """Return when the host recorded the event that is nearest to a boundary."""
        place = bisect_right(self._records, host_us)
        near = self._records[max(place - 1, 0) : place + 1]
        return min(near, key=lambda at: abs(at - host_us), default=host_us)

    def _end(self, stream: int, host_us: float) -> float:
        ends = self._of.get(stream, [])
        place = bisect_right(ends, (host_us, float("inf")))
        return ends[place - 1][1] if place else 0.0

    @staticmethod
    def _latest(ends: list[tuple[float, float]]) -> list[tuple[float, float]]:
        latest, found = 0.0, []
        for at, end in ends:
            latest = max(latest, end)
            found.append((at, latest))
        return found


def phases_in_trace(
    events: list[Event], *, marked: bool = False, own_stream: bool = False
) -> dict[int, Phases]:
    """Return the phases of each step that lies in a trace as a whole (in milliseconds).

    With `own_stream` a backward ends with the last kernel of the timed stream, without what the
    stream then waits for.
    """
    stream = Stream(events)
    found = {}
    for step, boundaries in _steps(_boundaries(events)):
        reached = [
            stream.reached(
                stream.marked(one.host_us) if marked else one.host_us,
                is_backward_end=not own_stream and one.name == "backward" and one.is_end,
            )
            for one in boundaries
        ]
        phases: Phases = {}
        for (start, end), phase in zip(pairwise(reached), _labels(boundaries), strict=True):
            phases[phase] = phases.get(phase, 0.0) + (end - start) / 1e3
        found[step] = phases
    return found


def _boundaries(events: list[Event]) -> list[Boundary]:
    """Return the boundaries in their order; of what is nested only the outermost."""
    found: list[Boundary] = []
    until = 0.0
    for event in of_categories(events, "user_annotation"):
        prefix = next((one for one in PREFIXES if event["name"].startswith(one)), None)
        if prefix is None or event["ts"] < until:
            continue
        name = PREFIXES[prefix] or event["name"].removeprefix(prefix)
        # The timer ends its step behind that point, and begins the body before that.
        at = end_of(event) if name.startswith("step ") else event["ts"]
        found.append(Boundary(at, name, False))
        if name in STARTS:
            found.append(Boundary(end_of(event), name, True))
            until = end_of(event)
    return found


def _steps(boundaries: list[Boundary]) -> Iterator[tuple[int, list[Boundary]]]:
    places = [i for i, one in enumerate(boundaries) if one.name.startswith("step ")]
    for first, last in pairwise(places):
        yield int(boundaries[first].name.split()[1]), boundaries[first : last + 1]


def _labels(boundaries: list[Boundary]) -> list[str]:
    """Return the phase from each boundary of a step to the next one."""
    has_body = any(one.name == "body" for one in boundaries)
    labels: list[str] = []
    for place, (start, end) in enumerate(pairwise(boundaries)):
        after = [one.name for one in boundaries[place + 1 :] if not one.is_end]
        if start.name in STARTS and not start.is_end:
            label = STARTS[start.name]
        elif start.name.startswith("step "):
            label = "data"
        elif start.name == "call":
            trained = next((name for name in after if name != "zero_grad"), "") == "backward"
            label = "forward" if end.name == "call" else "loss" if trained else "other"
        elif start.name == "backward" and end.name == "update":
            label = "optimizer"
        else:
            label = "data" if not has_body and not labels.count("forward") else "other"
        labels.append(label)
    return labels
