"""The timer for a plain PyTorch loop."""

import sys
from collections.abc import Sequence
from typing import Any, Literal, Self, Unpack

import torch
from torch import nn

from lightning_gputime._instrumentation.arguments import check_model, check_optimizers
from lightning_gputime._instrumentation.loop import Loop, is_engine
from lightning_gputime._loop_timer import LoopTimer
from lightning_gputime._options import AllOptions, Options, check_int, takes_options
from lightning_gputime._output.loggers import MetricsLogger, check_loggers
from lightning_gputime._record.clock import check_device, device_of
from lightning_gputime._session.self_check import (
    warn_of_other_parameters,
    warn_of_several_devices,
)
from lightning_gputime._timer import never_raises


@takes_options
class GPUPhaseHooks(LoopTimer):
    """Time the phases of each step of a plain PyTorch training loop, with device events.

    While attached, it has hooks on the model and the optimizers, and replaces the function that
    runs torch's autograd engine. Each boundary between phases is one event; the host waits for at
    most one event per step. Each `attach` starts a new measurement.

    Args:
        model: Model whose calls are `forward`. For several models, such as a GAN's, pass
            `torch.nn.ModuleList([generator, discriminator])`.
        optimizers: Optimizers whose updates are `optimizer`: one, a list, or None for inference.
            DeepSpeed's engine, passed as the model, has its own.
        device: Device to time, which must exist; by default that of the model's parameters.
        accumulate_grad_batches: Number of micro-batches per optimizer update, and so per step. With
            "auto" a step ends with the update; a skipped update is part of the next step.
            Accelerate's `accumulate` needs no number.
        logger: Destination of the means: one or several objects with `log_metrics(metrics, step)`.
        log_every_n_steps: Number of steps averaged into one log.
        first_step: Number of the first step after `attach`, to resume training. Steps are counted
            through all epochs; each `attach` starts here again.
        **options: Those of `TimerOptions`.

    Examples:
        >>> with GPUPhaseHooks(model, optimizer) as timer:
        ...     for x, y in timer.steps(loader):
        ...         loss = loss_fn(model(x), y)
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         optimizer.step()
        >>> print(timer.summary())
    """

    _USE = (
        "The timer was never attached: call attach(), or use 'with GPUPhaseHooks(...) as timer:'."
    )

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
        **options: Unpack[AllOptions],
    ) -> None:
        super().__init__(Options(**options), log_every_n_steps)
        first_step = check_int("first_step", first_step, 0, "the first step after attach()")
        found = check_optimizers(optimizers, check_model(model, optimizers))
        if is_engine(model) and accumulate_grad_batches == 1:
            accumulate_grad_batches = int(model.gradient_accumulation_steps())  # type: ignore[operator]
        self._loop = Loop(
            model,
            found,
            pause_evaluation=True if found else None,
            submodules=self._submodules(model),
            needs_updates=accumulate_grad_batches != 1,
        )
        warn_of_other_parameters(model, self._loop.optimizers)
        self._loggers = check_loggers(logger)
        self._device = None if device is None else check_device(device)
        if self._device is not None:
            self._clock_for(self._device)  # Raises where it is not here.
        self._accumulate_grad_batches = _check_accumulation(accumulate_grad_batches, self._loop)
        states = [getattr(found, "gradient_state", None) for found in self._loop.optimizers]
        self._gradient_state = next((state for state in states if state is not None), None)
        self._first_step = self._step = first_step

    def attach(self) -> Self:
        """Attach the hooks and start a new measurement. Safe to call twice."""
        if self._session.is_attached:
            return self
        try:
            self._attach()
            return self
        except BaseException:
            # As Ctrl-C: nobody gets the timer, to remove it.
            self._detach()
            raise

    @never_raises
    def _attach(self) -> None:
        device = self._device or device_of(self._loop.model)
        if self._device is None:
            warn_of_several_devices(self._loop.model, device)
        clock = self._clock_for(device, tell=True)
        every = getattr(self._gradient_state, "num_steps", self._accumulate_grad_batches)
        self._start_loop(clock, self._loggers, accumulate_grad_batches=every)

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        try:
            if exc_type is None:
                self.remove()
                return
            self._is_aborted = True
            try:
                self._abort()
            except Exception as error:
                self._give_up(error)
        except BaseException:
            self._detach()  # As Ctrl-C, anywhere in between.
            raise


def _check_accumulation(batches: int | str, loop: Loop) -> int:
    if batches != "auto":
        meaning = "micro-batches in one update, or 'auto' to end a step with the update"
        return check_int("accumulate_grad_batches", batches, 1, meaning)
    if not loop.optimizers:
        raise ValueError(
            "accumulate_grad_batches must be a number where there are no optimizers, whose update"
            " could end a step; got 'auto'"
        )
    # Larger than any number of micro-batches: only an update ends a step.
    return sys.maxsize
