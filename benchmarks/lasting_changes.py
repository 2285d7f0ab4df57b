"""How often a lasting change is said of a steady run, and how often a planted one is found.

Made runs of 1,000 to 60,000 steps of 100 ms, whose noise is 2 to 3 % of a step unless its name says
otherwise.

    python benchmarks/lasting_changes.py --runs 500 --out lasting_changes.json
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_gputime._measurement.changes import LastingChange, LevelRecorder
from lightning_gputime._measurement.sums import Sums

Floats = npt.NDArray[np.float64]
Random = np.random.Generator


def noise(random: Random, n: int, correlation: float = 0.5, size: float | None = None) -> Floats:
    """Returns 1 with noise of which neighbours correlate (AR(1))."""
    size = random.uniform(0.02, 0.03) if size is None else size
    kernel = correlation ** np.arange(200)
    white = random.standard_normal(n + 199) * size * np.sqrt(1 - correlation**2)
    return 1 + np.convolve(white, kernel, mode="valid")


def warming(random: Random, n: int) -> Floats:
    """Returns a GPU that gets up to 5 % slower, or faster, until it has settled."""
    settling = random.uniform(100, 1800)
    return noise(random, n) + random.uniform(-0.05, 0.05) * np.exp(-np.arange(n) / settling)


def outliers(random: Random, n: int) -> Floats:
    """Returns a run of which every hundredth step takes far longer."""
    steps = noise(random, n)
    far = random.random(n) < 0.01
    steps[far] *= 1 + 2 * random.pareto(1.5, int(far.sum()))
    return steps


def two_levels(random: Random, n: int) -> Floats:
    """Returns a run that changes between two levels every 30 steps or so."""
    changes = np.cumsum(random.random(n) < 1 / 30)
    return np.where(changes % 2 == 1, 0.3, 0.0) + noise(random, n)


def bursts(random: Random, n: int) -> Floats:
    """Returns a run that others disturb for some steps now and then."""
    steps = noise(random, n)
    for at in np.flatnonzero(random.random(n) < 1 / 500):
        steps[at : at + random.integers(5, 50)] *= 1.2
    return steps


def periodic(every: int, size: float) -> Callable[[Random, int], Floats]:
    """Returns runs of which every n-th step takes longer."""

    def steps(random: Random, n: int) -> Floats:
        made = noise(random, n)
        made[::every] *= size
        return made

    return steps


STEADY: dict[str, Callable[[Random, int], Floats]] = {
    "independent noise": lambda random, n: noise(random, n, 0.0),
    "AR(0.5)": noise,
    "AR(0.9)": lambda random, n: noise(random, n, 0.9),
    "AR(0.9) of 10 %": lambda random, n: noise(random, n, 0.9, 0.1),
    "a GPU that warms up": warming,
    "outliers": outliers,
    "two levels in turns": two_levels,
    "batches of random length": lambda random, n: random.gamma(8, 1 / 8, n) + 0.2,
    "bursts": bursts,
    "epochs of 391": periodic(391, 5.0),
    "every 8th step": periodic(8, 2.0),
}


def jump(n: int, size: float, first: float, last: float) -> Callable[[Random], Floats]:
    """Returns runs of `n` steps that get longer at once, in this part of the run."""

    def steps(random: Random) -> Floats:
        made = noise(random, n)
        made[int(n * random.uniform(first, last)) :] *= 1 + size
        return made

    return steps


PLANTED: dict[str, Callable[[Random], Floats]] = {
    "growth of 10 % in 5,000 steps": lambda random: noise(random, 5000) + np.linspace(0, 0.1, 5000),
    "jump of 3 % in 2,000 steps": jump(2000, 0.03, 0.4, 0.75),
    "jump of 3 % in 20,000 steps": jump(20_000, 0.03, 0.25, 0.8),
    "growth of 10 % from the middle of 10,000": lambda random: (
        noise(random, 10_000) + np.clip(np.linspace(-0.1, 0.1, 10_000), 0, None)
    ),
    "every 8th step grows twofold in 5,000": lambda random: (
        noise(random, 5000) + np.where(np.arange(5000) % 8, 0, np.linspace(1, 2, 5000))
    ),
}


def find(steps: Floats, step_ms: float = 100.0) -> LastingChange | None:
    """Returns what is said at the end of a run of these steps."""
    recorder, sums = LevelRecorder(), Sums()
    forward = sums.phases["forward"]
    for first in range(0, len(steps), 25):
        block = steps[first : first + 25] * step_ms
        for one in (sums.step, forward):
            one.n += len(block)
            one.device_ms += float(block.sum())
        recorder.note(first + len(block) - 1, sums)
    return recorder.find()


def count(make: Callable[[Random], Floats], runs: int) -> int:
    """Returns in how many runs a change is said."""
    random = np.random.default_rng(1)
    return sum(find(make(random)) is not None for _ in range(runs))


def of_any_length(make: Callable[[Random, int], Floats]) -> Callable[[Random], Floats]:
    """Returns runs of 1,000 to 60,000 steps."""
    return lambda random: make(random, int(np.exp(random.uniform(np.log(1e3), np.log(6e4)))))


def main() -> None:
    """Counts, prints, and writes a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, int]] = {"said of steady runs": {}, "planted and found": {}}
    for name, make in STEADY.items():
        found["said of steady runs"][name] = count(of_any_length(make), options.runs)
    for name, planted in PLANTED.items():
        found["planted and found"][name] = count(planted, options.runs)
    for title, numbers in found.items():
        print(title)
        for name, n in numbers.items():
            print(f"  {name:42} {n:4} of {options.runs}")
    if options.out:
        versions = {"python": platform.python_version(), "numpy": np.__version__}
        command = " ".join(["python", "benchmarks/lasting_changes.py", *sys.argv[1:]])
        record = {"command": command, "runs": options.runs, **versions, **found}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
