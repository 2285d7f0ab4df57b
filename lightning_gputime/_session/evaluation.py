"""Timing of evaluation loops: `data`, `forward`, `other`."""

from collections.abc import Callable, Mapping
from typing import Any

from lightning_gputime._boundaries.boundaries import Boundaries
from lightning_gputime._boundaries.loop import Batch, Loop
from lightning_gputime._options import Options
from lightning_gputime._phases import OTHER
from lightning_gputime._record.clock import Clock, HostClock
from lightning_gputime._record.pending_steps import BATCH
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.steps import StepRecord
from lightning_gputime._results.advice import TrainingSetup
from lightning_gputime._results.means import MeanLog
from lightning_gputime._results.results import Results
from lightning_gputime._results.sums import Sums
from lightning_gputime._work.work import Items


class Evaluations:
    """The evaluation loops of a trainer, one at a time, apart from its training.

    While none runs, all but `start` do nothing.
    """

    # Of the loop that runs; set by `start`.
    _boundaries: Boundaries
    _means: MeanLog
    _batch: Batch
    _items: Items
    _number: int

    def __init__(self, options: Options) -> None:
        self._options = options
        self._recorder: Recorder | None = None
        self.results: dict[str, Results] = {}  # Of the newest loop of each stage, the newest last.

    def __getstate__(self) -> dict[str, Any]:
        # Events cannot be pickled.
        return {"_options": self._options, "results": self.results, "_recorder": None}

    @property
    def is_running(self) -> bool:
        return self._recorder is not None

    def start(
        self,
        stage: str,
        clock: Clock,
        loop: Loop,
        means: MeanLog,
        *,
        number: int,
        items: Any,
        keep: Callable[[Mapping[str, float]], object],
        setup: TrainingSetup | None = None,
    ) -> None:
        """Start to time a loop, in place of the one that runs.

        The means are logged under `number`, and nothing of them must be due before the end. All of
        them, also those that are not logged, go to `keep`.
        """
        self.abort()
        results = Results(self._options.history_size, 0, isinstance(clock, HostClock))
        results.setup = setup or results.setup
        self.results.pop(stage, None)
        self.results[stage] = results
        means.results, means.groups, means.keep = results, self._options.logged_groups, keep

        def add(steps: list[StepRecord]) -> None:
            sums = Sums(steps)
            means.add(steps, sums)
            results.add(steps, sums)

        self._means, self._number, self._items = means, number, Items(items)
        recorder = Recorder(clock, lag=self._options._lag, emit=add, batch=BATCH)
        self._batch = loop.batch
        # Until the first batch, and between batches, calls of the model are other callbacks'.
        self._batch.is_open = False
        self._boundaries = Boundaries(recorder, loop)
        recorder.begin()
        self._recorder = recorder

    def batch_begins(self, batch: object) -> None:
        if self._recorder is not None:
            self._batch.is_open = True
            self._recorder.mark(OTHER)
            self._recorder.work_counts = (self._items.of(batch),)

    def batch_ends(self) -> None:
        if self._recorder is not None:
            self._batch.is_open = False
            self._boundaries.step_ended()
            self._recorder.end_step(self._number)

    def end(self) -> None:
        if self._recorder is not None:
            self._recorder.flush()
            means = self._means
            self.abort()
            means.log_means()

    def abort(self) -> None:
        """Take everything off, without a wait for the device. Safe to call twice."""
        if self._recorder is not None:
            self._boundaries.remove()
            self._recorder.rest()
            self._recorder = None
            del self._boundaries, self._means  # They hold the model.
