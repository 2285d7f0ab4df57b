"""What it costs to see each wait for other ranks.

A GPT with FSDP2 is trained with the timer, with a timer that sees no waits, and without one. They
take turns in one loop, all ranks the same ones. Beside it, what a wait costs the host: that of a
collective in a timed step, with and without the timer.

    torchrun --nproc-per-node 2 benchmarks/wait_cost.py --out benchmarks/results/wait_cost_x2.json
    torchrun --nproc-per-node 2 benchmarks/wait_cost.py --device cpu --layers 4 --width 64 --batch 1
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from loops import AGAIN, NONE, Way, attached, be_quiet, by_way, in_rounds, train
from models import GPT, Batch, Task
from overhead import summarize
from ranks import environment_of, start
from record import new_parser, save
from torch.distributed.fsdp import fully_shard
from turns import BLOCK, SETTLE, Stopwatch, take_turn

from lightning_gputime import GPUPhaseHooks, StepTimes
from lightning_gputime._boundaries import boundaries

VOCABULARY, LENGTH = 32768, 512
CALLS = 200


def without_waits(task: Task, optimizer: torch.optim.Optimizer) -> Way:
    """Returns the way of a timer that takes itself for alone: it sees no waits."""
    with mock.patch.object(boundaries, "is_distributed", return_value=False):
        return attached(GPUPhaseHooks(task.net, optimizer))


WAYS: dict[str, Callable[[Task, torch.optim.Optimizer], Way]] = {
    NONE: lambda task, optimizer: Way(),
    AGAIN: lambda task, optimizer: Way(),
    "GPUPhaseHooks() that sees no waits": without_waits,
    "GPUPhaseHooks()": lambda task, optimizer: attached(GPUPhaseHooks(task.net, optimizer)),
    "GPUPhaseHooks(every_n_steps=10)": lambda task, optimizer: attached(
        GPUPhaseHooks(task.net, optimizer, every_n_steps=10)
    ),
}


class HostStopwatch:
    """Times blocks of steps on the host's clock, where there is no GPU."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def press(self) -> None:
        """Starts a block, or ends it."""
        self._times.append(time.perf_counter() * 1e3)

    def times(self) -> list[float]:
        """Returns the time of a step in each block (in milliseconds)."""
        starts, ends = self._times[::2], self._times[1::2]
        return [(end - start) / BLOCK for start, end in zip(starts, ends, strict=True)]


def sharded(arguments: argparse.Namespace, device: torch.device) -> tuple[Task, Batch]:
    """Returns a GPT that FSDP2 shards, and a batch."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    width = arguments.width
    with device:
        net = GPT(arguments.layers, width, width // 64, VOCABULARY, LENGTH).to(dtype)
        tokens = torch.randint(0, VOCABULARY, (arguments.batch, LENGTH + 1))
    for part in (*net.blocks, net):
        fully_shard(part)
    return Task(net), (tokens[:, :-1], tokens[:, 1:])


def in_turns(task: Task, batch: Batch, rounds: int) -> dict[str, list[float]]:
    """Lets the ways take their turns in a loop; returns the time of a step in each turn."""
    ways = in_rounds([*WAYS], rounds)
    is_cuda = batch[0].is_cuda
    stopwatch = Stopwatch(len(ways)) if is_cuda else HostStopwatch()
    optimizer = new_optimizer(task, is_cuda)
    train(task, optimizer, batch, Way(), SETTLE)
    for name in ways:
        take_turn(task, optimizer, batch, WAYS[name](task, optimizer), stopwatch.press)
    return by_way(ways, stopwatch.times())


def new_optimizer(task: Task, is_cuda: bool) -> torch.optim.Optimizer:
    """Returns an optimizer for sharded parameters."""
    return torch.optim.AdamW(task.parameters(), lr=1e-4, fused=is_cuda)


def waits_a_step(task: Task, batch: Batch, steps: int = 10) -> dict[str, float]:
    """Returns how many waits a step has, in each phase, and how long they are together.

    And how long the host waits for the GPU: near zero, the host sets the pace.
    """
    found: list[StepTimes] = []
    optimizer = new_optimizer(task, batch[0].is_cuda)
    with GPUPhaseHooks(task.net, optimizer, observers=[found.append]) as timer:
        for _ in range(steps):
            train(task, optimizer, batch, Way(end_step=timer.step), 1)
    assert found[-1].timeline is not None
    names = [names[-1] for names in found[-1].timeline.names if names]
    waits = [name for name in names if name.endswith("/comm")]
    counts = {name: float(waits.count(name)) for name in dict.fromkeys(waits)}
    times = {
        f"{name}_ms": statistics.median(one.phase_ms.get(name, 0.0) for one in found)
        for name in counts
    }
    host_wait_ms = timer.summary().host_wait_mean_ms
    return {"waits": float(len(waits)), **counts, **times, "host_wait_ms": host_wait_ms}


def host_us_of_a_call(see_waits: bool, device: torch.device) -> float:
    """Returns what a collective takes of the host, in a step of a timer (in microseconds).

    Args:
        see_waits: Whether the timer sees them.
        device: What the collectives run on.
    """
    net = torch.nn.Linear(1, 1, device=device)
    optimizer = torch.optim.SGD(net.parameters())
    with mock.patch.object(boundaries, "is_distributed", return_value=see_waits):
        timer = GPUPhaseHooks(net, optimizer, sync_ranks=False).attach()
    # In the first step events are made, which are used again in the second.
    us = 0.0
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            dist.all_reduce(net.weight.data)
        us = (time.perf_counter() - began) / CALLS * 1e6
        timer.step()
        timer.flush()
    timer.remove()
    return us


def host_cost(device: torch.device, rounds: int = 20) -> dict[str, float]:
    """Returns what a collective takes of the host, and what seeing it adds (in microseconds)."""
    pairs = [[host_us_of_a_call(sees, device) for sees in (False, True)] for _ in range(rounds)]
    first, added, third = statistics.quantiles([b - a for a, b in pairs], method="inclusive")
    return {
        "call_us": statistics.median(a for a, _ in pairs),
        "added_us": added,
        "error_us": 0.93 * (third - first) / rounds**0.5,
    }


def show(found: dict[str, dict[str, dict[str, float]]]) -> None:
    """Prints what rank zero found."""
    for way in WAYS:
        row = found["ways"][way]
        added, error = (row["ratio"] - 1) * 100, row["error"] * 100
        print(f"{way:35} {added:+7.2f} ± {error:.2f} % of {row['quartiles_ms']} ms")
    print("waits a step:", found["waits"])
    print("host, a wait:", found["host"], flush=True)


def main(arguments: argparse.Namespace) -> None:
    """Measures in a process group; rank zero saves what all ranks found."""
    began = time.monotonic()
    device = start(arguments.device)
    # All ranks draw the same turns.
    random.seed(0)
    torch.manual_seed(0)
    task, batch = sharded(arguments, device)
    one = {
        "ways": summarize(in_turns(task, batch, arguments.rounds)),
        "waits": waits_a_step(task, batch),
        "host": host_cost(device),
    }
    ranks: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, one)
    if dist.get_rank() == 0:
        show(one)
        seconds = round(time.monotonic() - began)
        save(arguments.out, environment_of(device) | {"seconds": seconds, "ranks": ranks})
    dist.destroy_process_group()


def parse(words: list[str]) -> argparse.Namespace:
    """Returns what was asked for."""
    parser = new_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank")
    parser.add_argument("--rounds", type=int, default=8, help="how many turns each way has")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args(words)


if __name__ == "__main__":
    be_quiet()
    main(parse(sys.argv[1:]))
