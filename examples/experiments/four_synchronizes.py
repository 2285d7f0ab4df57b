"""Compare four synchronizes per step with one wait, in a loop with a body and a head.

python examples/experiments/four_synchronizes.py
"""

import statistics
import time

import torch
from common import find_device, in_turn, launch, show, synchronize
from torch import Tensor, nn

from lightning_gputime import GPUPhaseHooks

PARTS = ("body forward", "head forward", "loss", "head backward")


class Training:
    """Training of a head on a frozen body."""

    def __init__(self, width: int, batch: int, layers: int) -> None:
        self.device = device = find_device()
        body = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())]
        head = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())]
        self.body = nn.Sequential(*body).to(device).requires_grad_(False)
        self.head = nn.Sequential(*head).to(device)
        self.inputs = torch.randn(batch, width, device=device)
        self.targets = torch.randn(batch, width, device=device)
        self.optimizer = torch.optim.SGD(self.head.parameters(), lr=1e-3)

    def update(self) -> None:
        """Update the head."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, outputs: Tensor) -> Tensor:
        """Return the loss of the head's outputs."""
        return nn.functional.mse_loss(outputs, self.targets)

    def without_a_timer(self, n: int) -> dict[str, float]:
        """Train without measuring."""
        for _ in range(n):
            self.loss(self.head(self.body(self.inputs))).backward()
            self.update()
        return {}

    def with_four_synchronizes(self, n: int) -> dict[str, float]:
        """Train, and return the time of each part on the host clock (in milliseconds)."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for _ in range(n):
            start = time.perf_counter()
            hidden = self.body(self.inputs)
            synchronize(self.device)
            seconds["body forward"] += time.perf_counter() - start

            start = time.perf_counter()
            outputs = self.head(hidden)
            synchronize(self.device)
            seconds["head forward"] += time.perf_counter() - start

            start = time.perf_counter()
            loss = self.loss(outputs)
            synchronize(self.device)
            seconds["loss"] += time.perf_counter() - start

            start = time.perf_counter()
            loss.backward()
            synchronize(self.device)
            seconds["head backward"] += time.perf_counter() - start
            self.update()
        return {name: total / n * 1e3 for name, total in seconds.items()}

    def with_one_wait(self, n: int) -> dict[str, float]:
        """Train, and return the time of each part on the device clock (in milliseconds)."""
        models = {"body": self.body, "head": self.head}
        with GPUPhaseHooks(nn.ModuleDict(models), self.optimizer) as timer:
            for _ in timer.steps(range(n)):
                with timer.phase("forward/body"):
                    hidden = self.body(self.inputs)
                with timer.phase("forward/head"):
                    outputs = self.head(hidden)
                self.loss(outputs).backward()
                self.update()
        rows = timer.summary().rows
        phases = ("forward/body", "forward/head", "loss", "backward")
        return {part: rows[phase].mean_ms for part, phase in zip(PARTS, phases, strict=True)}


def main(
    width: int = 4096, batch: int = 512, layers: int = 4, n: int = 50, rounds: int = 5
) -> dict[str, dict[str, float]]:
    """Measure in random order over several rounds, and print."""
    training = Training(width, batch, layers)
    ways = {
        "no timer": lambda: training.without_a_timer(n),
        "four synchronizes": lambda: training.with_four_synchronizes(n),
        "one wait": lambda: training.with_one_wait(n),
    }
    training.without_a_timer(5)
    rows = {}
    for name, runs in in_turn(ways, rounds, training.device).items():
        times = [{**parts, "the whole loop": whole_ms} for parts, whole_ms in runs]
        rows[name] = {part: statistics.median(run[part] for run in times) for part in times[0]}
    show(f"A step of training, and the whole loop of {n}", rows)
    return rows


if __name__ == "__main__":
    launch(main, width=512, batch=128)
