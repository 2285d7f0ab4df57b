"""Timing of evaluation loops: `data`, `forward`, `other`."""

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lightning_gputime._boundaries.boundaries import Boundaries
from lightning_gputime._boundaries.loop import Batch, Loop
from lightning_gputime._measurement.advice import TrainingSetup
from lightning_gputime._measurement.means import MeanLog, MetricsLogger
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.sums import ThroughputReference
from lightning_gputime._options import Options
from lightning_gputime._phases import OTHER, StepRecord
from lightning_gputime._record.clock import Clock, HostClock
from lightning_gputime._record.pending_steps import BATCH
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._work.work import Items


class Evaluations:
    """Time the evaluation loops of a trainer, one at a time, apart from its training.

    While none runs, all methods but `start` do nothing.
    """

    # Of the loop that runs; set by `start`.
    _boundaries: Boundaries
    _means: MeanLog
    _results: Results
    _batch: Batch
    _now_ns: Callable[[], int]
    _number: int

    def __init__(self, options: Options) -> None:
        self._options = options
        # A number is of the batches of training.
        self._items = Items(options.items if callable(options.items) else None)
        self._recorder: Recorder | None = None
        self.means: deque[dict[str, Any]] = deque(maxlen=1000)  # Of each loop, as JSON objects.
        self.results: dict[str, Results] = {}  # Of the newest loop of each stage, the newest last.

    def __getstate__(self) -> dict[str, Any]:
        # Events cannot be pickled.
        own = {"_options": self._options, "_items": self._items}
        kept = {**own, "means": self.means, "results": self.results}
        return {**kept, "_recorder": None}

    @property
    def is_running(self) -> bool:
        return self._recorder is not None

    def start(
        self,
        stage: str,
        clock: Clock,
        loop: Loop,
        number: int,
        publish: Callable[[Mapping[str, float]], None],
        loggers: Sequence[MetricsLogger] = (),
        *,
        row: Mapping[str, float] = MappingProxyType({}),
        setup: TrainingSetup | None = None,
    ) -> None:
        """Start to time a loop, in place of the one that runs; log its means under `number`."""
        self.abort()
        options = self._options
        self._results = results = Results(options.history_size, 0, isinstance(clock, HostClock))
        results.setup = setup or results.setup
        results.throughput = ThroughputReference(self._items.source)
        self.results.pop(stage, None)
        self.results[stage] = results
        # Nothing is due before the end.
        self._means = means = MeanLog(
            options.prefix, sys.maxsize, loggers, publish, stage=stage, row=row, kept=self.means
        )
        means.results, means.groups = results, options.logged_groups
        self._now_ns, self._batch_ended_ns = clock.host_ns, clock.host_ns()
        self._number, self._batch = number, loop.batch
        # Until the first batch, and between batches, calls of the model are other callbacks'.
        self._batch.is_open = False
        self._recorder = Recorder(clock, lag=options._lag, emit=self._steps_read, batch=BATCH)
        self._boundaries = Boundaries(self._recorder, loop)
        self._recorder.begin()

    def _steps_read(self, records: list[StepRecord]) -> None:
        steps = ReadSteps(records, warmup=0)
        self._means.steps_read(steps)
        self._results.steps_read(steps)

    def batch_begins(self, batch: object) -> None:
        if self._recorder is not None:
            self._batch.is_open = True
            self._recorder.mark(OTHER)
            self._recorder.items = self._items.of(batch)

    def batch_ends(self) -> None:
        if self._recorder is not None:
            self._batch.is_open = False
            self._boundaries.step_ended()
            self._recorder.end_step(self._number)
            self._batch_ended_ns = self._now_ns()

    def end(self) -> int:
        """End the loop; return the time since its last batch (in nanoseconds)."""
        if self._recorder is None:
            return 0
        since_ns = self._now_ns() - self._batch_ended_ns
        self._recorder.flush()
        means = self._means
        self.abort()
        means.log_means()
        return since_ns

    def abort(self) -> None:
        """Remove all hooks, without a wait for the device. Safe to call twice."""
        if self._recorder is not None:
            self._boundaries.remove()
            self._recorder.rest()
            self._recorder = None
            del self._boundaries, self._means  # They hold the model.
