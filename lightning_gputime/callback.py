"""The timer for Lightning."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from lightning_gputime._options import (
    FlopsOption,
    ItemsOption,
    Options,
    SyncRanks,
    by_name,
    check_bools,
)
from lightning_gputime._phases import StepTimes
from lightning_gputime._record.clock import Clock
from lightning_gputime._reports import Reports
from lightning_gputime._results.slow import SlowStep
from lightning_gputime._trainer import TrainerTimer

_ELSEWHERE = {
    "model": "the trainer tells it the model",
    "optimizers": "the trainer tells it the optimizers",
    "device": "the trainer tells it the device",
    "logger": "the trainer's loggers get the means",
    "log_every_n_steps": "the trainer's log_every_n_steps counts",
    "accumulate_grad_batches": "the trainer's accumulate_grad_batches counts",
}
"""Options of the other timers."""


class GPUPhaseTimer(TrainerTimer):
    """Logs how long the phases of each training step take, on the device's own clock.

    From the start of training to its end it has hooks on the LightningModule and the optimizers,
    and stands in for what runs torch's autograd engine. It records one device event at each
    boundary between phases, and reads them back one step late, with at most one event wait a step.
    It never synchronizes the device, changes no result, raises nothing into training, and leaves
    nothing behind. Each `fit` is a new measurement.

    A step is one optimizer update: micro-batches whose gradients accumulate are one step.

    Logged every `trainer.log_every_n_steps` steps, as means over the steps since the last log, to
    the trainer's loggers and to `trainer.callback_metrics`:

    ============================ ==================================================================
    key                          time (in milliseconds)
    ============================ ==================================================================
    `phase_time/data_ms`         end of the last step to the batch on the device
    `phase_time/forward_ms`      first call of the model to the end of the last one
    `phase_time/loss_ms`         from there to zero_grad or backward
    `phase_time/backward_ms`     the call of backward
    `phase_time/optimizer_ms`    from there to the end of the update
    `phase_time/other_ms`        the rest
    `phase_time/step_ms`         the sum of these
    `phase_time/host_wait_ms`    how long the host waited for the device to finish a step
    `phase_time/slow_ms`         by how much slow steps were longer than usual, see `slowest`
    ============================ ==================================================================

    Validation, test and prediction loops are timed apart, and their means logged at their end under
    `phase_time/val/forward_ms` and so on (`test`, `predict`), with `data`, `forward` and `other`.

    Args:
        prefix: First part of the logged keys.
        lag: How many ended steps the device may still be at work on. With 1 a whole step stays
            queued while the host waits, so that the device never idles; with 0 a step's times are
            there when it ends.
        warmup_steps: How many of the first steps the summary leaves out.
        history: How many of the newest steps `history` returns, and percentiles are taken over.
        prog_bar: Whether to show the newest step's time, and what bounds training, on the bar.
        summary: Whether to print the table of the summary when training ends.
        modules: Modules of the LightningModule that are sub-phases, `forward/<name>` and
            `backward/<name>`: a depth such as 2, "all", dotted names, patterns such as "layers.*",
            or a mapping from names to modules.
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
        log_figure: Whether loggers that take figures (TensorBoard) get `plot()` when training ends.
        save: The file that the run is saved to, such as "run.json.gz", see `save`: on rank zero, at
            the end of epochs and of training, also after an error.
        clock: Takes the place of the device's clock, for tests and new kinds of device.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has an impossible value.
        ImportError: If `log_figure` is set and matplotlib is not installed (extra `plot`).

    Example:
        >>> trainer = Trainer(callbacks=[GPUPhaseTimer()])
    """

    @by_name(0, "write GPUPhaseTimer(save='run.json')", _ELSEWHERE)
    def __init__(
        self,
        *,
        prefix: str = "phase_time",
        lag: int = 1,
        warmup_steps: int = 5,
        history: int = 10_000,
        prog_bar: bool = False,
        summary: bool = True,
        modules: int | str | Sequence[str] | Mapping[str, torch.nn.Module] = (),
        annotate: bool = False,
        memory: bool = False,
        every_n_steps: int = 1,
        probe_every_n_steps: int = 0,
        max_overhead: float | None = None,
        sync_ranks: SyncRanks = True,
        on_step: Callable[[StepTimes], object] | None = None,
        on_slow_step: Callable[[SlowStep], object] | None = None,
        trace_slow_steps: str | Path | None = None,
        items: ItemsOption = None,
        flops: FlopsOption = None,
        measure_peak: bool = False,
        log_figure: bool = False,
        save: str | Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        check_bools(prog_bar=prog_bar, summary=summary, log_figure=log_figure)
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
            Reports(summary=summary, log_figure=log_figure, save=save),
            prog_bar=prog_bar,
        )
