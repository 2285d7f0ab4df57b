"""One fit of a trainer, in the words of a session: its epochs, batches and updates."""

from collections.abc import Callable, Mapping

from lightning_gputime import _lightning
from lightning_gputime._run.detached import Detached
from lightning_gputime._run.session import Session


class Fit:
    """Tells a session where a trainer is, as its callback and its profiler hear of it.

    Args:
        trainer: The trainer, a `lightning.pytorch.Trainer`.
        model: The LightningModule.
        session: Times the steps.
    """

    def __init__(
        self, trainer: _lightning.Trainer, model: _lightning.Module, session: Session | Detached
    ) -> None:
        self._trainer, self._model, self._session = trainer, model, session
        # From the start of a batch that is trained on to its end.
        self._in_batch = False

    def actions(self) -> Mapping[str, Callable[[], None]]:
        """Returns what is to be called when the trainer tells its profiler of an action."""
        trainer = self._trainer
        calls = {_lightning.fetch_action(trainer): self.fetch_begins}
        for callback in _lightning.callbacks_of(trainer):
            # So that callbacks before ours find the means, too.
            calls[_lightning.callback_action(callback, "on_train_epoch_end")] = (
                self._session.publish
            )
        return calls

    def epoch_begins(self) -> None:
        """Drops whatever an epoch left over: a batch that was skipped, its end, a validation."""
        self._in_batch = False
        self._session.begin(_lightning.step_number(self._trainer))

    def fetch_begins(self) -> None:
        """Says that the trainer fetches the next batch."""
        if self._in_batch:
            return  # A `training_step(dataloader_iter)` fetches by itself.
        if not self._session.has_begun:
            # A run that goes on in the middle of an epoch does not start that epoch.
            self.epoch_begins()
        self._session.fetch_begins()

    def batch_begins(self) -> None:
        """Says that the model is about to be trained on a batch."""
        self._in_batch = True
        self._session.batch_begins()

    def batch_ends(self, batch_idx: int) -> None:
        """Says that a batch is over, and ends the step if it was the last of one."""
        # A batch that is None ends without having started; its time is the next one's `data`.
        if not self._in_batch:
            return
        self._in_batch = False
        session = self._session
        # With manual optimization only the optimizers know.
        if self._model.automatic_optimization:
            is_update = _lightning.ends_update(self._trainer, batch_idx)
        else:
            is_update = session.has_updated or not session.sees_updates
        if is_update:
            session.end_step(_lightning.step_number(self._trainer))
        else:
            session.batch_ends()
