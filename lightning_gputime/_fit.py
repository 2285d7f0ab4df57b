"""One fit of a trainer, as a session needs it: its epochs, batches and updates."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lightning_gputime import _lightning
from lightning_gputime._boundaries.loop import Batch
from lightning_gputime._boundaries.patching import Attachments
from lightning_gputime._compat import lightning_
from lightning_gputime._measurement.wall_time import STEPS, WallTimeRecorder
from lightning_gputime._phases import CALLBACKS, COPY, DATA, FETCH, OTHER, WAIT, label_of_callback
from lightning_gputime._record.recorder import PAUSED
from lightning_gputime._session.session import Session

# The first update of all is waited for during this many batches that should end a step.
_PATIENCE = 100

# Hooks inside a step, after whose callbacks a trainer calls that of the module.
_INSIDE_STEP = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)

Action = tuple[str, Callable[[], None]]


class Fit:
    """Notify a session of a trainer's epochs, batches and updates, by its callback and profiler.

    Errors of the methods that run in every batch go to `fail`.
    """

    def __init__(
        self,
        trainer: Any,
        model: Any,
        session: Session,
        batch: Batch,
        books: WallTimeRecorder,
        row: dict[str, float],
        fail: Callable[[Exception], None],
    ) -> None:
        self.trainer, self._model, self._session = trainer, model, session
        self._batch, self._books, self._fail = batch, books, fail
        self._step_number = lightning_.step_counter(trainer)
        # What Lightning's own rows have beside metrics: the epoch whose steps are read.
        self.row = row
        self._in_batch = False  # From our own hook at the start of a batch to that at its end.
        # Whether micro-batches have ended since the last step: a step may reach across epochs.
        self._accumulates = False
        self._attachments = Attachments()
        self._listens_while_off = False
        self._patience: float = _PATIENCE
        self._callback = ""  # The phase of the callback that was called last inside a step.

    # Called by the callback

    def epoch_begins(self) -> None:
        """Start an epoch. Drop what the last one left: a skipped batch, its end, a validation."""
        self._in_batch = self._batch.is_open = False
        self._listen_while_off()
        self._books.epoch_turns()
        self.end_late_step()
        self.row["epoch"] = epoch = self.trainer.current_epoch
        self._session.start_epoch(self._step_number(), epoch)
        if self._accumulates:
            # What lies between two epochs belongs to no step.
            self._session.loop_goes_on()
        else:
            self._session.begin()
        self._session.recorder.mark_instead(DATA, CALLBACKS)

    def end_late_step(self) -> None:
        """End a step of manual optimization whose update came after its last batch."""
        session = self._session
        if self._accumulates and session.optimizer.has_updated:
            self._accumulates = False
            number = self._step_number() - 1  # That batch is counted already.
            if not session.is_left(number):
                session.end_step(number)

    # The next two run in every batch: without the function of `never_raises` around them.

    def batch_begins(self, batch: object) -> None:
        """Start a batch, which the model is about to be trained on. Raise nothing."""
        try:
            session = self._session
            if session.recorder.home == -1:
                self.epoch_begins()
            self._in_batch = True
            if self._books.entry is not STEPS:
                self._books.steps_go_on()
            if not session.is_off:
                self._batch.is_open = True
                session.batch_begins()
                session.work.add_batch(batch)
        except Exception as error:
            self._fail(error)

    def batch_ends(self, batch: object, batch_idx: int) -> None:
        """End a batch, and the step if it was its last. Raise nothing."""
        try:
            # One that is None ends without having started; its time is the next one's `data`. Any
            # other did start, heard or not: a callback before ours may have run a validation.
            if batch is None and not self._in_batch:
                return
            session = self._session
            if session.is_off:
                self._end_batch_off(batch_idx)
                return
            self._in_batch = self._batch.is_open = False
            has_updated = session.optimizer.updates > 0
            if has_updated and session.times_all and self._model.automatic_optimization:
                self._accumulates, self._patience = False, math.inf
            else:
                self._accumulates = not self._ends_step(batch_idx)
            if self._accumulates:
                session.batch_ends(CALLBACKS)
            else:
                if not session.end_step(self._step_number(), CALLBACKS):
                    self._attachments.suspend()
                if not self._books.has_stepped:
                    self._books.step_ends()
        except Exception as error:
            self._fail(error)

    def _end_batch_off(self, batch_idx: int) -> None:
        """End a batch while the hooks are off: by the trainer's count, where that was right."""
        session = self._session
        self._in_batch = False
        if self._listens_while_off:
            self._listens_while_off = False
            self._attachments.suspend()
        if session.needs_updates:
            ends = self._ends_step(batch_idx)
        else:
            ends = _lightning.ends_update(self.trainer, batch_idx)
        if ends and session.end_step(self._step_number(), CALLBACKS):
            self._batch.is_open = False
            self._attachments.reattach()

    def evaluation_ends(self) -> None:
        """End an evaluation. One that a callback runs may lie inside a step, which goes on.

        Else what follows until the next fetch, such as a checkpoint, is the evaluation's, too.
        """
        self._listen_while_off()
        if self._in_batch:
            self._books.steps_go_on()
            self._session.batch_begins()

    def _listen_while_off(self) -> None:
        # The next fetch ends what is no step in the wall time.
        if self._session.is_off:
            self._listens_while_off = True
            self._attachments.reattach()

    def _ends_step(self, batch_idx: int) -> bool:
        """Return whether a step ends with this batch, by what was seen of it."""
        session, optimizer = self._session, self._session.optimizer
        if not self._model.automatic_optimization:
            # Only the optimizers know.
            return optimizer.has_updated or not optimizer.has_any
        is_due = _lightning.ends_update(self.trainer, batch_idx)
        if optimizer.updates:
            self._patience = math.inf
        ends = optimizer.updates > 0 or (is_due and self._is_complete())
        # Else the trainer's count tells the end of a step also where no update is seen.
        session.needs_updates |= ends != is_due
        return ends

    def _is_complete(self) -> bool:
        """Return whether a step without an update that was due has ended."""
        optimizer = self._session.optimizer
        if optimizer.has_updated or not optimizer.has_any or self.trainer.is_last_batch:
            return True
        # An `optimizer_step` of the user's own may leave updates out. If it shows none at all, the
        # trainer's count is what is left.
        self._patience -= 1
        return self._patience < 0

    # Called by the profiler

    def listen(self, own: type) -> None:
        """Listen to the trainer's actions until `remove`. Callbacks of class `own` are ours."""
        trainer, session = self.trainer, self._session
        pause, action_of = session.recorder.pause_now, partial(lightning_.module_action, trainer)
        calls = dict([*self._actions_of_data(), *self._actions_of_callbacks(own)])
        # Not by the callback's hook of that name, for which a Trainer takes 2 us.
        update = action_of(self._model, "on_before_optimizer_step")
        calls[update] = self._end_callbacks_of_update if update in calls else session.update_begins
        # Where gradients accumulate none are cleared before a validation.
        calls[action_of(self._model, "on_validation_model_zero_grad")] = pause
        self._attachments.add(_lightning.listen_to_actions(trainer, calls, self._fail))
        if entry := lightning_.validation_entry(trainer):
            self._attachments.add(_lightning.call_at_start(*entry, pause))
        # A wait in every batch, for ranks that are late: it must not count for the loader.
        if place := lightning_.sigterm_broadcast(trainer):
            wait = partial(session.recorder.mark, WAIT)
            self._attachments.add(_lightning.call_at_start(*place, wait))

    def remove(self) -> None:
        self._attachments.remove()

    def fetch_begins(self) -> None:
        if self._in_batch:
            return  # A `training_step(dataloader_iter)` fetches by itself.
        session, recorder = self._session, self._session.recorder
        if recorder.home == -1:
            # A run that goes on in the middle of an epoch does not start that epoch.
            self.epoch_begins()
        if self._books.entry is not STEPS:
            self._books.steps_go_on()
        by_hand = not self._model.automatic_optimization
        if self._accumulates and by_hand and session.optimizer.has_updated:
            # The update came in the hooks at the end of its batch, which is counted already.
            self._accumulates = False
            if not session.end_step(self._step_number() - 1, CALLBACKS):
                self._attachments.suspend()
        # As `resume_or_mark`, without another call.
        if recorder.state is PAUSED:
            recorder.resume(FETCH)
        else:
            recorder.mark(FETCH)

    def _actions_of_data(self) -> Iterator[Action]:
        trainer, begins = self.trainer, self._session.recorder.mark
        yield lightning_.fetch_action(trainer), self.fetch_begins
        # The last hook before the loader's workers are started.
        hook = "on_train_epoch_start"
        label = CALLBACKS if lightning_.defines(self._model, hook) else FETCH
        yield lightning_.module_action(trainer, self._model, hook), partial(begins, label)
        yield lightning_.copy_action(trainer), partial(begins, COPY)
        for module in (self._model, trainer.datamodule):
            for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
                if module is not None and lightning_.defines(module, hook):
                    yield lightning_.module_action(trainer, module, hook), partial(begins, DATA)

    def _actions_of_callbacks(self, own: type) -> Iterator[Action]:
        others = [one for one in self.trainer.callbacks if not isinstance(one, own)]
        ends: dict[str, Callable[[], None]] = {
            "on_train_batch_start": self._callbacks_have_begun,
            "on_train_batch_end": partial(self._session.recorder.mark, CALLBACKS),
            **dict.fromkeys(_INSIDE_STEP, self._leave_callback),
        }
        for hook, end in ends.items():
            at_work = [one for one in others if lightning_.defines(one, hook)]
            for one in at_work:
                label = label_of_callback(one, hook)
                begins = self._enter_callback if hook in _INSIDE_STEP else self._callback_begins
                yield lightning_.callback_action(one, hook), partial(begins, label)
            if at_work:
                # The next that the trainer calls: all callbacks are over.
                yield lightning_.module_action(self.trainer, self._model, hook), end
        for one in others:
            # So that callbacks before ours find the means, too.
            yield lightning_.callback_action(one, "on_train_epoch_end"), self._session.publish

    def _callback_begins(self, label: str) -> None:
        self._batch.is_open = False
        self._session.recorder.mark(label)

    def _enter_callback(self, label: str) -> None:
        self._leave_callback()
        self._callback = label
        self._session.recorder.enter_phase(label)

    def _leave_callback(self) -> None:
        self._session.recorder.leave_phase(self._callback)

    def _end_callbacks_of_update(self) -> None:
        self._leave_callback()
        self._session.update_begins()

    def _callbacks_have_begun(self) -> None:
        if self._in_batch:
            self._batch.is_open = True
            self._session.recorder.mark(OTHER)
