"""Train a small net, and write its newest steps as a trace.

    python examples/perfetto_trace.py

Open `steps_trace.json` with https://ui.perfetto.dev or chrome://tracing.
"""

import json
from collections import deque
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_gputime import GPUPhaseHooks, StepTimes


class StepTrace:
    """Trace of the newest steps, with a lane for the GPU and a lane for the host.

    Args:
        steps: Number of steps to keep, each about 1 kB in the file.
    """

    def __init__(self, steps: int = 1000) -> None:
        self.newest: deque[StepTimes] = deque(maxlen=steps)

    def save(self, path: str | Path) -> None:
        """Write the steps in the Trace Event Format."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
            for pid, name in ((1, "GPU"), (2, "host"))
        ]
        end_ns = 0.0
        for step in self.newest:
            if (line := step.timeline) is None:
                continue
            # The GPU starts a step after the host has, and after the previous step. If the host
            # waited for the step, it ended no earlier than that wait.
            start_ns = max(end_ns, line.host_ns[0], line.finished_ns - 1e6 * sum(line.device_ms))
            gpu_ns = [*accumulate((1e6 * ms for ms in line.device_ms), initial=start_ns)]
            end_ns = gpu_ns[-1]
            for pid, times_ns in ((1, gpu_ns), (2, [*map(float, line.host_ns)])):
                events.append(event(pid, f"step {step.step}", times_ns[0], times_ns[-1]))
                for names, (begin, end) in zip(line.names, pairwise(times_ns), strict=True):
                    events += [event(pid, name, begin, end) for name in names or ("not timed",)]
        Path(path).write_text(json.dumps({"traceEvents": events}))


def event(pid: int, name: str, start_ns: float, end_ns: float) -> dict[str, Any]:
    """Return a slice of a lane, rounded to half a microsecond to prevent overlaps."""
    start_us, end_us = round(start_ns / 500) / 2, round(end_ns / 500) / 2
    return {
        "ph": "X",
        "pid": pid,
        "tid": pid,
        "ts": start_us,
        "dur": end_us - start_us,
        "name": name,
    }


def main(path: str = "steps_trace.json", steps: int = 100) -> GPUPhaseHooks:
    """Train, write the trace, and return the timer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batches = [(torch.randn(64, 256), torch.randint(10, (64,)))] * steps
    trace = StepTrace(steps=50)
    with GPUPhaseHooks(net, optimizer, observers=[trace.newest.append]) as timer:
        for x, y in timer.steps(batches):
            loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    trace.save(path)
    return timer


if __name__ == "__main__":
    main()
