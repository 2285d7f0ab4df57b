"""The timer for a loop with Lightning's Fabric."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_gputime._fabric import FabricTimer
from lightning_gputime._options import (
    FlopsOption,
    ItemsOption,
    Modules,
    Options,
    SyncRanks,
    by_name,
)
from lightning_gputime._record.clock import Clock
from lightning_gputime._results.slow import SlowStep

_ELSEWHERE = {
    "model": "fabric.setup tells it the model",
    "optimizers": "fabric.setup tells it the optimizers",
    "device": "Fabric tells it the device",
    "logger": "Fabric's loggers get the means",
    "accumulate_grad_batches": "a step ends with its update",
    "save": "call timer.save(path)",
    "summary": "write print(timer.summary())",
    "prog_bar": "show timer.last.step_ms on a bar of your own",
    "log_figure": "call timer.plot()",
}
"""Options of the other timers."""


class PhaseTimeCallback(FabricTimer):
    """Logs how long the phases of each training step take, for `Fabric(callbacks=[...])`.

    It starts with `fabric.setup(model, optimizer)`, or `setup_module` and `setup_optimizers`, and
    times all models that are set up and have trainable weights. One that is set up after an update
    starts a new measurement. The means go to `fabric.loggers`.

    A step ends where a loader of `fabric.setup_dataloaders` is asked for the next batch, if there
    was an update since the last: a batch with the updates of two optimizers (GAN) is one step, and
    so are micro-batches whose gradients accumulate. A loader that is read in eval mode or without
    grad is an evaluation, and belongs to no step. For any other loader say `steps(loader)`; else a
    step ends with the update of the optimizer that was seen last, and what follows is `data`.

    Args:
        prefix: First part of the logged keys.
        lag: How many ended steps the device may still be at work on.
        warmup_steps: How many of the first steps the summary leaves out.
        history: How many of the newest steps `history` returns, and percentiles are taken over.
        log_every_n_steps: How many steps are averaged into one log.
        modules: Modules of the first model that are sub-phases: a depth, "all", dotted names,
            patterns such as "layers.*", or a mapping.
        annotate: Whether to show the phases as ranges in torch.profiler and Nsight, too.
        memory: Whether to measure the most memory that is allocated in each phase (in MiB).
        every_n_steps: One step in so many is timed; of the others the host's time alone is taken.
        probe_every_n_steps: One step in so many is probed for launch gaps; with 0 none is.
        max_overhead: The part of the training's time that timing may take, such as 0.01.
        sync_ranks: When the ranks are compared: at the end of each epoch; with "log" at every log.
        on_step: Is called with the times of every step, when they are read; or a metric.
        on_slow_step: Is called with each `SlowStep`, when it is read.
        trace_slow_steps: A folder for traces of slow steps.
        items: What a batch holds: a function of the batch, or a number.
        flops: "count", or FLOPs of an item, or a function of the batch.
        measure_peak: Whether to measure what the device reaches in a large matmul.
        clock: Takes the place of the device's clock, for tests and new kinds of device.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has an impossible value.

    Example:
        >>> timer = PhaseTimeCallback()
        >>> fabric = Fabric(callbacks=[timer])
        >>> ...
        >>> timer.remove()
        >>> print(timer.summary())
    """

    @by_name(0, "write PhaseTimeCallback(warmup_steps=10)", _ELSEWHERE)
    def __init__(
        self,
        *,
        prefix: str = "phase_time",
        lag: int = 1,
        warmup_steps: int = 5,
        history: int = 10_000,
        log_every_n_steps: int = 50,
        modules: Modules = (),
        annotate: bool = False,
        memory: bool = False,
        every_n_steps: int = 1,
        probe_every_n_steps: int = 0,
        max_overhead: float | None = None,
        sync_ranks: SyncRanks = True,
        on_step: Any = None,
        on_slow_step: Callable[[SlowStep], object] | None = None,
        trace_slow_steps: str | Path | None = None,
        items: ItemsOption = None,
        flops: FlopsOption = None,
        measure_peak: bool = False,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(
            Options(
                prefix=prefix,
                lag=lag,
                warmup_steps=warmup_steps,
                history=history,
                modules=modules,
                annotate=annotate,
                memory=memory,
                every_n_steps=every_n_steps,
                probe_every_n_steps=probe_every_n_steps,
                max_overhead=max_overhead,
                sync_ranks=sync_ranks,
                on_step=on_step,
                on_slow_step=on_slow_step,
                trace_slow_steps=trace_slow_steps,
                items=items,
                flops=flops,
                measure_peak=measure_peak,
                clock=clock,
            ),
            log_every_n_steps=log_every_n_steps,
        )
