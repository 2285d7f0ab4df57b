"""The timer for the Trainer of Hugging Face's transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_gputime._huggingface.timer import TrainerTimer
from lightning_gputime._options import (
    FlopsOption,
    ItemsOption,
    Modules,
    Options,
    SyncRanks,
    by_name,
    check_bools,
)
from lightning_gputime._record.clock import Clock
from lightning_gputime._results.slow import SlowStep

_ELSEWHERE = {
    "model": "the Trainer tells it the model",
    "optimizers": "the Trainer tells it the optimizers",
    "device": "the Trainer tells it the device",
    "logger": "what report_to names gets the means",
    "log_every_n_steps": "the Trainer's logging_steps count",
    "accumulate_grad_batches": "the Trainer's gradient_accumulation_steps count",
    "items": "the Trainer itself reports train_samples_per_second",
    "save": "call timer.save(path)",
    "prog_bar": "the Trainer's bar stays as it is",
    "log_figure": "call timer.plot()",
}
"""Options of the other timers."""


class PhaseTimeCallback(TrainerTimer):
    """Reports how long the phases of each training step take, on the device's own clock.

    A step is one optimizer update, with the number that the Trainer gives it. Whenever the Trainer
    logs `loss`, the means over the steps since the last log stand beside it, for all that
    `report_to` names: `phase_time/forward_ms` and so on, as `GPUPhaseTimer` logs. An evaluation
    belongs to no step; its own means stand beside `eval_loss`: `eval_phase_time/forward_ms`.
    What is printed, what `train` and `evaluate` return, and the state of the Trainer have none.

    `data/fetch` is the fetch of all micro-batches of a step, and their copy to the device, which
    accelerate makes in one; `data/callbacks` is what callbacks, logging and checkpoints take.

    Args:
        prefix: First part of the logged keys.
        lag: How many ended steps the device may still be at work on.
        warmup_steps: How many of the first steps the summary leaves out.
        history: How many of the newest steps `history` returns, and percentiles are taken over.
        summary: Whether to print the table of the summary when training ends.
        modules: Modules of the model that are sub-phases: a depth, "all", dotted names,
            patterns such as "layers.*", or a mapping.
        annotate: Whether to show the phases as ranges in torch.profiler and Nsight, too.
        memory: Whether to measure the most memory that is allocated in each phase (in MiB).
        every_n_steps: One step in so many is timed; of the others the host's time alone is taken.
        probe_every_n_steps: One step in so many is probed for launch gaps; with 0 none is.
        max_overhead: The part of the training's time that timing may take, such as 0.01.
        sync_ranks: When the ranks of a distributed run are compared: at the end of each epoch and
            of training; with "log" at every log; with False never.
        on_step: Is called with the times of every step, when they are read; or a metric.
        on_slow_step: Is called with each `SlowStep`, when it is read.
        trace_slow_steps: A folder for traces of slow steps.
        items: What a micro-batch holds: a function of the inputs, or a number; by default the size
            of their first tensor.
        flops: "count", or FLOPs of an item, or a function of the inputs.
        measure_peak: Whether to measure what the device reaches in a large matmul.
        clock: Takes the place of the device's clock, for tests and new kinds of device.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has an impossible value.

    Example:
        >>> trainer = Trainer(model, args, callbacks=[PhaseTimeCallback()])
    """

    @by_name(0, "write PhaseTimeCallback(warmup_steps=10)", _ELSEWHERE)
    def __init__(
        self,
        *,
        prefix: str = "phase_time",
        lag: int = 1,
        warmup_steps: int = 5,
        history: int = 10_000,
        summary: bool = True,
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
            summary=summary,
        )
        check_bools(summary=summary)
