"""Check which rank is named as the straggler, and compare `comm` with the kernel trace.

Each rank trains linear layers in several kinds of parallelism, in a plain loop and in Lightning,
while one rank is delayed at one place of the step. `comm` of each phase is compared with the trace
of the same steps: the time in which the timed stream ran a collective or waited for another stream.

    torchrun --nproc-per-node 2 benchmarks/ranks.py --batch 32768 --out FILE
    torchrun --nproc-per-node 2 benchmarks/ranks.py --strategies fsdp2 --cases balanced data
    torchrun --nproc-per-node 2 benchmarks/ranks.py --device cpu --width 64 --batch 32 --steps 12
"""

import argparse
import gc
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from kernels import traced
from loops import be_quiet
from rank_lightning import LightningLoop
from rank_nets import PLAIN, SLOW_RANK, Job, PlainLoop, late_cycles
from rank_trace import in_trace
from record import ENVIRONMENT, command, new_parser, save
from torch.profiler import ProfilerActivity

from lightning_gputime import StepTimes
from lightning_gputime._output.summary import PhaseSummary

IN_LIGHTNING = {"lightning ddp": "ddp", "lightning fsdp2": "fsdp2"}
STRATEGIES = (*PLAIN, *IN_LIGHTNING)
EXPECTED = {
    "balanced": None,
    "data": "data",
    "forward": "forward",
    "third layer": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "callback": "callbacks",
}
"""For each case the phase in which the slow rank must be named."""

WARMUP, SETTLE = 5, 3
PHASES_IN = {
    "step": ("forward", "loss", "backward", "optimizer"),
    "data": ("data", "callbacks", "other"),
}
"""The phases in a window of the trace, where it is not the one of its name."""

CLOSE, CLOSE_MS = 0.1, 0.2
"""A time agrees with another within this part of it, or within so many milliseconds."""


def step_waits(times: StepTimes, windows: tuple[str, ...]) -> dict[str, float]:
    """Returns what the timer says of the waits in each window (in milliseconds)."""
    return {
        window: sum(
            times.phase_ms.get(f"{phase}/comm", 0.0) for phase in PHASES_IN.get(window, (window,))
        )
        for window in windows
    }


def hold_against_trace(
    loop: PlainLoop | LightningLoop, strategy: str, steps: int
) -> dict[str, dict[str, float | bool]]:
    """Returns the waits by the timer and by the trace, means of each window."""
    found: list[StepTimes] = []
    train = partial(loop.train, steps, 0, [found.append])
    _, events = traced(train, ProfilerActivity.CUDA)
    # The first steps under the profiler are slow to launch.
    ours = [step_waits(times, loop.windows) for times in found][SETTLE:]
    trace = [*in_trace(events, loop.windows, strategy)][SETTLE - 1 :]
    assert len(ours) == len(trace), f"{len(ours)} steps timed, {len(trace)} in the trace"
    return {
        window: _held(
            [step[window] for step in ours],
            [step[window].wait_ms for step in trace],
            [step[window].idle_ms for step in trace],
        )
        for window in loop.windows
    }


def _held(ours: list[float], trace: list[float], idle: list[float]) -> dict[str, float | bool]:
    comm_ms, trace_ms = statistics.mean(ours), statistics.mean(trace)
    return {
        "comm_ms": comm_ms,
        "trace_ms": trace_ms,
        "largest_difference_ms": max(abs(a - b) for a, b in zip(ours, trace, strict=True)),
        "launch_gaps_ms": statistics.mean(idle),
        "agrees": abs(comm_ms - trace_ms) <= max(CLOSE * trace_ms, CLOSE_MS),
    }


def new_loop(strategy: str, job: Job) -> PlainLoop | LightningLoop:
    """Returns the loop of a strategy."""
    if strategy in IN_LIGHTNING:
        return LightningLoop(job, IN_LIGHTNING[strategy])
    return PLAIN[strategy](job)


def measure(strategy: str, job: Job, steps: int, traced_steps: int) -> dict[str, Any]:
    """Returns what this rank's timer says, and beside it the trace."""
    loop = new_loop(strategy, job)
    start = time.perf_counter()
    summary = loop.train(steps + WARMUP, WARMUP)
    seconds = time.perf_counter() - start
    return {
        "phases_ms": {
            name: row.share * summary.step.mean_ms
            for name, row in summary.rows.items()
            if name.count("/") < 2
        },
        "step_ms": summary.step.mean_ms,
        "host_wait_ms": summary.host_wait_mean_ms,
        "verdict": summary.verdict,
        **of_ranks(summary, job.case),
        "windows": hold_against_trace(loop, strategy, traced_steps) if job.is_cuda else {},
        "seconds": round(seconds, 1),
    }


def of_ranks(summary: PhaseSummary, case: str) -> dict[str, Any]:
    """Returns what is said of the ranks, which rank zero knows, and if it is right."""
    ranks = summary.ranks
    if ranks is None:
        return {}
    expected = EXPECTED[case]
    right = (None, None) if expected is None else (SLOW_RANK, expected)
    # Of `data` the part is named, where it is known.
    phase = ranks.phase.partition("/")[0]
    named = (None, None) if ranks.slowest_rank is None else (ranks.slowest_rank, phase)
    return {
        "sentence": ranks.sentence,
        "slowest_rank": ranks.slowest_rank,
        "phase": phase,
        "behind_median_ms": ranks.behind_median_ms,
        "is_right": named == right,
    }


def show(strategy: str, case: str, found: list[dict[str, Any]]) -> None:
    """Prints what the ranks found: a line for all, and one for each."""
    first = found[0]
    said = first.get("sentence") or "nobody is named"
    print(f"{strategy}, {case}: {said}{'' if first.get('is_right') else ' <- WRONG'}")
    for rank, one in enumerate(found):
        waits = one["windows"] or {
            name.partition("/")[0]: {"comm_ms": ms}
            for name, ms in one["phases_ms"].items()
            if name.endswith("/comm")
        }
        words = [_word(name, row) for name, row in waits.items()]
        line = " ".join(word for word in words if word)
        print(f" {rank}: {one['step_ms']:.2f} {line}", flush=True)


def _word(name: str, row: Mapping[str, Any]) -> str:
    """Returns "window comm|trace", with the launch gaps if they are long."""
    ours, trace, gaps = (row.get(key, 0.0) for key in ("comm_ms", "trace_ms", "launch_gaps_ms"))
    agrees = row.get("agrees", True)
    if agrees and max(ours, trace) < 0.05 and gaps < CLOSE_MS:
        return ""
    held = f"|{trace:.2f}" if "trace_ms" in row else ""
    idle = f"(gaps {gaps:.2f})" if gaps >= CLOSE_MS else ""
    return f"{name} {ours:.2f}{held}{idle}{'' if agrees else ' <- OFF'}"


def skipped(strategy: str, device: torch.device) -> str:
    """Returns why a strategy cannot be measured on a device, if so."""
    if strategy == "syncbn" and device.type == "cpu":
        return "SyncBatchNorm needs a GPU"
    return ""


def measure_all(
    arguments: argparse.Namespace, device: torch.device
) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield what all ranks found, after each strategy. Rank zero prints it."""
    is_first = dist.get_rank() == 0
    cycles = late_cycles(arguments.late_ms, device, arguments.late_on == "host")
    results: dict[str, Any] = {}
    for strategy in arguments.strategies:
        if reason := skipped(strategy, device):
            if is_first:
                print(f"{strategy} is left out: {reason}", flush=True)
            continue
        results[strategy] = {}
        # Both halve the work of a rank.
        batch = arguments.batch * (2 if strategy in ("tp", "pp") else 1)
        for case in arguments.cases:
            if case == "callback" and strategy not in IN_LIGHTNING:
                continue
            torch.manual_seed(0)
            job = Job(device, arguments.width, batch, case, arguments.late_ms, cycles)
            one = measure(strategy, job, arguments.steps, arguments.traced)
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, one)
            results[strategy][case] = found
            gc.collect()
            if is_first:
                show(strategy, case, found)
        yield results


def summarize(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the straggler that rank zero named in each case, and how far waits are off the trace.

    Counts are pairs: the number that is right, and the number of all.
    """
    cases = [case for cases in results.values() for case in cases.values()]
    waits = {strategy: [*_waits(cases)] for strategy, cases in results.items()}
    rows = [row for rows in waits.values() for _, row in rows]
    return {
        "named_rightly": [sum(case[0].get("is_right", False) for case in cases), len(cases)],
        "agree_with_trace": [sum(row["agrees"] for row in rows), len(rows)],
        "straggler": {
            strategy: {case: _named(ranks[0]) for case, ranks in cases.items()}
            for strategy, cases in results.items()
        },
        "waits": {strategy: _differences(rows) for strategy, rows in waits.items() if rows},
        "disagree": [
            [strategy, *place, row["comm_ms"], row["trace_ms"]]
            for strategy, rows in waits.items()
            for place, row in rows
            if not row["agrees"]
        ],
    }


def _waits(cases: Mapping[str, Any]) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    for case, ranks in cases.items():
        for rank, found in enumerate(ranks):
            for window, row in found["windows"].items():
                yield [case, rank, window], row


def _named(found: Mapping[str, Any]) -> str:
    """Return the phase in which the straggler is named, and its milliseconds behind the median."""
    named = "none"
    if found.get("slowest_rank") is not None:
        named = f"{found['phase']} +{found['behind_median_ms']:.1f}"
    return named if found.get("is_right") else f"wrong: rank {found.get('slowest_rank')}, {named}"


def _differences(rows: list[tuple[list[Any], dict[str, Any]]]) -> dict[str, Any]:
    """Return how far the mean waits of one strategy are off the trace (in milliseconds)."""
    differences = [row["comm_ms"] - row["trace_ms"] for _, row in rows]
    return {
        "waits": len(rows),
        "agree": sum(row["agrees"] for _, row in rows),
        "longest_wait_ms": round(max(row["trace_ms"] for _, row in rows), 2),
        "mean_difference_ms": round(statistics.mean(differences), 4),
        "largest_difference_ms": round(max(map(abs, differences)), 3),
        "longest_launch_gaps_ms": round(max(row["launch_gaps_ms"] for _, row in rows), 2),
    }


def start(device: str) -> torch.device:
    """Enters the process group of torchrun; returns the device of this rank."""
    if device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return torch.device("cpu")
    local = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=local)
    return local


def environment_of(device: torch.device) -> dict[str, Any]:
    """Returns on what the results were found, and by which command."""
    words = shlex.split(command())[1:]
    launcher = ["torchrun", "--nproc-per-node", str(dist.get_world_size())]
    found = {key: ENVIRONMENT[key]() for key in ("host", "torch", "lightning")}
    if device.type == "cuda":
        found = {"gpu": ENVIRONMENT["gpu"](), **found}
    return found | {"command": shlex.join([*launcher, *words])}


def main(arguments: argparse.Namespace) -> None:
    """Measures in a process group; rank zero saves."""
    began = time.monotonic()
    device = start(arguments.device)
    for results in measure_all(arguments, device):
        if dist.get_rank() != 0:
            continue
        found = environment_of(device) | {
            "late_ms": arguments.late_ms,
            "late_on": arguments.late_on,
            "slow_rank": SLOW_RANK,
            "seconds": round(time.monotonic() - began),
            **summarize(results),
        }
        # After each strategy: a run that is cut off leaves what it found.
        save(arguments.out, found)
        print({key: found[key] for key in ("named_rightly", "agree_with_trace", "seconds")})
    dist.destroy_process_group()


def parse(words: list[str]) -> argparse.Namespace:
    """Returns what was asked for."""
    parser = new_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--strategies", nargs="+", default=[*STRATEGIES], choices=STRATEGIES)
    parser.add_argument("--cases", nargs="+", default=[*EXPECTED], choices=[*EXPECTED])
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed")
    parser.add_argument("--traced", type=int, default=10, help="steps under the profiler")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--late-ms", type=float, default=17.0)
    parser.add_argument(
        "--late-on", choices=("gpu", "host"), default="gpu", help="a spin kernel, or a sleep"
    )
    return parser.parse_args(words)


if __name__ == "__main__":
    be_quiet()
    main(parse(sys.argv[1:]))
