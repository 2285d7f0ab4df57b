"""One training of a Trainer, in the words of a session."""

from lightning_gputime._boundaries.loop import Batch
from lightning_gputime._huggingface.loss import LossFunction
from lightning_gputime._phases import CALLBACKS, FETCH
from lightning_gputime._results.means import MeanLog
from lightning_gputime._run.detached import Detached
from lightning_gputime._run.session import Session


class Training:
    """Tells a session where a Trainer is, as its callbacks hear of it.

    Args:
        session: Times the steps.
        batch: Is kept up to date: outside of it calls of the model are no `forward`. None where
            fetches are not told of.
        means: Are of the steps since the last log.
        loss: Splits `loss` from `forward`.
    """

    def __init__(
        self, session: Session | Detached, batch: Batch | None, means: MeanLog, loss: LossFunction
    ) -> None:
        self._session, self._batch = session, batch or Batch(is_open=False)
        self._sees_fetches = batch is not None
        self._means, self._loss = means, loss
        # Whether a step has begun and not ended: it may reach across epochs.
        self._is_open = False
        # Whether a micro-batch of it has begun.
        self._has_batch = False

    def epoch_begins(self) -> None:
        """Says that an epoch begins; what lies between two belongs to no step."""
        self._batch.is_open = False
        if self._is_open:
            self._session.pause()
            self._session.resume()
        else:
            self._session.begin(0)
        if self._sees_fetches:
            # The last hook before the workers of the loader start.
            self._session.part_began(FETCH)

    def fetch_begins(self) -> None:
        """Says that the Trainer fetches all micro-batches of a step, which ends a pause."""
        if not self._batch.is_open:
            self._session.fetch_begins()

    def step_begins(self) -> None:
        """Says that the batches are there."""
        if self._session.thread == -1:
            self.epoch_begins()
        self._is_open = self._batch.is_open = True
        self._has_batch = False
        self._session.batch_begins()

    def takes(self, inputs: object) -> None:
        """Says that the next of the micro-batches is trained on."""
        if self._has_batch:
            self._session.worked()
        self._has_batch = True
        self._session.takes(inputs)

    def step_ends(self, number: int) -> None:
        """Says that a step is over; what follows until the next fetch are callbacks."""
        self._is_open = self._batch.is_open = False
        self._session.end_step(number)
        if self._sees_fetches:
            self._session.part_began(CALLBACKS)

    def epoch_ends(self) -> None:
        """Says that an epoch is over."""
        self._batch.is_open = False
        self._session.compare_ranks()

    def evaluation_begins(self) -> None:
        """Says that an evaluation begins. What follows it until the next fetch is its, too."""
        self._session.evaluation_begins()

    def evaluation_ends(self) -> None:
        """Says that it is over: one that a callback runs for itself may lie inside a step."""
        if self._batch.is_open:
            self._session.batch_begins()

    def log(self, *, compares: bool) -> None:
        """Publishes the means of all steps that the device has finished.

        Args:
            compares: Whether ranks are compared as well.
        """
        self._session.drain()
        if compares:
            self._session.compare_ranks()
        self._means.log_means()

    def remove(self) -> None:
        """Takes off what is on the model. Safe to call twice."""
        self._loss.remove()
