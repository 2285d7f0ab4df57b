"""The timer for a plain PyTorch loop."""

import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from threading import get_ident
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch
from torch import nn

from lightning_gputime._boundaries.loop import Loop, check_model, check_optimizers
from lightning_gputime._messages import messages
from lightning_gputime._options import Options, SyncRanks, check_bools, check_int
from lightning_gputime._record.clock import Clock, check_device, clock_for, device_of
from lightning_gputime._results.means import MeanLog, MetricsLogger, check_loggers
from lightning_gputime._results.slow import SlowStep
from lightning_gputime._run.iteration import Steps
from lightning_gputime._timer import Timer

T = TypeVar("T")


class GPUPhaseHooks(Timer):
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
        logger: Where the means go: anything with `log_metrics(metrics, step)`, one or several.
        log_every_n_steps: How many steps are averaged into one log.
        first_step: The number of the first step after `attach`, where training is resumed. The
            steps are counted on through all epochs; another `attach` starts here again.
        modules: Modules of the model that are sub-phases, `forward/<name>` and `backward/<name>`:
            dotted names, or a mapping from names to modules.
        annotate: Whether to show the phases as ranges in torch.profiler and Nsight, too.
        every_n_steps: One step in so many is timed; in the others the hooks do nothing.
        probe_every_n_steps: One step in so many is launched while a spin kernel keeps the device
            busy, so that its phases are the work alone, without launch gaps; with 0 none is. Such
            steps, and those after them, are in no other statistics.
        max_overhead: The part of the training's time that timing may take, such as 0.01. Where the
            host sets the pace, so few steps are timed that it stays below; None times all.
        sync_ranks: When the ranks of a distributed run are compared: at the end of each epoch and
            of training; with "log" at every log; with False never.
        on_step: Is called with the times of every step, when they are read; or a metric of
            torchmetrics, which is updated with them.
        on_slow_step: Is called with each `SlowStep`, when it is read: a step that took much longer
            than those before it, with its causes. See `slowest`.
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

    _USE = (
        "The timer was never attached: call attach(), or use 'with GPUPhaseHooks(...) as timer:'."
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
        modules: Sequence[str] | Mapping[str, nn.Module] = (),
        annotate: bool = False,
        every_n_steps: int = 1,
        probe_every_n_steps: int = 0,
        max_overhead: float | None = None,
        sync_ranks: SyncRanks = True,
        on_step: Any = None,
        on_slow_step: Callable[[SlowStep], object] | None = None,
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
                every_n_steps=every_n_steps,
                probe_every_n_steps=probe_every_n_steps,
                max_overhead=max_overhead,
                sync_ranks=sync_ranks,
                on_step=on_step,
                on_slow_step=on_slow_step,
                clock=clock,
            )
        )
        check_bools(wrap_backward=wrap_backward)
        check_int("first_step", first_step, 0, "the number of the first step after attach()")
        check_int("log_every_n_steps", log_every_n_steps, 1, "steps in one logged mean")
        self._loop = Loop(
            check_model(model),
            check_optimizers(optimizers),
            pause_evaluation=optimizers is not None,
            submodules=self._submodules(model),
            wrap_backward=wrap_backward,
        )
        self._loggers = check_loggers(logger)
        self._device = None if device is None else check_device(device)
        if self._device is not None and clock is None:
            clock_for(self._device)
        self._accumulate_grad_batches = _check_accumulation(accumulate_grad_batches, self._loop)
        self._log_every_n_steps = log_every_n_steps
        self._first_step = self._step = first_step
        self._micro_batches = 0
        # The step and the micro-batch in whose body a loop over `steps` is; None outside.
        self._body: tuple[int, int] | None = None

    def attach(self) -> Self:
        """Puts the hooks on and starts a new measurement. Safe to call twice."""
        if not self._session.is_attached:
            device = self._device or device_of(self._loop.model)
            clock = self._options.clock or clock_for(device, tell=True)
            means = MeanLog(self._options.prefix, self._log_every_n_steps, self._loggers)
            self._step, self._micro_batches = self._first_step, 0
            self._body = None
            every = self._accumulate_grad_batches
            self._start(clock, self._loop, means, accumulate_grad_batches=every)
            self._session.begin(self._step)
        return self

    def remove(self) -> None:
        """Takes the hooks off, after the last steps are read and logged. Safe to call twice."""
        if self._session.is_attached:
            self._leave_body()
            self._finish()
            if self._step == self._first_step:
                messages.warning(
                    "No step has ended: iterate over steps(loader), or call step() at the end of"
                    " the loop's body."
                )

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is None:
            self.remove()
        else:
            self._abort()

    def steps(self, iterable: Iterable[T]) -> Steps[T]:
        """Yields the items of a loader, and ends a step (or a micro-batch) after each.

        The time between two calls, such as a validation between epochs, belongs to no step. A loop
        that is left (`break`, `islice`, `zip`, `remove`) has a last step if nothing but the end of
        the body was left to run: no model is called after the last update. That step ends with the
        update; in inference, with the last call of the model. Steps are counted on from one call
        to the next, until `attach`. Where the body calls `step`, or runs another `steps` of this
        timer, no further step is ended.

        Args:
            iterable: The loader.

        Returns:
            An iterator with the loader's length, if it has one.

        Raises:
            RuntimeError: If the timer was never attached. After `remove` the loop goes on, untimed.
        """
        return Steps(self._iterate(iterable), iterable)

    def _iterate(self, iterable: Iterable[T]) -> Generator[T, None, None]:
        self._begin("steps()")
        self._session.loads(iterable, in_data=True)
        self._know_batch(iterable)
        for item in iterable:
            self._session.batch_begins()
            self._body = body = self._step, self._micro_batches
            try:
                yield item
            except GeneratorExit:
                self._body = body
                self._leave_body()
                raise
            self._body = None
            if body == (self._step, self._micro_batches) and self._session.is_attached:
                self.step()
            self._session.loader_is_asked()
        self._session.compare_ranks()

    def _leave_body(self) -> None:
        """Ends the step in whose body the loop is left, if it was over."""
        body, self._body = self._body, None
        if body == (self._step, self._micro_batches) and self._session.is_left(self._step):
            self._step += 1
            self._micro_batches = 0

    def step(self) -> None:
        """Ends a step (or a micro-batch). Call it at the end of the loop's body.

        Raises:
            RuntimeError: If the timer was never attached. After `remove` this does nothing.
        """
        session = self._session
        if get_ident() != session.thread:
            # The loop runs in another thread than the one that attached the timer.
            self._begin("step()")
            return
        if self._accumulate_grad_batches > 1:
            self._micro_batches += 1
            is_last = self._micro_batches == self._accumulate_grad_batches
            if not is_last and not session.has_updated:
                session.batch_ends()
                return
        session.end_step(self._step)
        self._step += 1
        self._micro_batches = 0

    def _begin(self, call: str) -> None:
        if not self._session.was_attached:
            raise RuntimeError(
                f"{call} needs an attached timer: call attach() first, or use"
                " 'with GPUPhaseHooks(...) as timer:'"
            )
        if self._session.is_attached:
            self._session.begin(self._step)
        self._micro_batches = 0


def _check_accumulation(batches: int | str, loop: Loop) -> int:
    if batches != "auto":
        meaning = "micro-batches in one update, or 'auto' to end a step with the update"
        check_int("accumulate_grad_batches", batches, 1, meaning)
        return int(batches)
    if not loop.optimizers:
        raise ValueError(
            "accumulate_grad_batches must be a number where there are no optimizers, whose update"
            " could end a step; got 'auto'"
        )
    # No loop has so many micro-batches: only an update ends a step.
    return sys.maxsize
