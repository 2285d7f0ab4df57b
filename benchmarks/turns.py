"""The ways of timing a step that `overhead.py` compares, and the loops in which they take turns."""

import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import peers
import torch
from loops import AGAIN, NONE, Times, Way, attached, bare_trainer, by_way, train
from models import Batch, Repeat, Task

from lightning_gputime import GPUPhaseHooks, GPUPhaseTimer

# In each turn, steps that are not timed, and steps that are timed together: about one read of 25
# finished steps falls into each.
SETTLE, BLOCK = 10, 25


Tool = pl.Callback | pl.profilers.Profiler | None
"""What a way of timing gives to the Trainer."""

IN_LIGHTNING: dict[str, Callable[[], Tool]] = {
    NONE: lambda: None,
    AGAIN: lambda: None,
    "callback that does nothing": pl.Callback,
    "five events": peers.FiveEvents,
    "GPUPhaseTimer()": partial(GPUPhaseTimer, print_summary=False),
    "GPUPhaseTimer(lag=0)": partial(GPUPhaseTimer, print_summary=False, _lag=0),
    "GPUPhaseTimer(every_n_steps=10)": partial(
        GPUPhaseTimer, print_summary=False, every_n_steps=10
    ),
    "four synchronize": peers.FourSynchronize,
}
PEERS: dict[str, Callable[[], Tool]] = {
    "Lightning SimpleProfiler": pl.profilers.SimpleProfiler,
    "Lightning ThroughputMonitor": peers.throughput_monitor,
    "TorchTNT Timer(cuda_sync=True)": peers.TorchTNT,
    "DeepSpeed timers": peers.DeepSpeed,
}
ALONE: dict[str, Callable[[], Tool]] = {
    "Lightning PyTorchProfiler": pl.profilers.PyTorchProfiler,
    "TraceML": peers.traceml,
    "Alloc": peers.alloc,
}
IN_PLAIN: dict[str, Callable[[Task, torch.optim.Optimizer], Way]] = {
    NONE: lambda task, optimizer: Way(),
    AGAIN: lambda task, optimizer: Way(),
    "five events": lambda task, optimizer: peers.FiveEvents().way(),
    "GPUPhaseHooks()": lambda task, optimizer: attached(GPUPhaseHooks(task.net, optimizer)),
    "GPUPhaseHooks(lag=0)": lambda task, optimizer: attached(
        GPUPhaseHooks(task.net, optimizer, _lag=0)
    ),
    "four synchronize": lambda task, optimizer: peers.FourSynchronize().way(),
}


def new_tool(way: str) -> Tool:
    """Returns what a way gives to the Trainer.

    Raises:
        ImportError: If its package is not installed.
    """
    return (IN_LIGHTNING | PEERS | ALONE)[way]()


def is_present(way: str) -> bool:
    """Tells whether the package of a way is installed."""
    try:
        new_tool(way)
    except ImportError as error:
        print(f"{way} is absent: {error}", flush=True)
        return False
    return True


class Stopwatch:
    """Times blocks of steps on the device, which every way of timing gets alike."""

    def __init__(self, blocks: int, new_event: Callable[[], Any] = peers.cuda_event) -> None:
        self._blocks = blocks
        self._new_event = new_event
        self._events: list[Any] = []

    def press(self) -> None:
        """Starts a block, or ends it."""
        self._events.append(self._new_event())
        self._events[-1].record()
        done, is_open = divmod(len(self._events), 2)
        if not is_open:
            print(f"\r{done} of {self._blocks} turns ", end="", file=sys.stderr, flush=True)

    def times(self) -> list[float]:
        """Returns the time of a step in each block (in milliseconds)."""
        self._events[-1].synchronize()
        starts, ends = self._events[::2], self._events[1::2]
        return [start.elapsed_time(end) / BLOCK for start, end in zip(starts, ends, strict=True)]


def callbacks_of(tool: Tool) -> list[pl.Callback]:
    """Returns the callbacks of the Trainer that a tool is, if any."""
    return [] if tool is None or isinstance(tool, pl.profilers.Profiler) else [tool]


class Turns(pl.Callback):
    """Lets ways of timing take turns in one Lightning loop."""

    def __init__(
        self, ways: Sequence[str], new_event: Callable[[], Any] = peers.cuda_event
    ) -> None:
        self.stopwatch = Stopwatch(len(ways), new_event)
        self._ways = iter(ways)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        place = batch_idx % (SETTLE + BLOCK)
        if place == SETTLE:
            self.stopwatch.press()
        elif place == 0:
            if batch_idx > 0:
                self.stopwatch.press()
                self._leave(trainer, pl_module)
            way = next(self._ways, None)
            if way is not None:
                self._join(trainer, pl_module, new_tool(way))

    # Any: `callbacks` and `profiler` of a Trainer have no hint.
    def _join(self, trainer: Any, pl_module: pl.LightningModule, tool: Tool) -> None:
        self._profiler = trainer.profiler
        if isinstance(tool, pl.profilers.Profiler):
            trainer.profiler = tool
        self._callbacks = callbacks_of(tool)
        for callback in self._callbacks:
            callback.setup(trainer, pl_module, "fit")
            callback.on_fit_start(trainer, pl_module)
            callback.on_train_start(trainer, pl_module)
            callback.on_train_epoch_start(trainer, pl_module)
            trainer.callbacks.append(callback)

    def _leave(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        trainer.profiler = self._profiler
        for callback in self._callbacks:
            trainer.callbacks.remove(callback)
            callback.on_train_epoch_end(trainer, pl_module)
            callback.on_train_end(trainer, pl_module)
            callback.on_fit_end(trainer, pl_module)
            callback.teardown(trainer, pl_module, "fit")


def in_lightning(
    task: Task,
    batch: Batch,
    ways: Sequence[str],
    tool: Tool = None,
    *,
    accelerator: str = "gpu",
    new_event: Callable[[], Any] = peers.cuda_event,
) -> Times:
    """Lets ways take their turns in a loop; returns the time of a step in each turn.

    Args:
        task: What is trained.
        batch: With what.
        ways: The turns.
        tool: Is there in all turns.
        accelerator: What it runs on.
        new_event: Returns an event of that.
    """
    turns = Turns(ways, new_event)
    trainer = bare_trainer(
        accelerator=accelerator,
        max_epochs=1,
        logger=pl.loggers.logger.DummyLogger(),
        callbacks=[turns, *callbacks_of(tool)],
        profiler=tool if isinstance(tool, pl.profilers.Profiler) else None,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(task, Repeat(batch, len(ways) * (SETTLE + BLOCK) + 1))
    return by_way(ways, turns.stopwatch.times())


def in_plain_loop(task: Task, batch: Batch, ways: Sequence[str]) -> Times:
    """As `in_lightning`, in a plain loop."""
    task.cuda()  # A Trainer takes the model back to the CPU when it ends.
    stopwatch = Stopwatch(len(ways))
    for name in ways:
        optimizer = task.configure_optimizers()
        take_turn(task, optimizer, batch, IN_PLAIN[name](task, optimizer), stopwatch.press)
    return by_way(ways, stopwatch.times())


def take_turn(
    task: Task,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    way: Way,
    press: Callable[[], None],
) -> None:
    """Lets a way settle, and then times a block of steps: `press` is called at both ends."""
    train(task, optimizer, batch, way, SETTLE)
    press()
    train(task, optimizer, batch, way, BLOCK)
    press()
    way.remove()
