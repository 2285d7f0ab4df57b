"""Measures how often two runs are called different that are equal, and that are not.

    python benchmarks/compare_runs.py record long --n 40
    python benchmarks/compare_runs.py record short --n 120 --steps 250
    python benchmarks/compare_runs.py judge long short --out benchmarks/results/compare_runs.json

`record` trains a small net on the CPU, in steps of some 15 ms, each time in a process of its own,
and saves each run. `judge` compares them: as they were run, and what is resampled from them in
blocks.
The rule of TraceML (means, and fixed bands of 3 and 8 %) stands beside it.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import environment, new_parser, save
from torch import nn

from lightning_gputime import GPUPhaseHooks, Run, compare, load
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._saved_runs.page import page

WARMUP = 20
PAIRS = 200
BLOCKS = (10, 25, 50)
"""So many steps that follow each other are drawn together."""

MORE = 0.01
"""What is added to the steps of one side, as a part of the median step."""

BANDS = (0.03, 0.08)
"""TraceML 0.5.0 calls a mean that is longer by these parts a regression, and a severe one."""

Sides = tuple[Sequence[Run], Sequence[Run]]


SIZES = {"cpu": (512, 256), "cuda": (4096, 1024)}
"""The width of the net, and the batch: a step takes some 15 ms."""


def train(path: Path, steps: int, device: str) -> None:
    """Trains a net, and saves the run."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, batch = SIZES[device]
    layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.ReLU())]
    net = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(batch, width, device=device)
    with GPUPhaseHooks(net, optimizer, warmup_steps=WARMUP) as timer:
        for _ in timer.steps(range(steps + WARMUP)):
            loss = (net(x) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    timer.save(path)
    print(path.name, timer.summary().step.p50_ms, flush=True)


def record(folder: Path, n: int, steps: int, device: str) -> None:
    """Trains so many times, each time in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        path = str(folder / f"run{i:03}.json.gz")
        command = [sys.executable, __file__, "train", path, "--steps", str(steps)]
        command += ["--device", device]
        subprocess.run(command, check=True)


def resampled(run: Run, block: int, n: int, rng: np.random.Generator) -> Run:
    """Returns a run of steps that are drawn from another, some neighbours at a time."""
    steps = run.measured
    starts = rng.integers(0, len(steps) - block + 1, n // block)
    return replace(
        run, history=np.concatenate([steps[i : i + block] for i in starts]), warmup_steps=0
    )


def slowed(run: Run) -> Run:
    """Returns a run whose backward takes longer, by a part of the median step."""
    history = run.history.copy()
    more_ms = MORE * np.median(run.measured["step_ms"])
    for name in ("step_ms", "backward_ms"):
        history[name] += more_ms
    return replace(run, history=history)


def is_different(sides: Sides) -> bool:
    """Tells what we say of a pair."""
    return compare(*sides).verdict != "alike"


def by_bands(sides: Sides, band: float = BANDS[0]) -> bool:
    """Tells what TraceML's rule says of a pair."""
    before, after = (np.mean([run.measured["step_ms"].mean() for run in side]) for side in sides)
    return bool(abs(after / before - 1) >= band)


RULES: dict[str, Callable[[Sides], bool]] = {
    "ours": is_different,
    "bands, 3 %": by_bands,
    "bands, 8 %": lambda sides: by_bands(sides, BANDS[1]),
}


def called_different(pairs: Sequence[Sides]) -> dict[str, Any]:
    """Returns of how many pairs each rule says that they differ."""
    found: dict[str, Any] = {"pairs": len(pairs)}
    for name, rule in RULES.items():
        found[name] = round(sum(map(rule, pairs)) / len(pairs), 3)
    errors = [compare(*sides).step.error_ratio for sides in pairs]
    return {**found, "median error": round(float(np.median(errors)), 4)}


def drawn(
    runs: Sequence[Run], block: int, n: int, rng: np.random.Generator, *, many: int = 1
) -> dict[str, Any]:
    """Returns what is said of pairs that are resampled from one run each, and of slower ones."""
    equal, slower = [], []
    for i in range(PAIRS):
        run = runs[i % len(runs)]
        before, after = ([resampled(run, block, n, rng) for _ in range(many)] for _ in range(2))
        equal.append((before, after))
        slower.append((before, [slowed(one) for one in after]))
    return {"equal": called_different(equal), "1 % slower": called_different(slower)}


def really_run(runs: Sequence[Run], many: int) -> dict[str, Any]:
    """Returns what is said of pairs of equal runs, which took turns: before, after, before, ..."""
    groups = [runs[i : i + 2 * many] for i in range(0, len(runs) - 2 * many + 1, 2 * many)]
    equal = [(group[::2], group[1::2]) for group in groups]
    slower = [(before, [slowed(one) for one in after]) for before, after in equal]
    return {"equal": called_different(equal), "1 % slower": called_different(slower)}


def spread(run: Run) -> float:
    """Returns the width of the middle half of the steps, by their median."""
    low, middle, high = np.quantile(run.measured["step_ms"], (0.25, 0.5, 0.75))
    return float((high - low) / middle)


def judge(long: Sequence[Run], short: Sequence[Run]) -> dict[str, Any]:
    """Returns how often each rule calls a pair different."""
    rng = np.random.default_rng(0)
    quiet = sorted(long, key=spread)[: len(long) // 4]
    medians = [float(np.median(run.measured["step_ms"])) for run in long]
    begin = time.perf_counter()
    found: dict[str, Any] = {
        "runs": {
            "long": len(long),
            "short": len(short),
            "median step of the long ones, shortest and longest, ms": [min(medians), max(medians)],
            "spread of the quiet ones, largest": round(max(map(spread, quiet)), 3),
        },
        "resampled, all runs, 1,000 steps": {
            f"blocks of {block}": drawn(long, block, 1000, rng) for block in BLOCKS
        },
        "resampled, the quiet quarter, 1,000 steps": {
            f"blocks of {block}": drawn(quiet, block, 1000, rng) for block in BLOCKS
        },
        "resampled, the quiet quarter, 10,000 steps": {
            f"blocks of {block}": drawn(quiet, block, 10_000, rng) for block in BLOCKS
        },
        "really run, 1 a side": really_run(long, 1),
        "really run, 2 a side": really_run(short, 2),
        "really run, 3 a side": really_run(short, 3),
    }
    return {**found, "seconds": round(time.perf_counter() - begin)}


def seconds_of(call: Callable[[], Any]) -> tuple[float, Any]:
    """Returns how long a call takes, and what it returns."""
    begin = time.perf_counter()
    result = call()
    return round(time.perf_counter() - begin, 2), result


def large(rng: np.random.Generator, folder: Path) -> dict[str, Any]:
    """Returns what 100,000 steps cost: a timer's `save`, its file, a comparison, and the page."""
    net = nn.Linear(2, 2)
    timer = GPUPhaseHooks(net, history_size=100_000)
    labels = ("data/fetch", "data/copy", "forward", "<after forward>", "backward", "optimizer")
    times = np.round(rng.gamma(20.0, 0.15, (100_000, len(labels))), 4).tolist()
    # The first mark of each step is the last of the one before.
    ends_ns = np.cumsum(np.array(times), axis=1) * 1e6
    for i, (device_ms, host_ns) in enumerate(zip(times, ends_ns.astype(int).tolist(), strict=True)):
        step = StepRecord(i, labels, tuple(device_ms), (0, *host_ns), 0.5, host_ns[-1], False)
        timer._results.add([step])
    path, html = folder / "large.json.gz", folder / "large.html"
    found: dict[str, Any] = {"columns": len(timer.history().dtype.names or ())}
    found["save, s"] = seconds_of(lambda: timer.save(path))[0]
    found["file, MB"] = round(path.stat().st_size / 1e6, 2)
    found["load, s"], one = seconds_of(lambda: load(path))
    found["compare, with two loads, s"] = seconds_of(lambda: compare(path, path))[0]
    found["page, s"], text = seconds_of(lambda: page([one]))
    html.write_text(text)
    found["page, MB"] = round(html.stat().st_size / 1e6, 2)
    chromium = shutil.which("chromium")
    if chromium is not None:
        command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += ["--enable-logging=stderr", "--v=0", "--virtual-time-budget=20000"]
        run_it = partial(subprocess.run, capture_output=True, text=True, check=True)
        found["browser, start to end, s"], done = seconds_of(
            lambda: run_it([*command, html.resolve().as_uri()])
        )
        found["of which an empty page, s"] = seconds_of(lambda: run_it([*command, "about:blank"]))[
            0
        ]
        idle = re.search(r"document idle at (\d+) ms", done.stderr)
        found["charts drawn after, ms"] = int(idle[1]) if idle is not None else None
    return found


def main() -> None:
    """Records runs, or judges them."""
    parser = new_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=("record", "train", "judge"))
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--n", type=int, default=40)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    args = parser.parse_args()
    if args.what == "train":
        train(args.paths[0], args.steps, args.device)
    elif args.what == "record":
        record(args.paths[0], args.n, args.steps, args.device)
    else:
        long, short = ([load(one) for one in sorted(path.glob("*.gz"))] for path in args.paths)
        found = judge(long, short)
        with tempfile.TemporaryDirectory() as folder:
            found["100,000 steps"] = large(np.random.default_rng(0), Path(folder))
        for name, value in found.items():
            print(name, value)
        save(args.out, {**environment("host", "torch", "command"), "results": found})


if __name__ == "__main__":
    main()
