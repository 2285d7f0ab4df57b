"""The timer for the Trainer of Hugging Face's transformers."""

from typing import Unpack

from lightning_gputime._huggingface import TrainerTimer
from lightning_gputime._options import Options, TimerOptions, check_bools, takes_options

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


@takes_options(0, "write PhaseTimeCallback(warmup_steps=10)", _ELSEWHERE)
class PhaseTimeCallback(TrainerTimer):
    """Reports how long the phases of each training step take, on the device's own clock.

    A step is one optimizer update, with the number that the Trainer gives it. Whenever the Trainer
    logs `loss`, the means over the steps since the last log stand beside it, for all that
    `report_to` names and in `trainer.state.log_history`: `phase_time/forward_ms` and so on, as
    `GPUPhaseTimer` logs. An evaluation belongs to no step; its own means stand beside `eval_loss`
    in what is reported: `eval_phase_time/forward_ms`. What is printed, and what `train` and
    `evaluate` return, have none.

    `data/fetch` is the fetch of all micro-batches of a step, and their copy to the device, which
    accelerate makes in one; `data/callbacks` is what callbacks, logging and checkpoints take.

    Args:
        summary: Whether to print the table of the summary when training ends.
        **options: Those of `TimerOptions`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has an impossible value.

    Example:
        >>> trainer = Trainer(model, args, callbacks=[PhaseTimeCallback()])
    """

    def __init__(
        self,
        *,
        summary: bool = True,
        **options: Unpack[TimerOptions],
    ) -> None:
        super().__init__(Options(**options), summary=summary)
        check_bools(summary=summary)
