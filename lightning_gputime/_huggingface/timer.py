"""The hooks by which the Trainer of transformers calls a timer."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_gputime._guard import never_raises
from lightning_gputime._huggingface.evaluations import Evaluations
from lightning_gputime._huggingface.loss import LossFunction
from lightning_gputime._huggingface.trainer import (
    TrainerCallback,
    known_of,
    listen,
    loop_of,
    stand_around,
    trainer_of,
)
from lightning_gputime._huggingface.training import Training
from lightning_gputime._messages import messages
from lightning_gputime._options import Options
from lightning_gputime._record.clock import clock_for
from lightning_gputime._results.means import MeanLog
from lightning_gputime._results.show import show
from lightning_gputime._timer import Timer

_NOT_FOUND = "Nothing is timed: the Trainer that calls PhaseTimeCallback was not found."

# What is called before and after methods of the Trainer.
_METHODS = {
    "train": ("_train_is_called", "_train_ends"),
    "get_batch_samples": ("_fetch_begins", "_nothing_ends"),
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
        self._evaluations = Evaluations(options, self._keep_evaluation)
        self._training: Training | None = None
        # Means for the Trainer's next log, and the keys of those that are in its present one.
        self._unlogged = dict[str, float]()
        self._added: list[str] = []
        # Whether the end of `train` will be told, when progress bars are gone; if a table is due.
        self._is_told = self._owes_table = self._is_first = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_training": None}

    # Hooks of the callback

    @never_raises
    def on_init_end(self, *_: Any, **__: Any) -> None:
        self._follow()

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        submodules = self._submodules(
            known["model"]
        )  # Raises, before training, if a name is wrong.
        self._train_begins(args, state, submodules)

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
            if not self._is_told:
                self._show()

    # Called by `Front` and `Back`

    @never_raises
    def _step_ends(self, number: int) -> None:
        if self._training is not None:
            self._training.step_ends(number)

    @never_raises
    def _log_begins(self, logs: dict[str, Any]) -> None:
        added = self._evaluations.take(logs)
        is_last = "train_runtime" in logs
        if self._training is not None and (is_last or "loss" in logs):
            self._training.log(compares=is_last or self._options.sync_ranks == "log")
            added |= self._unlogged
            self._unlogged.clear()
        self._added = [*added]
        logs.update(added)

    @never_raises
    def _log_ends(self, logs: dict[str, Any]) -> None:
        added, self._added = self._added, []
        for key in added:
            logs.pop(key, None)

    # Around the Trainer's methods

    def _follow(self) -> Any:
        trainer = trainer_of(self)
        if trainer is not None:
            stand_around(trainer, self)
            listen(trainer, _METHODS)
        return trainer

    def _train_is_called(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._is_told, self._owes_table = True, False

    def _nothing_ends(self, error: BaseException | None) -> None: ...

    @never_raises
    def _train_begins(self, args: Any, state: Any, submodules: Mapping[str, nn.Module]) -> None:
        self._detach()
        trainer = self._follow()
        if trainer is None:
            messages.warning(_NOT_FOUND)
            return
        self._is_first = state.is_world_process_zero
        clock = self._options.clock or clock_for(args.device, tell=self._is_first)
        loop = loop_of(trainer, submodules)
        means = MeanLog(self._options.prefix, sys.maxsize, (), self._unlogged.update)
        self._unlogged.clear()
        self._start(clock, loop, means, **known_of(trainer))
        self._session.loads(trainer.callback_handler.train_dataloader, in_data=False)
        loss = LossFunction(loop.model, self._session.phase)
        self._training = Training(self._session, loop.batch, means, loss)

    @never_raises
    def _train_ends(self, error: BaseException | None) -> None:
        self._is_told = False
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
    def _evaluation_begins(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.evaluation_begins()
        stage = args[4] if len(args) > 4 else kwargs.get("metric_key_prefix", "eval")
        self._evaluations.start(trainer, stage)

    @never_raises
    def _prediction_begins(self, trainer: Any, model: nn.Module, *_: Any, **__: Any) -> None:
        self._evaluations.batch_begins(model)

    @never_raises
    def _evaluation_ends(self, error: BaseException | None) -> None:
        if error is None:
            self._evaluations.end()
        else:
            self._evaluations.abort()
        if self._training is not None:
            self._training.evaluation_ends()

    # The end

    def _show(self) -> None:
        if self._owes_table and self._summary and self._is_first:
            show(self._read().summary_to_print())
        self._owes_table = False

    def _give_up(self, error: Exception) -> None:
        messages.warning("Steps are no longer timed, because a hook failed: %r", error)
        self._detach()

    def _leave_training(self) -> None:
        if self._training is not None:
            self._training.remove()
            self._training = None

    def _detach(self) -> None:
        """Ends whatever runs, without a wait for the device or other ranks."""
        self._evaluations.abort()
        self._leave_training()
        self._abort()
