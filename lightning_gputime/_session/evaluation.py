"""Timing of evaluation loops. Each batch is a step with the phases `data`, `forward`, `other`."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from types import MappingProxyType
from typing import Any

from lightning_gputime._instrumentation.boundaries import Boundaries
from lightning_gputime._instrumentation.loop import BatchState, Loop
from lightning_gputime._instrumentation.work import Items
from lightning_gputime._measurement.measurement import TrainingSetup
from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.sums import ThroughputReference
from lightning_gputime._options import Options
from lightning_gputime._output.loggers import LogWriter, MeanLog, MetricsLogger
from lightning_gputime._phases import OTHER, StepRecord
from lightning_gputime._record.clock import Clock, HostClock
from lightning_gputime._record.pending_steps import READ_SIZE
from lightning_gputime._record.recorder import Recorder


@dataclass(eq=False)
class _Evaluation:
    """A running evaluation loop. Drop it at the end, because it keeps the model alive."""

    recorder: Recorder
    boundaries: Boundaries
    batch: BatchState
    number: int  # Step number to log the means under.
    log: MeanLog
    batch_ended_ns: int  # Host time.
    n_items: float = nan  # Number of items in the current batch.


class Evaluations:
    """Timing of a trainer's evaluation loops, one at a time and separate from its training.

    While no loop runs, all methods except `start` do nothing.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        # A fixed number of items applies to training batches only.
        self._items = Items(options.items if callable(options.items) else None)
        self._running: _Evaluation | None = None
        self.means: deque[dict[str, Any]] = deque(maxlen=1000)
        """Means of each loop, as JSON objects."""
        self.results: dict[str, Results] = {}
        """Results of the newest loop of each stage, the newest loop last."""

    def __getstate__(self) -> dict[str, Any]:
        # Events cannot be pickled.
        return {**self.__dict__, "_running": None, "means": self.means.copy()}

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
        """Start timing a loop of a stage: "val", "test" or "predict". Abort a loop that runs.

        Log the means under the step `number`. See `LogWriter` for `publish` and `row`.
        """
        self.abort()
        options = self._options
        results = Results(
            options.history_size,
            warmup_steps=0,
            on_host_clock=isinstance(clock, HostClock),
            setup=setup,
        )
        results.connect(ThroughputReference(self._items.source))
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
        means = MeanLog(every_n_steps=None, writer=writer)
        means.set_source(results, is_sampled=False, is_logged=True)

        def steps_read(records: list[StepRecord], _: int) -> None:
            steps = ReadSteps(records, warmup=0)
            results.steps_read(steps)
            means.take(steps)

        recorder = Recorder(clock, lag=options._lag, emit=steps_read, read_size=READ_SIZE)
        boundaries = Boundaries(recorder, loop)
        # Before the first batch and between batches, callbacks may call the model.
        loop.batch.close()
        # Set before attaching, so that `abort` removes the hooks if attaching is interrupted.
        self._running = _Evaluation(
            recorder, boundaries, loop.batch, number, means, batch_ended_ns=clock.host_ns()
        )
        try:
            boundaries.attach()
            recorder.begin()
        except BaseException:
            self.abort()
            raise

    def batch_begins(self, batch: object) -> None:
        if (running := self._running) is not None:
            running.batch.open()
            running.recorder.mark(OTHER)
            running.n_items = self._items.of(batch)

    def batch_ends(self) -> None:
        if (running := self._running) is not None:
            running.batch.close()
            running.boundaries.step_ended()
            running.recorder.end_step(running.number, items=running.n_items)
            running.batch_ended_ns = running.recorder.clock.host_ns()

    def end(self) -> int:
        """End the loop, and log its means. Return the time since its last batch in nanoseconds."""
        if (running := self._running) is None:
            return 0
        try:
            since_ns = running.recorder.clock.host_ns() - running.batch_ended_ns
            running.recorder.pending.flush()
        finally:
            self.abort()
        running.log.log_means()
        return since_ns

    def abort(self) -> None:
        """Remove all hooks without waiting for the device. Safe to call twice."""
        if self._running is not None:
            self._running.boundaries.remove()
            self._running.recorder.stop()
            self._running = None
