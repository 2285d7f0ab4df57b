"""The timer for the Trainer of Lightning."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from inspect import signature
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn, Unpack

import lightning.pytorch as pl
import torch

from lightning_gputime._compat import lightning_
from lightning_gputime._compat.lightning_ import IN_STEP
from lightning_gputime._instrumentation.loop import BatchState, Loop, is_optimizer, parameters_of
from lightning_gputime._instrumentation.patching import Calls, Subscription, do_nothing
from lightning_gputime._instrumentation.trainer_actions import FitActions
from lightning_gputime._measurement.measurement import TrainingSetup
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.wall_clock import (
    EPOCH_ENDS,
    SANITY_CHECK,
    SET_UP,
    STEPS,
    TEAR_DOWN,
    VALIDATION,
    WallClock,
)
from lightning_gputime._messages import messages
from lightning_gputime._options import AllOptions, Options, takes_options
from lightning_gputime._output.loggers import LogWriter, MeanLog
from lightning_gputime._output.summary import PhaseSummary, summary_of
from lightning_gputime._phases import CALLBACKS, DATA, FETCH, OTHER
from lightning_gputime._record.recorder import PAUSED
from lightning_gputime._runs import check_save_path
from lightning_gputime._runs.environment import cores_of_rank, loader_settings
from lightning_gputime._session.session import NEVER_ATTACHED, OFF, REMOVED, AnySession, Session
from lightning_gputime._timer import Timer, never_raises

# Methods of the model that Lightning sets on every callback. They must not keep the model alive in
# copies of a timer, or after the fit.
_MODEL_METHODS = ("log", "log_dict")

# Names of evaluations in tables, by their name in keys.
_STAGES = {"val": "validation", "test": "test", "predict": "prediction"}
_STAGES_BY_NAME = {name: stage for stage, name in _STAGES.items()}

_BATCH_START = "on_train_batch_start"

_SAVED = "The run up to the exception is saved in %s"

# If the first 100 due updates are all missing, the trainer's count of batches ends steps. With
# manual optimization, batches end steps if no update was found in the first 20.
_MAX_MISSING_UPDATES, _MAX_MISSING_MANUAL = 100, 20


class Fit(BatchState):
    """One fit of a trainer: it notifies a session of the epochs, batches and updates.

    While the session has hooks (its mode is not `OFF`), a batch has three states:

    | `_in_batch`, `is_open` | event | next |
    |---|---|---|
    | False, False | `batch_begins` | True, True |
    | True, True | a callback starts (`start_callback`) | True, False |
    | True, False | the work on the batch starts (`start_step`) | True, True |
    | any | `batch_ends`, or an epoch starts | False, False |

    Args:
        trainer: The Trainer.
        model: The LightningModule.
        wall_clock: The wall clock of the fit.
        timer: The timer.
        fail: Function that is called with errors of the methods that run in every batch.
    """

    is_open = False

    def __init__(
        self,
        trainer: Any,
        model: Any,
        wall_clock: WallClock,
        timer: "GPUPhaseTimer",
        fail: Callable[[Exception], None],
    ) -> None:
        self.trainer, self._model, self._wall_clock, self._fail = trainer, model, wall_clock, fail
        self._timer = timer
        self._session: AnySession = NEVER_ATTACHED
        self.start_update: Callable[[], None] = do_nothing
        self._actions = FitActions(trainer, model, wall_clock, timer, fail)
        self._may_skip_hooks = lightning_.skips_absent_hooks(trainer, timer)
        self._step_number = lightning_.step_counter(trainer)
        self.row = dict[str, float]()
        """Further values of each logged row: the epoch of its steps."""
        self._in_batch = False  # True between our hooks at the start and at the end of a batch.
        # True for a `training_step(dataloader_iter)`, which fetches its batches itself.
        self._step_fetches = "dataloader_iter" in signature(model.training_step).parameters
        # True if micro-batches have ended since the last step. A step may span epochs.
        self._accumulates = False
        # Exception that was already being handled when the epoch began.
        self._handled: BaseException | None = None
        # Example: if it is 2, the next two batches may lack the expected update; then each batch
        # ends a step. Infinite once an update was recorded.
        self._missing_updates_left: float = (
            _MAX_MISSING_UPDATES if model.automatic_optimization else _MAX_MISSING_MANUAL
        )

    def loop(self) -> Loop:
        """Describe the loop in which the trainer trains the model."""
        trainer, model, timer_class = self.trainer, self._model, type(self._timer)
        wrappers = [] if model.automatic_optimization else model.optimizers()
        others = [other for other in trainer.callbacks if not isinstance(other, timer_class)]
        logs_every_step = trainer.log_every_n_steps == 1 and len(trainer.loggers) > 0
        return Loop(
            model,
            [optimizer for optimizer in trainer.optimizers if _may_update(optimizer)],
            optimizer_wrappers=wrappers if isinstance(wrappers, list) else [wrappers],
            wrapper=_wrapper_of(trainer),
            compiled_step=lightning_.is_step_compiled(model),
            trains_in_closure=model.automatic_optimization,
            batch=self,
            needs_updates=not model.automatic_optimization,
            expects=[] if self._step_fetches else lightning_.expected_of(trainer, others),
            # An overridden `optimizer_step` may skip updates that the trainer counts.
            counts_steps=model.automatic_optimization
            and not lightning_.defines(model, "optimizer_step"),
            accumulate_grad_batches=trainer.accumulate_grad_batches,
            every_step_log="log_every_n_steps" if logs_every_step else "",
        )

    def listen(self, session: Session) -> None:
        """Notify a session of the trainer's loops and actions until `remove`."""
        self._session = session
        # An alias, because the Trainer calls it in every step.
        self.start_update = session.optimizer.update_begins
        self._skip_hooks(hook for hook in IN_STEP if not lightning_.defines(self._timer, hook))
        self._actions.listen(self, session.recorder)

    def remove(self) -> None:
        self._actions.remove()
        self._restore_hooks((*IN_STEP, _BATCH_START))
        # The session's hooks refer to this object as their `BatchState`.
        self._session, self.start_update = REMOVED, do_nothing

    # Epochs

    def start_epoch(self, *_: Any, **__: Any) -> None:
        """Start the loop over the batches of an epoch. Reset the state of the previous epoch."""
        self._in_batch = self.is_open = False
        self._handled = sys.exception()
        self._wall_clock.resume_steps()
        self.end_late_step()
        self.row["epoch"] = epoch = self.trainer.current_epoch
        self._actions.refresh(self)
        self._session.start_epoch(self._step_number(), epoch)
        if self._accumulates:
            # The time between two epochs is not part of any step.
            self._session.continue_in_loop()
        else:
            self._session.begin_step()
        self._session.recorder.mark_instead(CALLBACKS, of=DATA)
        self._session.recorder.mark(FETCH)  # The loader's workers start next.

    def end_epoch(self, _: object) -> None:
        has_failed = sys.exception() is not self._handled
        if not has_failed:  # `publish` waits for the device, which may hang after an error.
            self._session.publish()
        self._wall_clock.switch_to(EPOCH_ENDS)

    def end_late_step(self) -> None:
        """End a step of manual optimization whose update came after its last batch."""
        session = self._session
        if self._accumulates and session.optimizer.has_updated:
            self._accumulates = False
            number = self._step_number() - 1  # The trainer has already counted the last batch.
            has_ended = session.leave_loop(number)
            if not has_ended:
                session.end_step(number)
            self._follow_hooks()

    # Batches. The next two methods run in every batch, so they avoid the extra call of
    # `never_raises`.

    def batch_begins(self, batch: object) -> None:
        """Start a batch, just before the model is trained on it. Never raise an Exception."""
        try:
            session = self._session
            if session.recorder.threads.home == -1:  # The trainer did not report the epoch's start.
                self.start_epoch()
            self._in_batch = True
            if self._wall_clock.entry is not STEPS:
                self._wall_clock.resume_steps()
            self.is_open = True
            session.batch_begins(batch)
        except Exception as error:
            self._fail(error)

    def batch_ends(self, batch: object, batch_idx: int) -> None:
        """End a batch, and the step if this was its last batch. Never raise an Exception."""
        try:
            # Lightning ends a batch that is None without starting it. The time of this batch is
            # `data` of the next batch.
            if batch is None and not (self._in_batch or self._step_fetches):
                return
            session, counter = self._session, self._session.counter
            if counter.is_on:
                # Until the hooks return, the trainer's count of batches ends steps. Most batches
                # end here.
                n, trainer = batch_idx + 1, self.trainer
                ends = n % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
                if ends and counter.count(self._step_number()):
                    session.check_without_hooks()
                    if session.mode is not OFF:
                        self._follow_hooks()
                return
            if session.mode is OFF:  # That count was wrong before.
                if self._decide_step_end(batch_idx):
                    session.end_step_without_hooks(self._step_number())
                    if session.mode is not OFF:
                        self._follow_hooks()
                return
            self._in_batch = self.is_open = False
            has_updated = session.optimizer.updates > 0
            if has_updated and session.times_all and self._model.automatic_optimization:
                # The same as `_decide_step_end` does in the most common case, without a call.
                self._accumulates = False
                self._missing_updates_left = math.inf
            else:
                self._accumulates = not self._decide_step_end(batch_idx)
            if self._accumulates:
                session.batch_ends(CALLBACKS)
                return
            session.end_step(self._step_number(), CALLBACKS)
            if session.mode is OFF:
                self._follow_hooks()
            if not self._wall_clock.has_stepped:
                self._wall_clock.end_first_step()
        except Exception as error:
            self._fail(error)

    # Validations

    def on_validation_start(self, trainer: Any) -> None:
        """Start a validation at this hook of a callback, if no action of this fit has started it.

        `trainer` may be another trainer, which a callback of this fit runs.
        """
        if not self._starts_validations_of(trainer):
            self.start_validation()

    def on_validation_end(self, trainer: Any) -> None:
        if not self._starts_validations_of(trainer):
            self.end_validation()

    def _starts_validations_of(self, trainer: Any) -> bool:
        """Return True if actions of this fit call `start_validation`, before any callback."""
        return trainer is self.trainer and self._actions.reports_validations

    def start_validation(self, *_: Any, **__: Any) -> None:
        self._session.recorder.pause(now=True)
        # Publish first: `publish` waits for the device, and that wait belongs to the steps, not to
        # the validation.
        self._session.publish()
        self._wall_clock.enter_phase(VALIDATION)

    def end_validation(self, *_: Any) -> None:
        self._wall_clock.leave_phase(VALIDATION)
        if self._in_batch:
            self._session.batch_begins()  # A callback ran the validation inside a step.
        else:
            self._session.recorder.resume(CALLBACKS)

    # Ends of steps

    def _follow_hooks(self) -> None:
        """Remove or attach the trainer's actions, as the session has done with its hooks."""
        if self._session.mode is not OFF:
            self._restore_hooks((_BATCH_START,))
            self._actions.resume()
            return
        self._actions.suspend()
        # A subclass may use the hook itself.
        if type(self._timer).on_train_batch_start is GPUPhaseTimer.on_train_batch_start:
            self._skip_hooks((_BATCH_START,))

    # A Trainer takes several us to call a hook of the timer, even if it does nothing, but skips a
    # hook that is None.

    def _skip_hooks(self, hooks: Iterable[str]) -> None:
        if self._may_skip_hooks:
            vars(self._timer).update(dict.fromkeys(hooks))

    def _restore_hooks(self, hooks: Iterable[str]) -> None:
        for hook in hooks:
            if vars(self._timer).get(hook, self) is None:
                del vars(self._timer)[hook]

    def _decide_step_end(self, batch_idx: int) -> bool:
        """Decide by the updates of this batch whether it ends a step. Return True if it does.

        Count an update that is due and missing, except at the end of an epoch, which ends a step in
        any case. If the trainer's count of batches gives another result, stop using that count.
        """
        session, optimizer = self._session, self._session.optimizer
        if not self._model.automatic_optimization:
            # With manual optimization, only updates show where a step ends.
            if optimizer.has_updated:
                self._missing_updates_left = math.inf
                return True
            return not optimizer.has_any or self._miss_update()
        n, trainer = batch_idx + 1, self.trainer
        is_due: bool = n % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
        ends = is_due
        if optimizer.updates:
            self._missing_updates_left = math.inf
            ends = True
        # `has_updated` is also True for an update that was tried and skipped. An overridden
        # `optimizer_step` may even skip the attempt.
        elif is_due and not optimizer.has_updated and optimizer.has_any:
            ends = trainer.is_last_batch or self._miss_update()
        if ends != is_due:
            session.rely_on_updates()
        return ends

    def _miss_update(self) -> bool:
        """Count a missing update. Return True if too many are missing: then batches end steps."""
        self._missing_updates_left -= 1
        return self._missing_updates_left < 0

    # Other actions

    def start_fetch(self) -> None:
        if self._in_batch:
            return  # A `training_step(dataloader_iter)` fetches its batches itself.
        session, recorder = self._session, self._session.recorder
        if recorder.threads.home == -1:
            # A run that resumes in the middle of an epoch does not report the start of that epoch.
            self.start_epoch()
        if self._wall_clock.entry is not STEPS:
            self._wall_clock.resume_steps()
        is_manual = not self._model.automatic_optimization
        if self._accumulates and is_manual and session.optimizer.has_updated:
            # A hook at the end of the last batch ran the update. The trainer has already counted
            # that batch.
            self._accumulates = False
            session.end_step(self._step_number() - 1, CALLBACKS)
            if session.mode is OFF:
                self._follow_hooks()
        if recorder.state is PAUSED:
            recorder.resume(FETCH)
        else:
            recorder.mark(FETCH)

    def start_callback(self, label: str) -> None:
        self.is_open = False
        self._session.recorder.mark(label)

    def start_step(self) -> None:
        """Start the work on a batch, after the callbacks at its start."""
        if self._in_batch:
            self.is_open = True
            self._session.recorder.mark(OTHER)


def _may_update(optimizer: Any) -> bool:
    """Return whether an optimizer may run updates that torch's hooks report.

    Return False for Lightning's placeholder for "no optimizer", which has no parameter groups, or a
    single tensor that needs no gradient.
    """
    if not is_optimizer(optimizer):
        # For example Lookahead, which may never call `step` of the torch optimizer inside it.
        return False
    if parameters := parameters_of(optimizer):
        return any(getattr(parameter, "requires_grad", True) for parameter in parameters)
    groups = getattr(optimizer, "param_groups", None)  # A wrapper may not have this attribute.
    return groups is None or len(groups) > 0


def _log_writer_of(trainer: pl.Trainer, options: Options, row: Mapping[str, float]) -> LogWriter:
    """Return a writer to a trainer's loggers and `callback_metrics`."""
    publish = partial(lightning_.publish, trainer)
    groups = options.logged_groups
    return LogWriter(options.prefix, trainer.loggers, publish, groups=groups, row=row)


def _wrapper_of(trainer: pl.Trainer) -> torch.nn.Module | None:
    """Return the module that the strategy calls instead of the LightningModule, or None."""
    # Under DDP, FSDP and DeepSpeed it runs the whole training step, loss included.
    model = trainer.strategy.model
    return None if model is trainer.lightning_module else model


@takes_options
class GPUPhaseTimer(Timer, pl.Callback):
    """Log the time of each phase of training steps in Lightning's Trainer, from device events.

    A step is one optimizer update, with all the micro-batches whose gradients accumulate in it.
    Each boundary between phases is one event; the host waits for at most one event per step. Each
    `fit` is a new measurement.

    Every `trainer.log_every_n_steps` steps, the means since the last log go to the trainer's
    loggers and to `trainer.callback_metrics`. These are `phase_time/data_ms`, `callbacks_ms`,
    `forward_ms`, `loss_ms`, `backward_ms`, `optimizer_ms` and `other_ms`, their sum `step_ms`,
    `host_wait_ms` (all in milliseconds), and `items_per_sec`.

    Validation, test and prediction have separate means, which are logged when they end. Their keys
    are `phase_time/val/forward_ms` and so on (`val`, `test` or `predict`), for the phases `data`,
    `forward` and `other`.

    Args:
        print_summary: Whether to print the summary when training ends.
        save_path: File to save the run to on rank zero, such as "run.json.gz". It is written when
            training ends, even after an error. It is also rewritten at the end of each epoch and
            every 10 s (at most 1 % of the time), so `lightning-gputime show --watch` shows it live.
        **options: Options of all timers, see `TimerOptions`.

    Examples:
        >>> trainer = Trainer(callbacks=[GPUPhaseTimer()])
    """

    _libraries = ("torch", "lightning")
    _trainer_name, _runs_in_trainer = "Lightning", True
    _logs_fit = True
    _USE = "Nothing was trained: pass the timer to Trainer(callbacks=[...]) and call fit()."

    def __init__(
        self,
        *,
        print_summary: bool = True,
        save_path: str | Path | None = None,
        **options: Unpack[AllOptions],
    ) -> None:
        super().__init__(Options(**options), print_summary=print_summary)
        _remove_methods_set_on(type(self))
        self._path = check_save_path(save_path)
        self._fit: Fit | None = None
        # The trainer whose fit the wall clock measures, from before `setup` until after `teardown`.
        self._clock_trainer: pl.Trainer | None = None
        # Host time at which the current run started; None once the run has called `setup`.
        self._run_start_ns: int | None = None
        self._is_table_due = False  # True when training has ended, but the fit has not.

    def __getstate__(self) -> dict[str, Any]:
        # A copy must not refer to a trainer.
        detached = dict.fromkeys(("_fit", "_clock_trainer", "_run_start_ns"))
        state = {**super().__getstate__(), **detached}
        # `Fit` may have set hooks to None.
        return {
            name: value
            for name, value in state.items()
            if name not in _MODEL_METHODS and not (value is None and name.startswith("on_"))
        }

    def __enter__(self) -> NoReturn:
        plain = "In a plain loop write: with GPUPhaseHooks(model, optimizer) as timer"
        raise TypeError(
            f"GPUPhaseTimer is a callback: Trainer(callbacks=[GPUPhaseTimer()]). {plain}"
        )

    def __exit__(self, *_: object) -> None:
        """Do nothing. `with` looks this method up before it calls `__enter__`, which raises."""

    def summary(self, stage: str | None = None) -> PhaseSummary:
        """Return the statistics of the steps read so far.

        Args:
            stage: "fit" for training, without the warm-up. "val" (or "validation"), "test" or
                "predict" (or "prediction") for the newest such loop since the last fit started. The
                default is "fit", or the newest other loop if there was no fit.

        Raises:
            ValueError: If there is no such stage.
        """
        if not stage:
            has_fit = self._results.wall_clock is not None
            stage = "fit" if has_fit else next(reversed(self._evaluations.results), "fit")
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
        """Method `log` of the LightningModule, which Lightning sets on each callback.

        A property, because setting it is the first sign of a run, and starts the wall clock.
        """
        if "log" not in vars(self):
            raise AttributeError("log")
        return vars(self)["log"]

    @log.setter
    def log(self, method: Any) -> None:
        # Lightning sets `log` when a run starts, before `prepare_data`. No hook runs earlier.
        self._run_start_ns = self._host_ns()
        vars(self)["log"] = method
        self._start_clock_if_fit(method)

    @never_raises
    def _start_clock_if_fit(self, log: Any) -> None:
        """Start the wall clock if the Trainer of the module with this method `log` runs a fit."""
        trainer = None
        with suppress(AttributeError, RuntimeError):  # A module that has no Trainer yet.
            module = log.__self__
            trainer = module.trainer
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
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # has no hint
        timers = [timer for timer in callbacks if isinstance(timer, GPUPhaseTimer)]
        if len({timer._options.prefix for timer in timers}) < len(timers):
            raise ValueError(
                "Timers of one Trainer must log under different keys, got prefix="
                f"{self._options.prefix!r} twice: keep one timer, or pass different prefixes."
            )

    @never_raises
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # In `setup` there are no optimizers yet. Here the sanity check has also ended.
        self._evaluations.results.clear()
        lightning_.report_missing_names(trainer, pl_module)
        self._start_clock(trainer, None)
        fit = Fit(trainer, pl_module, self._wall_clock, self, self._give_up)
        session = self._start(
            self._clock_for(trainer.strategy.root_device, report_cpu=trainer.is_global_zero),
            fit.loop(),
            MeanLog(trainer.log_every_n_steps, _log_writer_of(trainer, self._options, fit.row)),  # type: ignore[attr-defined]  # has no hint
            lightning_.functions_to_name(trainer, pl_module, type(self)),
            precision=str(trainer.precision),
            accumulate_grad_batches=trainer.accumulate_grad_batches,
        )
        if not trainer.is_global_zero:
            self._live_file.start(None)
        elif self._path is not None:  # Otherwise keep the file that the command `run` may have set.
            self._live_file.start(self._path)
        self._read_loader(trainer.train_dataloader)
        self._time_saves(trainer, "save_checkpoint")
        self._fit = fit
        fit.listen(session)

    # The next two hooks run for every batch. They need no `never_raises`, which would take time,
    # because the functions that they call catch their own exceptions.

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        fit = self._fit
        if fit is not None and self._session.mode is not OFF:
            fit.batch_begins(batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is not None:
            self._fit.batch_ends(batch, batch_idx)
            if self._live_file.path is not None:
                self._save_if_due()

    @never_raises
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._session.compare_ranks()
        self._save_if_due(is_epoch_end=True)

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
                self._fit.on_validation_start(trainer)
            self._start_evaluation("val", trainer, pl_module)

    @never_raises
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._wall_clock.add_after_batches(self._evaluations.end())
        if self._fit is not None:
            self._fit.on_validation_end(trainer)

    @never_raises
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_evaluation("test", trainer, pl_module)

    @never_raises
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start_evaluation("predict", trainer, pl_module)

    def _start_evaluation(self, stage: str, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        settings = loader_settings(getattr(trainer, f"{stage}_dataloaders", None))
        self._evaluations.start(
            stage,
            self._clock_for(trainer.strategy.root_device, report_cpu=trainer.is_global_zero),
            Loop(model, wrapper=_wrapper_of(trainer), wrap_backward=False),
            lightning_.step_counter(trainer)(),
            partial(lightning_.publish, trainer),
            trainer.loggers,
            row={"epoch": trainer.current_epoch},
            setup=TrainingSetup(cores=cores_of_rank(trainer.world_size), **settings),
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
            self._drop_fit()
            self._finish()
            self._wall_clock.switch_to(TEAR_DOWN)
            if self.last_step is not None:
                writer = _log_writer_of(trainer, self._options, fit.row)
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
            # Stop the clock at the last call of a fit, after all callbacks and loggers have
            # finished: `profiler.describe()`.
            end = Calls(do_nothing, lambda _: self._end_fit(trainer))
            self._patches.add(Subscription(trainer.profiler, "describe", end))  # type: ignore[attr-defined]  # has no hint

    # The wall clock of a fit

    def _start_clock(self, trainer: pl.Trainer, start_ns: int | None) -> None:
        """Start the wall clock of a fit, unless it is running."""
        if trainer is not self._clock_trainer:
            self._stop_clock()
            named = lightning_.functions_to_name(trainer, trainer.lightning_module, type(self))
            self._start_wall_clock(start_ns, named)
            self._clock_trainer = trainer
            self._is_table_due = False
            self._patches.add(self._staged_loaders(trainer, "train_dataloader"))

    def _stop_clock(self) -> None:
        self._wall_clock.stop()
        self._patches.remove()
        self._clock_trainer = None

    def _end_fit(self, trainer: pl.Trainer, *, has_failed: bool = False) -> None:
        """Stop the wall clock of a fit, show the table, and save the run."""
        if trainer is not self._clock_trainer:
            return
        self._stop_clock()
        if self._is_table_due:
            self._is_table_due = False
            self._show(trainer.is_global_zero)
        # Without a timed step of this fit, keep the file of an earlier fit.
        path = self._live_file.path
        has_trained = self._wall_clock is self._results.wall_clock
        if path is None or not has_trained or self.last_step is None:
            return
        is_saved = self._live_file.try_to_save(path, self.save)
        if is_saved and has_failed:
            messages.warning(_SAVED, path)

    def _drop_fit(self) -> None:
        if self._fit is not None:
            self._fit.remove()
            self._fit = None

    def _leave(self, trainer: pl.Trainer) -> None:
        """End the timing of a trainer that is done: of its fit, or of its evaluation.

        The evaluation may run inside a fit of another trainer, which continues.
        """
        for name in _MODEL_METHODS:
            vars(self).pop(name, None)
        if self._fit is None or self._fit.trainer is trainer:
            self._detach()
        elif self._evaluations.is_running:
            self._evaluations.abort()
            self._fit.on_validation_end(trainer)

    def _detach(self) -> None:
        self._drop_fit()
        super()._detach()


# The property `log`, which Lightning replaces with a method if it is passed the class.
_LOG = vars(GPUPhaseTimer)["log"]


def _remove_methods_set_on(timer_class: type) -> None:
    """Remove methods that Lightning has set on the class, if it was passed the class by mistake."""
    for owner in timer_class.__mro__:
        if issubclass(owner, GPUPhaseTimer):
            for name in _MODEL_METHODS:
                if isinstance(vars(owner).get(name), MethodType):
                    delattr(owner, name)
    # The loop has deleted Lightning's `log`, so restore the property. `log_dict` had no original.
    if "log" not in vars(GPUPhaseTimer):
        type.__setattr__(GPUPhaseTimer, "log", _LOG)  # An assignment would be an error for mypy.
