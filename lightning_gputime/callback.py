"""The timer for Lightning."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
import numpy.typing as npt
import torch

from lightning_gputime._arguments import check_options
from lightning_gputime._events import Clock, clock_for, log
from lightning_gputime._log import PhaseLog
from lightning_gputime._named import NamedPhase
from lightning_gputime._phases import AFTER_BACKWARD, DATA, OPTIMIZER, OTHER, StepTimes
from lightning_gputime._recorder import Recorder
from lightning_gputime._results import Results
from lightning_gputime._session import Session
from lightning_gputime._summary import PhaseSummary

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

    return cast("Hook", guarded)


class GPUPhaseTimer(pl.Callback):
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

    Args:
        prefix: First part of the logged keys.
        lag: How many ended steps may be unread. With 1 a whole step stays queued while the host
            waits, so that the device never idles; with 0 a step's times are there when it ends.
        warmup_steps: How many of the first steps the summary leaves out.
        history: How many of the newest steps `history` returns, and percentiles are taken over.
        prog_bar: Whether to show the times of the newest step on the progress bar.
        summary: Whether to print the table of the summary when training ends.
        clock: Takes the place of the device's clock, for tests and new kinds of device.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has an impossible value.

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
        clock: Clock | None = None,
    ) -> None:
        check_options(prefix, lag, warmup_steps, history)
        self._prefix = prefix
        self._lag = lag
        self._warmup_steps = warmup_steps
        self._history = history
        self._prog_bar = prog_bar
        self._print_summary = summary
        self._clock = clock
        self._results = Results(history, warmup_steps)
        self._log: PhaseLog | None = None
        self._session: Session | None = None
        self._next_fetch: _NextFetch | None = None
        self._in_batch = self._tried_update = False

    def phase(self, name: str) -> NamedPhase:
        """Returns a context manager: the time of its code belongs to `name`.

        As `lightning_gputime.phase`, for this timer alone.

        Args:
            name: Any name, such as "augment". "forward/body" is a sub-phase: its time is also part
                of `forward`.

        Raises:
            ValueError: If no key can be made of the name.
        """
        return NamedPhase(name, [] if self._session is None else [self._session.recorder])

    @property
    def last(self) -> StepTimes | None:
        """The newest step that has been read, or None."""
        return self._results.last

    def flush(self) -> None:
        """Waits for the steps that have ended and are unread, and reads them."""
        if self._session is not None:
            self._session.recorder.flush()

    def history(self) -> npt.NDArray[Any]:
        """Returns the newest steps, as a structured array of shape (steps,).

        Its fields are `step` (int), `step_ms`, `host_wait_ms` and `<phase>_ms` (in milliseconds);
        NaN where a phase did not run. Warm-up steps are included.
        """
        return self._results.history()

    def summary(self) -> PhaseSummary:
        """Returns the statistics of the steps read so far, warm-up left out."""
        return self._results.summary()

    def __getstate__(self) -> dict[str, Any]:
        # Events cannot be pickled: ddp_spawn and copies get a timer that is not attached.
        return {**self.__dict__, "_session": None, "_log": None, "_next_fetch": None}

    # Lightning's hooks

    @_never_raises
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._detach()
        self._results = Results(self._history, self._warmup_steps)
        every_n_steps = trainer.log_every_n_steps  # type: ignore[attr-defined]  # has no hint
        publish = functools.partial(_publish, trainer)
        self._log = PhaseLog(self._prefix, every_n_steps, trainer.loggers, publish)
        recorder = Recorder(
            self._clock or clock_for(trainer.strategy.root_device, tell=trainer.is_global_zero),
            lag=self._lag,
            emit=functools.partial(self._emit, trainer),
        )
        self._session = Session(
            recorder,
            pl_module,
            [one for one in trainer.optimizers if isinstance(one, torch.optim.Optimizer)],
            optimizer_wrappers=_lightning_optimizers(pl_module),
            wrapper=_wrapper(trainer),
            compiled_step=pl_module._compiler_ctx is not None,
        )

    @_never_raises
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Whatever an epoch left over (a batch that was skipped, its end, a validation) is dropped.
        self._in_batch = False
        if self._session is not None:
            self._session.begin()

    @_never_raises
    def on_train_batch_start(self, *_: Any) -> None:
        self._in_batch = True
        if self._session is not None:
            self._session.recorder.resume(OTHER)
            self._session.recorder.mark(OTHER)

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
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._session is not None:
            self._session.recorder.pause()

    @_never_raises
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # What follows until the next fetch, such as saving a checkpoint, is the validation's, too.
        if self._session is not None and self._next_fetch is None:
            self._next_fetch = _NextFetch(trainer, self._resume)

    @_never_raises
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._session is not None:
            self.flush()
            self._detach()
            self._report(trainer)

    @_never_raises
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if self._session is not None:
            # After an error the device may never finish: read what is there.
            self._session.recorder.drain()
            self._detach()
            if isinstance(exception, KeyboardInterrupt):
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

    def _emit(self, trainer: pl.Trainer, times: StepTimes) -> None:
        self._results.add(times)
        if self._log is not None:
            self._log.add(times)
        if self._prog_bar:
            for name, ms in times.phase_ms.items():
                trainer.progress_bar_metrics[f"{name}_ms"] = ms

    def _report(self, trainer: pl.Trainer) -> None:
        if self._print_summary and trainer.is_global_zero:
            print(self.summary())

    def _resume(self) -> None:
        self._next_fetch = None
        if self._session is not None:
            self._session.recorder.resume()

    def _detach(self) -> None:
        if self._next_fetch is not None:
            self._next_fetch.remove()
            self._next_fetch = None
        if self._session is not None:
            self._session.remove()
            self._session = None
            if self._log is not None:
                self._log.log()
            self._log = None


class _NextFetch:
    """Calls back once, when the trainer tells its profiler that it fetches the next batch."""

    def __init__(self, trainer: pl.Trainer, call: Callable[[], None]) -> None:
        self._profiler = trainer.profiler  # type: ignore[attr-defined]  # has no hint
        start = self._profiler.start

        def watched(action_name: str) -> None:
            if "train_dataloader_next" in action_name:
                self.remove()
                call()
            start(action_name)

        self._watched = self._profiler.start = watched

    def remove(self) -> None:
        """Takes it off the profiler. Safe to call twice."""
        if vars(self._profiler).get("start") is self._watched:
            del self._profiler.start


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


def _publish(trainer: pl.Trainer, metrics: Mapping[str, float]) -> None:
    for key, value in metrics.items():
        trainer.callback_metrics[key] = torch.tensor(value)
