"""The timer for Lightning."""

from pathlib import Path
from typing import Unpack

from lightning_gputime._options import Options, TimerOptions, check_bools, takes_options
from lightning_gputime._reports import Reports
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


@takes_options(0, "write GPUPhaseTimer(save='run.json')", _ELSEWHERE)
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
        prog_bar: Whether to show the newest step's time, and what bounds training, on the bar.
        summary: Whether to print the table of the summary when training ends.
        log_figure: Whether loggers that take figures (TensorBoard) get `plot()` when training ends.
        save: The file that the run is saved to, such as "run.json.gz", see `save`: on rank zero, at
            the end of epochs and of training, also after an error.
        **options: Those of `TimerOptions`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has an impossible value.
        ImportError: If `log_figure` is set and matplotlib is not installed (extra `plot`).

    Example:
        >>> trainer = Trainer(callbacks=[GPUPhaseTimer()])
    """

    def __init__(
        self,
        *,
        prog_bar: bool = False,
        summary: bool = True,
        log_figure: bool = False,
        save: str | Path | None = None,
        **options: Unpack[TimerOptions],
    ) -> None:
        check_bools(prog_bar=prog_bar, summary=summary, log_figure=log_figure)
        super().__init__(
            Options(**options),
            Reports(summary=summary, log_figure=log_figure, save=save),
            prog_bar=prog_bar,
        )
