"""The timer for the Trainer of Hugging Face's transformers."""

import sys
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import nn

try:
    from transformers import DefaultFlowCallback, Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        "lightning_gputime.huggingface needs transformers and accelerate: python -m pip install"
        " transformers accelerate"
    ) from error

from lightning_gputime._compat import transformers_
from lightning_gputime._compat.python_ import variables_of_callers
from lightning_gputime._instrumentation.loop import BatchState, Loop
from lightning_gputime._instrumentation.patching import Calls, Subscription, do_nothing
from lightning_gputime._instrumentation.traced import phase
from lightning_gputime._measurement.wall_clock import EPOCH_ENDS, EVALUATION, STEPS, TEAR_DOWN
from lightning_gputime._options import AllOptions, Options, takes_options
from lightning_gputime._output.loggers import LogWriter, MeanLog
from lightning_gputime._phases import (
    AFTER_UPDATE,
    CALLBACKS,
    DATA,
    FETCH,
    GENERATE,
    OTHER,
    REWARD,
    label_of_callback,
)
from lightning_gputime._record.recorder import PAUSED
from lightning_gputime._timer import Timer, never_raises

# Events during a training in which the time of callbacks is recorded.
_EVENTS = (
    *("on_epoch_begin", "on_step_begin", "on_substep_end", "on_pre_optimizer_step"),
    *("on_optimizer_step", "on_step_end", "on_epoch_end", "on_log", "on_save", "on_evaluate"),
)


class _TrainCall(NamedTuple):
    """A running call of `Trainer.train`, which sets up before `on_train_begin`."""

    trainer: weakref.ref[Trainer]
    start_ns: int


@takes_options
class TransformersPhaseTimer(Timer, TrainerCallback):
    """Log the time of each phase of training steps in transformers' Trainer.

    A step is one optimizer update, numbered by `global_step`. Whenever the Trainer logs `loss`, it
    also logs the means since the last log: `phase_time/forward_ms` and so on, as `GPUPhaseTimer`
    does. They go to everything in `report_to`, to `trainer.state.log_history` and to the console.

    An evaluation during training is not part of any step. Its means are logged with `eval_loss`, as
    `eval_phase_time/forward_ms` and so on. In `log_history`, the entry before `eval_loss` contains
    them. `train` and `evaluate` do not return them.

    The wall clock runs from the call of `train()` to its return.

    `data/fetch` is the time to fetch all micro-batches of a step and to copy them to the device.
    `callbacks` is the time of callbacks, logging and checkpoints.

    Args:
        print_summary: Whether to print the summary when training ends.
        **options: Options of all timers, see `TimerOptions`.

    Examples:
        >>> trainer = Trainer(model, args, callbacks=[TransformersPhaseTimer()])
    """

    _trainer_name, _runs_in_trainer = "transformers", True
    _libraries = ("torch", "transformers", "trl")
    _USE = (
        "Nothing was trained: pass the timer to transformers.Trainer(callbacks=[...]) and call"
        " train()."
    )

    def __init__(self, *, print_summary: bool = True, **options: Unpack[AllOptions]) -> None:
        super().__init__(Options(**options), print_summary=print_summary)
        self._trainer: Any = None  # The Trainer that trains, from `on_train_begin` on.
        # Exception that was being handled when training began.
        self._handled: BaseException | None = None
        self._train_call: _TrainCall | None = None
        self._train_patches: dict[type, Subscription] = {}  # By the class that defines `train`.
        self._is_table_due = False  # True when training has ended, until the table is shown.
        # The callback that precedes the timer when no training runs.
        self._original_predecessor: Any = None
        # State of a training.
        self._batch = BatchState()
        self._batch.close()
        self._reports_starts = True  # False if the loop reports only the ends of steps.
        self._is_in_step = False  # True from `on_step_begin` to `on_step_end`, even across epochs.
        self._has_fetched = False  # True once the Trainer has called its patched fetch method.
        self._stage = ""  # Prefix of the newest evaluation's metrics, such as "eval".
        # Means of the newest evaluation, until the Trainer logs them.
        self._evaluation_means = dict[str, float]()
        self._unlogged = dict[str, float]()  # Means of steps for the Trainer's next log.
        self._newest_logs = dict[str, Any]()  # Logs that the Trainer is passing to its callbacks.
        self._added_keys = list[str]()  # Keys that were added to them.
        self._watch_train(Trainer)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is not attached to a training.
        detached = dict.fromkeys(("_trainer", "_handled", "_original_predecessor", "_train_call"))
        flags = {"_is_table_due": False, "_is_in_step": False}
        return {**super().__getstate__(), **detached, **flags, "_train_patches": {}}

    # A training

    @never_raises
    def on_init_end(self, *_: Any, **__: Any) -> None:
        trainer = find_trainer(self)
        for kind in type(trainer).__mro__:
            if "train" in vars(kind):
                # Patch the class that defines `train`. Its subclasses then still see patches that
                # other code applies later.
                self._watch_train(kind)
                break

    def _watch_train(self, owner: type) -> None:
        """Listen to calls of `train` while this timer exists."""
        # Events of callbacks cannot show the start and end of `train`: they start later, and stop
        # earlier. Patch the class, because a patch of the Trainer would be a reference cycle, which
        # keeps the model in memory until a garbage collection. Also, a Trainer does not report
        # itself to a callback that is added later.
        if owner in self._train_patches:
            return
        methods = (self._start_train_call, self._end_train_call)
        start, end = (partial(_call_alive, weakref.WeakMethod(method)) for method in methods)
        self._train_patches[owner] = call = Subscription(owner, "train", Calls(start, end))
        weakref.finalize(self, call.remove).atexit = False
        call.attach()

    def _start_train_call(self, trainer: Trainer, *_: Any, **__: Any) -> bool:
        # `train` of a subclass may call `train` of its base class. Both are patched.
        is_running = self._train_call is not None and self._train_call.trainer() is trainer
        is_ours = any(found is self for found in transformers_.callbacks_of(trainer))
        if is_running or not is_ours:
            return False
        self._train_call = _TrainCall(weakref.ref(trainer), self._host_ns())
        return True

    def _end_train_call(self, _: Any) -> None:
        try:
            if self._session.is_attached:
                self._end_if_failed()
            if self._session.is_attached:
                self._detach()  # The Trainer returned without `on_train_end`.
        finally:
            self._train_call = None
            self._leave_trainer()

    @never_raises
    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        trainer = find_trainer(self)
        if trainer is None:
            self._detach()
            self._warn_once(
                "No Trainer was found, and no step is timed. Pass the timer itself:"
                " transformers.Trainer(callbacks=[TransformersPhaseTimer()]), not a callback that"
                " calls it."
            )
            return
        try:
            self._attach(trainer, args, state, known)
        except BaseException:
            # For example, Ctrl-C before everything is patched.
            self._detach()
            self._leave_trainer()
            raise

    def _attach(self, trainer: Any, args: Any, state: Any, known: Mapping[str, Any]) -> None:
        self._patch_trainer(trainer)
        # The module that the Trainer calls, such as a DDP wrapper, a compiled or a sharded model.
        model = trainer.model_wrapped
        optimizer, loader = known.get("optimizer"), known.get("train_dataloader")
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else []
        # `args.logging_steps` may be a fraction of all steps; the state has the number.
        logs_every_step = args.logging_strategy == "steps" and state.logging_steps == 1
        loop = Loop(
            model,
            optimizers,
            splits_loss=True,
            expects=transformers_.expected_of(trainer),
            counts_steps=True,
            accumulate_grad_batches=args.gradient_accumulation_steps,
            every_step_log="logging_steps" if logs_every_step else "",
        )
        self._unlogged.clear()
        self._has_fetched = False
        clock = self._clock_for(args.device, report_cpu=state.is_world_process_zero)
        called_ns = None if self._train_call is None else self._train_call.start_ns
        functions = [*transformers_.functions_to_name(trainer)]
        self._start_wall_clock(called_ns, functions)
        precision = getattr(trainer.accelerator, "mixed_precision", "no")
        options, publish = self._options, self._unlogged.update
        writer = LogWriter(options.prefix, (), publish, groups=options.logged_groups)
        self._start(
            clock,
            loop,
            MeanLog(None, writer),
            functions,
            accumulate_grad_batches=args.gradient_accumulation_steps,
            batch_size=args.per_device_train_batch_size,
            precision=None if precision == "no" else f"{precision}-mixed",
        )
        if save := transformers_.save_method(trainer):
            self._time_saves(trainer, save)
        self._patch_callbacks(trainer)
        self._batch, self._reports_starts = loop.batch, True
        if loader is not None:
            self._read_loader(loader, prefix="dataloader_")
            self._time_loader()
        self._session.begin_step()

    @never_raises
    def on_epoch_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self._wall_clock.switch_to(EPOCH_ENDS)
        if self._reports_starts:
            self._batch.close()
        # A training that resumes from a checkpoint does not report its first epoch.
        if state.epoch or not state.global_step:
            self._session.start_epoch(state.global_step + 1, int(state.epoch or 0))
        # The time between two epochs is not part of any step.
        if self._is_in_step:
            self._session.continue_in_loop()
        else:
            self._session.begin_step()
        # This is the last callback before the loader's workers start.
        self._session.recorder.mark_instead(FETCH, of=DATA)

    def _start_epoch(self, *_: Any, **__: Any) -> None:
        """Return to the steps on the wall clock, before the loader's workers start."""
        if self._wall_clock.entry is not STEPS:
            self._wall_clock.resume_steps()

    def _start_fetch(self, *_: Any, **__: Any) -> None:
        self._has_fetched = True
        if self._wall_clock.entry is not STEPS:
            self._wall_clock.resume_steps()
        if not self._batch.is_open:
            recorder = self._session.recorder
            if recorder.state is PAUSED:
                recorder.resume(FETCH)
            else:
                recorder.mark(FETCH)

    def _end_fetch(self, fetched: Any = None) -> None:
        if isinstance(fetched, tuple):  # The micro-batches of a step, and their number of items.
            self._session.add_batches(fetched[0])

    @never_raises
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._is_in_step = True
        self._batch.open()
        if self._wall_clock.entry is not STEPS:
            self._wall_clock.resume_steps()
        self._session.batch_begins()

    @never_raises
    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._session.optimizer.update_begins()

    @never_raises
    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        # This runs before all other callbacks. Their time counts for the next step.
        if self._is_in_step:
            if not self._session.optimizer.has_any:
                self._session.recorder.mark(AFTER_UPDATE)
            self._batch.close()
        else:
            # An overridden training loop may report only the ends of steps. Then the batch is
            # always open from now on, as in a plain loop.
            self._batch.open()
            self._reports_starts = False
        self._is_in_step = False
        self._session.end_step(state.global_step)
        if not self._wall_clock.has_stepped:
            self._wall_clock.end_first_step()
        if self._has_fetched:
            self._session.recorder.mark_instead(CALLBACKS, of=DATA)
        if self._live_file.path is not None:
            self._save_if_due()

    @never_raises
    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._wall_clock.switch_to(EPOCH_ENDS)
        if self._reports_starts:  # The epoch may end inside a step that accumulates.
            self._batch.close()
        self._session.compare_ranks()
        self._save_if_due(is_epoch_end=True)

    @never_raises
    def on_train_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if self._session.is_attached:
            try:
                self._finish()
                self._wall_clock.switch_to(TEAR_DOWN)
            except BaseException:
                self._leave_trainer()
                raise
            self._is_table_due = state.is_world_process_zero
            if self._train_call is None:  # Otherwise `_end_train_call` does this.
                self._leave_trainer()

    def _end_if_failed(self, _: Any = None) -> None:
        """End the measurement if the training failed or this timer was removed from the Trainer.

        In both cases the Trainer does not call `on_train_end` of this timer. A failure is the
        exception that is being raised, see `sys.exception`.
        """
        trainer, error = self._trainer, sys.exception()
        if trainer is None:
            return
        has_failed = error is not None and error is not self._handled
        callbacks = transformers_.callbacks_of(trainer)  # Empty if they cannot be read.
        was_removed = bool(callbacks) and self not in callbacks
        if has_failed or was_removed:
            if self._session.is_attached:  # Otherwise `on_train_end` has set `_is_table_due`.
                is_rank_zero = trainer.state.is_world_process_zero
                self._is_table_due = is_rank_zero and isinstance(error, KeyboardInterrupt)
            try:
                self._detach()
            finally:
                self._leave_trainer()

    def _detach(self) -> None:
        self._is_in_step = False
        self._batch.close()
        super()._detach()

    # Evaluations

    def _start_evaluate(self, *_: Any, **__: Any) -> None:
        # Pause now: `evaluate` creates the loader, and an override may run the whole evaluation.
        self._session.recorder.pause(now=True)
        self._wall_clock.enter_phase(EVALUATION)

    def _end_evaluate(self, _: Any) -> None:
        self._wall_clock.leave_phase(EVALUATION)
        if self._batch.is_open:
            # A callback ran the evaluation inside a step.
            self._session.recorder.resume(OTHER if self._is_in_step else DATA)

    def _start_evaluation_loop(self, *args: Any, **kwargs: Any) -> None:
        self._start_evaluate()
        prefix, trainer = self._options.prefix, self._trainer
        # The Trainer passes it as a keyword, a subclass may pass it as the fifth argument.
        by_position = args[4] if len(args) > 4 else "eval"
        self._stage = stage = str(kwargs.get("metric_key_prefix", by_position))
        self._evaluation_means = {}

        def publish(metrics: Mapping[str, float]) -> None:
            # The Trainer puts the stage first: "eval_phase_time", not "phase_time/eval".
            old, new = f"{prefix}/{stage}", f"{stage}_{prefix}"
            self._evaluation_means = {key.replace(old, new, 1): ms for key, ms in metrics.items()}

        self._evaluations.start(
            stage,
            self._clock_for(trainer.args.device),
            Loop(trainer.model, wrap_backward=False),
            trainer.state.global_step,
            publish,
        )

    def _start_prediction(self, model: nn.Module, inputs: Any = None, *_: Any, **__: Any) -> None:
        self._evaluations.batch_begins(inputs)

    @never_raises
    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self._evaluations.batch_ends()

    def _end_evaluation_loop(self, output: Any) -> None:
        if output is None:  # The evaluation raised.
            self._evaluations.abort()
        else:
            self._wall_clock.add_after_batches(self._evaluations.end())
        self._end_evaluate(output)

    # Logs

    @never_raises
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        means = dict[str, float]()
        is_of_evaluation = f"{self._stage}_runtime" in logs
        if is_of_evaluation:
            means, self._evaluation_means = self._evaluation_means, {}
            if means and state.log_history:
                # Insert a separate entry, because model cards have a column for each key in the
                # entry of `eval_loss`.
                entry = {"epoch": state.epoch, "step": state.global_step, **means}
                state.log_history.insert(-1, entry)
        is_end_of_training = "train_runtime" in logs
        if is_end_of_training or "loss" in logs:
            if is_end_of_training or self._options.sync_ranks == "log":
                self._session.compare_ranks()
            self._session.log_means()  # Fills `_unlogged`.
            if state.log_history:
                # The Trainer has already copied these logs into the newest entry.
                state.log_history[-1].update(self._unlogged)
            means |= self._unlogged
            self._unlogged.clear()
        # Without a patched Trainer, `_end_log` would not remove the keys from the logs, and
        # `evaluate` would return them.
        if self._trainer is not None:
            self._newest_logs, self._added_keys = logs, [*means]
            logs.update(means)

    def _end_log(self, _: Any) -> None:
        # Remove the keys, because a Trainer may return its logs or make decisions by them.
        for key in self._added_keys:
            self._newest_logs.pop(key, None)
        self._newest_logs, self._added_keys = {}, []

    # Patches of a Trainer

    def _patch_trainer(self, trainer: Any) -> None:
        """Patch the Trainer's methods, and move the timer before all other callbacks."""
        self._leave_trainer()
        callbacks = transformers_.callbacks_of(trainer)
        index = callbacks.index(self) if self in callbacks else 0
        # Set before the order changes, so that `_leave_trainer` restores it after Ctrl-C.
        self._original_predecessor = callbacks[index - 1] if index else None
        self._trainer = trainer
        if index:
            # The Trainer is iterating over this list: later callbacks must not move.
            callbacks.insert(0, callbacks.pop(index))
        self._handled = sys.exception()
        check_end = Calls(do_nothing, self._end_if_failed)
        calls = {
            "end": check_end,
            "epoch": Calls(self._start_epoch, self._end_if_failed),
            "fetch": Calls(self._start_fetch, self._end_fetch),
            "evaluate": Calls(self._start_evaluate, self._end_evaluate),
            "evaluation": Calls(self._start_evaluation_loop, self._end_evaluation_loop),
            "prediction": Calls(self._start_prediction),
            "log": Calls(do_nothing, self._end_log),
            "rewards": phase(REWARD),
        }
        transformers_.report_missing_names(trainer)
        for name, listener in transformers_.patches(trainer, calls):
            self._patches.add(Subscription(trainer, name, listener))
        if entry := transformers_.epoch_start(trainer):
            self._patches.add(Subscription(*entry, check_end))
        # `model.generate` is timed in any loop, so only external engines need a patch here.
        if entry := transformers_.generation_engine(trainer):
            self._patches.add(Subscription(*entry, phase(GENERATE)))

    def _patch_callbacks(self, trainer: Any) -> None:
        """Time the events of other callbacks, each as a phase of this name."""
        for callback in transformers_.callbacks_of(trainer):
            is_excluded = isinstance(callback, Timer | DefaultFlowCallback)
            if is_excluded or not isinstance(callback, TrainerCallback):
                continue
            for event in _EVENTS:
                method = getattr(type(callback), event, None)
                if method is not getattr(TrainerCallback, event, None):
                    named = self.phase(label_of_callback(callback, event))
                    self._patches.add(Subscription(callback, event, named))

    def _leave_trainer(self) -> None:
        """Stop the wall clock, remove all patches, and show the table if it is due."""
        self._wall_clock.stop()
        self._patches.remove()
        if self._trainer is not None:
            transformers_.put_callback_after(self._trainer, self, self._original_predecessor)
            self._original_predecessor = None
        self._trainer = self._handled = None
        is_due, self._is_table_due = self._is_table_due, False
        self._show(is_due)


def _call_alive(method: weakref.WeakMethod[Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method if its object still exists. Otherwise return False, to skip `on_call_end`."""
    bound = method()
    return False if bound is None else bound(*args, **kwargs)


def find_trainer(callback: TrainerCallback) -> Any:
    """Return the Trainer that calls one of its callbacks, else None.

    A Trainer does not pass itself to callbacks, but it is on the call stack, as `self`.
    """
    for variables in variables_of_callers():
        if isinstance(caller := variables.get("self"), Trainer):
            # Without a list of callbacks, assume that the Trainer calls this callback.
            callbacks = transformers_.callbacks_of(caller) or [callback]
            return caller if any(known is callback for known in callbacks) else None
    return None
