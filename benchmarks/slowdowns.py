"""How often a slowdown is reported for a steady run, and how often a planted one is found.

Simulated runs of 10 to 1,000 windows of 50 steps. A steady run has no change that lasts.

    python benchmarks/slowdowns.py --runs 500 --out benchmarks/results/slowdowns.json
"""

import argparse
import json
import math
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_gputime._measurement.changes import Slowdown, StepSeries

Floats = npt.NDArray[np.float64]
Random = np.random.Generator
Make = Callable[[Random, int], Floats]
"""Returns the step time of each of n windows, relative to the usual one."""

STEPS = 50  # In a window.
TIMED = 5  # Of them.
LENGTHS = (10, 20, 40, 200, 1000)
STEP_MS = 10.0
PHASES = {"data": 0.3, "forward": 0.25, "backward": 0.35, "optimizer": 0.1}
"""The share of each phase of a step."""


def noise(random: Random, n: int, size: float = 0.05, correlation: float = 0.0) -> Floats:
    """Returns AR(1) noise with this standard deviation."""
    kernel = correlation ** np.arange(200.0 if correlation else 1.0)
    made = random.standard_normal(n + len(kernel) - 1) * size * math.sqrt(1 - correlation**2)
    return np.convolve(made, kernel, mode="valid")


def white(random: Random, n: int) -> Floats:
    return np.exp(noise(random, n))


def correlated(correlation: float, size: float = 0.05) -> Make:
    return lambda random, n: np.exp(noise(random, n, size, correlation))


def warming(random: Random, n: int) -> Floats:
    """Returns a GPU that gets up to 6 % slower, or faster, in its first minutes."""
    minutes = np.arange(n) * STEPS * random.choice([0.01, 0.1, 0.5]) / 60
    change = random.uniform(-0.06, 0.06)
    settled = 1 - np.exp(-minutes / random.uniform(0.5, 3.0))
    return (1 + change * settled) * np.exp(noise(random, n, 0.01, 0.5))


def periodic(every: int) -> Make:
    """Returns runs in which every n-th step takes 2 to 20 times as long."""

    def make(random: Random, n: int) -> Floats:
        each = np.exp(noise(random, n * STEPS, 0.1, 0.5))
        each[random.integers(every) :: every] *= random.uniform(2.0, 20.0)
        return each.reshape(n, STEPS).mean(axis=1)

    return make


def spikes(random: Random, n: int) -> Floats:
    """Returns runs in which validations, checkpoints and others interrupt 5 % of the windows."""
    far = np.where(random.random(n) < 0.05, random.pareto(1.5, n), 0.0)
    return white(random, n) + far


def bimodal(random: Random, n: int) -> Floats:
    """Returns windows of which each is on one of two levels."""
    share = random.uniform(0.2, 0.8)
    return np.where(random.random(n) < share, 1.2, 1.0) * np.exp(noise(random, n, 0.03))


STEADY: dict[str, Make] = {
    "white noise": white,
    "AR(0.5) noise": correlated(0.5),
    "AR(0.9) noise": correlated(0.9),
    "AR(0.9) noise of 10 %": correlated(0.9, 0.1),
    "warming GPU": warming,
    **{f"long step in every {every}": periodic(every) for every in (7, 50, 100, 500)},
    "random spikes": spikes,
    "bimodal windows": bimodal,
}


def jump(size: float, at: float, noisy: Make = white) -> Make:
    """Returns runs that change by `size` after this part of the windows."""

    def make(random: Random, n: int) -> Floats:
        return noisy(random, n) * np.where(np.arange(n) >= round(at * n), 1 + size, 1.0)

    return make


def trend(size: float, start: float = 0.0, end: float = 1.0, noisy: Make = white) -> Make:
    """Returns runs that grow by `size` between these parts of the run."""

    def make(random: Random, n: int) -> Floats:
        at = (np.arange(n) + 0.5) / n
        return noisy(random, n) * (1 + size * np.clip((at - start) / (end - start), 0, 1))

    return make


def stretch(size: float, start: float, end: float) -> Make:
    def make(random: Random, n: int) -> Floats:
        at = (np.arange(n) + 0.5) / n
        return white(random, n) * np.where((at > start) & (at < end), 1 + size, 1.0)

    return make


NOISES = {"white": white, "AR(0.5)": correlated(0.5), "AR(0.9)": correlated(0.9)}
JUMPS = {
    f"{size:+.0%} at {at:.0%}, {name}": jump(size, at, noisy)
    for name, noisy in NOISES.items()
    for size in (0.33, -0.33)
    for at in (0.2, 0.3, 0.5)
}


def run(make: Make, random: Random, n: int) -> StepSeries:
    """Returns a run that changes in `data` alone. The phases are known from 5 steps in 50.

    1 of 10 windows has no timed step.
    """
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
    """Returns what is reported at the end of these runs."""
    random = np.random.default_rng([seed, n])
    return [run(make, random, n).find() for _ in range(runs)]


def main() -> None:
    """Simulates, prints, and writes a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record = {}
    for title, cases in (("steady", STEADY), ("jumps", JUMPS)):
        print(f"{title:32}", *(f"{n:>7}" for n in options.lengths))
        for name, make in cases.items():
            counts, right = [], []
            for n in options.lengths:
                found = [one for one in find(make, options.runs, n) if one is not None]
                counts.append(len(found))
                right.append(sum(one.phase == "data" for one in found))
            print(f"{name:32}", *(f"{one:7}" for one in counts), "|", *(f"{one:7}" for one in right), flush=True)


if __name__ == "__main__":
    main()
