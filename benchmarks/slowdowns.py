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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gputime._measurement.changes import Slowdown, StepSeries

Floats = npt.NDArray[np.float64]
Random = np.random.Generator
Make = Callable[[Random, int], Floats]
"""Returns the step time of each of n windows, relative to the usual one."""

STEPS = 50  # In a window.
TIMED = 5  # Of them.
LENGTHS = (10, 20, 28, 40, 200, 1000)
STEP_MS = 10.0
PHASES = {"data": 0.3, "forward": 0.25, "backward": 0.35, "optimizer": 0.1}
"""The share of each phase of a step."""


def noise(random: Random, n: int, size: float = 0.05, correlation: float = 0.0) -> Floats:
    """Returns AR(1) noise with this standard deviation."""
    kernel = correlation ** np.arange(200.0 if correlation else 1.0)
    made = random.standard_normal(n + len(kernel) - 1) * size * math.sqrt(1 - correlation**2)
    return np.convolve(made, kernel, mode="valid")


def white(random: Random, n: int) -> Floats:
    """Returns independent noise of 5 %."""
    return correlated(0.0)(random, n)


def correlated(correlation: float, size: float = 0.05) -> Make:
    """Returns runs with AR(1) noise."""

    def make(random: Random, n: int) -> Floats:
        made: Floats = np.exp(noise(random, n, size, correlation))
        return made

    return make


def warming(random: Random, n: int) -> Floats:
    """Returns a GPU that gets up to 6 % slower, or faster, in its first minutes."""
    minutes = np.arange(n) * STEPS * random.choice([0.01, 0.1, 0.5]) / 60
    change = random.uniform(-0.06, 0.06)
    settled = 1 - np.exp(-minutes / random.uniform(0.5, 3.0))
    steps: Floats = (1 + change * settled) * np.exp(noise(random, n, 0.01, 0.5))
    return steps


def periodic(every: int) -> Make:
    """Returns runs in which every n-th step takes 2 to 20 times as long."""

    def make(random: Random, n: int) -> Floats:
        each = np.exp(noise(random, n * STEPS, 0.1, 0.5))
        each[random.integers(every) :: every] *= random.uniform(2.0, 20.0)
        means: Floats = each.reshape(n, STEPS).mean(axis=1)
        return means

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


@dataclass(frozen=True)
class Planted:
    """A change by `size` that grows between two parts of the run, and may end."""

    size: float
    start: float
    full: float
    end: float = 1.0
    noise: Make = white

    def make(self, random: Random, n: int) -> Floats:
        edges = np.arange(n + 1) / n
        start, full = (round(at * n) / n for at in (self.start, self.full))
        # The integral of the change.
        rise = max(full - start, 1e-9)
        grown = np.clip(edges - start, 0, rise) ** 2 / (2 * rise) + np.maximum(edges - full, 0)
        shape = np.diff(grown) * n * (edges[1:] <= round(self.end * n) / n)
        return self.noise(random, n) * (1 + self.size * shape)


NOISES = {"white noise": white, "AR(0.5) noise": correlated(0.5), "AR(0.9) noise": correlated(0.9)}
PLANTED = {
    f"{size:+.0%} at {at:.0%}, {name}": Planted(size, at, at, noise=noisy)
    for name, noisy in NOISES.items()
    for size in (0.33, -0.33)
    for at in (0.2, 0.3, 0.5)
} | {
    "3 to 15 ms": Planted(4.0, 0.0, 1.0),
    "3 to 15 ms, AR(0.5) noise": Planted(4.0, 0.0, 1.0, noise=correlated(0.5)),
    "late growth, +100 % from 40 %": Planted(1.0, 0.4, 1.0),
    "growth that saturates at 60 %": Planted(1.0, 0.0, 0.6),
    "stretch, +33 % from 40 to 70 %": Planted(0.33, 0.4, 0.4, 0.7),
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


def check(planted: Planted, found: list[Slowdown | None], n: int) -> dict[str, float]:
    """Returns the percentage of runs in which a change was found, and of these how many are right.

    Size and start are right to within 10 % (of the size, and of the run).
    """
    reported = [one for one in found if one is not None]
    size = np.array([one.change for one in reported]) / planted.size - 1
    error = np.array([one.error for one in reported]) / abs(planted.size)
    start = np.array([one.since_step for one in reported]) / STEPS / n - planted.start
    right = {
        "size": np.abs(size) <= 0.1,
        "start": np.abs(start) <= 0.1,
        "interval": np.abs(size) <= error,
        "phase": np.array([one.phase == "data" for one in reported]),
    }
    shares = {name: round(100 * float(np.mean(of)), 1) for name, of in right.items() if reported}
    return {"found": round(100 * len(reported) / len(found), 1), **shares}


def main() -> None:
    """Simulates, prints, and writes a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    command = " ".join(["python", "benchmarks/slowdowns.py", *sys.argv[1:]])
    record: dict[str, Any] = {"command": command, "runs": options.runs, **versions}
    titles: dict[str, Mapping[str, Make | Planted]] = {"steady": STEADY, "planted": PLANTED}
    for title, cases in titles.items():
        record[title] = {}
        print(f"{title:32}", *(f"{n:>32}" for n in options.lengths), "windows")
        for name, case in cases.items():
            make = case.make if isinstance(case, Planted) else case
            row = record[title][name] = {}
            for n in options.lengths:
                found = find(make, options.runs, n)
                if isinstance(case, Planted):
                    row[n] = check(case, found, n)
                else:
                    row[n] = {"reported": sum(one is not None for one in found)}
            cells = (" ".join(map(str, cell.values())) for cell in row.values())
            print(f"{name:32}", *(f"{cell:>32}" for cell in cells), flush=True)
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
