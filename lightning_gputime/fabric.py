"""The timer for a loop with Lightning's Fabric."""

from typing import Unpack

from lightning_gputime._fabric import FabricTimer
from lightning_gputime._options import Options, TimerOptions, takes_options

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


@takes_options(0, "write PhaseTimeCallback(warmup_steps=10)", _ELSEWHERE)
class PhaseTimeCallback(FabricTimer):
    """Logs how long the phases of each training step take, for `Fabric(callbacks=[...])`.

    It starts with `fabric.setup(model, optimizer)`, and times all models that are set up and have
    trainable weights. One that is set up after an update starts a new measurement. Fabric tells
    nobody of `setup_module` and `setup_optimizers`: call `timer.on_after_setup(fabric, model,
    optimizer)` after them. The means go to `fabric.loggers`.

    A step ends where a loader of `fabric.setup_dataloaders` is asked for the next batch, if there
    was an update since the last: a batch with the updates of two optimizers (GAN) is one step, and
    so are micro-batches whose gradients accumulate. A loader that is read in eval mode or without
    grad is an evaluation, and belongs to no step. For any other loader say `steps(loader)`; else a
    step ends with the update of the optimizer that was seen last, and what follows is `data`.

    Args:
        log_every_n_steps: How many steps are averaged into one log.
        **options: Those of `TimerOptions`.

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

    def __init__(
        self,
        *,
        log_every_n_steps: int = 50,
        **options: Unpack[TimerOptions],
    ) -> None:
        super().__init__(
            Options(**options),
            log_every_n_steps=log_every_n_steps,
        )
