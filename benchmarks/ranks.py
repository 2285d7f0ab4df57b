"""Check which rank is named as the straggler, and compare `comm` with the kernel trace.

The ranks train linear layers with several kinds of parallelism, while rank 1 is delayed at one
place in the step. The `comm` of each phase is compared with the trace of the same steps, that is,
with the time in which the timed stream ran a collective or waited for another stream.

    torchrun --nproc-per-node 2 benchmarks/ranks.py --batch 32768 --traced 8 --out FILE
    torchrun --nproc-per-node 2 benchmarks/ranks.py --device cpu --width 64 --batch 32 --steps 60
"""

import argparse
import os
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity

from lightning_gputime import GPUPhaseHooks, PhaseSummary, StepTimes

SLOW_RANK, LAYERS = 1, 8
MICRO_BATCHES, LAYERS_PER_STAGE = 4, 4
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

    def delay(self, place: str, parts: int = 1) -> None:
        """Delay the slow rank if this case has its delay at `place`."""
        if place == self.case and dist.get_rank() == SLOW_RANK:
            if self.late_cycles:
                torch.cuda._sleep(self.late_cycles // parts)
            else:
                time.sleep(self.late_ms / 1e3 / parts)

    def delimit(self) -> None:
        """Launch a kernel that separates two windows of the trace."""
        self.delimiter.erfinv_()

    def batches(self, n: int, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
        x = torch.randn(self.batch, self.width, device=self.device, dtype=dtype)
        for _ in range(n):
            self.delay("data")
            yield x


class Net(nn.Module):
    """Linear layers with possible delays in forward, in the third layer and in backward."""

    def __init__(self, job: Job, layers: int = LAYERS, parts: int = 1, norm: bool = False) -> None:
        super().__init__()
        self.delay = partial(job.delay, parts=parts)
        width = job.width
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(
            nn.BatchNorm1d(width) if norm else nn.Identity() for _ in range(layers)
        )
        self.layers[2].register_forward_pre_hook(lambda *_: self.delay("third layer"))

    def forward(self, x: Tensor) -> Tensor:
        self.delay("forward")
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x))
        return spin_in_backward(x.clone(), partial(self.delay, "backward"))


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
        self.job.delay("optimizer")
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
        rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        with job.device:
            net = Net(job, LAYERS_PER_STAGE, MICRO_BATCHES)
        net = net.to(torch.bfloat16) if job.is_cuda else net
        super().__init__(job, net, in_bfloat16=True)
        stage = PipelineStage(net, rank, self.last + 1, job.device)
        self.schedule = Schedule1F1B(stage, MICRO_BATCHES, nn.functional.mse_loss)

    def step(self, x: Tensor) -> None:
        self.job.delimit()
        rank = dist.get_rank()
        # Compute the gradient of the input, so that all stages have the same work.
        given = (x.detach().requires_grad_(),) if rank == 0 else ()
        self.schedule.step(*given, target=torch.zeros_like(x) if rank == self.last else None)
        self.job.delay("optimizer")
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
        named = (None, None) if ranks.slowest_rank is None else (ranks.slowest_rank, phase)
        found["is_right"] = named == ((SLOW_RANK, expected) if expected else (None, None))
        found["named"] = "none"
        if ranks.slowest_rank is not None:
            found["named"] = f"{phase} +{ranks.behind_median_ms:.1f}"
        if not found["is_right"]:
            found["named"] = f"wrong: rank {ranks.slowest_rank}, {found['named']}"
    if job.is_cuda:
        found["windows"] = compare_with_trace(loop, strategy, traced_steps)
    return found


def summarize(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the straggler in each case, and the differences of waits from the trace.

    Counts are pairs: the number of correct results and the total number.
    """
    cases = [case for cases in results.values() for case in cases.values()]
    waits = {
        strategy: [
            row for ranks in cases.values() for rank in ranks for row in rank["windows"].values()
        ]
        for strategy, cases in results.items()
    }
    rows = [row for rows in waits.values() for row in rows]
    return {
        "named_rightly": [sum(case[0].get("is_right", False) for case in cases), len(cases)],
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
    device = start(arguments.device)
    cycles = 0 if device.type == "cpu" else cycles_of(arguments.late_ms)
    results: dict[str, Any] = {}
    for strategy in arguments.strategies:
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
    # SyncBatchNorm needs GPUs.
    parser.add_argument("--strategies", nargs="+", default=[*STRATEGIES], choices=[*STRATEGIES])
    parser.add_argument("--cases", nargs="+", default=[*PHASE_OF], choices=[*PHASE_OF])
    parser.add_argument("--steps", type=int, default=30, help="timed steps")
    parser.add_argument("--traced", type=int, default=10, help="steps under the profiler")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--late-ms", type=float, default=17.0)
    main(parser.parse_args())
