"""Are the peaks of the phases true, and what do they cost?

A net is trained, with every step sampled, and once more without the timer. There the loop itself
notes the peak at the ends of its phases and resets the counters, through torch's own functions:
these must be the timer's, to the byte. The same with what tensors asked for (`requested_bytes`),
which the allocator's trace has entry by entry: the loop leaves a tensor of a known size there at
the ends of its phases, the trace is replayed, and the peaks between these must be the timer's, to
the byte. Both are from the same code of the timer; what is `allocated_bytes` is larger, by what the
allocator rounds up.

    python benchmarks/memory.py --out benchmarks/results/memory.json
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from loops import AGAIN, NONE, Way, attached, by_way, in_rounds
from models import Batch, Task, load
from overhead import summarize
from record import environment, new_parser, save
from turns import Stopwatch, take_turn

from lightning_gputime import GPUPhaseHooks, _memory
from lightning_gputime._memory import PhaseMemory, counters_of, sampler, torch_counters
from lightning_gputime._record.clock import Clock, clock_for

MIB = 2**20
STEPS = 4
PHASES = ("forward", "loss", "other", "backward", "optimizer")
"""What lies between the ends that the loop notes."""

# The size of the tensor that marks an end in the trace; nothing else has such a one.
MARKER, BEGIN = 70_001, 99

NO_TIMER: Any = nullcontext()

OfSteps = list[dict[str, int]]
"""Of each step, the peak of each phase (in bytes)."""


class Requested:
    """An allocator that tells what tensors have asked for as if it were what is allocated."""

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self.index, self.total = allocator.index, allocator.total
        self.reset = allocator.reset

    def read(self) -> Mapping[str, Any]:
        stats = self._allocator.read()
        return {**stats, "allocated_bytes": stats["requested_bytes"]}


def new_clock(device: torch.device) -> Any:
    """Returns the clock of the GPU, whose allocator can be replaced."""
    clock: Any = clock_for(device)
    clock.allocator = torch_counters(device)
    return clock


@contextmanager
def every_step() -> Iterator[None]:
    """Lets every step be sampled that is timed inside."""
    with mock.patch.object(_memory, "EVERY", 1):
        yield


def train(
    task: Task, batch: Batch, clock: Clock, at_end: Callable[[int], None], timed: bool = True
) -> OfSteps:
    """Trains some steps, and returns the peaks that the timer found in each.

    Args:
        task: What is trained.
        batch: With what.
        clock: Has the allocator.
        at_end: Is called where the step begins, and after each of `PHASES`.
        timed: Whether with the timer.
    """
    x, y = batch
    optimizer = task.configure_optimizers()
    found: OfSteps = []
    # Else backward makes it, and frees it between the timer's mark and the loop's.
    seed = torch.ones_like(task.loss(task.net(x), y).detach())

    def keep(_: PhaseMemory, number: int, peaks: Mapping[str, int]) -> None:
        found.append(dict(peaks))

    timer = GPUPhaseHooks(task.net, optimizer, _clock=clock, memory=True, warmup_steps=0)
    # What the timer shows is the highest of all steps.
    with every_step(), mock.patch.object(PhaseMemory, "_keep", keep), timer if timed else NO_TIMER:
        for _ in range(STEPS):
            at_end(0)
            out = task.net(x)
            at_end(1)
            loss = task.loss(out, y)
            at_end(2)
            optimizer.zero_grad()
            at_end(3)
            loss.backward(seed)
            at_end(4)
            optimizer.step()
            at_end(5)
            if timed:
                timer.step()
            del out, loss
    optimizer.zero_grad()
    return found


def by_hand(task: Task, batch: Batch, clock: Clock) -> tuple[OfSteps, OfSteps]:
    """Returns the peaks of the timer, and those that torch's own functions tell."""
    expected: OfSteps = []

    def at_end(place: int) -> None:
        if place == 0:
            expected.append({})
        else:
            expected[-1][PHASES[place - 1]] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    # One after the other: both reset the same counters.
    train(task, batch, clock, at_end, timed=False)
    return train(task, batch, clock, lambda place: None), expected


def by_replay(task: Task, batch: Batch, clock: Any) -> tuple[OfSteps, OfSteps]:
    """Returns the peaks of the timer in what was requested, and those of the allocator's trace."""

    def at_end(place: int) -> None:
        torch.empty(MARKER + place, dtype=torch.uint8, device="cuda")

    requested = new_clock(clock.device)
    requested.allocator = Requested(clock.allocator)
    torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
    before = clock.allocator.read()["requested_bytes"]["all"]["current"]
    at_end(BEGIN)
    try:
        found = train(task, batch, requested, at_end)
        [trace] = [one for one in torch.cuda.memory._snapshot()["device_traces"] if one]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return found, replayed(trace, before)


def replayed(trace: Sequence[Mapping[str, Any]], current: int) -> OfSteps:
    """Returns the peaks between the markers in a trace.

    Args:
        trace: What the allocator has done, in order.
        current: What was requested, and not freed, before.
    """
    found: OfSteps = []
    peak, place = current, -1
    # The trace may still have what was recorded before.
    begins = [i for i, entry in enumerate(trace) if entry["size"] == MARKER + BEGIN]
    for entry in trace[begins[-1] + 1 :]:
        if entry["action"] == "alloc":
            marks = entry["size"] - MARKER
            if 0 <= marks <= len(PHASES):
                if marks == 0:
                    found.append({})
                elif place == marks - 1:
                    # The loss lasts until `zero_grad`: the marker behind it is part of it.
                    last = current + entry["size"] if PHASES[marks - 1] == "loss" else 0
                    found[-1][PHASES[marks - 1]] = max(peak, last)
                peak, place = current, marks
            current += entry["size"]
            peak = max(peak, current)
        elif entry["action"] == "free_completed":
            current -= entry["size"]
    return found


def differences(pair: tuple[OfSteps, OfSteps]) -> dict[str, Any]:
    """Returns the timer's peaks of the last step, and the largest difference of each phase."""
    found, expected = pair
    assert len(found) == len(expected) == STEPS, (len(found), len(expected))
    names = [name for name in PHASES if name != "other"]
    return {
        name: {
            "peak_bytes": found[-1][name],
            "first_step_bytes": found[0][name],
            "largest_difference_bytes": max(
                abs(one[name] - other[name]) for one, other in zip(found, expected, strict=True)
            ),
        }
        for name in names
    }


def each_sampled(task: Task, optimizer: torch.optim.Optimizer) -> Way:
    """Returns the way of a timer that samples every step."""
    timer = GPUPhaseHooks(task.net, optimizer, memory=True).attach()

    def end_step() -> None:
        with every_step():
            timer.step()

    return Way(end_step=end_step, remove=timer.remove)


WAYS: dict[str, Callable[[Task, torch.optim.Optimizer], Way]] = {
    NONE: lambda task, optimizer: Way(),
    AGAIN: lambda task, optimizer: Way(),
    "GPUPhaseHooks()": lambda task, optimizer: attached(GPUPhaseHooks(task.net, optimizer)),
    # One of the 25 steps that are timed is sampled.
    "GPUPhaseHooks(memory=True)": lambda task, optimizer: attached(
        GPUPhaseHooks(task.net, optimizer, memory=True)
    ),
    "every step sampled": each_sampled,
}


def in_turns(task: Task, batch: Batch, rounds: int) -> dict[str, list[float]]:
    """Lets the ways take their turns in a loop; returns the time of a step in each turn."""
    ways = in_rounds([*WAYS], rounds)
    stopwatch = Stopwatch(len(ways))
    for name in ways:
        optimizer = task.configure_optimizers()
        take_turn(task, optimizer, batch, WAYS[name](task, optimizer), stopwatch.press)
    return by_way(ways, stopwatch.times())


def host_us(clock: Any, calls: int = 2000) -> dict[str, float]:
    """Returns what a mark of a sampled step takes of the host (in microseconds)."""
    counters = counters_of(clock)
    assert counters is not None
    found = {}
    for name, call in (
        ("read", clock.allocator.read),
        ("reset", clock.allocator.reset),
        ("all", sampler(counters)),
    ):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        found[name] = round((time.perf_counter() - begin) / calls * 1e6, 2)
    return found


def main() -> None:
    """Measures each model, prints what is found, and records it."""
    parser = new_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["gpt12", "resnet50"])
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    results: dict[str, Any] = {}
    for model in arguments.models:
        task, batch = load(model, device)
        clock = new_clock(device)
        results[model] = {
            "allocated, by hand": differences(by_hand(task, batch, clock)),
            "requested, by the trace": differences(by_replay(task, batch, clock)),
            "added": summarize(in_turns(task, batch, arguments.rounds)),
        }
        for way in ("allocated, by hand", "requested, by the trace"):
            for phase, row in results[model][way].items():
                mib, off = row["peak_bytes"] / MIB, row["largest_difference_bytes"]
                print(f"{model}: {way}: {phase} {mib:,.1f} MiB, off by {off} bytes")
        for way, row in results[model]["added"].items():
            print(f"{model}: {way}: {row['ratio']:.5f} ({row['error']:.5f})")
        del task, batch
    results["host_us"] = host_us(new_clock(device))
    print(results["host_us"])
    save(arguments.out, {**environment(), "results": results})


if __name__ == "__main__":
    main()
