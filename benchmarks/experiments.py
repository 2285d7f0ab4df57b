"""Runs all of `examples/experiments`, each in a process of its own, and saves what they measured.

python benchmarks/experiments.py --out benchmarks/results/experiments.json
"""

import multiprocessing
import runpy
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from record import environment, new_parser, save

EXPERIMENTS = Path(__file__).parent.parent / "examples" / "experiments"
NAMES = (
    "launch_time",
    "inference",
    "pipeline",
    "beside_the_profiler",
    "four_synchronizes",
    "callables",
)


def run(name: str) -> dict[str, dict[str, float]]:
    """Runs one experiment."""
    sys.path.insert(0, str(EXPERIMENTS))
    rows: dict[str, dict[str, float]] = runpy.run_path(str(EXPERIMENTS / f"{name}.py"))["main"]()
    return {row: {key: round(ms, 5) for key, ms in cells.items()} for row, cells in rows.items()}


def main(out: Path | None) -> None:
    """Runs them all, and saves after each."""
    results = {}
    for name in NAMES:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
            results[name] = executor.submit(run, name).result()
        save(out, environment() | {"unit": "ms", "results": results})


if __name__ == "__main__":
    main(new_parser(__doc__).parse_args().out)
