"""HTA (HolisticTraceAnalysis): it reads traces of torch.profiler of steps that we timed.

CHECKOUT is a folder for the traces. On one GPU, HTA's idle time is compared with the launch gaps
that probes measure. On two GPUs, its exposed communication is compared with `comm`, and the time in
which collectives run alone is split by what the timed stream does: it waits, or the host is late.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from kernels import Event, end_of, of_categories
from loops import train_step
from models import Task, load
from rank_trace import is_collective
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function

from lightning_gputime import GPUPhaseHooks, StepTimes

Span = tuple[float, float]
"""A start and an end (in microseconds)."""

WAIT = "foreign/wait"
"""The name of the range in which the host makes the timed stream wait."""

PACKAGES = ("HolisticTraceAnalysis", "pandas")
ALONE = ("mlp", "gpt12")
SHARED = {"DDP": 1, "FSDP2": 1, "FSDP2, 8 x the batch": 8}
"""How the ranks share the GPT, and how often the batch is repeated: a long step hides the host."""
SETTLE, STEPS, PROBED = 30, 30, 150


def timed(task: Task, batch: Any, trace: Path) -> list[StepTimes]:
    """Train; return the steps that were timed while they were traced. The trace is cut to them."""
    optimizer = task.configure_optimizers()
    found: list[StepTimes] = []
    with GPUPhaseHooks(task.net, optimizer, every_n_steps=1, observers=[found.append]) as timer:

        def train(steps: int) -> None:
            for _ in range(steps):
                with record_function("foreign/step"):
                    train_step(task, optimizer, batch)
                    timer.step()

        train(SETTLE)
        torch.cuda.synchronize()
        with profile() as profiler:
            train(STEPS)
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    cut(trace)
    return [one for one in found if SETTLE < one.step < SETTLE + STEPS - 1]


def cut(trace: Path) -> None:
    """Leave in a trace only what its steps launched, without the first and the last."""
    content = json.loads(trace.read_text())
    events: list[Event] = content["traceEvents"]
    steps = [
        one for one in of_categories(events, "user_annotation") if one["name"] == "foreign/step"
    ]
    start, end = end_of(steps[0]), end_of(steps[-2])
    launches = of_categories(events, "cuda_runtime", "cuda_driver")
    inside = {one["args"].get("correlation") for one in launches if start <= one["ts"] < end}
    work = ("kernel", "gpu_memcpy", "gpu_memset")
    content["traceEvents"] = [
        one
        for one in events
        if (one["args"].get("correlation") in inside if one.get("cat") in work
            else one.get("cat") != "cuda_sync" and one.get("cat") != "gpu_user_annotation")
    ]  # fmt: skip
    trace.write_text(json.dumps(content))


def kernel_ms(trace: Path) -> dict[str, float]:
    """Return for how long anything ran in a step, in whole nanoseconds, and how many kernels."""
    events: list[Event] = json.loads(trace.read_text())["traceEvents"]
    kernels = of_categories(events, "kernel", "gpu_memcpy", "gpu_memset")
    comm = [kernel for kernel in kernels if is_collective(kernel)]
    found = {"busy_ms": union_us(kernels), "collectives_ms": union_us(comm)}
    found = {name: us / 1e3 / (STEPS - 2) for name, us in found.items()}
    return found | {"kernels": len(kernels) / (STEPS - 2)}


def union_us(kernels: list[Event]) -> float:
    """Return for how long any of these ran, which are in the order of their starts."""
    return length_us(spans(kernels))


def spans(kernels: Iterable[Event]) -> list[Span]:
    """Return when any kernel ran, disjoint and in order. Kernels must be ordered by their start."""
    found: list[Span] = []
    for kernel in kernels:
        start, end = kernel["ts"], end_of(kernel)
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def without(some: list[Span], others: list[Span]) -> Iterator[Span]:
    """Yield the parts of disjoint spans that no span of `others` covers."""
    for start, end in some:
        first = bisect_left(others, start, key=lambda span: span[1])
        for other_start, other_end in others[first:]:
            if other_start >= end:
                break
            if other_start > start:
                yield start, other_start
            start = max(start, other_end)
        if start < end:
            yield start, end


def comm_parts(trace: Path) -> dict[str, float]:
    """Split HTA's exposed communication by what the timed stream does (in ms per step).

    Returns:
        `copies_alone`, which HTA counts, and `collectives_alone`, in which no compute kernel runs.
        Where the timed stream waits by calls, the latter is split: `before_wait` is until the host
        launches the wait, `no_wait` while the host is late without a wait, `in_wait` from the wait
        to the next kernel, `under_copies` the rest. DDP waits in C++, which leaves no call.
    """
    events: list[Event] = json.loads(trace.read_text())["traceEvents"]
    calls = of_categories(events, "cuda_runtime", "cuda_driver")
    launched = {call["args"].get("correlation"): call["ts"] for call in calls}
    ranges = of_categories(events, "user_annotation")
    waits = [event["ts"] for event in ranges if event["name"] == WAIT]
    kernels = of_categories(events, "kernel")
    compute = spans(kernel for kernel in kernels if not is_collective(kernel))
    exposed = [*without(spans(kernel for kernel in kernels if is_collective(kernel)), compute)]
    copies = spans(of_categories(events, "gpu_memcpy", "gpu_memset"))
    parts = {
        "copies_alone": length_us(without(copies, spans(kernels))),
        "collectives_alone": length_us(exposed),
    }
    idle: dict[str, list[Span]] = {"before_wait": [], "no_wait": [], "in_wait": []}
    for last, following in pairwise(timed_stream(events)):
        start, end = end_of(last), following["ts"]
        launches = [launched[one["args"]["correlation"]] for one in (last, following)]
        place = bisect_right(waits, launches[0])
        if end <= start:
            continue
        if place == len(waits) or waits[place] > launches[1]:
            idle["no_wait"].append((start, end))
            continue
        reached = min(max(start, waits[place]), end)
        idle["before_wait"].append((start, reached))
        idle["in_wait"].append((reached, end))
    if waits:
        for name, gaps in idle.items():
            parts[name] = length_us(gaps) - length_us(without(gaps, exposed))
        parts["under_copies"] = length_us(exposed) - sum(parts[name] for name in idle)
    return {name: round(us / 1e3 / (STEPS - 2), 4) for name, us in parts.items()}


def timed_stream(events: list[Event]) -> list[Event]:
    """Return what ran on the stream with the most kernels, apart from collectives."""
    work = of_categories(events, "kernel", "gpu_memcpy", "gpu_memset")
    streams = [one["args"]["stream"] for one in work if not is_collective(one)]
    stream = statistics.mode(streams)
    return [one for one in work if one["args"]["stream"] == stream]


def length_us(parts: Iterable[Span]) -> float:
    """Return how long disjoint spans are together (in microseconds)."""
    return sum(end - start for start, end in parts)


def busy_ms(task: Task, batch: Any) -> float | None:
    """Return a step's time without launch gaps, by probes."""
    optimizer = task.configure_optimizers()
    with GPUPhaseHooks(task.net, optimizer, warmup_steps=10, probe_every_n_steps=5) as timer:
        for _ in timer.steps(range(PROBED)):
            train_step(task, optimizer, batch)
    return timer.summary().step.gpu_busy_mean_ms


def by_hta(folder: Path) -> dict[int, dict[str, float]]:
    """Return what HTA says of a folder's traces: of each rank, in milliseconds a step."""
    # Else it rounds times down to microseconds, and kernels of 2 us lose half of theirs.
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    from hta.trace_analysis import TraceAnalysis

    traces = {rank: str(path) for rank, path in enumerate(sorted(folder.glob("*.json")))}
    analysis = TraceAnalysis(trace_files=traces)
    parts = analysis.get_temporal_breakdown(visualize=False)
    found = {}
    for row in parts.to_dict("records"):
        found[int(row["rank"])] = {
            name: row[f"{name}_time(us)"] / 1e3 / (STEPS - 2)
            for name in ("kernel", "compute", "non_compute", "idle")
        }
    return found


def means(steps: list[StepTimes]) -> dict[str, float]:
    """Return the mean of each phase and of the step (in milliseconds)."""
    names = {name for one in steps for name in one.phase_ms}
    found = {name: statistics.mean(one.phase_ms.get(name, 0.0) for one in steps) for name in names}
    return found | {"step": statistics.mean(one.step_ms for one in steps)}


def compared(ours: float, theirs: float, step: float) -> dict[str, Any]:
    """Return two times of a step beside each other."""
    return {
        "ours_ms": round(ours, 4),
        "hta_ms": round(theirs, 4),
        "part_of_step": round(abs(ours - theirs) / step, 4),
        "agrees": abs(ours - theirs) <= 0.02 * step,
    }


def alone(model: str, folder: Path) -> dict[str, Any]:
    """Hold the steps of one model against HTA."""
    folder.mkdir(parents=True, exist_ok=True)
    task, batch = load(model, torch.device("cuda"))
    steps = means(timed(task, batch, folder / "0.json"))
    busy = busy_ms(task, batch)
    hta = by_hta(folder)[0]
    found: dict[str, Any] = {"phases_ms": steps, "hta": hta, "gpu_busy_ms": busy}
    found["in_trace"] = kernel_ms(folder / "0.json")
    step = steps["step"]
    found["step"] = compared(step, hta["kernel"], step)
    if busy is not None:
        found["busy"] = compared(busy, hta["compute"] + hta["non_compute"], step)
        found["idle"] = compared(step - busy, step - hta["compute"] - hta["non_compute"], step)
    return found


def show_waits() -> None:
    """Leave a range in the trace where the host makes the default stream wait for an event."""
    kind: Any = torch.cuda.Stream
    wait_event = kind.wait_event

    def in_range(stream: torch.cuda.Stream, event: Any) -> None:
        is_timed = stream == torch.cuda.default_stream()
        with record_function(WAIT) if is_timed else nullcontext():
            wait_event(stream, event)

    kind.wait_event = in_range


def rank_task(strategy: str, device: torch.device) -> tuple[Task, Any]:
    """Return a GPT that two ranks share, and a batch."""
    torch.manual_seed(0)
    task, (x, y) = load("gpt12", device)
    batch = x.repeat(SHARED[strategy], 1), y.repeat(SHARED[strategy], 1)
    if strategy == "DDP":
        task.net = DistributedDataParallel(task.net, device_ids=[device.index])
    else:
        for block in task.net.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(task.net)
    return task, batch


def run_rank(folder: Path) -> None:
    """Train as one rank, under each strategy."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    show_waits()
    for strategy in SHARED:
        task, batch = rank_task(strategy, device)
        (folder / strategy).mkdir(parents=True, exist_ok=True)
        steps = means(timed(task, batch, folder / strategy / f"{rank}.json"))
        (folder / f"{strategy}.{rank}.steps").write_text(json.dumps(steps))
        dist.barrier()
    dist.destroy_process_group()


def shared(folder: Path) -> dict[str, Any]:
    """Hold the steps of two ranks against HTA."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run([*launcher, "--nproc-per-node", "2", __file__, str(folder)], check=True)
    found: dict[str, Any] = {}
    for strategy in SHARED:
        for rank, hta in by_hta(folder / strategy).items():
            steps = json.loads((folder / f"{strategy}.{rank}.steps").read_text())
            comm = sum(ms for name, ms in steps.items() if name.endswith("/comm"))
            found[f"{strategy} rank {rank}"] = {
                "step": compared(steps["step"], hta["kernel"], steps["step"]),
                "comm": compared(comm, hta["non_compute"], steps["step"]),
                "parts_ms": comm_parts(folder / strategy / f"{rank}.json"),
            }
    return found


def measure(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Train, let HTA read the traces, and return both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=[*ALONE], choices=ALONE)
    known = parser.parse_args(arguments)
    found = {model: alone(model, folder / model) for model in known.models}
    if torch.cuda.device_count() > 1:
        found |= shared(folder)
    for name, one in found.items():
        for part in ("step", "busy", "idle", "comm", "parts_ms"):
            if part in one:
                print(f"{name:14} {part:5} {one[part]}", flush=True)
    gpus = torch.cuda.device_count()
    return {"gpu": torch.cuda.get_device_name(), "gpus": gpus, "results": found}


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
