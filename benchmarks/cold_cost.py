"""Measure the time that timing adds to a host-bound step.

An empty loop would keep the timer's code in the processor's cache and hide most of its cost, so
this loop trains a small net of many short kernels. Each way of timing is on for 27 steps, then off
for 27, and so on. The "least timer" records the same marks in the fewest lines.

By default, most steps are only counted. They are measured in such turns. What the other steps add,
which are timed, examined, read or logged, is measured against the steps around them. It is an upper
bound, because interruptions by the system count for them. The default adds the sum of both.
`--defaults` measures only this, for several numbers of layers and of steps between logs.

    python benchmarks/cold_cost.py --out benchmarks/results/cold_cost.json
    python benchmarks/cold_cost.py --defaults 2,16 2,64 8,16 8,64 40,16
"""

import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice, pairwise, repeat
from threading import get_ident
from typing import Any, TypeVar

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from models import Repeat, bare_trainer, be_quiet
from record import environment, new_parser, save
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer
from lightning_gputime._session.schedule import Schedule, Windows
from lightning_gputime._session.session import OFF

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")

# Steps for which a way of timing is on, then off: two more than the timer reads at a time. With
# fewer steps, it would read all steps of a block while it is off.
BLOCK = 27
AFTER = 3  # Steps after a timed step that find cold caches.
WARMUP = 600  # Steps in which the cost of timing and the first lines are measured.
TOGETHER = 20  # Consecutive cycles of the same way.
LEAST, TIMED, EMPTY = "least timer", "every step timed", "empty callback"
UNTIMED, SPECIAL, DEFAULT = "no step timed", "timed steps of the default", "default"
NEVER: dict[str, Any] = {"every_n_steps": 10**9, "lines": False}

T = TypeVar("T")
Added = Generator[float, None, None]
"""Microseconds that a way adds to a step, one value per cycle of steps without and with it."""
Step = Callable[[], object]


class Alternating(Schedule):
    """A schedule that times `BLOCK` of every 2 * `BLOCK` steps."""

    def __init__(self) -> None:
        super().__init__(Windows(BLOCK, 2 * BLOCK))

    def next_timed(self, index: int) -> int:
        return index + max(BLOCK - index % (2 * BLOCK), 0)


class Task(pl.LightningModule):
    """A small net: many kernels, each of which is short."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(96, 96) for _ in range(layers)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Training:
    """A plain loop."""

    def __init__(self, layers: int) -> None:
        self.net = Task(layers).net.to(DEVICE)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-4)
        self.x = torch.randn(64, 96, device=DEVICE)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(self.x).square().mean().backward()
        self.optimizer.step()


class Least:
    """Complete timer in as little code as possible.

    It records the same marks, checks the label and the thread, splits steps, reads several steps at
    a time, and waits once per read.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.label, self.thread = "", get_ident()
        self.marks: list[tuple[str, Any]] = []
        self.steps: list[list[tuple[str, Any]]] = []
        self.free: list[Any] = []
        self.sums: dict[str, float] = {}

    def attach(self) -> None:
        begin, net, optimizer = self.begin, self.training.net, self.training.optimizer
        zero_grad = optimizer.zero_grad
        self.engine = engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

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
        vars(optimizer)["zero_grad"] = timed_zero_grad
        vars(torch.autograd)["_engine_run_backward"] = timed_engine

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        del vars(self.training.optimizer)["zero_grad"]
        vars(torch.autograd)["_engine_run_backward"] = self.engine

    def begin(self, label: str) -> None:
        if label != self.label and get_ident() == self.thread:
            self.label = label
            if CUDA:
                free = self.free
                mark = free.pop() if free else torch.Event(device=DEVICE, enable_timing=True)
                mark.record()
            else:
                mark = time.perf_counter_ns()
            self.marks.append((label, mark))

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
                self.free += [mark for _, mark in step[:-1]]


def us_per_step(step: Step, n: int = BLOCK) -> float:
    """Return the microseconds per step of one block."""
    start = time.perf_counter()
    for _ in range(n):
        step()
    return (time.perf_counter() - start) / n * 1e6


def added_by_least(training: Training) -> Added:
    way = Least(training)
    while True:
        without_us = us_per_step(training.step)
        way.attach()
        us = us_per_step(way.step)
        way.remove()
        yield us - without_us


def timed_steps(training: Training, **options: Any) -> tuple[Any, Step]:
    """Return a timer, and a function that runs a step of the training with it."""
    timer = GPUPhaseHooks(training.net, training.optimizer, **options)
    timer.attach()
    batches = iter(timer.steps(repeat(training.x)))
    next(batches)

    def step() -> None:
        # Measure from batch to batch, to include the end of the step.
        training.step()
        next(batches)

    return timer, step


def added_by_timed(training: Training) -> Added:
    # An examined step would distort its block.
    options = {"every_n_steps": 2 * BLOCK, "log_every_n_steps": 10**6, "lines": False}
    timer, step = timed_steps(training, **options)
    # Remove hooks between blocks, as "auto" does between timing windows.
    timer._session.schedule = Alternating()
    try:
        while True:
            without_us = us_per_step(step)
            yield us_per_step(step) - without_us
    finally:
        timer.remove()


class StepTimes:
    """Times of the steps of one run (in microseconds), and which of them did more than count."""

    def __init__(self, timer: Any) -> None:
        self._timer = timer
        self._us = list[float]()
        self._is_special = list[bool]()
        self._mode = OFF

    def add(self, us: float) -> None:
        """Add the step that has just ended."""
        session = self._timer._session
        mode_before, self._mode = self._mode, session.mode
        has_checked = (
            session._checked_at == session.counter.index
        )  # It may have read or logged, too.
        self._us.append(us)
        self._is_special.append(mode_before is not OFF or session.mode is not OFF or has_checked)

    def added_us(self, parts: int = 8) -> list[float]:
        """Return what the special steps add to the mean step, for each part of the run.

        A special step and the `AFTER` steps after it are compared with the median of the steps
        around them that only count. The mean of these is above their median, too, which is
        subtracted.
        """
        us = np.array(self._us)
        is_special = np.array(self._is_special)
        for _ in range(AFTER):
            is_special[1:] |= is_special[:-1]
        counting = np.flatnonzero(~is_special)
        excess_us = np.empty_like(us)
        for step in range(len(us)):
            next_ = int(np.searchsorted(counting, step))
            around = counting[max(next_ - 10, 0) : next_ + 10]
            excess_us[step] = us[step] - np.median(us[around])
        found = []
        for steps in np.array_split(np.arange(len(us)), parts):
            special = is_special[steps]
            # Interrupts of the system hit few steps, so leave out the largest of each kind.
            usual_us, special_us = excess_us[steps][~special], excess_us[steps][special]
            usual_us = usual_us[usual_us <= np.quantile(usual_us, 0.99)]
            if len(special_us):
                found.append(float((special_us - usual_us.mean()).sum() / len(steps)))
        return found


def in_turns(step: Step, bare: Step, rounds: int) -> list[float]:
    """Return what `step` adds to `bare` in each round of a few steps without and with it."""
    found = []
    for _ in range(rounds):
        bare()
        without_us = us_per_step(bare)
        step()
        found.append(us_per_step(step) - without_us)
    return found


def defaults_in_plain_loop(layers: int, seconds: float, **options: Any) -> dict[str, list[float]]:
    """Return the bare step, and what each kind of step adds with default options."""
    training = Training(layers)
    timer, step = timed_steps(training, **NEVER)
    us_per_step(step, 4 * BLOCK)
    found = {"step": [us_per_step(training.step) for _ in range(8)]}
    steps = int(seconds * 1e6 / statistics.mean(found["step"]))
    found[UNTIMED] = in_turns(step, training.step, steps // (2 * BLOCK + 2))
    timer.remove()
    timer, step = timed_steps(training, **options)
    us_per_step(step, WARMUP)
    times = StepTimes(timer)
    for _ in range(steps):
        times.add(us_per_step(step, 1))
    found[SPECIAL] = times.added_us()
    print(f"1 of {timer.summary().timed_every_n_steps} steps was timed")
    timer.remove()
    return found


def in_plain_loop(layers: int, cycles: int) -> dict[str, list[float]]:
    """Return what each way adds to a step in each cycle."""
    training = Training(layers)
    ways = {LEAST: added_by_least, TIMED: added_by_timed}
    found: dict[str, list[float]] = {LEAST: [], TIMED: []}
    for _ in range(8):
        us_per_step(training.step)
    # The speed of the host drifts, so alternate the ways after a few cycles.
    for _ in range(math.ceil(cycles / TOGETHER)):
        for name in random.sample([*ways], len(ways)):
            added = ways[name](training)
            for _ in range(4):  # Skip the first steps of a timer.
                next(added)
            found[name] += islice(added, TOGETHER)
            added.close()
    return found


class Stopwatch(pl.Callback):
    """Callback that records the time of each batch (in microseconds)."""

    def __init__(self) -> None:
        self.steps_us: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        now = time.perf_counter()
        if self._start:
            self.steps_us.append((now - self._start) * 1e6)
        self.batch_begins(trainer)
        self._start = time.perf_counter()

    def batch_begins(self, trainer: Any) -> None: ...


class Scheduled(Stopwatch):
    """Sets the schedule of a timer in its first batch."""

    def __init__(self, timer: Any) -> None:
        super().__init__()
        self._timer = timer

    def batch_begins(self, trainer: Any) -> None:
        if not self.steps_us:
            self._timer._session.schedule = Alternating()


class EmptyCallback(pl.Callback):
    """Callback with the two hooks that run in every batch."""

    def on_train_batch_start(self, *_: Any) -> None: ...

    def on_train_batch_end(self, *_: Any) -> None: ...


class Turns(Stopwatch):
    """Removes a callback, which has no hooks, from its trainer for `BLOCK` steps in turns."""

    def __init__(self, callback: pl.Callback) -> None:
        super().__init__()
        self._callback = callback
        self._left, self._is_on = 4 * BLOCK, True
        self.blocks_us: list[float] = []

    @property
    def added_us(self) -> list[float]:
        """Time of each block with the callback, minus the mean of the blocks next to it."""
        off, on = self.blocks_us[::2], self.blocks_us[1::2]
        return [us - (a + b) / 2 for us, (a, b) in zip(on, pairwise(off), strict=False)]

    def batch_begins(self, trainer: Any) -> None:
        self._left -= 1
        if self._left:
            return
        if self.blocks_us or not self._is_on:
            self.blocks_us.append(statistics.mean(self.steps_us[1:]))
        self._left, self.steps_us = BLOCK + 1, []
        self._is_on = not self._is_on
        callbacks = trainer.callbacks
        (callbacks.append if self._is_on else callbacks.remove)(self._callback)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        # A timer whose training does not end would stay attached.
        if self._callback not in trainer.callbacks:
            trainer.callbacks.append(self._callback)


class Recording(Stopwatch):
    """Records the kind of each step of a timer, after the first steps."""

    def __init__(self, timer: Any) -> None:
        super().__init__()
        self.times, self._n = StepTimes(timer), 0

    def batch_begins(self, trainer: Any) -> None:
        self._n += 1
        if self._n > WARMUP:
            self.times.add(self.steps_us[-1])


def fit(layers: int, steps: int, callbacks: list[pl.Callback], **options: Any) -> None:
    """Train in Lightning."""
    trainer = bare_trainer(max_epochs=1, callbacks=callbacks, **options)
    trainer.fit(Task(layers), Repeat(torch.randn(64, 96), steps + 1))


def in_lightning(layers: int, rounds: int) -> dict[str, list[float]]:
    """Return what each way adds to a step in Lightning."""
    timer = GPUPhaseTimer(every_n_steps=2 * BLOCK, print_summary=False, lines=False)
    watch = Scheduled(timer)
    fit(layers, 2 * (rounds + 2) * BLOCK, [watch, timer])
    blocks = [statistics.mean(block) for block in batched(watch.steps_us[4 * BLOCK :], BLOCK)]
    found = {TIMED: [us - off_us for off_us, us in zip(blocks[::2], blocks[1::2], strict=False)]}
    found[EMPTY] = turns_in_lightning(layers, rounds, EmptyCallback()).added_us
    return found


def turns_in_lightning(layers: int, rounds: int, callback: pl.Callback) -> Turns:
    turns = Turns(callback)
    fit(layers, 4 * BLOCK + 2 * rounds * (BLOCK + 1), [turns, callback])
    return turns


def defaults_in_lightning(layers: int, seconds: float, **options: Any) -> dict[str, list[float]]:
    """Return the bare step, and what each kind of step adds with default options."""
    timer = GPUPhaseTimer(print_summary=False)
    recording = Recording(timer)
    stopwatch = Stopwatch()
    fit(layers, 4 * BLOCK, [stopwatch])
    steps = int(seconds * 1e6 / statistics.median(stopwatch.steps_us))
    fit(layers, WARMUP + steps, [recording, timer], **options)
    print(f"1 of {timer.summary().timed_every_n_steps} steps was timed")
    untimed = GPUPhaseTimer(print_summary=False, **NEVER)
    turns = turns_in_lightning(layers, steps // (2 * BLOCK + 2), untimed)
    return {
        "step": turns.blocks_us[::2],
        UNTIMED: turns.added_us,
        SPECIAL: recording.times.added_us(),
    }


def batched(items: Iterable[T], n: int) -> Iterator[list[T]]:
    """Yield full batches of n items."""
    left = iter(items)
    while len(batch := [*islice(left, n)]) == n:
        yield batch


def mean_and_error(us: list[float]) -> dict[str, float]:
    """Return the mean without an eighth of the values at each end, and its standard error."""
    cut = len(us) // 8
    kept = sorted(us)[cut : len(us) - cut]
    # The standard error of a trimmed mean, from the winsorized variance.
    ends = [kept[0]] * cut + kept + [kept[-1]] * cut
    error = statistics.pstdev(ends) / (len(kept) / len(us)) / math.sqrt(max(len(us) - 1, 1))
    return {"us": round(statistics.mean(kept), 1), "error_us": round(error, 1)}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--cycles", type=int, default=200, help="of each way, in 27 steps")
    parser.add_argument("--seconds", type=float, default=20, help="for each kind of step")
    parser.add_argument("--defaults", nargs="*", metavar="LAYERS,STEPS_PER_LOG")
    arguments = parser.parse_args()
    be_quiet()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    header = environment(
        *(["gpu"] if CUDA else []), "host", "python", "torch", "lightning", "command"
    )
    results: dict[str, Any] = {}
    for pair in arguments.defaults or ["8,0"]:
        layers, log_every = map(int, pair.split(","))
        options = {"logger": DummyLogger(), "log_every_n_steps": log_every} if log_every else {}
        logs = f", {log_every} steps per log" if log_every else ""
        rows_of = {
            "plain": defaults_in_plain_loop(layers, arguments.seconds, **options),
            "lightning": defaults_in_lightning(layers, arguments.seconds, **options),
        }
        if not arguments.defaults:
            rows_of["plain"] |= in_plain_loop(layers, arguments.cycles)
            rows_of["lightning"] |= in_lightning(layers, arguments.cycles)
        for loop, rows in rows_of.items():
            # "auto" is never off if it times every step.
            found = {name: mean_and_error(us) for name, us in rows.items() if us}
            parts = [found[name] for name in (UNTIMED, SPECIAL) if name in found]
            error_us = math.hypot(*[part["error_us"] for part in parts])
            total_us = sum(part["us"] for part in parts)
            found[DEFAULT] = {"us": round(total_us, 1), "error_us": round(error_us, 1)}
            name = f"{loop}, {layers} layers{logs}"
            results[name] = found
            for way, row in found.items():
                share = row["us"] / found["step"]["us"]
                row_text = f"{row['us']:+8.1f} ± {row['error_us']:.1f} us  {share:+.1%}"
                print(f"{name}: {way:27} {row_text}", flush=True)
        save(arguments.out, header | {"results": results})


if __name__ == "__main__":
    main()
