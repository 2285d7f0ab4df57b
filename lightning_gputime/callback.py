"""The timer for Lightning."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_gputime import _lightning
from lightning_gputime._books import FitBooks, turns
from lightning_gputime._evaluations import Evaluations, starts
from lightning_gputime._fit import NESTED, Fit
from lightning_gputime._messages import messages
from lightning_gputime._options import Options, SyncRanks, check_bools
from lightning_gputime._phases import StepTimes
from lightning_gputime._record.clock import Clock
from lightning_gputime._reports import Reports
from lightning_gputime._results.ledger import EPOCH_ENDS, SANITY_CHECK, SET_UP, VALIDATION
from lightning_gputime._results.slow import SlowStep
from lightning_gputime._timer import Timer
from lightning_gputime._untraced import untraced


class GPUPhaseTimer(Timer, pl.Callback):
    """Logs how long the phases of each training step take, on the device's own clock.

    From the start of training to its end it has hooks on the LightningModule and the optimizers,
    and stands in for what runs torch's autograd engine. It records one device event at each
    boundary between phases, and reads them back one step late, with at most one event wait a step.
    It never synchronizes the device, changes no result, raises nothing into training, and leaves
    nothing behind. Each `fit` is a new measurement.

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
    `phase_time/slow_ms`         by how much slow steps were longer than usual, see `slowest`
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
        max_overhead: The part of the training's time that timing may take, such as 0.01. Where the
            host sets the pace, so few steps are timed that it stays below; None times all.
        sync_ranks: When the ranks of a distributed run are compared: at the end of each epoch and
            of training; with "log" at every log; with False never.
        on_step: Is called with the times of every step, when they are read; or a metric of
            torchmetrics, which is updated with them.
        on_slow_step: Is called with each `SlowStep`, when it is read: a step that took much longer
            than those before it, with its causes. See `slowest`.
        log_figure: Whether loggers that take figures (TensorBoard) get `plot()` when training ends.
        save: The file that the run is saved to, such as "run.json.gz", see `save`: on rank zero, at
            the end of epochs and of training, also after an error.
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
        max_overhead: float | None = None,
        sync_ranks: SyncRanks = True,
        on_step: Callable[[StepTimes], object] | None = None,
        on_slow_step: Callable[[SlowStep], object] | None = None,
        log_figure: bool = False,
        save: str | os.PathLike[str] | None = None,
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
        check_bools(prog_bar=prog_bar, summary=summary, log_figure=log_figure)
        self._prog_bar = prog_bar
        self._reports = Reports(summary=summary, log_figure=log_figure, save=save)
        self._evaluations = Evaluations(self._options, self._keep_evaluation)
        self._fit: Fit | None = None
        self._books = FitBooks(self._options.clock)

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "_fit": None}
        # Methods of the model, which Lightning puts on every callback: no copy needs the model.
        left = {"log", "log_dict", *_lightning.unused_of(state)}
        return {name: one for name, one in state.items() if name not in left}

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
        loop = _lightning.loop_of(trainer, pl_module, self._submodules(pl_module))
        self._start(
            _lightning.clock_of(trainer, self._options.clock),
            loop,
            _lightning.mean_log_of(trainer, self._options.prefix),
            [functools.partial(_lightning.show_on_bar, trainer)] if self._prog_bar else [],
            **_lightning.known_of(trainer),
        )
        self._know_batch(trainer.train_dataloader)
        self._results.books = books = self._books.open(trainer)
        self._fit = Fit(trainer, pl_module, self._session, loop.batch, books, self._give_up)
        self._fit.listen(self)

    @_lightning.never_raises
    def on_train_epoch_start(self, *_: Any) -> None:
        if self._fit is not None:
            self._fit.epoch_begins()

    # These run in every batch: nothing in them raises.

    @untraced
    def on_train_batch_start(self, *_: Any) -> None:
        if self._fit is not None:
            self._fit.batch_begins()

    @_lightning.never_raises
    def on_before_optimizer_step(self, *_: Any) -> None:
        self._session.update_begins()

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
            self._fit.batch_ends(batch_idx)

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
        self._session.pause()
        if not trainer.sanity_checking:
            self._books.turn(VALIDATION)
            self._evaluations.start("val", trainer, pl_module)

    @_lightning.never_raises
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evaluations.end()
        if self._fit is not None:
            self._fit.evaluation_ends()

    on_test_start, on_predict_start = starts("test"), starts("predict")

    @_lightning.never_raises
    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        self._evaluations.batch_begins()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    @_lightning.never_raises
    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self._evaluations.batch_ends()

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    @_lightning.never_raises
    def on_test_end(self, *_: Any, **__: Any) -> None:
        self._evaluations.end()

    on_predict_end = on_test_end

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

    def _give_up(self, error: Exception) -> None:
        messages.warning("Steps are no longer timed, because a hook failed: %r", error)
        self._detach()

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
