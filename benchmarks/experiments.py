"""Run `examples/experiments`, each in a separate process, and save the results.

python benchmarks/experiments.py --out benchmarks/results/experiments.json
"""

import multiprocessing
import runpy
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from record import environment, new_parser, save

EXPERIMENTS = Path(__file__).parent.parent / "examples" / "experiments"
FIRST = ("launch_time", "inference", "pipeline")
NAMES = (*FIRST, "beside_the_profiler", "four_synchronizes", "callables")


def run(name: str) -> dict[str, dict[str, float]]:
    sys.path.insert(0, str(EXPERIMENTS))
    rows: dict[str, dict[str, float]] = runpy.run_path(str(EXPERIMENTS / f"{name}.py"))["main"]()
    return {row: {key: round(ms, 5) for key, ms in cells.items()} for row, cells in rows.items()}


if __name__ == "__main__":
    out = new_parser(__doc__).parse_args().out
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as executor:
        results = dict(zip(NAMES, executor.map(run, NAMES), strict=True))
    save(out, environment() | {"unit": "ms", "results": results})
