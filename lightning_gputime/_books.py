"""The ledger of a fit, from its setup to its end."""

import time
from collections.abc import Callable
from typing import Any

from lightning_gputime import _lightning
from lightning_gputime._boundaries.attach import StandIn, listen
from lightning_gputime._phases import StepTimes
from lightning_gputime._record.clock import Clock
from lightning_gputime._results.ledger import REST, Books


class FitBooks:
    """Keeps the books of one fit at a time, and hears of each checkpoint that its trainer saves.

    Args:
        clock: Has the host's time; None for that of the machine.
    """

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock
        self._trainer: _lightning.Trainer | None = None
        self._books: Books | None = None
        self._stand_in: StandIn | None = None

    def __getstate__(self) -> dict[str, Any]:
        # No copy needs the trainer.
        return {**self.__dict__, "_trainer": None, "_books": None, "_stand_in": None}

    def open(self, trainer: _lightning.Trainer) -> Books:
        """Begins those of a trainer, or returns them if they are open."""
        if self._books is None or trainer is not self._trainer:
            self.close()
            clock = self._clock
            self._books = Books(time.perf_counter_ns if clock is None else clock.host_ns)
            self._trainer = trainer
            # The hook of a checkpoint tells where it begins, but not where it ends.
            # On the class: what is bound to this trainer would go into copies of it.
            self._stand_in = listen(type(trainer), "save_checkpoint", self)
        return self._books

    def turn(self, entry: str) -> None:
        """Says that from here on the time belongs to another entry."""
        if self._books is not None:
            self._books.turn(entry)

    def training_ends(self, prefix: str, last: StepTimes | None) -> None:
        """Says that training is over, and logs the share of each entry under the last step."""
        self.turn(REST)
        if self._books is not None and self._trainer is not None and last is not None:
            log = _lightning.mean_log_of(self._trainer, prefix)
            log.log_values(self._books.ledger().metrics(), last.step)

    def call_begins(self, *args: Any, **__: Any) -> bool:
        """Is told that a trainer saves a checkpoint, which may be another one."""
        if self._books is None or not args or args[0] is not self._trainer:
            return False
        self._books.save_begins()
        return True

    def call_ends(self, result: Any = None) -> None:
        """Is told that it is saved."""
        if self._books is not None:
            self._books.save_ends()

    def close(self, trainer: _lightning.Trainer | None = None) -> Books | None:
        """Ends them, if they are of this trainer. Safe to call twice.

        Returns:
            Those that were open, if they were.
        """
        books = self._books
        if books is None or (trainer is not None and trainer is not self._trainer):
            return None
        books.close()
        if self._stand_in is not None:
            self._stand_in.forget(self)
        self._trainer = self._books = self._stand_in = None
        return books


def turns(entry: str) -> Callable[..., None]:
    """Returns a hook of a callback that turns its books to an entry."""

    @_lightning.never_raises
    def hook(self: Any, *_: Any) -> None:
        self._books.turn(entry)

    return hook
