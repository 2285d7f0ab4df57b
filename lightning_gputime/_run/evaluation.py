"""Timing of the steps of an evaluation loop: `data`, `forward`, `other`."""

from collections.abc import Callable, Mapping
from typing import Any

from lightning_gputime._boundaries.boundaries import Boundaries
from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._options import Options
from lightning_gputime._phases import OTHER
from lightning_gputime._record.backlog import BATCH
from lightning_gputime._record.clock import Clock
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.means import MeanLog
from lightning_gputime._results.results import Results
from lightning_gputime._results.sums import Sums
from lightning_gputime._work.items import Items


class Evaluation:
    """One run of an evaluation loop, whose means are logged when it ends.

    Args:
        clock: Where events and host times come from.
        loop: What is hooked.
        means: Log the steps; nothing must be due before the end.
        results: Keep every step for the user.
        lag: How many ended steps the device may still be at work on.
        number: The number that the means are logged under.
        items: A function that tells the items of a batch, if there is one.
    """

    def __init__(
        self,
        clock: Clock,
        loop: Loop,
        means: MeanLog,
        results: Results,
        *,
        lag: int,
        number: int,
        items: Any = None,
    ) -> None:
        self._number = number
        self._means, self._results = means, results
        self._items = Items(items)
        self._recorder = Recorder(clock, lag=lag, emit=self._add, batch=BATCH)
        self._batch = loop.batch
        # Until the first batch, and between batches, calls of the model are other callbacks'.
        self._batch.is_open = False
        self._boundaries = Boundaries(self._recorder, loop)
        self._recorder.begin()

    def _add(self, steps: list[StepRecord]) -> None:
        sums = Sums(steps)
        self._means.add(steps, sums)
        self._results.add(steps, sums)

    def batch_begins(self, batch: object = None) -> None:
        """Says that the batch is there: its fetch is over."""
        self._batch.is_open = True
        self._recorder.mark(OTHER)
        self._recorder.load = (self._items.of(batch),)

    def batch_ends(self) -> None:
        """Says that the step of this batch is over."""
        self._batch.is_open = False
        self._boundaries.step_ended()
        self._recorder.end_step(self._number)

    def finish(self) -> None:
        """Reads the last steps, logs the means, and takes everything off."""
        self._recorder.flush()
        self.abort()
        self._means.log_means()

    def abort(self) -> None:
        """Takes everything off."""
        self._boundaries.remove()
        self._recorder.rest()


class Evaluating:
    """The evaluations of a trainer, one at a time; who knows the trainer starts them.

    Args:
        options: How steps are timed.
        keep: Is called with the stage, the number and the means of each.
    """

    def __init__(
        self, options: Options, keep: Callable[[str, int, Mapping[str, float]], None]
    ) -> None:
        self._options, self._keep = options, keep
        self._now: Evaluation | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_now": None}  # Events cannot be pickled.

    @property
    def is_running(self) -> bool:
        """Whether one runs."""
        return self._now is not None

    def batch_ends(self) -> None:
        """Says that the step of a batch is over."""
        if self._now is not None:
            self._now.batch_ends()

    def end(self) -> None:
        """Says that it is over."""
        if self._now is not None:
            self._now.finish()
            self._now = None

    def abort(self) -> None:
        """Ends it without a wait for the device."""
        if self._now is not None:
            self._now.abort()
            self._now = None
