"""Custom output: an observer that logs a metric and adds a line to the summary.

python examples/own_output.py
"""

from collections.abc import Mapping

import torch
from torch import nn

from lightning_gputime import GPUPhaseHooks, StepTimes


class Longest:
    """Observer that logs the longest step, and adds it to the summary."""

    def __init__(self) -> None:
        self.step: StepTimes | None = None

    def on_step(self, times: StepTimes) -> None:
        """Keep the step if it is the longest."""
        if self.step is None or times.step_ms > self.step.step_ms:
            self.step = times

    def metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return additional values to log, under the prefix of the timer."""
        return {"longest_ms": self.step.step_ms} if self.step else {}

    def summary(self) -> str | None:
        """Return a line for the summary."""
        return f"longest: step {self.step.step}, {self.step.step_ms:.2f} ms" if self.step else None


def main(steps: int = 50) -> GPUPhaseHooks:
    """Train a small net with the observer."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with GPUPhaseHooks(model, optimizer, observers=[Longest()]) as timer:
        for x in timer.steps([torch.randn(8, 32)] * steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    print(timer.summary())
    return timer


if __name__ == "__main__":
    main()
