"""What a trainer of Lightning tells a timer: the verbs of `Session`, in Lightning's hooks."""

import functools
from typing import Any

import lightning.pytorch as pl

from lightning_gputime import _lightning
from lightning_gputime._books import FitBooks, turns
from lightning_gputime._evaluations import begins_batch, start, starts, summary_of, tells
from lightning_gputime._fit import NESTED, Fit
from lightning_gputime._messages import messages
from lightning_gputime._options import Options
from lightning_gputime._reports import Reports
from lightning_gputime._results.ledger import EPOCH_ENDS, SANITY_CHECK, SET_UP, VALIDATION
from lightning_gputime._results.summary import PhaseSummary
from lightning_gputime._run.evaluation import Evaluations
from lightning_gputime._timer import Timer
from lightning_gputime._untraced import untraced


class TrainerTimer(Timer, pl.Callback):
    """A timer of what a trainer runs.

    Args:
        options: How steps are timed.
        reports: What a fit leaves behind.
        prog_bar: Whether to show the newest step on the progress bar.
    """

    _USE = "Nothing was trained: give it to Trainer(callbacks=[...]), and call fit()."

    def __init__(self, options: Options, reports: Reports, *, prog_bar: bool) -> None:
        super().__init__(options)
        self._prog_bar = prog_bar
        self._reports = reports
        self._evaluations = Evaluations(options)
        self._fit: Fit | None = None
        self._has_fitted = False
        self._books = FitBooks(self._options.clock)

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_fit": None}
        # Methods of the model, which Lightning puts on every callback: no copy needs the model.
        return {name: one for name, one in state.items() if name not in ("log", "log_dict")}

    def summary(self, stage: str | None = None) -> PhaseSummary:
        """Returns the statistics of the steps read so far.

        Args:
            stage: "fit" for the steps of training, warm-up left out; "val", "test" or "predict" for
                those of the newest such loop since the last fit began. By default those of the
                fit, and where there was none those of the newest other loop.

        Raises:
            ValueError: If there is no such stage.
        """
        newest = next(reversed(self._evaluations.results), "")
        stage = stage or ("" if self._has_fitted else newest) or "fit"
        return super().summary() if stage == "fit" else summary_of(self._evaluations, stage)

    # Lightning's hooks

    @_lightning.never_raises
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._books.close()
            self._books.open(trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._submodules(pl_module)  # Raises, before training, if a name is wrong.

    @_lightning.never_raises
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Not in `setup`: there are no optimizers yet. Here the sanity check is over, too.
        if self._session.is_attached:
            messages.warning(NESTED)
        self._detach()
        self._evaluations.forget()
        self._has_fitted = True
        loop = _lightning.loop_of(trainer, pl_module, self._submodules(pl_module))
        epochs = _lightning.Epochs(trainer)
        self._start(
            _lightning.clock_of(trainer, self._options.clock),
            loop,
            _lightning.mean_log_of(trainer, self._options.prefix, beside=epochs.row),
            [functools.partial(_lightning.show_on_bar, trainer, lambda: self._results)]
            if self._prog_bar
            else [],
            **_lightning.known_of(trainer),
        )
        self._know_batch(trainer.train_dataloader)
        self._results.books = books = self._books.open(trainer)
        self._fit = Fit(trainer, pl_module, self._session, loop.batch, books, epochs, self._give_up)
        self._fit.listen(type(self))

    @_lightning.never_raises
    def on_train_epoch_start(self, *_: Any) -> None:
        if self._fit is not None:
            self._fit.epoch_begins()

    # These run in every batch: nothing in them raises.

    @untraced
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is not None:
            self._fit.batch_begins(batch)

    @untraced
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._fit is not None:
            self._fit.batch_ends(batch, batch_idx)

    @_lightning.never_raises
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._books.turn(EPOCH_ENDS)
        self._session.publish()
        self._session.compare_ranks()
        self._reports.save_if_due(self, trainer)

    on_sanity_check_start, on_sanity_check_end = turns(SANITY_CHECK), turns(SET_UP)

    @_lightning.never_raises
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._session.publish()
        self._session.evaluation_begins()
        if not trainer.sanity_checking:
            self._books.turn(VALIDATION)
            start(self, "val", trainer, pl_module)

    @_lightning.never_raises
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evaluations.end()
        if self._fit is not None:
            self._fit.evaluation_ends()

    on_test_start, on_predict_start = starts("test"), starts("predict")

    on_validation_batch_start = begins_batch
    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_validation_batch_end = tells(Evaluations.batch_ends)
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end
    on_test_end = on_predict_end = tells(Evaluations.end)

    @_lightning.never_raises
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._session.is_attached:
            self._leave_fit()
            self._finish()
            self._books.training_ends(self._options.prefix, self.last)
            self._reports.show(self, trainer, self._options.prefix)

    @_lightning.never_raises
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        # After an error Lightning calls only this: neither `on_train_end` nor `teardown`.
        was_training = self._fit is not None and self._fit.is_of(trainer)
        self._leave(trainer)
        if was_training and isinstance(exception, KeyboardInterrupt):
            self._reports.show(self, trainer, self._options.prefix)
        self._close_books(trainer)

    @_lightning.never_raises
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._leave(trainer)
        self._close_books(trainer)

    def _close_books(self, trainer: pl.Trainer) -> None:
        books = self._books.close(trainer)
        # Else nothing was trained, and a file of before is worth more.
        if books is not None and books is self._results.books:
            self._reports.save(self, trainer)

    def _leave_fit(self) -> None:
        if self._fit is not None:
            self._fit.remove()
            self._fit = None

    def _leave(self, trainer: pl.Trainer) -> None:
        """Ends what a trainer runs, which may be an evaluation inside another trainer's fit."""
        if self._fit is None or self._fit.is_of(trainer):
            self._detach()
        elif self._evaluations.is_running:
            self._evaluations.abort()
            self._fit.evaluation_ends()

    def _detach(self) -> None:
        """Ends whatever runs, without a wait for the device or other ranks."""
        self._evaluations.abort()
        self._leave_fit()
        self._abort()
