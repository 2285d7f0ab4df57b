"""Measures what timing adds to a step in a loop that does real work: the judge of what it costs.

An empty loop keeps the timer's code in the processor's cache, and hides most of it. Here a small
net is trained whose steps the host paces. In a plain loop each way of timing is on for 27 steps and
off for 27, in turns: what differs is what it adds. In Lightning, ways without blocks have fits of
their own.

    python benchmarks/cold_cost.py --out benchmarks/results/cold_cost.json
    python benchmarks/cold_cost.py --layers 32 --rounds 0
"""

import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import islice, pairwise, repeat
from threading import get_ident
from typing import Any, Protocol, TypeVar, cast

import lightning.pytorch as pl
import torch
from loops import bare_trainer, be_quiet
from peers import Boundaries, FiveEvents, FourSynchronize
from record import environment, new_parser, save
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer
from lightning_gputime._session.schedule import Plan, Schedule

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")

BLOCK = 27
"""So many steps a way is on, and then off. It has two more than are read together: else all that
the timer reads of a block would be read when it is off."""

CHUNK = 500
"""So many steps with "auto" are compared among themselves."""

TOGETHER = 20
"""So many cycles of one way follow each other."""

SETTLE, STEPS = 100, 100
"""In Lightning: steps before those that are measured, in which a timer finds its way, and these."""

ON_A_DEVICE: dict[str, Callable[[], Boundaries]] = (
    {"five events": FiveEvents, "four synchronize": FourSynchronize} if CUDA else {}
)
"""What needs a device."""

LEAST, TIMED = "the least timer", "every step timed"

T = TypeVar("T")


class Alternating:
    """A schedule that times blocks of `BLOCK` steps, with as many untimed ones before each."""

    plan, times_all, warmup_steps = Plan(BLOCK, 2 * BLOCK), False, 0

    def next_timed(self, index: int) -> int:
        return index + max(BLOCK - index % (2 * BLOCK), 0)

    def is_timed(self, index: int) -> bool:
        return index == self.next_timed(index)

    def is_probed(self, index: int) -> bool:
        return False


def synchronize() -> None:
    """Waits for the device, if there is one."""
    if CUDA:
        torch.cuda.synchronize()


class Task(pl.LightningModule):
    """A small net and its training: many kernels, each of which is short."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(96, 96) for _ in range(layers)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Training:
    """A plain loop. `zero_grad` and the like are where ways put their hooks."""

    def __init__(self, layers: int) -> None:
        self.net = Task(layers).net.to(DEVICE)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-4)
        self.x = torch.randn(64, 96, device=DEVICE)

    def step(self, boundary: Callable[[int], None] | None = None) -> None:
        if boundary is None:
            self.optimizer.zero_grad()
            self.net(self.x).square().mean().backward()
            self.optimizer.step()
            return
        boundary(0)
        self.optimizer.zero_grad()
        out = self.net(self.x)
        boundary(1)
        loss = out.square().mean()
        boundary(2)
        loss.backward()
        boundary(3)
        self.optimizer.step()
        boundary(4)


class Way(Protocol):
    """A way of timing, which is put on and taken off."""

    def on(self) -> None: ...
    def step(self) -> None: ...
    def off(self) -> None: ...


class AtBoundaries:
    """A way that the loop itself tells of its boundaries."""

    def __init__(self, training: Training, told: Boundaries) -> None:
        self.training, self.told = training, told

    def on(self) -> None:
        pass

    def step(self) -> None:
        self.training.step(self.told.boundary)
        self.told.end_step()

    def off(self) -> None:
        pass


class Hooks:
    """Hooks that do nothing, in the places of a timer's."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def begin(self, label: str) -> None:
        pass

    def on(self) -> None:
        self.zero_grad = zero_grad = self.training.optimizer.zero_grad
        self.engine = engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        begin, net = self.begin, self.training.net

        def timed_zero_grad(*args: Any, **kwargs: Any) -> Any:
            begin("other")
            return zero_grad(*args, **kwargs)

        def timed_engine(*args: Any, **kwargs: Any) -> Any:
            begin("backward")
            try:
                return engine(*args, **kwargs)
            finally:
                begin("optimizer")

        self.handles = [
            net.register_forward_pre_hook(lambda *_: begin("forward")),
            net.register_forward_hook(lambda *_: begin("loss")),
            optimizers.register_optimizer_step_post_hook(lambda *_: begin("after")),
        ]
        vars(self.training.optimizer)["zero_grad"] = timed_zero_grad
        vars(torch.autograd)["_engine_run_backward"] = timed_engine

    def step(self) -> None:
        self.training.step()

    def off(self) -> None:
        for handle in self.handles:
            handle.remove()
        del vars(self.training.optimizer)["zero_grad"]
        vars(torch.autograd)["_engine_run_backward"] = self.engine


class Least(Hooks):
    """The least that is a whole timer.

    It makes the same marks, checks label and thread, cuts steps, reads some at a time, and waits
    once.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.label, self.thread = "", get_ident()
        self.marks: list[tuple[str, Any]] = []
        self.steps: list[list[tuple[str, Any]]] = []
        self.free: list[Any] = []
        self.sums: dict[str, float] = {}

    def begin(self, label: str) -> None:
        if label != self.label and get_ident() == self.thread:
            self.label = label
            if CUDA:
                free = self.free
                at = free.pop() if free else torch.Event(device=DEVICE, enable_timing=True)
                at.record()
            else:
                at = time.perf_counter_ns()
            self.marks.append((label, at))

    def step(self) -> None:
        self.begin("before")
        self.training.step()
        self.begin("data")
        self.steps.append(self.marks)
        self.marks = self.marks[-1:]
        if len(self.steps) > BLOCK:
            self._read()

    def _read(self) -> None:
        ready = self.steps[:-1]
        del self.steps[:-1]
        if CUDA:
            ready[-1][-1][1].synchronize()
        for step in ready:
            for (label, start), (_, end) in pairwise(step):
                ms = start.elapsed_time(end) if CUDA else end - start
                self.sums[label] = self.sums.get(label, 0.0) + ms
            if CUDA:
                self.free += [at for _, at in step[:-1]]


def us_a_step(step: Callable[[], object]) -> float:
    """Returns how long a step takes, over one block (in us)."""
    start = time.perf_counter()
    for _ in range(BLOCK):
        step()
    return (time.perf_counter() - start) / BLOCK * 1e6


def added_by_way(training: Training, way: Way) -> Generator[float, None, None]:
    """Yields what a way adds to a step (in us), by cycles of steps without and with it."""
    while True:
        without_us = us_a_step(training.step)
        way.on()
        us = us_a_step(way.step)
        way.off()
        yield us - without_us


def added_by_timed(training: Training) -> Generator[float, None, None]:
    """Yields the same of this package's timer: blocks of timed steps between those it is off."""
    with GPUPhaseHooks(
        training.net, training.optimizer, every_n_steps=2 * BLOCK, log_every_n_steps=10**6
    ) as timer:
        # As "auto" does it, but whatever it takes.
        timer._session._schedule = cast("Schedule", Alternating())
        batches = iter(timer.steps(repeat(training.x)))

        def step() -> None:
            # From one batch to the next, so that the end of a step belongs to it.
            training.step()
            next(batches)

        next(batches)
        while True:
            without_us = us_a_step(step)
            yield us_a_step(step) - without_us


def _next_step(training: Training, batches: Iterator[Tensor]) -> None:
    next(batches)
    training.step()


def added_by_untimed(training: Training) -> Generator[float, None, None]:
    """Yields the same of a timer that is off, against none."""
    while True:
        with GPUPhaseHooks(training.net, training.optimizer, every_n_steps=10**6) as timer:
            batches = iter(timer.steps(repeat(training.x)))

            step = partial(_next_step, training, batches)
            us_a_step(step)  # Hooks stay on in the first steps.
            us = us_a_step(step)
        yield us - us_a_step(training.step)


def added_by_default(training: Training, chunks: int) -> Iterator[float]:
    """Yields what "auto" adds to a step (in us): all steps of a chunk, less those it is off in."""
    with GPUPhaseHooks(training.net, training.optimizer) as timer:
        batches = iter(timer.steps(repeat(training.x)))
        next(batches)
        for number in range(chunks + 1):
            all_us, off_us = [], []
            for _ in range(CHUNK):
                was_off = timer._session.is_off
                start = time.perf_counter()
                training.step()
                next(batches)
                us = (time.perf_counter() - start) * 1e6
                all_us.append(us)
                if was_off and timer._session.is_off:
                    off_us.append(us)
            # In the first chunk "auto" finds out what timing takes.
            if number and off_us:
                yield statistics.mean(all_us) - statistics.mean(off_us)
        print(timer.summary().timed_every_n_steps, timer.summary().timing_share)


def in_plain_loop(layers: int, cycles: int) -> dict[str, list[float]]:
    """Returns what each way added to a step in each cycle (in us), and the step without."""
    training = Training(layers)
    ways: dict[str, Way] = {
        "hooks that do nothing": Hooks(training),
        **{name: AtBoundaries(training, new()) for name, new in ON_A_DEVICE.items()},
        LEAST: Least(training),
    }
    ways_of = {name: partial(added_by_way, training, way) for name, way in ways.items()}
    ways_of["no step timed"] = partial(added_by_untimed, training)
    ways_of[TIMED] = partial(added_by_timed, training)
    found: dict[str, list[float]] = {"step": [], **{name: [] for name in ways_of}}
    for _ in range(8):
        us_a_step(training.step)
    # Some cycles of each way, then of the next, round and round: the host has its moods.
    for _ in range(math.ceil(cycles / TOGETHER)):
        found["step"].append(us_a_step(training.step))
        for name in random.sample([*ways_of], len(ways_of)):
            added = ways_of[name]()
            for _ in range(4):  # A timer judges its first steps.
                next(added)
            found[name] += islice(added, TOGETHER)
            added.close()
    found["default"] = [*added_by_default(training, cycles // 4)]
    return found


class Batches:
    """A loader that takes no time."""

    def __init__(self, number: int) -> None:
        self._number, self._batch = number, torch.randn(64, 96)

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Tensor]:
        return iter([self._batch] * self._number)


class Stopwatch(pl.Callback):
    """Takes the time from each batch to the next (in us), and whether its timer is off."""

    def __init__(self, timer: pl.Callback | None = None, plan: Schedule | None = None) -> None:
        self.starts: list[float] = []
        self.was_off: list[bool] = []
        self._timer, self._plan = timer, plan

    def on_train_batch_start(self, *_: Any) -> None:
        if isinstance(self._timer, GPUPhaseTimer):
            if self._plan is not None and not self.starts:
                self._timer._session._schedule = self._plan
            self.was_off.append(self._timer._session.is_off)
        self.starts.append(time.perf_counter() * 1e6)

    def steps_us(self) -> list[float]:
        """Returns the time of each step."""
        return [end - start for start, end in pairwise(self.starts)]


def fit(task: Task, steps: int, watch: Stopwatch, *callbacks: pl.Callback) -> list[float]:
    """Trains in Lightning. Returns the time of each step (in us)."""
    bare_trainer(max_epochs=1, callbacks=[watch, *callbacks]).fit(task, Batches(steps + 1))
    return watch.steps_us()


def in_lightning(layers: int, rounds: int) -> dict[str, list[float]]:
    """Returns the same of Lightning."""
    task = Task(layers)
    ways: dict[str, Callable[[], pl.Callback]] = {
        "a callback that does nothing": Boundaries,
        **ON_A_DEVICE,
        "no step timed": partial(GPUPhaseTimer, every_n_steps=10**6, print_summary=False),
    }

    def us_a_step(*callbacks: pl.Callback) -> float:
        return statistics.mean(fit(task, SETTLE + STEPS, Stopwatch(), *callbacks)[SETTLE:])

    us_a_step()
    found: dict[str, list[float]] = {"step": [], **{name: [] for name in ways}}
    for _ in range(rounds):
        before = us_a_step()
        for name in random.sample([*ways], len(ways)):
            us, after = us_a_step(ways[name]()), us_a_step()
            found["step"].append(before)
            found[name].append(us - (before + after) / 2)
            before = after
    # Of the timer what differs inside of one fit: the host has other moods in the next.
    timer = GPUPhaseTimer(every_n_steps=2 * BLOCK, print_summary=False)
    watch = Stopwatch(timer, cast("Schedule", Alternating()))
    blocks = [
        statistics.mean(block)
        for block in batched(fit(task, 4 * rounds * BLOCK, watch, timer)[4 * BLOCK :], BLOCK)
    ]
    found[TIMED] = [us - before for before, us in zip(blocks[::2], blocks[1::2], strict=False)]
    timer = GPUPhaseTimer(print_summary=False)
    watch = Stopwatch(timer)
    chunks = batched(
        zip(fit(task, 5 * rounds * CHUNK // 4, watch, timer), watch.was_off, strict=False), CHUNK
    )
    found["default"] = [
        statistics.mean(us for us, _ in chunk) - statistics.mean(us for us, off in chunk if off)
        for chunk in [*chunks][1:]
        if any(off for _, off in chunk)
    ]
    print(timer.summary().timed_every_n_steps, timer.summary().timing_share)
    return found


def batched(items: Iterable[T], n: int) -> Iterator[list[T]]:
    """Yields the items by so many, as long as there are as many."""
    left = iter(items)
    while len(some := [*islice(left, n)]) == n:
        yield some


def mean_and_error(us: list[float]) -> dict[str, float]:
    """Returns the mean without the eighth at each end, and its standard error."""
    cut = len(us) // 8
    kept = sorted(us)[cut : len(us) - cut]
    # The error of what is cut at both ends, by Winsor's variance.
    ends = [kept[0]] * cut + kept + [kept[-1]] * cut
    error = statistics.pstdev(ends) / (len(kept) / len(us)) / math.sqrt(max(len(us) - 1, 1))
    return {"us": round(statistics.mean(kept), 1), "error_us": round(error, 1)}


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--cycles", type=int, default=200, help="of each way in the plain loop")
    parser.add_argument("--rounds", type=int, default=40, help="of fits in Lightning")
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    be_quiet()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    loops = {"plain": partial(in_plain_loop, cycles=arguments.cycles)}
    if arguments.rounds:
        loops["lightning"] = partial(in_lightning, rounds=arguments.rounds)
    results: dict[str, Any] = {}
    for loop, measure in loops.items():
        rows = measure(arguments.layers)
        # "auto" is never off where it times each step.
        results[loop] = {name: mean_and_error(us) for name, us in rows.items() if us}
        step_us = results[loop]["step"]["us"]
        print(f"{loop}: a step without a timer takes {step_us:.0f} us")
        for name, row in results[loop].items():
            if name != "step":
                share = row["us"] / step_us
                print(f"  {name:30s} {row['us']:+7.1f} ± {row['error_us']:.1f} us  {share:+.1%}")
    header = environment(
        *(["gpu"] if CUDA else []), "host", "python", "torch", "lightning", "command"
    )
    save(arguments.out, header | {"results": results})
