"""The timer for a plain PyTorch loop."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lightning_gputime._options import FlopsOption, ItemsOption, Options, SyncRanks, by_name
from lightning_gputime._plain import PlainTimer
from lightning_gputime._record.clock import Clock
from lightning_gputime._results.loggers import MetricsLogger
from lightning_gputime._results.slow import SlowStep

_ELSEWHERE = {
    "loader": "write for batch in timer.steps(loader)",
    "save": "call timer.save(path)",
    "summary": "write print(timer.summary())",
    "prog_bar": "show timer.last.step_ms on a bar of your own",
    "log_figure": "call timer.plot()",
}
"""Options of the other timers."""


class GPUPhaseHooks(PlainTimer):
    """Times the phases of each step of a plain PyTorch training loop, on the device's own clock.

    While it is attached it has hooks on the model and the optimizers, and stands in for what runs
    torch's autograd engine. It records one device event at each boundary between phases, and
    reads them back one step late, with at most one event wait a step. It never synchronizes the
    device, changes no result, raises nothing into the loop, and leaves nothing behind.

    Each `attach` starts a new measurement; what the last one found can be read until then.

    Args:
        model: The model whose calls are `forward`. For several models, such as a GAN's, give
            `torch.nn.ModuleList([generator, discriminator])`.
        optimizers: The optimizers whose updates end `optimizer`: one, several, or none to time
            inference.
        prefix: First part of the logged keys.
        lag: How many ended steps the device may still be at work on. With 1 a whole step stays
            queued while the host waits, so that the device never idles; with 0 a step's times are
            there when it ends.
        warmup_steps: How many of the first steps the summary leaves out.
        history: How many of the newest steps `history` returns, and percentiles are taken over.
        device: The device to time; by default the one that the model's parameters are on.
        accumulate_grad_batches: How many micro-batches make one optimizer update, and so one step;
            with "auto" a step ends with the update, and one that is skipped is part of the next.
            Accelerate's `accumulate` needs no number: its optimizers say which batch is the last.
        logger: Where the means go: anything with `log_metrics(metrics, step)`, one or several.
        log_every_n_steps: How many steps are averaged into one log.
        first_step: The number of the first step after `attach`, where training is resumed. The
            steps are counted on through all epochs; another `attach` starts here again.
        modules: Modules of the model that are sub-phases, `forward/<name>` and `backward/<name>`:
            a depth such as 2, "all", dotted names, patterns such as "layers.*", or a mapping from
            names to modules.
        annotate: Whether to show the phases as ranges in torch.profiler and Nsight, too.
        memory: Whether to measure the most memory that is allocated in each phase (in MiB), in one
            of 20 steps and the first three.
        every_n_steps: One step in so many is timed; of the others the host's time alone is taken.
        probe_every_n_steps: One step in so many is launched while a spin kernel keeps the device
            busy, so that its phases are the work alone, without launch gaps; with 0 none is. Such
            steps, and those after them, are in no other statistics.
        max_overhead: The part of the training's time that timing may take, such as 0.01. Where the
            host sets the pace, so few steps are timed that it stays below; None times all.
        sync_ranks: When the ranks of a distributed run are compared: at the end of each epoch and
            of training; with "log" at every log; with False never.
        on_step: Is called with the times of every step, when they are read; or a metric of
            torchmetrics, which is updated with them.
        items: What a batch holds: a function of the batch, or the number of items in each; by
            default the first dimension of the batch's first tensor, if its tensors agree in it.
        flops: FLOPs of forward and backward: "count" for those of the model, counted once on a copy
            without memory; or those of an item, as one number or as two (forward, backward); or a
            function of the batch that returns those of the batch.
        measure_peak: Whether to measure what the device reaches in a large matmul: once, after the
            first step.
        on_slow_step: Is called with each `SlowStep`, when it is read: a step that took much longer
            than those before it, with its causes. See `slowest`.
        trace_slow_steps: A folder. Where slow steps recur, `torch.profiler` watches some more, and
            the traces of the slow ones go there, five a run. Steps it watches count nowhere.
        wrap_backward: Whether to stand in for what runs torch's autograd engine. Without it, say
            `with timer.phase("backward")` yourself.
        clock: Takes the place of the device's clock, for tests and new kinds of device.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has an impossible value, or the device is not here.

    Example:
        >>> with GPUPhaseHooks(model, optimizer) as timer:
        ...     for x, y in timer.steps(loader):
        ...         loss = loss_fn(model(x), y)
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         optimizer.step()
        >>> print(timer.summary())
    """

    @by_name(
        2, "give several optimizers as a list, and the loader to timer.steps(loader)", _ELSEWHERE
    )
    def __init__(
        self,
        model: nn.Module,
        optimizers: Any = None,
        *,
        prefix: str = "phase_time",
        lag: int = 1,
        warmup_steps: int = 5,
        history: int = 10_000,
        device: torch.device | str | int | None = None,
        accumulate_grad_batches: int | Literal["auto"] = 1,
        logger: MetricsLogger | Sequence[MetricsLogger] | None = None,
        log_every_n_steps: int = 50,
        first_step: int = 0,
        modules: int | str | Sequence[str] | Mapping[str, nn.Module] = (),
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
        wrap_backward: bool = True,
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
            model,
            optimizers,
            device=device,
            accumulate_grad_batches=accumulate_grad_batches,
            logger=logger,
            log_every_n_steps=log_every_n_steps,
            first_step=first_step,
            wrap_backward=wrap_backward,
        )
