"""Export phase times to Prometheus. `grafana_dashboard.json` is a dashboard for them.

python -m pip install prometheus-client
python examples/prometheus_metrics.py
"""

from collections.abc import Mapping
from typing import Any

import torch
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, start_http_server
from torch import nn

from lightning_gputime import GPUPhaseHooks, SlowStep, StepTimes


class PrometheusMetrics:
    """Observer that exports `gputime_*` metrics, labeled by phase.

    Args:
        registry: Registry of the metrics.
        labels: Constant labels, such as `{"job_name": "gpt", "rank": "0"}`.
    """

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._labels = [*(labels or {}).values()]
        names = [*(labels or {})]
        options: dict[str, Any] = {"registry": registry}
        phase = [*names, "phase"]
        self._seconds = Counter("gputime_phase_seconds", "Time of phases", phase, **options)
        self._steps = Counter("gputime_steps", "Timed steps", names, **options)
        self._wait = Counter("gputime_host_wait_seconds", "CPU waits for the GPU", names, **options)
        self._slow = Counter("gputime_slow_steps", "Slow steps", phase, **options)
        self._last = Gauge("gputime_last_step", "Number of the newest timed step", names, **options)

    def on_step(self, times: StepTimes) -> None:
        """Add a timed step."""
        for name, ms in times.phase_ms.items():
            if "/" not in name:  # Sub-phases are included in their phase.
                self._of(self._seconds, name).inc(max(ms, 0.0) / 1e3)
        self._of(self._steps).inc()
        self._of(self._wait).inc(max(times.host_wait_ms, 0.0) / 1e3)
        self._of(self._last).set(times.step)

    def on_slow_step(self, step: SlowStep) -> None:
        """Count a slow step under the phase that grew most."""
        self._of(self._slow, step.phase).inc()

    def _of(self, metric: Any, *labels: str) -> Any:
        values = (*self._labels, *labels)
        return metric.labels(*values) if values else metric


def main(registry: CollectorRegistry = REGISTRY, steps: int = 2000) -> GPUPhaseHooks:
    """Train a small net, and add its times to the metrics of a registry."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with GPUPhaseHooks(model, optimizer, observers=[PrometheusMetrics(registry)]) as timer:
        for x in timer.steps([torch.randn(8, 32)] * steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return timer


if __name__ == "__main__":
    start_http_server(9400)
    main()
    input("http://localhost:9400/metrics: press Enter to end")
