"""The timer for the Trainer of Hugging Face's transformers, whose callbacks tell it of steps."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Unpack

import torch
from torch import nn

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        "lightning_gputime.huggingface needs transformers and accelerate: python -m pip install"
        " transformers accelerate"
    ) from error

from lightning_gputime._boundaries.compiled import is_compiled
from lightning_gputime._boundaries.loop import Batch, Loop
from lightning_gputime._boundaries.patching import Subscription, patch_function
from lightning_gputime._guard import never_raises
from lightning_gputime._messages import TellOnce
from lightning_gputime._options import Options, TimerOptions, check_bools, takes_options
from lightning_gputime._phases import CALLBACKS, FETCH
from lightning_gputime._record.clock import clock_for
from lightning_gputime._results.means import MeanLog
from lightning_gputime._results.table import show
from lightning_gputime._run import lifetimes
from lightning_gputime._run.evaluation import Evaluations
from lightning_gputime._timer import Timer

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

_NOT_FOUND = (
    "No Trainer is known: steps are timed, but nothing is logged, no evaluation is timed, and after"
    " an error the hooks stay on. Give PhaseTimeCallback itself to transformers.Trainer("
    "callbacks=[...])."
)

# They show what is logged: a line of ten more numbers would be no help.
_PRINTERS = ("NotebookProgressCallback", "PrinterCallback", "ProgressCallback")


@takes_options(0, "write PhaseTimeCallback(warmup_steps=10)", _ELSEWHERE)
class PhaseTimeCallback(Timer, TrainerCallback):
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

    _USE = (
        "Nothing was trained: give it to transformers.Trainer(callbacks=[...]), and call train()."
    )

    def __init__(
        self,
        *,
        summary: bool = True,
        **options: Unpack[TimerOptions],
    ) -> None:
        super().__init__(Options(**options))
        check_bools(summary=summary)
        self._prints_table = summary
        self._tell_once = TellOnce()
        # The Trainer at work, and what is on it.
        self._trainer: Any = None
        self._behind: _Behind | None = None
        self._patches: list[Subscription] = []
        self._handled: BaseException | None = None
        # Of a training. A step may reach across epochs; its inputs are those not yet trained on.
        self._means: MeanLog | None = None
        self._loss: _LossFunction | None = None
        self._batch, self._inputs = Batch(is_open=False), list[Any]()
        self._sees_fetches = self._is_in_step = False
        # Of evaluations: the model of the open one; the newest one's means, as they are logged.
        self._evaluations = Evaluations(self._options)
        self._evaluated_model: nn.Module | None = None
        self._stage, self._evaluation_means = "", dict[str, float]()
        # Means for the Trainer's next log.
        self._unlogged = dict[str, float]()
        # Whether a table is due, and whether it is this rank that prints it.
        self._owes_table = self._is_first = False

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_patches": [], "_inputs": []}
        alone = ("_trainer", "_behind", "_handled", "_means", "_loss", "_evaluated_model")
        return {**state, **dict.fromkeys(alone)}

    def __del__(self) -> None:
        loss = vars(self).get("_loss")
        if loss is not None:
            lifetimes.lost(loss)
        super().__del__()

    # A training

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        # Raises, before training, if a name is wrong.
        submodules = self._submodules(known["model"])
        self._start_training(args, state, submodules, **known)

    @never_raises
    def _start_training(
        self,
        args: Any,
        state: Any,
        submodules: Mapping[str, nn.Module],
        model: nn.Module,
        optimizer: Any = None,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        self._detach()
        frame = _frame_of(self)
        trainer = None if frame is None else frame.f_locals["self"]
        self._is_first, self._sees_fetches = state.is_world_process_zero, trainer is not None
        known = {
            "accumulate_grad_batches": args.gradient_accumulation_steps,
            "batch_size": args.per_device_train_batch_size,
        }
        if trainer is None:
            self._tell_once(_NOT_FOUND)
        else:
            self._patch_training(trainer)
            # As the Trainer calls it: DDP's wrapper, the compiled module, the sharded model.
            model = trainer.model_wrapped
            precision = getattr(trainer.accelerator, "mixed_precision", "no")
            known["precision"] = None if precision == "no" else f"{precision}-mixed"
        loop = Loop(
            model,
            [one for one in [optimizer] if isinstance(one, torch.optim.Optimizer)],
            pause_evaluation=trainer is None,
            submodules=submodules,
            batch=Batch(is_open=trainer is None),
        )
        self._batch = loop.batch if self._sees_fetches else Batch(is_open=False)
        self._unlogged.clear()
        self._means = MeanLog(self._options.prefix, sys.maxsize, (), self._unlogged.update)
        clock = self._options.clock or clock_for(args.device, tell=self._is_first)
        self._start(clock, loop, self._means, **known)
        self._session.loads(train_dataloader, in_data=not self._sees_fetches)
        if train_dataloader is not None:
            self._know_batch(train_dataloader)
        self._loss = _LossFunction(model, self._session.phase)
        if not self._sees_fetches:
            self.on_epoch_begin()  # Perhaps nothing else tells where a step begins.

    @never_raises
    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._batch.is_open = False
        # What lies between two epochs belongs to no step.
        if self._is_in_step:
            self._session.pause()
            self._session.resume()
        else:
            self._session.begin(0)
        if self._sees_fetches:
            # The last callback before the workers of the loader start.
            self._session.part_began(FETCH)

    def _start_fetch(self, *_: Any, **__: Any) -> None:
        if not self._batch.is_open:
            self._session.fetch_begins()

    def _end_fetch(self, fetched: Any = None) -> None:
        self._inputs = [*fetched[0]] if isinstance(fetched, tuple) else []

    @never_raises
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self._session.thread == -1:
            self.on_epoch_begin()
        self._is_in_step = self._batch.is_open = True
        self._session.batch_begins()
        if self._inputs:
            self._session.takes(self._inputs.pop(0))

    @never_raises
    def on_substep_end(self, *_: Any, **__: Any) -> None:
        if self._inputs:
            self._session.worked()
            self._session.takes(self._inputs.pop(0))

    @never_raises
    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._session.update_begins()

    @never_raises
    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        # Before all other callbacks: what they do until the next fetch is no part of the step.
        self._is_in_step = self._batch.is_open = False
        self._inputs.clear()
        self._session.end_step(state.global_step)
        if self._sees_fetches:
            self._session.part_began(CALLBACKS)

    @never_raises
    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._batch.is_open = False
        self._session.compare_ranks()

    @never_raises
    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._session.is_attached:
            self._forget_training()
            self._finish()
            self._owes_table = True
            if self._trainer is not None:
                # It is called once more, when progress bars are gone.
                self._trainer.callback_handler.callbacks.append(self)
                return
        self._leave()

    def _start_run(self, *_: Any, **__: Any) -> None:
        self._handled = sys.exception()

    def _end_run(self, *_: Any) -> None:
        """End the measurement after an error, of which a Trainer tells no callback."""
        error, handled, self._handled = sys.exception(), self._handled, None
        if error is not None and error is not handled:
            self._detach()
            self._owes_table = isinstance(error, KeyboardInterrupt)
            self._leave()

    def _forget_training(self) -> None:
        if self._loss is not None:
            self._loss.remove()
        self._means = self._loss = None
        self._batch, self._inputs = Batch(is_open=False), []
        self._is_in_step = False

    def _detach(self) -> None:
        """End whatever runs, without a wait for the device or other ranks."""
        self._evaluations.abort()
        self._forget_training()
        self._abort()

    # Evaluations

    def _start_evaluate(self, *_: Any, **__: Any) -> None:
        # It makes the loader, or a method of one's own does all in it.
        self._session.evaluation_begins()

    def _end_evaluate(self, *_: Any) -> None:
        if self._batch.is_open:
            # A callback has evaluated inside a step.
            self._session.batch_begins()

    def _start_loop(self, *args: Any, **kwargs: Any) -> None:
        self._session.evaluation_begins()
        self._stage = args[4] if len(args) > 4 else kwargs.get("metric_key_prefix", "eval")
        self._start_evaluation(self._trainer.model)

    def _start_evaluation(self, model: nn.Module) -> None:
        options, trainer, stage = self._options, self._trainer, self._stage
        number, self._evaluation_means = trainer.state.global_step, {}

        def publish(metrics: Mapping[str, float]) -> None:
            self._keep_evaluation(stage, number, metrics)
            # As the Trainer names its own.
            old, new = f"{options.prefix}/{stage}", f"{stage}_{options.prefix}"
            self._evaluation_means = {key.replace(old, new, 1): ms for key, ms in metrics.items()}

        self._evaluations.start(
            stage,
            options.clock or clock_for(trainer.args.device),
            Loop(model, wrap_backward=False),
            # Nothing is due before the end.
            MeanLog(options.prefix, sys.maxsize, (), publish, stage=stage),
            number=number,
            items=options.items,
        )
        self._evaluated_model = model

    def _start_prediction(self, model: nn.Module, inputs: Any = None, *_: Any, **__: Any) -> None:
        if self._evaluations.is_running and model is not self._evaluated_model:
            # It was wrapped or compiled meanwhile; the first fetch is lost.
            self._start_evaluation(model)
        self._evaluations.batch_begins(inputs)

    @never_raises
    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        if self._evaluations.is_running:
            self._evaluations.batch_ends()
        elif self._trainer is None:
            self._join_evaluation()

    def _join_evaluation(self) -> None:
        """Time an evaluation that runs alone, of which nothing tells before its first batch."""
        frame = _frame_of(self)
        if frame is None:
            self._tell_once(_NOT_FOUND)
            return
        known = frame.f_locals
        self._stand_around(known["self"])
        # Nothing tells of an error in the loader: between batches nothing is on the model.
        self._patch("prediction_step", self._start_prediction, self._suspend_evaluation)
        self._patch("evaluation_loop", self._start_loop, self._end_loop)
        self._stage = known.get("metric_key_prefix", "eval")
        self._start_evaluation(known.get("model", self._trainer.model))
        self._evaluations.suspend()

    def _suspend_evaluation(self, *_: Any) -> None:
        self._evaluations.suspend()

    def _end_loop(self, output: Any = None) -> None:
        if output is None:  # It raised.
            self._evaluations.abort()
        else:
            self._evaluations.end()
        self._evaluated_model = None
        self._end_evaluate()

    @never_raises
    def on_predict(self, *_: Any, **__: Any) -> None:
        self._evaluations.end()
        if not self._session.is_attached:
            self._leave()

    on_evaluate = on_predict

    # Logs

    @never_raises
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        added = dict[str, float]()
        if f"{self._stage}_runtime" in logs:
            self._evaluations.end()
            added, self._evaluation_means = self._evaluation_means, {}
        is_last = "train_runtime" in logs
        if self._means is not None and (is_last or "loss" in logs):
            self._session.drain()
            if is_last or self._options.sync_ranks == "log":
                self._session.compare_ranks()
            self._means.log_means()
            if state.log_history:
                # Its newest entry has been made from these logs.
                state.log_history[-1].update(self._unlogged)
            added |= self._unlogged
            self._unlogged.clear()
        if self._behind is not None:  # Else nobody takes them out of what `evaluate` returns.
            self._behind.added = [*added]
            logs.update(added)

    # What is on a Trainer

    def _patch_training(self, trainer: Any) -> None:
        self._stand_around(trainer)
        self._patch("get_batch_samples", self._start_fetch, self._end_fetch)
        self._patch("evaluate", self._start_evaluate, self._end_evaluate)
        self._patch("evaluation_loop", self._start_loop, self._end_loop)
        self._patch("prediction_step", self._start_prediction)
        # Before transformers 5 there is none for an epoch, and an error in another callback stays
        # unknown.
        runs = "_run_epoch" if hasattr(trainer, "_run_epoch") else "training_step"
        self._patch(runs, self._start_run, self._end_run)

    def _patch(
        self,
        name: str,
        on_start: Callable[..., object],
        on_end: Callable[..., object] = lambda *_: None,
    ) -> None:
        self._patches.append(patch_function(self._trainer, name, _Calls(on_start, on_end)))

    def _stand_around(self, trainer: Any) -> None:
        """Stand before all callbacks of a Trainer, and behind those that report."""
        self._leave()
        self._trainer, handler = trainer, trainer.callback_handler
        others = [one for one in handler.callbacks if one is not self]
        printers = [one for one in others if type(one).__name__ in _PRINTERS]
        reporters = [one for one in others if type(one).__name__ not in _PRINTERS]
        # A new list: the Trainer may be on its way through the old one.
        self._behind = _Behind()
        handler.callbacks = [self, *reporters, self._behind, *printers]

    def _leave(self) -> None:
        """Take off what is on the Trainer, and print the table, if it is due."""
        while self._patches:
            self._patches.pop().remove()
        trainer, behind, self._trainer, self._behind = self._trainer, self._behind, None, None
        if trainer is not None:
            handler = trainer.callback_handler
            before = [one for one in handler.callbacks if one is self][:1]
            others = [one for one in handler.callbacks if one not in (self, behind)]
            handler.callbacks = [*before, *others]
        if self._owes_table and self._prints_table and self._is_first:
            show(self._read().summary_to_print())
        self._owes_table = False


class _Behind(TrainerCallback):
    """Stands behind all callbacks that report, and takes the phases out before any prints them."""

    def __init__(self) -> None:
        self.added: list[str] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        while self.added:
            logs.pop(self.added.pop(), None)


@dataclass(slots=True, eq=False)
class _Calls:
    """A listener of the calls of a Trainer's method."""

    on_start: Callable[..., object]
    call_ends: Callable[..., object]

    def call_begins(self, *args: Any, **kwargs: Any) -> bool:
        self.on_start(*args, **kwargs)
        return True


def _frame_of(timer: PhaseTimeCallback) -> FrameType | None:
    """Return the frame of the Trainer that calls a timer, if it is a callback of one.

    No callback is told of its Trainer; but that is on the stack, as `self`.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            callbacks = caller.callback_handler.callbacks
            return frame if any(one is timer for one in callbacks) else None
        frame = frame.f_back
    return None


class _LossFunction:
    """Stands in for what a model of transformers computes its loss by: it is the phase `loss`.

    Given labels, these models compute the loss inside `forward`. Nothing is done if the model has
    no such function, or runs it compiled.
    """

    def __init__(self, model: nn.Module, phase: Callable[[str], Any]) -> None:
        self._phase = phase
        places = (one for one in model.modules() if is_compiled(one) or _has_loss_function(one))
        found: Any = next(places, None)
        self._model: Any = None if found is None or is_compiled(found) else found
        self._given = self._found = None
        self._is_removed = False
        if self._model is not None:
            # The model prefers this to what it finds for its class.
            self._given = self._found = vars(self._model).get("_loss_function")
            self._model.loss_function = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._phase("loss"):
            return self._original()(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._original(),)  # No copy of the model is timed.

    def _original(self) -> Any:
        # Not before it is needed: transformers warns of a model that has none of its own.
        if self._found is None:
            # Another timer's may stand in its place.
            newest = vars(self._model).pop("_loss_function", None)
            try:
                self._found = self._model.loss_function
            finally:
                if newest is not None:
                    self._model.loss_function = newest
        return self._found

    def remove(self) -> None:
        """Take it off. Safe to call twice."""
        self._is_removed = True
        if self._model is not None and vars(self._model).get("_loss_function") is self:
            del self._model._loss_function
            given = self._given
            while isinstance(given, _LossFunction) and given._is_removed:
                given = given._given
            if given is not None:
                self._model.loss_function = given


def _has_loss_function(module: nn.Module) -> bool:
    place = getattr(type(module), "loss_function", None)
    return isinstance(place, property) and place.fset is not None


def _same(one: Any) -> Any:
    return one
