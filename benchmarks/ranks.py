"""Check which rank and line are named as the straggler, and compare `comm` with the kernel trace.

The ranks train linear layers with several kinds of parallelism, while a function delays rank 1 at
one place in the step. The `comm` of each phase is compared with the trace of the same steps, that
is, with the time in which the timed stream ran a collective or waited for another stream.

    torchrun --nproc-per-node 2 benchmarks/ranks.py --batch 32768 --traced 8 --out FILE
    torchrun --nproc-per-node 2 benchmarks/ranks.py --width 64 --batch 32 --steps 40 \
        --late-on host --traced 0
    torchrun --nproc-per-node 8 benchmarks/ranks.py --device cpu --width 64 --batch 32 --steps 60

With `--simulated-ranks 1024`, measure the exchange of so many ranks in one process instead:

    python benchmarks/ranks.py --simulated-ranks 1024
"""

import argparse
import os
import random
import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from kernels import Event, cycles_of, end_of, of_categories, spin_in_backward, traced
from record import ENVIRONMENT, command, new_parser, save
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity

from lightning_gputime import GPUPhaseHooks, PhaseSummary, StepTimes
from lightning_gputime._ranks import (
    BatchContent,
    BatchMeans,
    LineTime,
    RankTotals,
    encode,
)
from lightning_gputime._ranks.comparison import compare
from lightning_gputime._ranks.exchange import Exchange

STRAGGLER, LAYERS = 1, 8
PHASES = {"data": 1.0, "forward": 4.0, "backward": 8.0, "optimizer": 2.0}
LAYERS_PER_STAGE = 4
WARMUP, SETTLE = 5, 3
MAX_RELATIVE_ERROR, MAX_ERROR_MS = 0.1, 0.2
"""A wait must agree with the trace within either of these."""

PHASE_OF = {
    "balanced": None,
    "data": "data",
    "forward": "forward",
    "third layer": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
}
"""Expected phase in each case."""

Waste = Callable[[], object]


def augment(waste: Waste) -> None:
    waste()


def gate(waste: Waste) -> None:
    waste()


def preprocess(waste: Waste) -> None:
    waste()


def penalize(waste: Waste) -> None:
    waste()


def average_weights(waste: Waste) -> None:
    waste()


PLANTED = {
    "data": augment,
    "forward": gate,
    "third layer": preprocess,
    "backward": penalize,
    "optimizer": average_weights,
}
"""Function that delays rank 1 in each case."""

PHASES_IN = {
    "step": ("forward", "loss", "backward", "optimizer"),
    "data": ("data", "other"),
}
"""Phases in each window of the trace that contains several phases."""

GAP_US = 20.0  # A stream that pauses for longer waits: gaps between kernels are shorter.
DELIMITED = ("forward", "loss", "backward", "optimizer", "data")
"""Windows after each delimiter of a step. The last window is part of the next step."""

Observers = Sequence[Callable[[Any], object]]
Span = tuple[float, float]
"""A start and an end, in microseconds."""


@dataclass(frozen=True, eq=False)
class Job:
    """Training job of this rank. `late_cycles` is 0 if the host sleeps instead."""

    device: torch.device
    width: int
    batch: int
    case: str
    late_ms: float
    late_cycles: int
    delimiter: Tensor

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def planted(self, place: str, parts: int = 1) -> Waste:
        """Return the function that delays the straggler at `place` in this case.

        Each place calls its own function directly: a function of theirs would run in all phases.
        """
        if place != self.case or dist.get_rank() != STRAGGLER:
            return lambda: None
        waste = partial(time.sleep, self.late_ms / 1e3 / parts)
        if self.late_cycles:
            waste = partial(torch.cuda._sleep, self.late_cycles // parts)
        return partial(PLANTED[place], waste)

    def delimit(self) -> None:
        """Launch a kernel that separates two windows of the trace."""
        self.delimiter.erfinv_()

    def batches(self, n: int, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
        x = torch.randn(self.batch, self.width, device=self.device, dtype=dtype)
        delay = self.planted("data")
        for _ in range(n):
            delay()
            yield x


class Net(nn.Module):
    """Linear layers with possible delays in forward, in the third layer and in backward."""

    def __init__(self, job: Job, layers: int = LAYERS, parts: int = 1, norm: bool = False) -> None:
        super().__init__()
        self.delays = {place: job.planted(place, parts) for place in PLANTED}
        width = job.width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(
            nn.BatchNorm1d(width) if norm else nn.Identity() for _ in range(layers)
        )
        self.layers[2].register_forward_pre_hook(lambda *_: self.delays["third layer"]())

    def forward(self, x: Tensor) -> Tensor:
        self.delays["forward"]()
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x))
        return spin_in_backward(x.clone(), self.delays["backward"])


class PlainLoop:
    """A plain training loop; `sync` runs after each backward."""

    windows: tuple[str, ...] = DELIMITED

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        sync: Callable[[nn.Module], None] = lambda model: None,
        in_bfloat16: bool = False,
    ) -> None:
        self.job, self.model, self.sync = job, model, sync
        self.dtype = torch.bfloat16 if in_bfloat16 and job.is_cuda else torch.float32
        self.delay_update = job.planted("optimizer")
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=job.is_cuda)

    def step(self, x: Tensor) -> None:
        enabled = self.job.is_cuda and x.dtype == torch.float32
        self.job.delimit()
        with torch.autocast(self.job.device.type, torch.bfloat16, enabled=enabled):
            out = self.model(x)
            self.job.delimit()
            loss = out.square().mean()
        self.job.delimit()
        loss.backward()
        self.job.delimit()
        self.delay_update()
        self.sync(self.model)
        self.optimizer.step()
        self.job.delimit()
        self.optimizer.zero_grad()

    def train(self, steps: int, warmup_steps: int, observers: Observers = ()) -> PhaseSummary:
        with GPUPhaseHooks(
            self.model, self.optimizer, warmup_steps=warmup_steps, observers=observers
        ) as timer:
            for x in timer.steps(self.job.batches(steps, self.dtype)):
                self.step(x)
        return timer.summary()


class PipelineLoop(PlainLoop):
    """Training loop of a pipeline stage, whose forwards and backwards alternate."""

    windows = ("step", "data")

    def __init__(self, job: Job) -> None:
        rank, n_ranks = dist.get_rank(), dist.get_world_size()
        self.last, n_micro_batches = n_ranks - 1, max(n_ranks, 4)
        with job.device:
            net = Net(job, LAYERS_PER_STAGE, n_micro_batches)
        net = net.to(torch.bfloat16) if job.is_cuda else net
        super().__init__(job, net, in_bfloat16=True)
        stage = PipelineStage(net, rank, n_ranks, job.device)
        self.schedule = Schedule1F1B(stage, n_micro_batches, nn.functional.mse_loss)

    def step(self, x: Tensor) -> None:
        self.job.delimit()
        rank = dist.get_rank()
        # Compute the gradient of the input, so that all stages have the same work.
        given = (x.detach().requires_grad_(),) if rank == 0 else ()
        self.schedule.step(*given, target=torch.zeros_like(x) if rank == self.last else None)
        self.delay_update()
        self.optimizer.step()
        self.job.delimit()
        self.optimizer.zero_grad()


def _net(job: Job, norm: bool = False) -> Net:
    with job.device:
        return Net(job, norm=norm)


def _fsdp2(job: Job) -> PlainLoop:
    net = _net(job)
    for part in (*net.layers, net):
        fully_shard(part)
    return PlainLoop(job, net)


def _ddp(job: Job, view: bool = False, norm: bool = False) -> PlainLoop:
    net: nn.Module = _net(job, norm)
    if norm:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    ids = [job.device] if job.is_cuda else None
    model = DistributedDataParallel(net, device_ids=ids, gradient_as_bucket_view=view)
    return PlainLoop(job, model)


def _tensor_parallel(job: Job) -> PlainLoop:
    mesh = init_device_mesh(job.device.type, (dist.get_world_size(),))
    net = _net(job).to(torch.bfloat16) if job.is_cuda else _net(job)
    styles: Any = (ColwiseParallel, RowwiseParallel)
    plan = {f"layers.{i}": styles[i % 2]() for i in range(LAYERS)}
    return PlainLoop(job, parallelize_module(net, mesh, plan), in_bfloat16=True)


def _reduce_each(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)


def _reduce_together(model: nn.Module) -> None:
    with _coalescing_manager(async_ops=True) as works:
        _reduce_each(model)
    works.wait()


STRATEGIES: dict[str, Callable[[Job], PlainLoop]] = {
    "ddp": _ddp,
    "ddp bucket view": partial(_ddp, view=True),
    "fsdp2": _fsdp2,
    "tp": _tensor_parallel,
    "pp": PipelineLoop,
    "syncbn": partial(_ddp, norm=True),
    "all-reduce": lambda job: PlainLoop(job, _net(job), _reduce_each),
    "all-reduce coalesced": lambda job: PlainLoop(job, _net(job), _reduce_together),
}


def waits_in_trace(
    events: list[Event], windows: Sequence[str], strategy: str
) -> Iterator[dict[str, float]]:
    """Yield the milliseconds of waiting in each window, for each step but the first."""
    activities = of_categories(events, "kernel", "gpu_memcpy", "gpu_memset")
    delimiters = [event for event in activities if "erfinv" in event["name"]]
    stream = delimiters[0]["args"]["stream"]
    own = [event for event in activities if event["args"]["stream"] == stream]
    busy = merged(event for event in activities if event["args"]["stream"] != stream)
    n, turned = len(windows), (windows[-1], *windows[:-1])
    assert len(delimiters) % n == 0, f"{len(delimiters)} delimiters"
    for first in range(n, len(delimiters), n):
        found = {}
        for place, window in zip(range(first - 1, first + n - 1), turned, strict=True):
            begin, end = delimiters[place : place + 2]
            inside = [event for event in own if begin["ts"] < event["ts"] < end["ts"]]
            found[window] = _wait_us((end_of(begin), end["ts"]), inside, busy, strategy, window)
        yield {window: us / 1e3 for window, us in found.items()}


def _wait_us(window: Span, own: list[Event], busy: list[Span], strategy: str, name: str) -> float:
    if name == "backward" and ("ddp" in strategy or strategy == "syncbn"):
        return _after_own_work(window, own)
    return _in_pauses(window, own, busy)


def _in_pauses(window: Span, own: list[Event], busy: list[Span]) -> float:
    """Return the time in which the stream ran collectives, or paused while others were busy."""
    wait: float = sum(event["dur"] for event in own if is_collective(event))
    until = window[0]
    for start, end in [*((event["ts"], end_of(event)) for event in own), (window[1], window[1])]:
        if start - until > GAP_US:
            wait += sum(max(min(start, b) - max(until, a), 0.0) for a, b in busy)
        until = max(until, end)
    return wait


def _after_own_work(window: Span, own: list[Event]) -> float:
    """Return the time after the last kernel of backward, plus the time of collectives before it.

    After its wait, DDP copies gradients out of its buckets. Copies are not kernels.
    """
    kernels = [event for event in own if event["cat"] == "kernel"]
    last = max((end_of(event) for event in kernels if not is_collective(event)), default=window[0])
    before: float = sum(
        event["dur"] for event in kernels if is_collective(event) and event["ts"] < last
    )
    return window[1] - last + before


def is_collective(kernel: Event) -> bool:
    return "nccl" in kernel["name"].lower()


def merged(activities: Iterable[Event]) -> list[Span]:
    """Return the spans in which any activity ran, sorted by start."""
    spans: list[Span] = []
    for event in activities:
        start, end = event["ts"], end_of(event)
        if spans and start - spans[-1][1] < GAP_US:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        else:
            spans.append((start, end))
    return spans


def compare_with_trace(loop: PlainLoop, strategy: str, steps: int) -> dict[str, dict[str, Any]]:
    """Return the mean wait in each window, from the timer and from the trace."""
    found: list[StepTimes] = []
    _, events = traced(partial(loop.train, steps, 0, [found.append]), ProfilerActivity.CUDA)
    # The profiler delays launches in its first steps.
    trace = [*waits_in_trace(events, loop.windows, strategy)][SETTLE - 1 :]
    assert len(found) - SETTLE == len(trace), f"{len(found)} steps timed, {len(trace)} in the trace"
    rows = {}
    for window in loop.windows:
        names = [f"{phase}/comm" for phase in PHASES_IN.get(window, (window,))]
        comm_ms = statistics.mean(
            sum(times.phase_ms.get(name, 0.0) for name in names) for times in found[SETTLE:]
        )
        trace_ms = statistics.mean(step[window] for step in trace)
        bound = max(MAX_RELATIVE_ERROR * trace_ms, MAX_ERROR_MS)
        rows[window] = {
            "comm_ms": comm_ms,
            "trace_ms": trace_ms,
            "agrees": abs(comm_ms - trace_ms) <= bound,
        }
    return rows


def measure(strategy: str, job: Job, steps: int, traced_steps: int) -> dict[str, Any]:
    """Return the straggler that rank zero names, and the waits of this rank."""
    loop = STRATEGIES[strategy](job)
    ranks = loop.train(steps + WARMUP, WARMUP).ranks
    found: dict[str, Any] = {"windows": {}}
    if ranks is not None:
        # Compare top-level phases: the summary may name `data/fetch`.
        phase, expected = ranks.phase.partition("/")[0], PHASE_OF[job.case]
        named = (None, None) if ranks.straggler is None else (ranks.straggler, phase)
        found["is_right"] = named == ((STRAGGLER, expected) if expected else (None, None))
        found["is_line_right"] = _is_planted(ranks.line, job) if expected else not ranks.line
        found["named"] = "none"
        if ranks.straggler is not None:
            found["named"] = f"{phase} +{ranks.excess_ms:.1f} {ranks.line}".rstrip()
            found["sentences"] = [ranks.sentence, *ranks.notes]
        if not found["is_right"]:
            found["named"] = f"wrong: rank {ranks.straggler}, {found['named']}"
            found["suspect"] = ranks.suspect, ranks.excess_ms, ranks.error_ms, ranks.line
    if job.is_cuda and traced_steps:
        found["windows"] = compare_with_trace(loop, strategy, traced_steps)
    return found


def _is_planted(line: str, job: Job) -> bool:
    """Return True if a line is the planted function's.

    The backward of a GPU runs in a thread of its own, whose time belongs to the line of forward.
    """
    names = [PLANTED[job.case].__name__]
    if job.is_cuda and job.case == "backward":
        names += ["Net.forward", "spin_in_backward"]
    return any(f"`{name}`" in line for name in names)


def summarize(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the straggler in each case, and the differences of waits from the trace.

    Counts are pairs: the number of correct results and the total number.
    """
    cases = [case for cases in results.values() for case in cases.values()]
    delayed = [cases[name] for cases in results.values() for name in cases if name in PLANTED]
    waits = {
        strategy: [
            row for ranks in cases.values() for rank in ranks for row in rank["windows"].values()
        ]
        for strategy, cases in results.items()
    }
    rows = [row for rows in waits.values() for row in rows]
    return {
        "named_rightly": [sum(case[0].get("is_right", False) for case in cases), len(cases)],
        "line_named_rightly": [
            sum(case[0].get("is_line_right", False) for case in delayed),
            len(delayed),
        ],
        "agree_with_trace": [sum(row["agrees"] for row in rows), len(rows)],
        "straggler": {
            strategy: {case: ranks[0].get("named") for case, ranks in cases.items()}
            for strategy, cases in results.items()
        },
        "waits": {strategy: _differences(rows) for strategy, rows in waits.items() if rows},
    }


def _differences(rows: list[dict[str, Any]]) -> dict[str, Any]:
    differences = [row["comm_ms"] - row["trace_ms"] for row in rows]
    return {
        "waits": len(rows),
        "agree": sum(row["agrees"] for row in rows),
        "longest_wait_ms": round(max(row["trace_ms"] for row in rows), 2),
        "mean_difference_ms": round(statistics.mean(differences), 4),
        "largest_difference_ms": round(max(map(abs, differences)), 3),
    }


def simulate(n_ranks: int) -> dict[str, Any]:
    """Return the size of an exchange between so many ranks, and the time that it takes rank zero.

    Each rank sends the totals, the lines and the windows of 10,000 steps.
    """
    chance, n = random.Random(0), 10_000
    late = n_ranks // 2

    def totals_of_rank(rank: int) -> RankTotals:
        local = BatchMeans()
        more_ms = 12.0 * (rank == late)
        phases_ms = {name: ms * chance.uniform(0.98, 1.02) for name, ms in PHASES.items()}
        phases_ms["data"] += more_ms
        step_ms = sum(PHASES.values()) + 12.0
        phases_ms["backward"] += (wait_ms := step_ms - sum(phases_ms.values()))
        for number in range(n):
            local.take(step_ms - wait_ms + chance.gauss(0.0, 0.3), wait_ms, number)
        lines = [
            LineTime(
                f"`Block{i}.forward` (model.py:{20 * i})",
                f"Block{i}.forward",
                "GPT.forward",
                round(chance.uniform(0.1, 0.2), 3),
                round(chance.uniform(0.9, 1.0), 3),
                round(chance.uniform(0.1, 0.2), 3),
                0.02,
                {
                    "forward": round(chance.uniform(0.3, 0.4), 3),
                    "backward": round(chance.uniform(0.6, 0.8), 3),
                    "backward/comm": round(wait_ms / 11, 3),
                },
            )
            for i in range(11)
        ]
        if more_ms:
            text = "`Augment.__call__` (data.py:31)"
            name, caller = "Augment.__call__", "Dataset.__getitem__"
            lines.insert(0, LineTime(text, name, caller, 12.1, 0.0, 12.1, 0.1, {"data": 12.1}))
        totals = {**phases_ms, "step": step_ms, "backward/comm": wait_ms}
        return RankTotals(
            {name: (n * ms, n) for name, ms in totals.items()},
            local.deviation_ms,
            dict.fromkeys(PHASES, 0.25),
            lines,
            batch=BatchContent("tokens", round(chance.uniform(8000, 8200), 1)),
            windows=local.windows,
        )

    store = HashStore()
    exchanges = [Exchange(store, rank, n_ranks) for rank in range(n_ranks)]
    sent = {rank: totals_of_rank(rank) for rank in range(n_ranks)}
    sizes = [len(encode(totals)) for totals in sent.values()]
    since_s = time.perf_counter()
    for rank, exchange in enumerate(exchanges):
        exchange.send(sent[rank], n)
    sent_s = time.perf_counter()
    [(_, received)] = exchanges[0].arrived(wait=False)
    received_s = time.perf_counter()
    found = compare(received)
    compared_s = time.perf_counter()
    assert found is not None
    assert found.straggler == late
    return {
        "ranks": n_ranks,
        "steps": n,
        "mean_bytes_per_rank": round(statistics.mean(sizes)),
        "max_bytes_per_rank": max(sizes),
        "send_ms_per_rank": round(1e3 * (sent_s - since_s) / n_ranks, 3),
        "receive_ms": round(1e3 * (received_s - sent_s), 1),
        "compare_ms": round(1e3 * (compared_s - received_s), 1),
        "sentences": [found.sentence, *found.notes],
    }


def start(device: str) -> torch.device:
    """Join the process group of torchrun, and return the device of this rank."""
    if device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return torch.device("cpu")
    local = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=local)
    return local


def main(arguments: argparse.Namespace) -> None:
    if arguments.simulated_ranks:
        header = {"host": ENVIRONMENT["host"](), "command": command()}
        save(arguments.out, header | simulate(arguments.simulated_ranks))
        return
    device = start(arguments.device)
    on_host = device.type == "cpu" or arguments.late_on == "host"
    cycles = 0 if on_host else cycles_of(arguments.late_ms)
    results: dict[str, Any] = {}
    for strategy in arguments.strategies:
        if strategy == "syncbn" and device.type == "cpu":
            continue  # SyncBatchNorm needs GPUs.
        results[strategy] = {}
        # With these strategies, each of two ranks has half of the work.
        batch = arguments.batch * (2 if strategy in ("tp", "pp") else 1)
        for case in arguments.cases:
            torch.manual_seed(0)
            late_ms, delimiter = arguments.late_ms, torch.zeros(1, device=device)
            job = Job(device, arguments.width, batch, case, late_ms, cycles, delimiter)
            measured = measure(strategy, job, arguments.steps, arguments.traced)
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, measured)
            results[strategy][case] = found
            if dist.get_rank() == 0:
                print(f"{strategy}, {case}:", *found, sep="\n  ", flush=True)
    if dist.get_rank() == 0:
        keys = ("gpu", "host", "torch")
        header = {key: ENVIRONMENT[key]() for key in keys[device.type == "cpu" :]}
        launcher = ["torchrun", "--nproc-per-node", str(dist.get_world_size())]
        header["command"] = shlex.join([*launcher, *shlex.split(command())[1:]])
        save(arguments.out, header | {"late_ms": arguments.late_ms, **summarize(results)})
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--strategies", nargs="+", default=[*STRATEGIES], choices=[*STRATEGIES])
    parser.add_argument("--cases", nargs="+", default=[*PHASE_OF], choices=[*PHASE_OF])
    parser.add_argument("--steps", type=int, default=30, help="timed steps")
    parser.add_argument("--traced", type=int, default=10, help="steps under the profiler")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--late-ms", type=float, default=17.0)
    # A host-bound step hides a delay of the GPU.
    parser.add_argument("--late-on", choices=("gpu", "host"), default="gpu")
    parser.add_argument("--simulated-ranks", type=int, default=0)
    main(parser.parse_args())
