"""The hooks by which the Trainer of transformers calls a timer."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._guard import never_raises
from lightning_gputime._huggingface.calls import hear
from lightning_gputime._huggingface.loss import LossFunction
from lightning_gputime._huggingface.trainer import (
    Trainer,
    TrainerCallback,
    known_of,
    loop_of,
    stand_around,
)
from lightning_gputime._huggingface.training import Training
from lightning_gputime._messages import TellOnce
from lightning_gputime._options import Options
from lightning_gputime._record.clock import clock_for
from lightning_gputime._results.means import MeanLog
from lightning_gputime._results.table import show
from lightning_gputime._run.evaluation import Evaluations
from lightning_gputime._timer import Timer

_NOT_FOUND = (
    "No Trainer is known: steps are timed, but nothing is logged, no evaluation is timed, and after"
    " an error the hooks stay on. Give PhaseTimeCallback itself to transformers.Trainer("
    "callbacks=[...]), and call super().train() in a train() of your own."
)

# What is called before and after methods of the Trainer.
_METHODS = {
    "train": ("_train_is_called", "_train_ends"),
    "get_batch_samples": ("_fetch_begins", "_nothing_ends"),
    "training_step": ("_micro_batch_begins", "_nothing_ends"),
    "evaluate": ("_evaluate_is_called", "_evaluate_ends"),
    "evaluation_loop": ("_evaluation_begins", "_evaluation_ends"),
    "prediction_step": ("_prediction_begins", "_nothing_ends"),
}


class TrainerTimer(Timer, TrainerCallback):
    """A timer that a Trainer calls. Each training is a new measurement.

    Args:
        options: How steps are timed.
        summary: Whether to print the table when training ends.
    """

    _USE = (
        "Nothing was trained: give it to transformers.Trainer(callbacks=[...]), and call train()."
    )

    def __init__(self, options: Options, *, summary: bool) -> None:
        super().__init__(options)
        self._summary = summary
        self._evaluations = Evaluations(options)
        self._training: Training | None = None
        # The model that the open evaluation times, its name in keys, and its means.
        self._evaluated_model: nn.Module | None = None
        self._stage, self._evaluation_means = "", dict[str, float]()
        # Means for the Trainer's next log, and the keys of those that are in its present one.
        self._unlogged = dict[str, float]()
        self._added: list[str] = []
        # Who runs `train`, if that is told; whether a table is due, and is this rank's to show.
        self._trainer: Any = None
        self._owes_table = self._is_first = False
        self._tell_once = TellOnce()
        hear(Trainer, _METHODS, self)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_training": None,
            "_trainer": None,
            "_evaluated_model": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        hear(Trainer, _METHODS, self)

    # Hooks of the callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        # Raises, before training, if a name is wrong.
        submodules = self._submodules(known["model"])
        self._train_begins(args, state, submodules, **known)

    @never_raises
    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        if self._training is not None:
            self._training.epoch_begins()

    @never_raises
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self._training is not None:
            self._training.step_begins()

    @never_raises
    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._session.update_begins()

    @never_raises
    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        # Before all other callbacks: what they do is no part of the step.
        if self._training is not None:
            self._training.step_ends(state.global_step)

    @never_raises
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        added = dict[str, float]()
        if f"{self._stage}_runtime" in logs:
            added, self._evaluation_means = self._evaluation_means, {}
        is_last = "train_runtime" in logs
        if self._training is not None and (is_last or "loss" in logs):
            self._training.log(compares=is_last or self._options.sync_ranks == "log")
            if self._trainer is not None:  # Else nobody takes it out again.
                added |= self._unlogged
            self._unlogged.clear()
        self._added = [*added]
        logs.update(added)

    @never_raises
    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        if self._training is not None:
            self._training.epoch_ends()

    @never_raises
    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self._evaluations.batch_ends()

    @never_raises
    def on_train_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if self._session.is_attached:
            self._leave_training()
            self._finish()
            self._owes_table = True
            if self._trainer is None:  # Else progress bars are not yet gone.
                self._show()

    @never_raises
    def _log_ends(self, logs: dict[str, Any]) -> None:
        """Is called by `Back`."""
        added, self._added = self._added, []
        for key in added:
            logs.pop(key, None)

    # Around the Trainer's methods

    @never_raises
    def _train_is_called(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._trainer, self._owes_table = trainer, False
        self._follow(trainer)

    def _follow(self, trainer: Any) -> None:
        stand_around(trainer, self)
        hear(type(trainer), _METHODS, self)  # Its own methods may not call those of `Trainer`.

    def _nothing_ends(self, error: BaseException | None) -> None: ...

    @never_raises
    def _train_begins(
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
        trainer = self._trainer
        if trainer is None:
            self._tell_once(_NOT_FOUND)
        self._is_first = state.is_world_process_zero
        clock = self._options.clock or clock_for(args.device, tell=self._is_first)
        loop = loop_of(trainer, model, optimizer, submodules)
        means = MeanLog(self._options.prefix, sys.maxsize, (), self._unlogged.update)
        self._unlogged.clear()
        self._start(clock, loop, means, **known_of(trainer, args))
        self._session.loads(train_dataloader, in_data=trainer is None)
        if train_dataloader is not None:
            self._know_batch(train_dataloader)
        loss = LossFunction(loop.model, self._session.phase)
        batch = None if trainer is None else loop.batch
        self._training = Training(self._session, batch, means, loss)
        if trainer is None:
            self._training.epoch_begins()  # Perhaps nothing else tells where a step begins.

    @never_raises
    def _train_ends(self, error: BaseException | None) -> None:
        self._trainer = None
        if self._session.is_attached:
            # After an error no callback is called.
            self._detach()
            self._owes_table = isinstance(error, KeyboardInterrupt)
        self._show()

    @never_raises
    def _fetch_begins(self, trainer: Any, *_: Any, **__: Any) -> None:
        if self._training is not None:
            self._training.fetch_begins()

    @never_raises
    def _micro_batch_begins(
        self, trainer: Any, model: nn.Module, inputs: Any = None, *_: Any, **__: Any
    ) -> None:
        if self._training is not None:
            self._training.takes(inputs)

    @never_raises
    def _evaluate_is_called(self, *_: Any, **__: Any) -> None:
        # It makes the loader, or a method of one's own does all in it.
        if self._training is not None:
            self._training.evaluation_begins()

    @never_raises
    def _evaluate_ends(self, error: BaseException | None) -> None:
        if self._training is not None:
            self._training.evaluation_ends()

    @never_raises
    def _evaluation_begins(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.evaluation_begins()
        self._follow(trainer)
        stage = args[4] if len(args) > 4 else kwargs.get("metric_key_prefix", "eval")
        self._stage, self._evaluation_means = stage, {}
        self._start_evaluation(trainer, trainer.model)

    def _start_evaluation(self, trainer: Any, model: nn.Module) -> None:
        options, stage, number = self._options, self._stage, trainer.state.global_step

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

    @never_raises
    def _prediction_begins(
        self, trainer: Any, model: nn.Module, inputs: Any = None, *_: Any, **__: Any
    ) -> None:
        if self._evaluations.is_running and model is not self._evaluated_model:
            # It was wrapped or compiled meanwhile; the first fetch is lost.
            self._start_evaluation(trainer, model)
        self._evaluations.batch_begins(inputs)

    @never_raises
    def _evaluation_ends(self, error: BaseException | None) -> None:
        if error is None:
            self._evaluations.end()
        else:
            self._evaluations.abort()
        self._evaluated_model = None
        if self._training is not None:
            self._training.evaluation_ends()

    # The end

    def _show(self) -> None:
        if self._owes_table and self._summary and self._is_first:
            show(self._read().summary_to_print())
        self._owes_table = False

    def _leave_training(self) -> None:
        if self._training is not None:
            self._training.remove()
            self._training = None

    def _detach(self) -> None:
        """Ends whatever runs, without a wait for the device or other ranks."""
        self._evaluations.abort()
        self._leave_training()
        self._abort()
