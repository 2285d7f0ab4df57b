"""One fit of a trainer, as a session needs it: its epochs, batches and updates."""

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lightning_gputime import _lightning
from lightning_gputime._compat import lightning_
from lightning_gputime._instrumentation.loop import Batch
from lightning_gputime._instrumentation.patching import Attachments, Calls, Subscription
from lightning_gputime._measurement.wall_clock import (
    EPOCH_ENDS,
    STEPS,
    TEAR_DOWN,
    VALIDATION,
    WallClock,
)
from lightning_gputime._phases import CALLBACKS, COPY, DATA, FETCH, OTHER, WAIT, label_of_callback
from lightning_gputime._record.state import PAUSED
from lightning_gputime._session.session import Session
from lightning_gputime._session.state import OFF

# The first update of all is waited for during this many batches that should end a step.
_MAX_BATCHES_WITHOUT_UPDATE = 100

_EPOCH_START = "on_train_epoch_start"

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
        wall_clock: WallClock,
        row: dict[str, float],
        fail: Callable[[Exception], None],
        own: type,
    ) -> None:
        self.trainer, self._model, self._session = trainer, model, session
        self._optimizer = session.open_step.optimizer
        self._batch, self._wall_clock, self._fail = batch, wall_clock, fail
        self._own = own  # The class of callbacks that are timers.
        self._step_number = lightning_.step_counter(trainer)
        # The epoch of the steps that are read; rows of Lightning's loggers have it.
        self.row = row
        self._in_batch = False  # From our own hook at the start of a batch to that at its end.
        # True if micro-batches have ended since the last step. A step may span epochs.
        self._accumulates = False
        self._handled: BaseException | None = None  # The error that is handled around the epoch.
        self._attachments = Attachments()  # Removed while no step is timed.
        self._loops = Attachments()  # Around whole loops of the trainer, at no cost per step.
        self._validation_entry = lightning_.validation_entry(trainer)
        self._patience: float = _MAX_BATCHES_WITHOUT_UPDATE
        self._calls: dict[str, Callable[[], None]] = {}  # By the action of the trainer.
        self._listener = _lightning.ActionListener(trainer.profiler, self._calls, fail)
        self._callback = ""  # The phase of the callback that was called last inside a step.

    # Called by the callback

    def epoch_begins(self, *_: Any, **__: Any) -> None:
        """Start the loop over the batches of an epoch. Drop what the last one left open."""
        self._in_batch = self._batch.is_open = False
        self._handled = sys.exception()
        self._wall_clock.resume_steps()
        self.end_late_step()
        self.row["epoch"] = epoch = self.trainer.current_epoch
        self._calls.update(self._actions())  # The `state_key` of a callback may have changed.
        self._listener.refresh()
        self._session.start_epoch(self._step_number(), epoch)
        if self._accumulates:
            # The time between two epochs belongs to no step.
            self._session.open_step.continue_in_loop()
        else:
            self._session.steps.begin()
        self._session.recorder.mark_instead(DATA, CALLBACKS)
        self._session.recorder.mark(FETCH)  # The loader's workers start next.

    def _epoch_ends(self, _: object) -> None:
        if sys.exception() is self._handled:  # Else nobody waits for the device any more.
            self._session.publish()
        self._wall_clock.switch_to(EPOCH_ENDS)

    def end_late_step(self) -> None:
        """End a step of manual optimization whose update came after its last batch."""
        session = self._session
        if self._accumulates and session.open_step.has_updated:
            self._accumulates = False
            number = self._step_number() - 1  # That batch is counted already.
            if not session.steps.leave(number):
                session.steps.end_step(number)

    # The next two run in every batch: without the function of `never_raises` around them.

    def batch_begins(self, batch: object) -> None:
        """Start a batch, which the model is about to be trained on. Raise nothing."""
        try:
            session = self._session
            if session.recorder.threads.home == -1:
                self.epoch_begins()
            self._in_batch = True
            if self._wall_clock.entry is not STEPS:
                self._wall_clock.resume_steps()
            if session.steps.state is not OFF:
                self._batch.is_open = True
                session.open_step.batch_begins(batch)
        except Exception as error:
            self._fail(error)

    def batch_ends(self, batch: object, batch_idx: int) -> None:
        """End a batch, and the step if it was its last. Raise nothing."""
        try:
            # A batch that is None ends without a start; its time is `data` of the next batch. Any
            # other did start, heard or not: a callback before ours may have run a validation.
            if batch is None and not self._in_batch:
                return
            session = self._session
            if session.steps.state is OFF:
                self._end_batch_off(batch_idx)
                return
            self._in_batch = self._batch.is_open = False
            has_updated = self._optimizer.updates > 0
            if has_updated and session.steps.times_all and self._model.automatic_optimization:
                self._accumulates, self._patience = False, math.inf
            else:
                self._accumulates = not self._ends_step(batch_idx)
            if self._accumulates:
                session.open_step.batch_ends(CALLBACKS)
            else:
                if not session.steps.end_step(self._step_number(), CALLBACKS):
                    self._attachments.suspend()
                if not self._wall_clock.has_stepped:
                    self._wall_clock.end_first_step()
        except Exception as error:
            self._fail(error)

    def _end_batch_off(self, batch_idx: int) -> None:
        """End a batch while the hooks are off: by the trainer's count, where that was right."""
        session = self._session
        self._in_batch = False
        if session.open_step.needs_updates:
            ends = self._ends_step(batch_idx)
        else:
            ends = _lightning.ends_update(self.trainer, batch_idx)
        if ends and session.steps.end_step(self._step_number(), CALLBACKS):
            self._batch.is_open = False
            self._attachments.reattach()

    def evaluation_begins(self, trainer: Any) -> None:
        """Start a validation, perhaps of another trainer, by a callback's hook."""
        if not self._sees_validations_of(trainer):
            self._start_validation()

    def evaluation_ends(self, trainer: Any) -> None:
        if not self._sees_validations_of(trainer):
            self._end_validation()

    def _sees_validations_of(self, trainer: Any) -> bool:
        """Return True if the trainer reports the exact start and end of validations."""
        return trainer is self.trainer and self._validation_entry is not None

    def _start_validation(self, *_: Any, **__: Any) -> None:
        self._session.recorder.pause(now=True)
        # The wait for the device's work on steps is part of the steps.
        self._session.publish()
        self._wall_clock.enter_phase(VALIDATION)

    def _end_validation(self, *_: Any) -> None:
        self._wall_clock.leave_phase(VALIDATION)
        if self._in_batch:
            self._session.open_step.batch_begins()  # A callback has run it inside a step.
        else:
            self._session.recorder.resume(CALLBACKS)

    def _ends_step(self, batch_idx: int) -> bool:
        """Return True if a step ends with this batch, by its recorded boundaries."""
        open_step = self._session.open_step
        if not self._model.automatic_optimization:
            # Only the optimizers know.
            return open_step.has_updated or not open_step.has_optimizer
        is_due = _lightning.ends_update(self.trainer, batch_idx)
        if open_step.updates:
            self._patience = math.inf
        ends = open_step.updates > 0 or (is_due and self._is_complete())
        # Otherwise the trainer's count ends a step, even without a recorded update.
        if ends != is_due:
            open_step.rely_on_updates()
        return ends

    def _is_complete(self) -> bool:
        """Return whether a step without an update that was due has ended."""
        open_step = self._session.open_step
        if open_step.has_updated or not open_step.has_optimizer or self.trainer.is_last_batch:
            return True
        # An overridden `optimizer_step` may skip updates. If no update is recorded at all, the
        # trainer's count is what is left.
        self._patience -= 1
        return self._patience < 0

    # Called by the profiler

    def listen(self) -> None:
        """Listen to the trainer's actions until `remove`."""
        trainer, session = self.trainer, self._session
        self._calls.update(self._actions())
        self._attachments.add(self._listener)
        if self._validation_entry is not None:
            validation = Calls(self._start_validation, self._end_validation)
            self._loops.add(Subscription(*self._validation_entry, validation))
        if entry := lightning_.epoch_entry(trainer):
            self._loops.add(Subscription(*entry, Calls(self.epoch_begins, self._epoch_ends)))
        if entry := lightning_.fit_end(trainer):
            end = partial(self._wall_clock.switch_to, TEAR_DOWN)
            self._loops.add(_lightning.call_at_start(*entry, end))
        # A wait in every batch, for ranks that are late: it must not count for the loader.
        if place := lightning_.sigterm_broadcast(trainer):
            wait = partial(session.recorder.mark, WAIT)
            self._attachments.add(_lightning.call_at_start(*place, wait))

    def remove(self) -> None:
        self._attachments.remove()
        self._loops.remove()
        self._calls.clear()  # They hold this object.

    def fetch_begins(self) -> None:
        if self._in_batch:
            return  # A `training_step(dataloader_iter)` fetches by itself.
        session, recorder = self._session, self._session.recorder
        if recorder.threads.home == -1:
            # A run that resumes in the middle of an epoch does not start that epoch.
            self.epoch_begins()
        if self._wall_clock.entry is not STEPS:
            self._wall_clock.resume_steps()
        by_hand = not self._model.automatic_optimization
        if self._accumulates and by_hand and session.open_step.has_updated:
            # The update came in the hooks at the end of its batch, which is counted already.
            self._accumulates = False
            if not session.steps.end_step(self._step_number() - 1, CALLBACKS):
                self._attachments.suspend()
        if recorder.state is PAUSED:
            recorder.resume(FETCH)
        else:
            recorder.mark(FETCH)

    def _actions(self) -> dict[str, Callable[[], None]]:
        session = self._session
        action_of = partial(lightning_.module_action, self.trainer, self._model)
        calls = dict([*self._actions_of_data(), *self._actions_of_callbacks()])
        # Before the first epoch starts, all is set-up.
        start_epoch = partial(self._wall_clock.switch_to, EPOCH_ENDS)
        for callback in self.trainer.callbacks:
            calls[lightning_.callback_action(callback, _EPOCH_START)] = start_epoch
        calls[action_of(_EPOCH_START)] = start_epoch
        # Not by the callback's hook of that name, for which a Trainer takes 2 us.
        update = action_of("on_before_optimizer_step")
        calls[update] = (
            self._end_callbacks_of_update if update in calls else session.open_step.update_begins
        )
        # While gradients accumulate, they are not cleared before a validation.
        calls[action_of("on_validation_model_zero_grad")] = partial(
            session.recorder.pause, now=True
        )
        return calls

    def _actions_of_data(self) -> Iterator[Action]:
        trainer, begins = self.trainer, self._session.recorder.mark
        yield lightning_.fetch_action(trainer), self.fetch_begins
        yield lightning_.copy_action(trainer), partial(begins, COPY)
        for module in (self._model, trainer.datamodule):
            for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
                if module is not None and lightning_.defines(module, hook):
                    yield lightning_.module_action(trainer, module, hook), partial(begins, DATA)

    def _actions_of_callbacks(self) -> Iterator[Action]:
        others = [found for found in self.trainer.callbacks if not isinstance(found, self._own)]
        ends: dict[str, Callable[[], None]] = {
            "on_train_batch_start": self._callbacks_have_begun,
            "on_train_batch_end": partial(self._session.recorder.mark, CALLBACKS),
            **dict.fromkeys(lightning_.IN_STEP, self._leave_callback),
        }
        for hook, end in ends.items():
            active = [callback for callback in others if lightning_.defines(callback, hook)]
            for callback in active:
                label = label_of_callback(callback, hook)
                in_step = hook in lightning_.IN_STEP
                begins = self._enter_callback if in_step else self._callback_begins
                yield lightning_.callback_action(callback, hook), partial(begins, label)
            if active:
                # The trainer calls this next, after all callbacks.
                yield lightning_.module_action(self.trainer, self._model, hook), end

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
        self._session.open_step.update_begins()

    def _callbacks_have_begun(self) -> None:
        if self._in_batch:
            self._batch.is_open = True
            self._session.recorder.mark(OTHER)
