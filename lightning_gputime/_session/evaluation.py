"""Timing of evaluation loops: `data`, `forward`, `other`."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from types import MappingProxyType
from typing import Any

from lightning_gputime._instrumentation.boundaries import Boundaries
from lightning_gputime._instrumentation.loop import Batch, Loop
from lightning_gputime._instrumentation.work import Items
from lightning_gputime._measurement.means import MeanLog
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.setup import TrainingSetup
from lightning_gputime._measurement.sums import ThroughputReference
from lightning_gputime._options import Options
from lightning_gputime._output.loggers import LogWriter, MetricsLogger
from lightning_gputime._phases import OTHER, StepRecord
from lightning_gputime._record.clock import Clock, HostClock
from lightning_gputime._record.pending_steps import BATCH
from lightning_gputime._record.recorder import Recorder


@dataclass(slots=True)
class _Running:
    """An evaluation loop that runs. It holds the model."""

    recorder: Recorder
    boundaries: Boundaries
    means: MeanLog
    batch: Batch
    number: int
    items: float
    now_ns: Callable[[], int]
    batch_ended_ns: int


class Evaluations:
    """Time the evaluation loops of a trainer, one at a time, apart from its training.

    While none runs, all methods but `start` do nothing.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        # A number is of the batches of training.
        self._items = Items(options.items if callable(options.items) else None)
        self._running: _Running | None = None
        self.means: deque[dict[str, Any]] = deque(maxlen=1000)  # Of each loop, as JSON objects.
        self.results: dict[str, Results] = {}  # Of the newest loop of each stage, the newest last.

    def __getstate__(self) -> dict[str, Any]:
        # Events cannot be pickled.
        own = {"_options": self._options, "_items": self._items}
        kept = {**own, "means": self.means, "results": self.results}
        return {**kept, "_running": None}

    @property
    def is_running(self) -> bool:
        return self._running is not None

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
        results = Results(
            options.history_size,
            0,
            isinstance(clock, HostClock),
            setup=setup,
            throughput=ThroughputReference(self._items.source),
        )
        self.results.pop(stage, None)
        self.results[stage] = results
        writer = LogWriter(
            options.prefix,
            loggers,
            publish,
            groups=options.logged_groups,
            stage=stage,
            row=row,
            kept=self.means,
        )
        means = MeanLog(None, writer)
        means.connect(results, is_sampled=False)

        def steps_read(records: list[StepRecord]) -> None:
            steps = ReadSteps(records, warmup=0)
            results.steps_read(steps)
            means.take(steps)

        # Until the first batch, and between batches, calls of the model are other callbacks'.
        loop.batch.is_open = False
        recorder = Recorder(clock, lag=options._lag, emit=steps_read, batch=BATCH)
        boundaries, now_ns = Boundaries(recorder, loop), clock.host_ns
        # Owned before it is attached: `abort` finds whatever is there when this is interrupted.
        self._running = _Running(
            recorder, boundaries, means, loop.batch, number, nan, now_ns, batch_ended_ns=now_ns()
        )
        try:
            boundaries.attach()
            recorder.begin()
        except BaseException:
            self.abort()
            raise

    def batch_begins(self, batch: object) -> None:
        if (running := self._running) is not None:
            running.batch.is_open = True
            running.recorder.mark(OTHER)
            running.items = self._items.of(batch)

    def batch_ends(self) -> None:
        if (running := self._running) is not None:
            running.batch.is_open = False
            running.boundaries.step_ended()
            running.recorder.end_step(running.number, items=running.items)
            running.batch_ended_ns = running.now_ns()

    def end(self) -> int:
        """End the loop; return the time since its last batch (in nanoseconds)."""
        if (running := self._running) is None:
            return 0
        since_ns = running.now_ns() - running.batch_ended_ns
        try:
            running.recorder.pending.flush()
        finally:
            self.abort()
        running.means.log_means()
        return since_ns

    def abort(self) -> None:
        """Remove all hooks, without a wait for the device. Safe to call twice."""
        if (running := self._running) is not None:
            running.boundaries.remove()
            running.recorder.stop()
            self._running = None
