"""Measures how often runs are called different that are equal, and that are not.

    python benchmarks/compare_runs.py record runs --n 64 --steps 250
    python benchmarks/compare_runs.py judge runs --out benchmarks/results/compare_runs.json
    python benchmarks/compare_runs.py bench --out benchmarks/results/compare_runs_bench.json

`record` trains a small net on the CPU, in steps of some 15 ms, each time in a process of its own,
and saves each run. `judge` compares runs of made noise, what is resampled from one recorded run in
blocks, and the recorded runs, dealt to two sides by lot. Of each it compares equal ones, and such
of which one side has +2 % in the whole step, or +10 % in a phase that takes 2 % of it.
The rule of TraceML (means, and a fixed band of 3 %) stands beside it. `bench` does what the command
of this name does, with runs of made noise, and a drift of the machine from run to run.
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
from scipy import signal
from torch import nn

from lightning_gputime import Environment, GPUPhaseHooks, Run, RunComparison, compare, load
from lightning_gputime._auto_instrumentation.command import _LOOKS
from lightning_gputime._measurement.results import Results
from lightning_gputime._output.summary import summary_of
from lightning_gputime._phases import StepRecord
from lightning_gputime._saved_runs.compare import compare_groups
from lightning_gputime._saved_runs.page import page

WARMUP = 20
PAIRS = 200
STEPS = (50, 250, 1000, 10_000)
A_SIDE = (2, 3, 5)
"""How many runs a side has."""

BLOCK = 25
"""So many steps that follow each other are drawn together."""

STEP_MORE, PHASE_MORE = 0.02, 0.1
"""What is planted: in the whole step, and in the phase "norm", which takes 2 % of it."""

TURNS = 12
"""How many runs of each a bench takes at most."""

BAND = 0.03
"""TraceML 0.5.0 calls a mean that is longer by this part a regression."""

SHARES = {
    "data": 0.02,
    "forward": 0.28,
    "loss": 0.02,
    "norm": 0.02,
    "backward": 0.5,
    "optimizer": 0.14,
    "other": 0.02,
}
"""Of the phases of a made step."""

NOISE = {
    "as steady as an H200": (0.0008, 0.97, 0.0003),
    "1 % in steps, 0.3 % between runs": (0.01, 0.9, 0.003),
    "5 % in steps, 1 % between runs": (0.05, 0.97, 0.01),
}
"""Of a run's steps: the deviation of what lasts, how much of it lasts to the next step, and the
deviation between runs."""

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


def run_of(step_ms: Any, phases_ms: dict[str, Any], like: Run | None = None) -> Run:
    """Returns a run of these times."""
    names = ["step_ms", *(f"{name}_ms" for name in phases_ms)]
    history = np.zeros(len(step_ms), [("step", np.int64), *((name, float) for name in names)])
    history["step"] = np.arange(len(step_ms))
    for name, times in zip(names, (step_ms, *phases_ms.values()), strict=True):
        history[name] = times
    if like is not None:
        return replace(like, history=history, warmup_steps=0)
    return Run(Environment(), history, 0, summary_of(Results(1, 0)))


def made(noise: str, steps: int, rng: np.random.Generator) -> Run:
    """Returns a run of 15 ms a step, in which one step in 100 is slow."""
    deviation, lasting, between = NOISE[noise]
    new = rng.standard_normal(steps)
    new[1:] *= np.sqrt(1 - lasting**2)
    # Six tenths of the variance last, the rest is new in each step.
    lasts = np.sqrt(0.6) * signal.lfilter([1.0], [1.0, -lasting], new)
    both = lasts + np.sqrt(0.4) * rng.standard_normal(steps)
    factor = np.exp(between * rng.standard_normal() + deviation * both)
    factor *= 1 + (rng.random(steps) < 0.01) * rng.exponential(0.5, steps)
    phases_ms = {
        name: 15 * share * factor * np.exp(deviation * rng.standard_normal(steps))
        for name, share in SHARES.items()
    }
    return run_of(sum(phases_ms.values()), phases_ms)


def with_norm(run: Run) -> Run:
    """Returns a run in which 2 % of the step are a phase of their own, as noisy as `optimizer`."""
    steps = run.measured
    phases_ms = {name: steps[f"{name}_ms"].copy() for name in SHARES if name != "norm"}
    middle = np.median(steps["step_ms"]) / np.median(phases_ms["optimizer"])
    norm = np.minimum(SHARES["norm"] * middle * phases_ms["optimizer"], phases_ms["forward"])
    phases_ms["forward"] -= norm
    return run_of(steps["step_ms"], {**phases_ms, "norm": norm}, run)


def resampled(run: Run, steps: int, rng: np.random.Generator) -> Run:
    """Returns a run of steps that are drawn from another, some neighbours at a time."""
    starts = rng.integers(0, len(run.history) - BLOCK + 1, steps // BLOCK)
    drawn = np.concatenate([run.history[i : i + BLOCK] for i in starts])
    return replace(run, history=drawn)


def slower(run: Run, phase: str) -> Run:
    """Returns a run whose steps are longer by a part of each, or whose phase is."""
    history = run.history.copy()
    if phase == "step":
        for name in (history.dtype.names or ())[1:]:
            history[name] *= 1 + STEP_MORE
    else:
        history["step_ms"] += PHASE_MORE * history[f"{phase}_ms"]
        history[f"{phase}_ms"] *= 1 + PHASE_MORE
    return replace(run, history=history)


def is_claimed(found: RunComparison) -> bool:
    """Tells whether anything is called different: the step, its mean or a phase."""
    told = [found.step, found.mean, *(found.rows[name] for name in found.judged)]
    return any(one.is_significant for one in told)


def by_band(sides: Sides) -> bool:
    """Tells what TraceML's rule says of a pair."""
    before, after = (np.mean([run.measured["step_ms"].mean() for run in side]) for side in sides)
    return bool(abs(after / before - 1) >= BAND)


def judged(new_sides: Callable[[], Sides]) -> dict[str, Any]:
    """Returns what is said of equal sides, and of such with something planted."""
    equal, planted = [], []
    for i in range(PAIRS):
        before, after = new_sides()
        found = compare(before, after)
        equal.append((is_claimed(found), by_band((before, after)), found.step.relative_error))
        if i % 2 == 0:
            step = compare(before, [slower(run, "step") for run in after])
            phase = compare(before, [slower(run, "norm") for run in after])
            planted.append((step.verdict == "slower", phase.rows["norm"].verdict == "slower"))
    claimed, band, error = np.array(equal).T
    in_step, in_phase = np.array(planted).T
    return {
        "equal, called different": round(float(claimed.mean()), 3),
        "equal, by a band of 3 %": round(float(band.mean()), 3),
        "+2 % in the step, found": round(float(in_step.mean()), 3),
        "+10 % in a phase of 2 %, found": round(float(in_phase.mean()), 3),
        "error of the step, median": round(float(np.median(error)), 4),
    }


def judge(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns how often each kind of pairs is called different."""
    rng = np.random.default_rng(0)
    begin = time.perf_counter()
    medians = sorted(float(np.median(run.measured["step_ms"])) for run in runs)
    found: dict[str, Any] = {
        "equal pairs of each": PAIRS,
        "pairs with something planted": PAIRS // 2,
        "recorded runs": len(runs),
        "their median steps, shortest, middle and longest, ms": [
            round(medians[i], 1) for i in (0, len(medians) // 2, -1)
        ],
    }

    def tell(kind: str, steps: int, many: int, new_sides: Callable[[], Sides]) -> None:
        name = f"{kind}: {many} a side of {steps:,} steps"
        found[name] = judged(new_sides)
        print(name, found[name], flush=True)

    cases = [(steps, many) for steps in STEPS for many in A_SIDE if steps * many <= 20_000]
    for noise in NOISE:
        for steps, many in cases:
            one = partial(made, noise, steps, rng)
            tell(noise, steps, many, partial(pair_of, one, many))
    ours = [with_norm(run) for run in runs]
    for steps, many in cases:
        tell("resampled", steps, many, partial(drawn_pair, ours, steps, many, rng))
    for steps in (50, len(ours[0].history)):
        for many in A_SIDE:
            tell("recorded", steps, many, partial(dealt_pair, ours, steps, many, rng))
    return {**found, "seconds": round(time.perf_counter() - begin)}


def pair_of(new: Callable[[], Run], many: int) -> Sides:
    """Returns two sides of new runs."""
    return [new() for _ in range(many)], [new() for _ in range(many)]


def drawn_pair(runs: Sequence[Run], steps: int, many: int, rng: np.random.Generator) -> Sides:
    """Returns two sides that are all resampled from one run: they are equal for certain."""
    run = runs[int(rng.integers(len(runs)))]
    return pair_of(lambda: resampled(run, steps, rng), many)


def dealt_pair(runs: Sequence[Run], steps: int, many: int, rng: np.random.Generator) -> Sides:
    """Returns two sides of recorded runs, which are dealt by lot."""
    chosen = [runs[i] for i in rng.permutation(len(runs))[: 2 * many]]
    cut = [replace(run, history=run.history[:steps]) for run in chosen]
    return cut[:many], cut[many:]


def benched(noise: str, more: str, rng: np.random.Generator) -> tuple[RunComparison, int]:
    """Returns what `bench` says at its end of runs of 250 steps, and after how many turns."""
    drift = NOISE[noise][2] * np.cumsum(rng.standard_normal(2 * TURNS))
    sides: tuple[list[Run], list[Run]] = ([], [])
    looks = [*(n for n in _LOOKS if n < TURNS), TURNS]
    for turn in range(1, TURNS + 1):
        for i in (0, 1) if turn % 2 else (1, 0):
            n = len(sides[0]) + len(sides[1])
            run = made(noise, 250, rng)
            for name in (run.history.dtype.names or ())[1:]:
                run.history[name] *= np.exp(drift[n])
            started = replace(run.environment, started=f"2026-01-01T00:00:{n:02}+00:00")
            run = replace(run, environment=started)
            sides[i].append(slower(run, more) if i and more else run)
        if turn in looks:
            found = compare_groups(sides, looks=len(looks))
            if found.outcome(0.0, "step") != "cannot tell":
                break
    return found, turn


def bench() -> dict[str, Any]:
    """Returns how often benches of equal commands, and of slower ones, end in a difference."""
    rng = np.random.default_rng(0)
    results: dict[str, Any] = {"benches of each": PAIRS, "turns at most": TURNS}
    for noise in NOISE:
        equal = [benched(noise, "", rng) for _ in range(PAIRS)]
        more = [benched(noise, "step", rng) for _ in range(PAIRS)]
        results[noise] = {
            "equal, the step called different": np.mean(
                [one.step.is_significant for one, _ in equal]
            ),
            "equal, anything called different": np.mean([is_claimed(one) for one, _ in equal]),
            "+2 % in the step, found": np.mean([one.verdict == "slower" for one, _ in more]),
            "+2 % in the step, turns, median": np.median([turns for _, turns in more]),
        }
        results[noise] = {name: round(float(one), 3) for name, one in results[noise].items()}
        print(noise, results[noise], flush=True)
    return results


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
    parser.add_argument("what", choices=("record", "train", "judge", "bench"))
    parser.add_argument("paths", type=Path, nargs="*")
    parser.add_argument("--n", type=int, default=40)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    args = parser.parse_args()
    if args.what == "train":
        train(args.paths[0], args.steps, args.device)
    elif args.what == "record":
        record(args.paths[0], args.n, args.steps, args.device)
    elif args.what == "bench":
        save(args.out, {**environment("host", "torch", "command"), "results": bench()})
    else:
        found = judge([load(one) for one in sorted(args.paths[0].glob("*.gz"))])
        with tempfile.TemporaryDirectory() as folder:
            found["100,000 steps"] = large(np.random.default_rng(0), Path(folder))
        print(found["100,000 steps"])
        save(args.out, {**environment("host", "torch", "command"), "results": found})


if __name__ == "__main__":
    main()
