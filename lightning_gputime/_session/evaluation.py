"""Timing of evaluation loops. Each batch is a step with the phases `data`, `forward`, `other`."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import nan
from types import MappingProxyType
from typing import Any

from lightning_gputime._instrumentation.boundaries import Boundaries
from lightning_gputime._instrumentation.loop import Loop
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


class _Evaluation:
    """A running evaluation loop. Drop it at the end, because it keeps the model alive.

    Args:
        recorder: Records the batches.
        loop: Model of the loop, and the state of its batch.
        items: Counts the items of each batch.
        number: Step number to log the means under.
        log: Logs the means at the end.
    """

    def __init__(
        self, recorder: Recorder, loop: Loop, items: Items, number: int, log: MeanLog
    ) -> None:
        self._recorder, self._number, self.log = recorder, number, log
        self._boundaries = Boundaries(recorder, loop)
        self._batch, self._items, self._now_ns = loop.batch, items, recorder.clock.host_ns
        self._n_items = nan  # Number of items in the current batch.
        self._batch_ended_ns = self._now_ns()
        # Before the first batch and between batches, callbacks may call the model.
        self._batch.close()

    def attach(self) -> None:
        self._boundaries.attach()
        self._recorder.begin()

    def batch_begins(self, batch: object) -> None:
        self._batch.open()
        self._recorder.mark(OTHER)
        self._n_items = self._items.of(batch)

    def batch_ends(self) -> None:
        self._batch.close()
        self._boundaries.step_ended()
        self._recorder.end_step(self._number, items=self._n_items)
        self._batch_ended_ns = self._now_ns()

    def finish(self) -> int:
        """Read the last batches. Return the time since the last of them (in nanoseconds)."""
        since_ns = self._now_ns() - self._batch_ended_ns
        self._recorder.pending.flush()
        return since_ns

    def remove(self) -> None:
        self._boundaries.remove()
        self._recorder.stop()


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
        return {**self.__dict__, "_running": None}

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
        """Start timing a loop. If another loop is running, abort it.

        Args:
            stage: "val", "test" or "predict".
            clock: Clock of the device.
            loop: Model of the loop, and the state of its batch.
            number: Step number to log the means under.
            publish: See `LogWriter`.
            loggers: Receive the means.
            row: See `LogWriter`.
            setup: Setup of the training.
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
        means.connect(results, is_sampled=False, is_logged=True)

        def steps_read(records: list[StepRecord], _: int) -> None:
            steps = ReadSteps(records, warmup=0)
            results.steps_read(steps)
            means.take(steps)

        recorder = Recorder(clock, lag=options._lag, emit=steps_read, batch=BATCH)
        # Set before attaching, so that `abort` removes the hooks if attaching is interrupted.
        self._running = _Evaluation(recorder, loop, self._items, number, means)
        try:
            self._running.attach()
        except BaseException:
            self.abort()
            raise

    def batch_begins(self, batch: object) -> None:
        if self._running is not None:
            self._running.batch_begins(batch)

    def batch_ends(self) -> None:
        if self._running is not None:
            self._running.batch_ends()

    def end(self) -> int:
        """End the loop, and log its means. Return the time since its last batch in nanoseconds."""
        if (evaluation := self._running) is None:
            return 0
        try:
            since_ns = evaluation.finish()
        finally:
            self.abort()
        evaluation.log.log_means()
        return since_ns

    def abort(self) -> None:
        """Remove all hooks without waiting for the device. Safe to call twice."""
        if self._running is not None:
            self._running.remove()
            self._running = None
