"""Export each step as an OpenTelemetry span, with a child span per phase.

python -m pip install opentelemetry-sdk
python examples/opentelemetry_spans.py
"""

import time
from typing import Any

import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from torch import nn

from lightning_gputime import GPUPhaseHooks, StepTimes


class Spans:
    """Observer that exports steps as spans, which start at host times and last for GPU times."""

    def __init__(self, provider: Any) -> None:
        self._tracer = provider.get_tracer("lightning_gputime")
        # Steps use `time.perf_counter_ns`, but spans use the time of day.
        self._to_day_ns = time.time_ns() - time.perf_counter_ns()

    def on_step(self, times: StepTimes) -> None:
        """Export a step."""
        if times.timeline is not None:
            start_ns = times.timeline.host_ns[0] + self._to_day_ns
            span = self._tracer.start_span(f"step {times.step}", start_time=start_ns)
            at_ns = start_ns
            for name, ms in times.phase_ms.items():
                if "/" not in name:  # Sub-phases are included in their phase.
                    inside = trace.set_span_in_context(span)
                    phase = self._tracer.start_span(name, inside, start_time=at_ns)
                    at_ns += round(ms * 1e6)
                    phase.end(at_ns)
            span.end(at_ns)


def main(provider: TracerProvider | None = None, steps: int = 50) -> GPUPhaseHooks:
    """Train a small net, and export its steps, by default to the terminal."""
    if provider is None:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with GPUPhaseHooks(model, optimizer, observers=[Spans(provider)]) as timer:
        for x in timer.steps([torch.randn(8, 32)] * steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return timer


if __name__ == "__main__":
    main()
