"""Measure the time that timing adds to a host-bound step.

An empty loop would keep the timer's code in the processor's cache and hide most of its cost, so
this loop trains a small net of many short kernels. In a plain loop, each way of timing is on for 27
steps, then off for 27, and so on. The "least timer" records the same marks in the fewest lines.
Blocks of the default alternate with blocks of the same training without a timer. `--defaults`
measures only the default, for several lengths of a step and of a log.

    python benchmarks/cold_cost.py --out benchmarks/results/cold_cost.json
    python benchmarks/cold_cost.py --layers 1 --rounds 0
    python benchmarks/cold_cost.py --defaults 2,16 2,64 8,16 8,64 40,16
"""

import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice, pairwise, repeat
from threading import get_ident
from typing import Any, TypeVar

import lightning.pytorch as pl
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
RUN = 10 * BLOCK  # Steps with "auto" in a row, before as many without a timer.
CHUNK = 2 * RUN  # Steps with "auto" to compare with the same number without a timer.
TOGETHER = 20  # Consecutive cycles of the same way.
LEAST, TIMED, DEFAULT = "least timer", "every step timed", "default"
EMPTY, UNTIMED = "empty callback", "no step timed"
# Net and chunks of steps for each (layers, steps per log) of `--defaults`.
CHUNKS_OF = {2: 16, 8: 10, 40: 3}
# Ways that take turns of `RUN` steps with a training without a timer, and options of the timer.
IN_RUNS: dict[str, dict[str, Any]] = {
    UNTIMED: {"every_n_steps": 10**9, "lines": False},
    DEFAULT: {},
}

T = TypeVar("T")
Added = Generator[float, None, None]
"""Microseconds that a way adds to a step, one value per cycle of steps without and with it."""


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


def us_per_step(step: Callable[[], object], n: int = BLOCK) -> float:
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


def examine_no_pauses(timer: Any) -> None:
    """Do not time lines in pauses, which would slow down the training without a timer there."""
    timer._outside_lines.stop()


def added_by_timed(training: Training) -> Added:
    with GPUPhaseHooks(
        training.net,
        training.optimizer,
        every_n_steps=2 * BLOCK,
        log_every_n_steps=10**6,
        lines=False,  # An examined step would distort its block.
    ) as timer:
        # Remove hooks between blocks, as "auto" does between timing windows.
        timer._session.schedule = Alternating()  # type: ignore[union-attr]
        batches = iter(timer.steps(repeat(training.x)))

        def step() -> None:
            # Measure from batch to batch, to include the end of the step.
            training.step()
            next(batches)

        next(batches)
        while True:
            without_us = us_per_step(step)
            yield us_per_step(step) - without_us


def added_in_runs(training: Training, layers: int, chunks: int, **options: Any) -> Iterator[float]:
    """Yield the mean of a chunk of steps minus that of the same training without a timer."""
    bare = Training(layers)
    with GPUPhaseHooks(training.net, training.optimizer, **options) as timer:
        examine_no_pauses(timer)
        batches = iter(timer.steps(repeat(training.x)))
        next(batches)

        def step() -> None:
            training.step()
            next(batches)

        for _ in range(2 * CHUNK):  # "auto" measures the cost of timing.
            step()
        for _ in range(chunks):
            added_us = 0.0
            for _ in range(CHUNK // RUN):
                with timer.paused():
                    added_us -= us_per_step(bare.step, RUN)
                added_us += us_per_step(step, RUN)
            yield added_us / (CHUNK // RUN)
        print(f"1 of {timer.summary().timed_every_n_steps} steps was timed")


def in_plain_loop(layers: int, cycles: int) -> dict[str, list[float]]:
    """Return the microseconds that each way adds to a step in each cycle, and the bare step."""
    training = Training(layers)
    ways = {LEAST: added_by_least, TIMED: added_by_timed}
    found: dict[str, list[float]] = {"step": [], LEAST: [], TIMED: []}
    for _ in range(8):
        us_per_step(training.step)
    # The speed of the host drifts, so alternate the ways after a few cycles.
    for _ in range(math.ceil(cycles / TOGETHER)):
        found["step"].append(us_per_step(training.step))
        for name in random.sample([*ways], len(ways)):
            added = ways[name](training)
            for _ in range(4):  # Skip the first steps of a timer.
                next(added)
            found[name] += islice(added, TOGETHER)
            added.close()
    for name, options in IN_RUNS.items():
        found[name] = [*added_in_runs(training, layers, cycles // 4, **options)]
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
    """Removes a callback from its trainer for `RUN` steps, adds it for `RUN` steps, and so on.

    A timer is removed only while it has no hooks, and is paused meanwhile.
    """

    def __init__(self, callback: pl.Callback) -> None:
        super().__init__()
        self._callback, self._pause = callback, ExitStack()
        self._left, self._is_on = 2 * CHUNK, True  # "auto" measures the cost of timing first.
        self.added_us: list[float] = []
        self.bare_us: list[float] = []
        self._without_us = 0.0

    def batch_begins(self, trainer: Any) -> None:
        is_timer = isinstance(self._callback, GPUPhaseTimer)
        if is_timer and not self.steps_us:
            examine_no_pauses(self._callback)
        self._left -= 1
        if self._left > 0 or (is_timer and self._is_on and not self._has_no_hooks()):
            return
        took_us, self.steps_us = statistics.mean(self.steps_us), []
        self._left, self._is_on = RUN, not self._is_on
        if self._is_on:
            self._without_us = took_us
            self.bare_us.append(took_us)
            self._pause.close()
            trainer.callbacks.append(self._callback)
            return
        if self._without_us:
            self.added_us.append(took_us - self._without_us)
        trainer.callbacks.remove(self._callback)
        if is_timer:
            self._pause.enter_context(self._callback.paused())  # type: ignore[attr-defined]

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        # A timer whose training does not end would stay attached.
        self._pause.close()
        if self._callback not in trainer.callbacks:
            trainer.callbacks.append(self._callback)

    def _has_no_hooks(self) -> bool:
        session: Any = self._callback._session  # type: ignore[attr-defined]
        return session.mode is OFF


def fit(layers: int, steps: int, callbacks: list[pl.Callback], **options: Any) -> None:
    """Train in Lightning."""
    trainer = bare_trainer(max_epochs=1, callbacks=callbacks, **options)
    trainer.fit(Task(layers), Repeat(torch.randn(64, 96), steps + 1))


def in_lightning(layers: int, rounds: int) -> dict[str, list[float]]:
    """Return the microseconds that each way adds to a step in Lightning, and the bare step."""
    timer = GPUPhaseTimer(every_n_steps=2 * BLOCK, print_summary=False, lines=False)
    watch = Scheduled(timer)
    fit(layers, 4 * rounds * BLOCK, [watch, timer])
    blocks = [statistics.mean(block) for block in batched(watch.steps_us[4 * BLOCK :], BLOCK)]
    found = {"step": blocks[::2]}
    found[TIMED] = [us - off_us for off_us, us in zip(blocks[::2], blocks[1::2], strict=False)]
    callbacks: dict[str, pl.Callback] = {EMPTY: EmptyCallback()}
    for way, options in IN_RUNS.items():
        callbacks[way] = GPUPhaseTimer(print_summary=False, **options)
    for way, callback in callbacks.items():
        turns = Turns(callback)
        fit(layers, 2 * CHUNK + 2 * RUN * rounds, [turns, callback])
        found[way] = turns.added_us
    return found


def defaults(layers: int, log_every: int) -> dict[str, dict[str, list[float]]]:
    """Return what the default adds to a step with a logger, and the bare step, by loop."""
    chunks = CHUNKS_OF.get(layers, 8)
    training = Training(layers)
    for _ in range(8):
        us_per_step(training.step)
    step_us = [us_per_step(training.step) for _ in range(8)]
    logger = DummyLogger()
    added = added_in_runs(training, layers, chunks, log_every_n_steps=log_every, logger=logger)
    found = {"plain": {"step": step_us, DEFAULT: [*added]}}
    timer = GPUPhaseTimer(print_summary=False)
    turns = Turns(timer)
    steps = 2 * CHUNK + 2 * RUN * 2 * chunks
    fit(layers, steps, [turns, timer], logger=logger, log_every_n_steps=log_every)
    found["lightning"] = {"step": turns.bare_us, DEFAULT: turns.added_us}
    return found


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


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--cycles", type=int, default=200, help="of each way in the plain loop")
    parser.add_argument("--rounds", type=int, default=40, help="length of the fits in Lightning")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--defaults", nargs="*", metavar="LAYERS,STEPS_PER_LOG", help="measure only the default"
    )
    arguments = parser.parse_args()
    be_quiet()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    measured: dict[str, dict[str, list[float]]] = {}
    for pair in arguments.defaults or []:
        layers, log_every = map(int, pair.split(","))
        for loop, rows in defaults(layers, log_every).items():
            measured[f"{loop}, {log_every} steps per log, {layers} layers"] = rows
    if not measured:
        measured["plain"] = in_plain_loop(arguments.layers, arguments.cycles)
        if arguments.rounds:
            measured["lightning"] = in_lightning(arguments.layers, arguments.rounds)
    results: dict[str, Any] = {}
    for loop, rows in measured.items():
        # "auto" is never off if it times every step.
        results[loop] = {name: mean_and_error(us) for name, us in rows.items() if us}
        step_us = results[loop]["step"]["us"]
        for name, row in results[loop].items():
            share = row["us"] / step_us
            print(f"{loop} {name:20} {row['us']:+8.1f} ± {row['error_us']:.1f} us  {share:+.1%}")
    header = environment(
        *(["gpu"] if CUDA else []), "host", "python", "torch", "lightning", "command"
    )
    save(arguments.out, header | {"results": results})
