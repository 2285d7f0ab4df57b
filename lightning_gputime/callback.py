"""The timer for the Trainer of Lightning."""

import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Unpack

import lightning.pytorch as pl

from lightning_gputime import _lightning
from lightning_gputime._compat import lightning_
from lightning_gputime._culprits.places import frames_here
from lightning_gputime._fit import Fit
from lightning_gputime._instrumentation.loop import Loop
from lightning_gputime._instrumentation.patching import Calls, Subscription, do_nothing
from lightning_gputime._measurement.culprits import CulpritSums
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.setup import TrainingSetup
from lightning_gputime._measurement.wall_clock import (
    SANITY_CHECK,
    SET_UP,
    TEAR_DOWN,
    WallClock,
)
from lightning_gputime._messages import messages
from lightning_gputime._options import AllOptions, Options, takes_options
from lightning_gputime._output.summary import PhaseSummary, summary_of
from lightning_gputime._runs.environment import cores_of_rank, known_of_loader
from lightning_gputime._runs.paths import check_save_path
from lightning_gputime._timer import Timer, never_raises

# Methods of the model, which Lightning puts on every callback: neither a copy nor a timer that is
# kept after the fit may hold the model by them.
_OF_MODEL = ("log", "log_dict")

# The name in the table of each kind of evaluation in keys.
_STAGES = {"val": "validation", "test": "test", "predict": "prediction"}
_STAGES_BY_NAME = {name: stage for stage, name in _STAGES.items()}

_SAVED = "The run up to the exception is saved in %s"


@takes_options
class GPUPhaseTimer(Timer, pl.Callback):
    """Log the time of each phase of the training steps of Lightning's Trainer, with device events.

    A step is one optimizer update: micro-batches whose gradients accumulate are one step. Each
    boundary between phases is one event; the host waits for at most one event per step. Each `fit`
    is a new measurement.

    Every `trainer.log_every_n_steps` steps the means since the last log go to the trainer's loggers
    and to `trainer.callback_metrics`. These are `phase_time/data_ms`, `callbacks_ms`, `forward_ms`,
    `loss_ms`, `backward_ms`, `optimizer_ms` and `other_ms`, their sum `step_ms`, `host_wait_ms`
    (all in milliseconds), and `items_per_sec`.

    Validation, test and prediction have separate means, logged at their end: the keys are
    `phase_time/val/forward_ms` and so on (`test`, `predict`), with `data`, `forward` and `other`.

    Args:
        print_summary: Whether to print the summary when training ends.
        save_path: File to save the run to on rank zero, such as "run.json.gz". It is written when
            training ends, after an error, too, at ends of epochs, and every 10 s (at most 1 % of
            the time): `lightning-gputime show --watch` shows it live.
        **options: Those of `TimerOptions`.

    Examples:
        >>> trainer = Trainer(callbacks=[GPUPhaseTimer()])
    """

    _libraries = ("torch", "lightning")
    _logs_fit = True
    _USE = "Nothing was trained: give it to Trainer(callbacks=[...]), and call fit()."

    def __init__(
        self,
        *,
        print_summary: bool = True,
        save_path: str | Path | None = None,
        **options: Unpack[AllOptions],
    ) -> None:
        super().__init__(Options(**options), print_summary=print_summary)
        self._path = check_save_path(save_path)
        self._fit: Fit | None = None
        self._clock_trainer: pl.Trainer | None = None  # The trainer whose fit is measured.
        self._run_start_ns: int | None = None  # Start of the run that has not called `setup` yet.
        self._is_table_due = False  # Training has ended; the fit has not.

    def __getstate__(self) -> dict[str, Any]:
        # No copy needs a trainer.
        alone = dict.fromkeys(("_fit", "_clock_trainer", "_run_start_ns"))
        state = {**super().__getstate__(), **alone}
        return {name: value for name, value in state.items() if name not in _OF_MODEL}

    def __enter__(self) -> NoReturn:
        plain = "In a plain loop write: with GPUPhaseHooks(model, optimizer) as timer"
        raise TypeError(
            f"GPUPhaseTimer is a callback: Trainer(callbacks=[GPUPhaseTimer()]). {plain}"
        )

    def __exit__(self, *_: object) -> None:
        """Do nothing: `with` asks for it before it calls `__enter__`."""

    def summary(self, stage: str | None = None) -> PhaseSummary:
        """Return the statistics of the steps read so far.

        Args:
            stage: "fit" for training, without the warm-up. "val" (or "validation"), "test" or
                "predict" (or "prediction") for the newest such loop since the last fit started. The
                default is "fit", or the newest other loop if there was no fit.

        Raises:
            ValueError: If there is no such stage.
        """
        newest = next(reversed(self._evaluations.results), "")
        stage = stage or (newest if self._results.wall_clock is None else "") or "fit"
        stage = _STAGES_BY_NAME.get(stage, stage)
        if stage == "fit":
            return super().summary()
        if stage not in _STAGES:
            raise ValueError(f"stage must be one of {', '.join(('fit', *_STAGES))}, got {stage!r}")
        none = Results(1, 0, hint=f"No {_STAGES[stage]} loop has run since the last fit began.")
        results = self._evaluations.results.get(stage, none)
        return summary_of(results, _STAGES[stage])

    # Lightning's hooks

    @property
    def log(self) -> Any:
        """The method `log` of the LightningModule."""
        if "log" not in vars(self):
            raise AttributeError("log")
        return vars(self)["log"]

    @log.setter
    def log(self, method: Any) -> None:
        # Lightning sets it at the start of each run, before `prepare_data`: no hook is as early.
        self._run_start_ns = self._host_ns()
        vars(self)["log"] = method
        self._note_run(method)

    @never_raises
    def _note_run(self, method: Any) -> None:
        trainer = None
        with suppress(AttributeError, RuntimeError):  # A module that has no Trainer yet.
            trainer = method.__self__.trainer
        if trainer is not None and trainer.state.fn == "fit":
            start_ns, self._run_start_ns = self._run_start_ns, None
            self._start_clock(trainer, start_ns)

    def _save_to(self, path: str | None) -> None:
        """Save the run to another file than `save_path`."""
        self._path = path

    @never_raises
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        start_ns, self._run_start_ns = self._run_start_ns, None
        if stage == "fit":
            self._start_clock(trainer, start_ns)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._submodules(pl_module)  # Raises, before training, if a name is wrong.
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # has no hint
        timers = [timer for timer in callbacks if isinstance(timer, GPUPhaseTimer)]
        if len({timer._options.prefix for timer in timers}) < len(timers):
            raise ValueError(
                "Timers of one Trainer must log under different keys, got prefix="
                f"{self._options.prefix!r} twice: keep one timer, or give each its own prefix."
            )

    @never_raises
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not in `setup`: there are no optimizers yet. Here the sanity check is over, too.
        self._evaluations.results.clear()
        lightning_.report_missing_names(trainer, pl_module)
        submodules = self._submodules(pl_module)
        loop = _lightning.loop_of(trainer, pl_module, submodules, type(self))
        row = dict[str, float]()
        self._start_clock(trainer, None)
        session = self._start(
            self._clock_for(trainer.strategy.root_device, tell=trainer.is_global_zero),
            loop,
            _lightning.mean_log_of(trainer, self._options, row),
            self._wall_clock,
            frames_here(),
            precision=str(trainer.precision),
            accumulate_grad_batches=trainer.accumulate_grad_batches,
        )
        self._save_live_to(self._path if trainer.is_global_zero else None)
        self._know_loader(trainer.train_dataloader)
        self._time_saves(trainer, "save_checkpoint")
        self._time_calls(lightning_.own_functions(trainer, pl_module))
        self._fit = Fit(
            trainer,
            pl_module,
            session,
            loop.batch,
            self._wall_clock,
            row,
            self._give_up,
            type(self),
        )
        self._fit.listen()

    # These run in every batch: nothing in them raises.

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is not None:
            self._fit.batch_begins(batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is not None:
            self._fit.batch_ends(batch, batch_idx)
            if self._live_path is not None:
                self._save_if_due()

    @never_raises
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._session.compare_ranks()
        if self._live_path is not None and time.perf_counter() >= self._save_due:
            self._rewrite()

    @never_raises
    def on_sanity_check_start(self, *_: Any) -> None:
        self._wall_clock.switch_to(SANITY_CHECK)

    @never_raises
    def on_sanity_check_end(self, *_: Any) -> None:
        self._wall_clock.switch_to(SET_UP)

    @never_raises
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            if self._fit is not None:
                self._fit.evaluation_begins(trainer)
            self._start_evaluation("val", trainer, pl_module)

    @never_raises
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._wall_clock.add_after_batches(self._evaluations.end())
        if self._fit is not None:
            self._fit.evaluation_ends(trainer)

    @never_raises
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_evaluation("test", trainer, pl_module)

    @never_raises
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_evaluation("predict", trainer, pl_module)

    def _start_evaluation(self, stage: str, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        known = known_of_loader(getattr(trainer, f"{stage}_dataloaders", None))
        self._evaluations.start(
            stage,
            self._clock_for(trainer.strategy.root_device, tell=trainer.is_global_zero),
            Loop(model, wrapper=_lightning.wrapper_of(trainer), wrap_backward=False),
            lightning_.step_counter(trainer)(),
            partial(_lightning.publish, trainer),
            trainer.loggers,
            row={"epoch": trainer.current_epoch},
            setup=TrainingSetup(cores=cores_of_rank(trainer.world_size), **known),
        )

    @never_raises
    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        self._evaluations.batch_begins(batch)

    @never_raises
    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self._evaluations.batch_ends()

    @never_raises
    def on_test_end(self, *_: Any, **__: Any) -> None:
        self._evaluations.end()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_predict_end = on_test_end

    @never_raises
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        fit = self._fit
        if fit is not None and self._session.is_attached:
            fit.end_late_step()
            self._leave_fit()
            self._finish()
            self._wall_clock.switch_to(TEAR_DOWN)
            if self.last_step is not None:
                writer = _lightning.log_writer_of(trainer, self._options, fit.row)
                writer.write(self._wall_clock.summary().metrics(), self.last_step.step)
            self._is_table_due = True

    @never_raises
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        # After an error Lightning calls only this: neither `on_train_end` nor `teardown`.
        was_training = self._fit is not None and self._fit.trainer is trainer
        self._is_table_due |= was_training
        self._leave(trainer)
        self._end_fit(trainer, has_failed=True)

    @never_raises
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._leave(trainer)
        if trainer is self._clock_trainer:
            # The trainer calls it last, after the hooks of all others and the loggers' ends.
            end = Calls(do_nothing, lambda _: self._end_fit(trainer))
            self._patches.add(Subscription(trainer.profiler, "describe", end))  # type: ignore[attr-defined]  # has no hint

    # The wall clock of a fit

    def _start_clock(self, trainer: pl.Trainer, start_ns: int | None) -> None:
        """Start the wall clock of a fit, unless it runs."""
        if trainer is not self._clock_trainer:
            self._stop_clock()
            self._wall_clock = WallClock(self._host_ns, start_ns)
            self._clock_trainer, self._is_table_due = trainer, False
            self._culprits = CulpritSums()
            named = lightning_.named_functions(trainer, trainer.lightning_module, type(self))
            self._time_calls(named)
            self._patches.add(self._staged_loaders(trainer, "train_dataloader"))

    def _stop_clock(self) -> None:
        self._wall_clock.stop()
        self._remove_patches()
        self._clock_trainer = None

    def _end_fit(self, trainer: pl.Trainer, *, has_failed: bool = False) -> None:
        """Stop the wall clock of a fit, show the table, and save the run."""
        if trainer is not self._clock_trainer:
            return
        self._stop_clock()
        if self._is_table_due:
            self._is_table_due = False
            self._show(trainer.is_global_zero)
        # Without a training, keep the file of an earlier training.
        is_saved = self._wall_clock is self._results.wall_clock and self._save_run(trainer)
        if is_saved and has_failed:
            messages.warning(_SAVED, self._path)

    # Results of a fit, on rank zero

    def _save_run(self, trainer: pl.Trainer) -> bool:
        """Write the file if `save_path` is set and a step was timed. Warn once on failure."""
        if self._path is None or not trainer.is_global_zero:
            return False
        if self.last_step is None and not self.summary().probed_steps:
            return False  # Without a step a file of before is worth more.
        return self._try_to_save(self._path)

    def _leave_fit(self) -> None:
        if self._fit is not None:
            self._fit.remove()
            self._fit = None

    def _leave(self, trainer: pl.Trainer) -> None:
        """End what a trainer runs: a fit, or an evaluation inside another trainer's fit."""
        for name in _OF_MODEL:
            vars(self).pop(name, None)
        if self._fit is None or self._fit.trainer is trainer:
            self._detach()
        elif self._evaluations.is_running:
            self._evaluations.abort()
            self._fit.evaluation_ends(trainer)

    def _detach(self) -> None:
        self._leave_fit()
        super()._detach()
