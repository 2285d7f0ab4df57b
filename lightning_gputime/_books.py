"""The ledger of a fit, from its setup to its end."""

import time
from collections.abc import Callable
from typing import Any

from lightning_gputime import _lightning
from lightning_gputime._actions import Actions
from lightning_gputime._boundaries.patching import Subscription, patch_function
from lightning_gputime._messages import messages
from lightning_gputime._phases import StepTimes
from lightning_gputime._record.clock import Clock
from lightning_gputime._results.ledger import REST, WallTimeRecorder

# The action by which a Trainer says that it saves a checkpoint.
_SAVES = "save_checkpoint"


class FitBooks:
    """Keeps the books of one fit at a time, and hears of each checkpoint that its trainer saves."""

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock
        self._trainer: _lightning.Trainer | None = None
        self._books: WallTimeRecorder | None = None
        self._saves: Actions | None = None
        self._save: Subscription | None = None

    def __getstate__(self) -> dict[str, Any]:
        # No copy needs the trainer.
        return {**self.__dict__, "_trainer": None, "_books": None, "_saves": None, "_save": None}

    def open(self, trainer: _lightning.Trainer) -> WallTimeRecorder:
        """Begin those of a trainer, or return them if they are open."""
        if self._books is None or trainer is not self._trainer:
            self.close()
            now_ns = time.perf_counter_ns if self._clock is None else self._clock.host_ns
            self._books, self._trainer = WallTimeRecorder(now_ns), trainer
            profiler, is_idle = _lightning.profiler_of(trainer)
            calls = {_SAVES: self._save_begins}
            self._saves = Actions(profiler, calls, _tell, is_idle=is_idle)
        return self._books

    def turn(self, entry: str) -> None:
        """Attribute time to another entry from now on."""
        if self._books is not None:
            self._books.switch_to(entry)

    def training_ends(self, prefix: str, last: StepTimes | None) -> None:
        """End the training, and log the fraction of each entry under the last step."""
        self.turn(REST)
        if self._books is not None and self._trainer is not None and last is not None:
            log = _lightning.mean_log_of(self._trainer, prefix)
            log.log_values(self._books.metrics(), last.step)

    def _save_begins(self) -> None:
        if self._books is not None and self._trainer is not None and self._save is None:
            self._books.save_begins()
            # Only until then: a step has dozens of actions that end.
            profiler, _ = _lightning.profiler_of(self._trainer)
            self._save = patch_function(profiler, "stop", self)

    def call_begins(self, action_name: str = "", *_: Any, **__: Any) -> bool:
        """Handle the end of an action, which may be that of the checkpoint."""
        if action_name == _SAVES:
            self._save_ends()
        return False

    def call_ends(self, result: Any = None) -> None:
        """Is never called."""

    def _save_ends(self) -> None:
        save, self._save = self._save, None
        if save is not None and self._books is not None:
            save.remove()
            self._books.save_ends()

    def close(self, trainer: _lightning.Trainer | None = None) -> WallTimeRecorder | None:
        """End and return those that are open, if they are of this trainer. Safe to call twice."""
        books = self._books
        if books is None or (trainer is not None and trainer is not self._trainer):
            return None
        self._save_ends()
        books.remove()
        if self._saves is not None:
            self._saves.remove()
        self._trainer = self._books = self._saves = None
        return books


def _tell(error: Exception) -> None:
    messages.warning("The time of checkpoints is not told: %r", error)


def turns(entry: str) -> Callable[..., None]:
    """Return a hook of a callback that attributes time to an entry."""

    @_lightning.never_raises
    def hook(self: Any, *_: Any) -> None:
        self._books.turn(entry)

    return hook
