"""Runs all of `examples/experiments`, each in a process of its own, and saves what they measured.

python benchmarks/experiments.py --out benchmarks/results/experiments.json
"""

import argparse
import multiprocessing
import runpy
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from record import command, save

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
    """Runs them all."""
    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": command(),
        "unit": "ms",
        "results": {},
    }
    for name in NAMES:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
            results["results"][name] = executor.submit(run, name).result()
        save(out, results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    main(parser.parse_args().out)
