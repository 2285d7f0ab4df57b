"""The timer for a plain PyTorch loop."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack

import torch
from torch import nn

from lightning_gputime._options import Options, TimerOptions, takes_options
from lightning_gputime._plain import PlainTimer
from lightning_gputime._results.loggers import MetricsLogger

_ELSEWHERE = {
    "loader": "write for batch in timer.steps(loader)",
    "save": "call timer.save(path)",
    "summary": "write print(timer.summary())",
    "prog_bar": "show timer.last.step_ms on a bar of your own",
    "log_figure": "call timer.plot()",
}
"""Options of the other timers."""


@takes_options(
    2, "give several optimizers as a list, and the loader to timer.steps(loader)", _ELSEWHERE
)
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
        device: The device to time; by default the one that the model's parameters are on.
        accumulate_grad_batches: How many micro-batches make one optimizer update, and so one step;
            with "auto" a step ends with the update, and one that is skipped is part of the next.
            Accelerate's `accumulate` needs no number: its optimizers say which batch is the last.
        logger: Where the means go: anything with `log_metrics(metrics, step)`, one or several.
        log_every_n_steps: How many steps are averaged into one log.
        first_step: The number of the first step after `attach`, where training is resumed. The
            steps are counted on through all epochs; another `attach` starts here again.
        wrap_backward: Whether to stand in for what runs torch's autograd engine. Without it, say
            `with timer.phase("backward")` yourself.
        **options: Those of `TimerOptions`.

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

    def __init__(
        self,
        model: nn.Module,
        optimizers: Any = None,
        *,
        device: torch.device | str | int | None = None,
        accumulate_grad_batches: int | Literal["auto"] = 1,
        logger: MetricsLogger | Sequence[MetricsLogger] | None = None,
        log_every_n_steps: int = 50,
        first_step: int = 0,
        wrap_backward: bool = True,
        **options: Unpack[TimerOptions],
    ) -> None:
        super().__init__(
            Options(**options),
            model,
            optimizers,
            device=device,
            accumulate_grad_batches=accumulate_grad_batches,
            logger=logger,
            log_every_n_steps=log_every_n_steps,
            first_step=first_step,
            wrap_backward=wrap_backward,
        )
