"""Simulated runs of windows of 50 steps, steady or with a planted slowdown."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_gputime._measurement.changes import Slowdown, StepSeries

Floats = npt.NDArray[np.float64]
Random = np.random.Generator
Make = Callable[[Random, int], Floats]
"""A function that returns the step times of n windows relative to the baseline."""

STEPS = 50  # Steps per window.
TIMED = 5  # Timed steps per window.
STEP_MS = 10.0
PHASES = {"data": 0.3, "forward": 0.25, "backward": 0.35, "optimizer": 0.1}
"""Share of each phase in a step."""


def noise(random: Random, n: int, size: float = 0.05, correlation: float = 0.0) -> Floats:
    """Return AR(1) noise with this standard deviation."""
    kernel = correlation ** np.arange(200.0 if correlation else 1.0)
    made = random.standard_normal(n + len(kernel) - 1) * size * math.sqrt(1 - correlation**2)
    return np.convolve(made, kernel, mode="valid")


def white(random: Random, n: int) -> Floats:
    """Return independent noise of 5 %."""
    return correlated(0.0)(random, n)


def correlated(correlation: float) -> Make:
    """Return a function that makes AR(1) noise."""

    def make(random: Random, n: int) -> Floats:
        made: Floats = np.exp(noise(random, n, correlation=correlation))
        return made

    return make


def warming(random: Random, n: int) -> Floats:
    """Return a GPU that becomes up to 6 % slower, or faster, in its first minutes."""
    minutes = np.arange(n) * STEPS * random.choice([0.01, 0.1, 0.5]) / 60
    change = random.uniform(-0.06, 0.06)
    progress = 1 - np.exp(-minutes / random.uniform(0.5, 3.0))
    steps: Floats = (1 + change * progress) * np.exp(noise(random, n, 0.01, 0.5))
    return steps


def periodic(every: int) -> Make:
    """Return a function that makes every n-th step 2 to 20 times as long."""

    def make(random: Random, n: int) -> Floats:
        each = np.exp(noise(random, n * STEPS, 0.1, 0.5))
        each[random.integers(every) :: every] *= random.uniform(2.0, 20.0)
        means: Floats = each.reshape(n, STEPS).mean(axis=1)
        return means

    return make


def spikes(random: Random, n: int) -> Floats:
    """Return a run in which validations or checkpoints interrupt 5 % of the windows."""
    interruptions = np.where(random.random(n) < 0.05, random.pareto(1.5, n), 0.0)
    return white(random, n) + interruptions


def bimodal(random: Random, n: int) -> Floats:
    """Return windows that alternate randomly between two levels."""
    share = random.uniform(0.2, 0.8)
    return np.where(random.random(n) < share, 1.2, 1.0) * np.exp(noise(random, n, 0.03))


STEADY: dict[str, Make] = {
    "white noise": white,
    "AR(0.5) noise": correlated(0.5),
    "AR(0.9) noise": correlated(0.9),
    "warming GPU": warming,
    **{f"long step in every {every}": periodic(every) for every in (7, 100)},
    "random spikes": spikes,
    "bimodal windows": bimodal,
}


@dataclass(frozen=True)
class Planted:
    """A change of the step time. Its times are fractions of the run."""

    size: float  # Relative to the step time before: 0.5 for +50 %.
    start: float
    full: float  # From `start` to `full` the change grows linearly.
    end: float = 1.0
    noise: Make = white

    def make(self, random: Random, n: int) -> Floats:
        edges = np.arange(n + 1) / n
        start, full = (round(at * n) / n for at in (self.start, self.full))
        rise = max(full - start, 1e-9)
        integral = np.clip(edges - start, 0, rise) ** 2 / (2 * rise) + np.maximum(edges - full, 0)
        # Mean of the change in each window, as a fraction of its size.
        shape = np.diff(integral) * n * (edges[1:] <= round(self.end * n) / n)
        return self.noise(random, n) * (1 + self.size * shape)


NOISES = {"white noise": white, "AR(0.5) noise": correlated(0.5), "AR(0.9) noise": correlated(0.9)}
PLANTED = {
    f"{size:+.0%} at {at:.0%}, {name}": Planted(size, at, at, noise=noisy)
    for name, noisy in NOISES.items()
    for size in (0.33, -0.33)
    for at in (0.2, 0.5)
} | {
    "3 to 15 ms": Planted(4.0, 0.0, 1.0),
    "late growth, +100 % from 40 %": Planted(1.0, 0.4, 1.0),
    "growth that saturates at 60 %": Planted(1.0, 0.0, 0.6),
    "stretch, +33 % from 40 to 70 %": Planted(0.33, 0.4, 0.4, 0.7),
}


def run(make: Make, random: Random, n: int) -> StepSeries:
    """Return a run that changes only in `data`. In 9 of 10 windows, 5 of 50 steps are timed."""
    series, factors = StepSeries(), make(random, n)
    shares = np.tile([*PHASES.values()], (n, 1))
    shares[:, 0] = np.maximum(shares[:, 0] + factors - 1, 0.01)
    spread = np.exp(random.normal(0.0, 0.2, (n, len(PHASES), TIMED))).mean(axis=2)
    rows = (STEP_MS * shares * spread).tolist()
    is_timed = random.random(n) < 0.9
    for i, (factor, row) in enumerate(zip(factors.tolist(), rows, strict=True)):
        phases_ms = dict(zip(PHASES, row, strict=True)) if is_timed[i] else {}
        series.add((i + 1) * STEPS - 1, STEPS, STEP_MS * STEPS * factor, phases_ms)
    return series


def find(make: Make, runs: int, n: int, seed: int = 1) -> list[Slowdown | None]:
    """Return the slowdown that is reported at the end of each run."""
    random = np.random.default_rng([seed, n])
    return [run(make, random, n).find() for _ in range(runs)]


def check(planted: Planted, found: list[Slowdown | None], n: int) -> dict[str, float]:
    """Return the percentage of runs in which the change was found, and of correct findings.

    A size or start is correct within 10 % of the size or of the length of the run.
    """
    reported = [slowdown for slowdown in found if slowdown is not None]
    size = np.array([slowdown.change for slowdown in reported]) / planted.size - 1
    start = np.array([slowdown.since_step for slowdown in reported]) / STEPS / n - planted.start
    is_correct = {
        "size": np.abs(size) <= 0.1,
        "start": np.abs(start) <= 0.1,
        "phase": np.array([slowdown.phase == "data" for slowdown in reported]),
    }
    shares = {name: 100 * float(np.mean(values)) for name, values in is_correct.items() if reported}
    return {"found": 100 * len(reported) / len(found), **shares}
