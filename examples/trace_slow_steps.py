"""Trains a small net, and keeps a trace of torch.profiler where slow steps recur.

python examples/trace_slow_steps.py
"""

from contextlib import closing
from pathlib import Path

import torch
from torch import nn
from torch.profiler import profile, schedule

from lightning_gputime import GPUPhaseHooks, SlowStep


class SlowStepTraces:
    """Profiles a window of steps once two were slow, and keeps its trace if it has a slow one.

    Args:
        folder: Where the traces go.
        window: Number of steps in a trace.
        most: Number of traces to keep in a run.
    """

    def __init__(self, folder: str | Path, window: int = 30, most: int = 3) -> None:
        self.folder, self.window, self.most = Path(folder), window, most
        self.kept: list[Path] = []
        self.slow: list[SlowStep] = []
        self.profiler: profile | None = None
        self.first = 0

    def on_slow_step(self, step: SlowStep) -> None:
        """Take a slow step, when the timer has read it."""
        self.slow.append(step)

    def step(self, timer: GPUPhaseHooks, number: int) -> None:
        """Call at the end of each step's code: there the profiler starts and stops."""
        if self.profiler is None and (len(self.slow) < 2 or len(self.kept) == self.most):
            return
        with timer.paused():  # What the profiler takes to start, and to save, is in no step.
            if self.profiler is None:
                self.start(number)
            else:
                self.profiler.step()
                if number == self.first + self.window - 1:
                    timer.flush()  # Reads the steps, and so calls `on_slow_step`.
                    self.end(self.profiler)

    def start(self, number: int) -> None:
        """Start a profiler, which sets itself up in one step before it records the next ones."""
        self.first = number + 2
        self.profiler = profile(schedule=schedule(wait=0, warmup=1, active=self.window, repeat=1))
        self.profiler.start()

    def end(self, profiler: profile) -> None:
        """Save the trace if a step of it was slow, then wait for two slow steps again."""
        # All steps are slower under a profiler, but not as much.
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
        """Stop the profiler, if one runs: call it where the loop is left, also by an error."""
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None


def main(folder: str = "slow_step_traces", steps: int = 300) -> SlowStepTraces:
    """Trains with a rare, slow branch, and returns what has kept its traces."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batches = [(torch.randn(64, 256), torch.randint(10, (64,)))] * steps
    traces = SlowStepTraces(folder)
    timer = GPUPhaseHooks(net, optimizer, observers=[traces])
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
