"""Train a small net, and save traces of torch.profiler if slow steps recur.

python examples/trace_slow_steps.py
"""

from contextlib import closing
from pathlib import Path

import torch
from torch import nn
from torch.profiler import profile, schedule

from lightning_gputime import GPUPhaseHooks, SlowStep


class SlowStepTraces:
    """Observer that profiles a window of steps after two slow steps.

    It saves the trace if the window contains a slow step.

    Args:
        folder: Folder for the traces.
        window: Number of steps in a trace.
        most: Maximum number of traces per run.
    """

    def __init__(self, folder: str | Path, window: int = 30, most: int = 3) -> None:
        self.folder, self.window, self.most = Path(folder), window, most
        self.kept: list[Path] = []  # Traces that were saved.
        self.slow: list[SlowStep] = []  # Slow steps since the last trace.
        self.profiler: profile | None = None
        self.first = 0  # Number of the first step in the newest trace.

    def on_slow_step(self, step: SlowStep) -> None:
        """Keep a slow step."""
        self.slow.append(step)

    def step(self, timer: GPUPhaseHooks, number: int) -> None:
        """Start, advance or stop the profiler. Call this at the end of the loop body."""
        if self.profiler is None and (len(self.slow) < 2 or len(self.kept) == self.most):
            return
        with timer.paused():  # Exclude starting and saving from all steps.
            if self.profiler is None:
                self.start(number)
            else:
                self.profiler.step()
                if number == self.first + self.window - 1:
                    timer.flush()  # Resolves the steps, which calls `on_slow_step`.
                    self.end(self.profiler)

    def start(self, number: int) -> None:
        """Start a profiler, which warms up for one step before it records."""
        self.first = number + 2
        self.profiler = profile(schedule=schedule(wait=0, warmup=1, active=self.window, repeat=1))
        self.profiler.start()

    def end(self, profiler: profile) -> None:
        """Save the trace if it contains a slow step, then wait for two more slow steps."""
        # The profiler slows down every step. Assume by less than half the excess of the two slow
        # steps that started it, and ignore steps below that bound.
        least_ms = min(step.excess_ms for step in self.slow[:2]) / 2
        for step in self.slow:
            if step.step >= self.first and step.excess_ms >= least_ms:
                path = self.folder / f"steps-{self.first}.json"
                if path not in self.kept:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    profiler.export_chrome_trace(str(path))
                    self.kept.append(path)
                print(f"{path}, ProfilerStep#{step.step - self.first + 1}: {step}")
        self.close()
        self.slow.clear()

    def close(self) -> None:
        """Stop a running profiler. Call this after the loop, even after an error."""
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None


def main(folder: str = "slow_step_traces", steps: int = 300) -> SlowStepTraces:
    """Train with a slow branch in 1 of 20 steps, and return the traces."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batches = [(torch.randn(64, 256), torch.randint(10, (64,)))] * steps
    traces = SlowStepTraces(folder)
    # Time every step, so that no slow step is missed. Do not examine lines, which slows steps down.
    timer = GPUPhaseHooks(net, optimizer, observers=[traces], every_n_steps=1, lines=False)
    with closing(traces), timer:
        for number, (x, y) in enumerate(timer.steps(batches)):
            loss = nn.functional.cross_entropy(net(x), y)
            if number % 20 == 19:
                loss = loss + 1e-6 * torch.linalg.svdvals(net[0].weight).max()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            traces.step(timer, number)
    print(timer.summary())
    return traces


if __name__ == "__main__":
    main()
