"""Measures what recording and reading an event costs the host, cold as in a training step.

    python benchmarks/event_cost.py --out benchmarks/results/event_cost.json

Each of the ways records eight events a step, between small kernels, and reads them 25 steps at a
time. Before each record and each reading the host touches more memory than a core's caches hold.
Needs a GPU of CUDA.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from record import environment, new_parser, save

MARKS, BATCH, BATCHES, TURNS = 8, 25, 8, 5

Read = Callable[[list[list[Any]]], object]


class CudaEvent(torch._C._CudaEventBase):
    """CUDA's own event: reading it asks for no state first, but recording it needs the stream."""

    __slots__ = ()
    streams: dict[int, torch.cuda.Stream] = {}  # noqa: RUF012  # of the process

    def record(self) -> None:  # type: ignore[override]  # that of the base class takes a stream
        raw = torch._C._cuda_getCurrentRawStream(0)
        stream = self.streams.get(raw)
        if stream is None:
            stream = self.streams[raw] = torch.cuda.current_stream()
        super().record(stream)


def by_step(steps: list[list[Any]]) -> object:
    """Reads each step for itself."""
    elapsed_time = type(steps[0][0]).elapsed_time
    return [tuple(map(elapsed_time, events, events[1:])) for events in steps]


def in_one_pass(steps: list[list[Any]]) -> object:
    """Reads all steps as one, in order."""
    events = [event for of_step in steps for event in of_step]
    return [*map(type(events[0]).elapsed_time, events, events[1:])]


WAYS: dict[str, tuple[Callable[[], Any], Read]] = {
    "torch.Event": (lambda: torch.Event("cuda", enable_timing=True), by_step),
    "torch.Event, in one pass": (lambda: torch.Event("cuda", enable_timing=True), in_one_pass),
    "CUDA's own": (lambda: CudaEvent(enable_timing=True), by_step),
    "CUDA's own, in one pass": (lambda: CudaEvent(enable_timing=True), in_one_pass),
}


def measure(new_event: Callable[[], Any], read: Read) -> dict[str, float]:
    """Returns the microseconds of one record, of one query, and of reading one interval."""
    x, much = torch.ones(16, device="cuda"), bytearray(4 << 20)
    record_ns, query_ns, read_ns = [], [], []
    pool = [[new_event() for _ in range(MARKS)] for _ in range(BATCH)]
    for _ in range(BATCHES):
        for events in pool:
            for event in events:
                x.add_(1)
                much.count(1)
                begun = time.perf_counter_ns()
                event.record()
                record_ns.append(time.perf_counter_ns() - begun)
        torch.cuda.synchronize()
        much.count(1)
        begun = time.perf_counter_ns()
        pool[-1][-1].query()
        query_ns.append(time.perf_counter_ns() - begun)
        much.count(1)
        begun = time.perf_counter_ns()
        read(pool)
        read_ns.append((time.perf_counter_ns() - begun) / (BATCH * MARKS))
    return {"record": _us(record_ns), "query": _us(query_ns), "interval": _us(read_ns)}


def _us(values_ns: Iterable[float]) -> float:
    return round(statistics.median(values_ns) / 1e3, 2)


if __name__ == "__main__":
    out = new_parser(__doc__).parse_args().out
    for way in WAYS.values():
        measure(*way)
    # In turns: what the machine does besides must not fall on one of them.
    found = [{name: measure(*way) for name, way in WAYS.items()} for _ in range(TURNS)]
    # What is read is the same, within the resolution.
    first, second = (new() for new in (WAYS["CUDA's own"][0], WAYS["CUDA's own"][0]))
    first.record()
    torch.cuda._sleep(10_000_000)
    second.record()
    torch.cuda.synchronize()
    print("10 million cycles took", first.elapsed_time(second), "ms")
    us = {
        name: {
            what: statistics.median(turn[name][what] for turn in found)
            for what in ("record", "query", "interval")
        }
        for name in WAYS
    }
    print(json.dumps(us, indent=2))
    save(out, environment("gpu", "machine", "python", "torch", "command") | {"us": us})
