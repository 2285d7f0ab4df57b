"""The timer for Lightning."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
import torch

from lightning_gputime._arguments import check_bools, check_modules
from lightning_gputime._evaluation import Evaluation
from lightning_gputime._events import Clock, clock_for, log
from lightning_gputime._log import PhaseLog
from lightning_gputime._measurement import SyncRanks
from lightning_gputime._parts import resolve
from lightning_gputime._phases import AFTER_BACKWARD, DATA, OPTIMIZER, OTHER, StepTimes, in_order
from lightning_gputime._plot import new_axes
from lightning_gputime._stand_in import listen
from lightning_gputime._summary import show
from lightning_gputime._timer import Timer
from lightning_gputime._untraced import untraced

Hook = TypeVar("Hook", bound=Callable[..., None])


def _never_raises(hook: Hook) -> Hook:
    """Ends the timing, and lets the training go on, when a hook of ours fails."""

    @functools.wraps(hook)
    def guarded(self: "GPUPhaseTimer", *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            log.warning("Steps are no longer timed, because a hook failed: %r", error)
            self._detach()

    # A step that is compiled calls some of them.
    untraced(hook)
    return cast("Hook", untraced(guarded))


class GPUPhaseTimer(Timer, pl.Callback):
    """Logs how long the phases of each training step take, on the device's own clock.

    From the start of training to its end it has hooks on the LightningModule and its optimizers,
    and stands in for `torch.autograd.backward`. It records one device event at each boundary
    between phases, and reads them back one step late, with at most one event wait a step. It never
    synchronizes the device, changes no result, raises nothing into training, and leaves nothing
    behind. Each `fit` is a new measurement.

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
        prog_bar: Whether to show the times of the newest step on the progress bar.
        summary: Whether to print the table of the summary when training ends.
        modules: Modules of the LightningModule that are sub-phases, `forward/<name>` and
            `backward/<name>`: dotted names, or a mapping from names to modules.
        annotate: Whether to show the phases as ranges in torch.profiler and Nsight, too.
        every_n_steps: One step in so many is timed; in the others the hooks do nothing.
        probe_every_n_steps: One step in so many is launched while a spin kernel keeps the device
            busy, so that its phases are the work alone, without launch gaps; with 0 none is. Such
            steps, and those after them, are in no other statistics.
        sync_ranks: When the ranks of a distributed run are compared: at the end of each epoch and
            of training; with "log" at every log; with False never.
        on_step: Is called with the times of every step, when they are read; or a metric of
            torchmetrics, which is updated with them.
        log_figure: Whether loggers that take figures (TensorBoard) get `plot()` when training ends.
        clock: Takes the place of the device's clock, for tests and new kinds of device.

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
        prefix: str = "phase_time",
        lag: int = 1,
        warmup_steps: int = 5,
        history: int = 10_000,
        prog_bar: bool = False,
        summary: bool = True,
        modules: Sequence[str] | Mapping[str, torch.nn.Module] = (),
        annotate: bool = False,
        every_n_steps: int = 1,
        probe_every_n_steps: int = 0,
        sync_ranks: SyncRanks = True,
        on_step: Any = None,
        log_figure: bool = False,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(
            prefix=prefix,
            lag=lag,
            warmup_steps=warmup_steps,
            history=history,
            annotate=annotate,
            every_n_steps=every_n_steps,
            probe_every_n_steps=probe_every_n_steps,
            sync_ranks=sync_ranks,
            on_step=on_step,
            clock=clock,
        )
        check_bools(prog_bar=prog_bar, summary=summary, log_figure=log_figure)
        self._prog_bar = prog_bar
        self._print_summary = summary
        self._modules = check_modules(modules)
        self._log_figure = log_figure
        if log_figure:
            new_axes()  # Raises now if matplotlib is missing, not when training ends.
        self._evaluation: Evaluation | None = None
        self._next_fetch: _NextFetch | None = None
        self._in_batch = self._tried_update = False

    def __getstate__(self) -> dict[str, Any]:
        # Events cannot be pickled: ddp_spawn and copies get a timer that is not attached.
        return {
            **self.__dict__,
            "_session": None,
            "_next_fetch": None,
            "_evaluation": None,
        }

    # Lightning's hooks

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        resolve(self._modules, pl_module)  # Raises, before training, if a name is wrong.

    @_never_raises
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._detach()
        clock = self._clock_of(trainer)
        every_n_steps = trainer.log_every_n_steps  # type: ignore[attr-defined]  # has no hint
        publish = functools.partial(_publish, trainer)
        self._start(
            clock,
            pl_module,
            [one for one in trainer.optimizers if isinstance(one, torch.optim.Optimizer)],
            PhaseLog(self._prefix, every_n_steps, trainer.loggers, publish),
            [functools.partial(_show_on_bar, trainer)] if self._prog_bar else [],
            optimizer_wrappers=_lightning_optimizers(pl_module),
            wrapper=_wrapper(trainer),
            compiled_step=getattr(pl_module, "_compiler_ctx", None) is not None,
            parts=resolve(self._modules, pl_module),
        )

    @_never_raises
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Whatever an epoch left over (a batch that was skipped, its end, a validation) is dropped.
        self._in_batch = False
        if self._session is not None:
            self._session.begin(trainer.fit_loop.epoch_loop._batches_that_stepped)

    @_never_raises
    def on_train_batch_start(self, *_: Any) -> None:
        self._in_batch = True
        if self._session is not None:
            recorder = self._session.recorder
            recorder.resume(OTHER)
            recorder.mark(OTHER)

    @_never_raises
    def on_before_optimizer_step(self, *_: Any) -> None:
        self._tried_update = True
        # Where training_step returned None there was no backward, but the update runs.
        if self._session is not None and self._session.recorder.label != AFTER_BACKWARD:
            self._session.recorder.mark(OPTIMIZER)

    @_never_raises
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        # A batch that is None ends without having started; its time is the next one's `data`.
        if self._session is None or not self._in_batch:
            return
        self._in_batch = False
        if self._is_update(trainer, pl_module, batch_idx):
            self._tried_update = False
            self._session.end_step(trainer.fit_loop.epoch_loop._batches_that_stepped)
        else:
            self._session.recorder.mark(DATA)

    @_never_raises
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._session is not None:
            self._session.sync()

    @_never_raises
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._session is not None:
            self._session.recorder.pause()
        if not trainer.sanity_checking:
            self._start_evaluation("val", trainer, pl_module)

    @_never_raises
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_evaluation()
        # What follows until the next fetch, such as saving a checkpoint, is the validation's, too.
        if self._session is not None and self._next_fetch is None:
            self._next_fetch = _NextFetch(trainer, self._resume)

    @_never_raises
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_evaluation("test", trainer, pl_module)

    @_never_raises
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_evaluation("predict", trainer, pl_module)

    @_never_raises
    def on_validation_batch_start(self, *_: Any) -> None:
        if self._evaluation is not None:
            self._evaluation.begin_batch()

    def on_test_batch_start(self, *_: Any) -> None:
        self.on_validation_batch_start()

    def on_predict_batch_start(self, *_: Any) -> None:
        self.on_validation_batch_start()

    @_never_raises
    def on_validation_batch_end(self, *_: Any) -> None:
        if self._evaluation is not None:
            self._evaluation.end_batch()

    def on_test_batch_end(self, *_: Any) -> None:
        self.on_validation_batch_end()

    def on_predict_batch_end(self, *_: Any) -> None:
        self.on_validation_batch_end()

    @_never_raises
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_evaluation()

    @_never_raises
    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_evaluation()

    @_never_raises
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._session is not None:
            self.flush()
            self._session.sync()
            self._detach()
            self._report(trainer)

    @_never_raises
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        was_training = self._session is not None
        if self._session is not None:
            # After an error the device may never finish: read what is there.
            self._session.recorder.drain()
        self._detach()
        if was_training and isinstance(exception, KeyboardInterrupt):
            self._report(trainer)

    @_never_raises
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._detach()

    def _is_update(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch_idx: int
    ) -> bool:
        session = self._session
        assert session is not None
        if pl_module.automatic_optimization:
            return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        # A GradScaler that skips an update calls this hook of ours, and none of the optimizer's.
        boundaries = session.boundaries
        return boundaries.updates > 0 or self._tried_update or not boundaries.optimizers

    def _report(self, trainer: pl.Trainer) -> None:
        if self._print_summary and trainer.is_global_zero:
            show(self.summary())
        if self._log_figure and trainer.is_global_zero:
            self._send_figure(trainer)

    def _send_figure(self, trainer: pl.Trainer) -> None:
        for logger in trainer.loggers:
            add_figure = getattr(getattr(logger, "experiment", None), "add_figure", None)
            if add_figure is not None and self.last is not None:
                figure, _ = self.plot(ax=new_axes())
                add_figure(f"{self._prefix}/steps", figure, self.last.step)

    def _clock_of(self, trainer: pl.Trainer) -> Clock:
        device = trainer.strategy.root_device
        return self._clock or clock_for(device, tell=trainer.is_global_zero)

    def _start_evaluation(
        self, stage: str, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> None:
        self._evaluation = Evaluation(
            pl_module,
            self._clock_of(trainer),
            lag=self._lag,
            prefix=f"{self._prefix}/{stage}",
            step=trainer.fit_loop.epoch_loop._batches_that_stepped,
            loggers=trainer.loggers,
            publish=functools.partial(_publish, trainer),
            wrapper=_wrapper(trainer),
        )

    def _end_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.end()
            self._evaluation = None

    def _resume(self) -> None:
        self._next_fetch = None
        if self._session is not None:
            self._session.recorder.resume()

    def _detach(self) -> None:
        if self._evaluation is not None:
            self._evaluation.abort()
            self._evaluation = None
        if self._next_fetch is not None:
            self._next_fetch.remove()
            self._next_fetch = None
        if self._session is not None:
            self._session.remove()
            self._session = None


@untraced
class _NextFetch:
    """Calls back once, when the trainer tells its profiler that it fetches the next batch."""

    def __init__(self, trainer: pl.Trainer, call: Callable[[], None]) -> None:
        self._call = call
        profiler = trainer.profiler  # type: ignore[attr-defined]  # has no hint
        self._stand_in = listen(profiler, "start", self)

    def before(self, action_name: str, *_: Any, **__: Any) -> bool:
        """Is told what the trainer begins."""
        if "train_dataloader_next" in action_name:
            self.remove()
            self._call()
        return False

    def after(self) -> None:
        """Is never told."""

    def remove(self) -> None:
        """Takes it off the profiler. Safe to call twice."""
        self._stand_in.leave(self)


def _wrapper(trainer: pl.Trainer) -> torch.nn.Module | None:
    """Returns the module that the strategy calls in place of the LightningModule, if it does."""
    model = trainer.strategy.model
    return None if model is trainer.lightning_module else model


def _lightning_optimizers(pl_module: pl.LightningModule) -> list[Any]:
    """Returns what `self.optimizers()` gives a training_step with manual optimization."""
    if pl_module.automatic_optimization:
        return []
    optimizers = pl_module.optimizers()
    return optimizers if isinstance(optimizers, list) else [optimizers]


def _show_on_bar(trainer: pl.Trainer, times: StepTimes) -> None:
    shown = (name for name in in_order(list(times.phase_ms)) if "/" not in name)
    bar: dict[str, Any] = trainer.progress_bar_metrics
    bar["phase_ms"] = " ".join(f"{name} {times.phase_ms[name]:.3g}" for name in shown)


def _publish(trainer: pl.Trainer, metrics: Mapping[str, float]) -> None:
    # In one go: Lightning gathers them anew at each look.
    trainer.callback_metrics.update({key: torch.tensor(ms) for key, ms in metrics.items()})
