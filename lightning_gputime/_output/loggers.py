"""Logs: means since the last log, their groups and keys, and how each kind of logger is called."""

import math
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol

from lightning_gputime._measurement.observers import ReadSteps
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.sums import Sums
from lightning_gputime._measurement.untimed import Estimate
from lightning_gputime._messages import format_value, messages
from lightning_gputime._phases import COMM

# Patterns of the names of values, and their group. The first match counts; without a match, the
# group is "phases".
_GROUPS = (
    (re.compile(r"step_ms$"), "step"),
    (re.compile(r"host_wait_ms$"), "host"),
    (re.compile(r"items_per_sec$|(for|back)ward_tflops$|mfu$"), "work"),
    (re.compile(r"slow(_excess_ms$|/)|lasting_change_ms$"), "slow"),
    (re.compile(r"ranks/"), "ranks"),
    (re.compile(r"fit/"), "fit"),
    (re.compile(rf".+/{COMM}_ms$"), "comm"),
    (re.compile(r".+/"), "parts"),
)
GROUPS = ("phases", *(group for _, group in _GROUPS))


class MetricsLogger(Protocol):
    """Interface of a logger, as in Lightning, in Fabric and in the module `mlflow`."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> Any:
        """Store `metrics` under `step`."""


class LogWriter:
    """Writer of values to loggers."""

    def __init__(
        self,
        prefix: str,  # First part of each key.
        loggers: Sequence[MetricsLogger],  # Each gets keys with its own separator.
        # Also called with the values, under keys with "/".
        publish: Callable[[Mapping[str, float]], None] | None = None,
        *,
        groups: Collection[str] = GROUPS,  # Groups of values to write.
        stage: str = "",  # Second part of each key, such as "val"; empty for training.
        # Further values to log in the same row, under keys without the prefix.
        row: Mapping[str, float] = MappingProxyType({}),
        # Gets all values of each log, of any group, as one JSON object.
        kept: deque[dict[str, Any]] | None = None,
    ) -> None:
        self._prefix, self._stage, self._row, self._kept = prefix, stage, row, kept
        self._loggers, self._groups, self._publish = loggers, groups, publish
        self._last_step = -1  # Largest step number that was logged.
        self._has_failed = False  # True once a logger has raised, which was reported.

    @property
    def has_rows(self) -> bool:
        """True if each log is stored. Values that are only published replace the earlier."""
        return bool(self._loggers) or self._kept is not None

    @property
    def has_destination(self) -> bool:
        return self.has_rows or self._publish is not None

    def begin(self) -> None:
        """Add charts to TensorBoard. Call it early: a later layout, as the user's, replaces it."""
        pattern = re.escape(self._prefix)  # TensorBoard matches tags by regular expressions.
        charts = {
            "phases (ms)": ["Multiline", [rf"^{pattern}/(?!step_ms$)[^/]+_ms$"]],
            "step (ms)": ["Multiline", [rf"^{pattern}/step_ms$"]],
        }
        for logger in self._loggers:
            with self._reported_errors():
                if (writer := _tensorboard_writer(logger)) is not None:
                    writer.add_custom_scalars({self._prefix: charts})

    def write(
        self,
        values: Mapping[str, float],
        step: int,
        added: Mapping[str, float] = MappingProxyType({}),
        *,
        only_publish: bool = False,
    ) -> None:
        """Log the `values` whose group is in `groups`, and all values that observers `added`."""
        if self._kept is not None:
            self._kept.append({"stage": self._stage, "step": step, **values, **added})
        wanted = {name: value for name, value in values.items() if group_of(name) in self._groups}
        wanted |= added
        if not wanted:
            return
        metrics = {_key(self._prefix, self._stage, name): value for name, value in wanted.items()}
        if not only_publish:
            # Some loggers drop values whose step is smaller than the last step.
            step = self._last_step = max(step, self._last_step)
            for logger in self._loggers:
                with self._reported_errors():
                    if _tensorboard_writer(logger) is not None:
                        # Lightning itself adds the values of `row` to TensorBoard.
                        logged = {self._tag(name): value for name, value in wanted.items()}
                    else:
                        separator = getattr(logger, "group_separator", "/")
                        logged = {
                            name.replace("/", separator): value for name, value in metrics.items()
                        }
                        logged |= self._row
                    # Call it once, because a call is a row of CSV, or a request to MLflow. Pass
                    # keywords, as Lightning does: a wrapper may look up arguments by name.
                    logger.log_metrics(metrics=logged, step=step)
        if self._publish is not None:
            with self._reported_errors():
                self._publish(metrics)

    def _tag(self, name: str) -> str:
        """Return a tag for TensorBoard, such as "phase_time_val/forward_ms".

        TensorBoard groups charts by the part of a tag before the first "/". So values other than
        phases get a group of their stage or kind: "phase_time_val" or "phase_time_ranks".
        """
        group = self._stage or group_of(name)
        if group in ("phases", "step"):
            return _key(self._prefix, "", name)
        first, slash, rest = self._prefix.partition("/")
        return f"{first}_{group}{slash}{rest}/{name.removeprefix(f'{group}/')}"

    @contextmanager
    def _reported_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Keep training, for example if the server is down.
            if not self._has_failed:
                messages.warning("Cannot log phase times: %r", error)
            self._has_failed = True


class MeanLog:
    """Write the means since the last log, every n steps. Call `set_source` before others.

    It logs at steps `n - 1`, `2 n - 1` and so on, as Lightning does, or at the next step if that
    number is skipped. If n is 0, nothing is logged; if it is None, only `log_means` logs.
    """

    def __init__(self, every_n_steps: int | None, writer: LogWriter) -> None:
        self.every_n_steps, self.writer = every_n_steps, writer
        self.newest: int | None = None
        """Number of the newest step that was added; at first, of the step before the first."""
        self.is_due = False
        """True if the step at which a log is due has finished, but has not been read yet."""
        self.is_logged = True
        """False if no logger, observer or other destination receives the means."""
        self._due_at = math.inf  # Number of the step at which the next log is due.
        # Mean host wait of the newest log with timed steps. Logs without timed steps repeat it.
        self._host_wait_ms = math.nan
        self._sums = Sums()  # Timed steps since the last log.

    def set_source(self, results: Results, *, is_sampled: bool, is_logged: bool) -> None:
        """Set the facts to log. Steps must be added to `results` before they are added here.

        Args:
            results: Facts to log.
            is_sampled: True if some steps are not timed. Then `take` never logs: call `log_at`.
            is_logged: False if no logger, observer or other destination receives the means.
        """
        self._results, self._is_sampled, self.is_logged = results, is_sampled, is_logged

    def start(self, before: int) -> None:
        """Set the number of the step before the first, unless a step was added."""
        if self.newest is None:
            self.newest, self._due_at = before, self.next_due(before)

    def next_due(self, step: int) -> float:
        """Return the number of the first step after `step` at which a log is due.

        Example: every 50 steps, 49 is due after -1, and 99 after 49.
        """
        every = self.every_n_steps
        return ((step + 1) // every + 1) * every - 1 if every else math.inf

    def step_finished(self, step: int) -> None:
        """Update `is_due` after the step of this number has finished."""
        self.is_due = step >= self._due_at

    def log_at(self, step: int, *, until: int = 0) -> None:
        """Log the steps since the last log up to this number.

        If these steps are not settled, `until` is the index of the first step after them.
        """
        self.newest, self._due_at, self.is_due = step, self.next_due(step), False
        self.log_means(until=until)

    def take(self, steps: ReadSteps) -> bool:
        """Add steps that `results` already includes. Return True if a log was written."""
        records, has_logged = steps.records, False
        n, start = len(records), 0  # The steps from `start` on are still to be added.
        if not self._is_sampled:
            self.start(records[0].number - 1)
        for end, step in enumerate(records, 1):
            is_due = step.number >= self._due_at and not self._is_sampled
            if is_due or end == n:
                is_all = end - start == n  # Then their sums are known.
                self._sums.merge(steps.sums if is_all else Sums(records[start:end]))
                start, self.newest = end, step.number
            if is_due:
                self.log_at(step.number)
                has_logged = True
        return has_logged

    def log_means(self, *, only_publish: bool = False, until: int = 0) -> None:
        """Log the means over the steps since the last log, under the number of the newest step.

        With `only_publish`, publish the means without a log, and keep the steps for the next log.
        See `log_at` for `until`.
        """
        sums, results, untimed = self._sums, self._results, Estimate()
        if not only_publish:
            if sums.step.n:
                self._sums = Sums()
            results.read_memory()
        if not self.is_logged or (self.every_n_steps == 0 and not only_publish):
            return
        timed_steps = int(sums.step.n)
        if self._is_sampled:
            untimed = results.log_untimed(
                self.newest or 0, until, has_timed=timed_steps > 0, only_publish=only_publish
            )
        every = sums.plus(untimed.sums)
        if self.newest is None or not every.step.n:
            return
        if timed_steps:
            self._host_wait_ms = sums.wait_ms / timed_steps
        means_ms = {name: phase.device_ms / phase.n for name, phase in every.phases.items()}
        steps = every.step.n + untimed.unsampled_steps
        means_ms["step"] = (every.step.device_ms + untimed.unsampled_ms) / steps
        if not math.isnan(self._host_wait_ms):
            means_ms["host_wait"] = self._host_wait_ms
        values, added = results.log_values(
            self.newest, timed_steps, every, means_ms, keep=only_publish
        )
        if self._is_sampled:  # In all rows, because a CSV file has the columns of its first row.
            values["estimated"] = float(not timed_steps)
        self.writer.write(values, self.newest, added, only_publish=only_publish)


@lru_cache(maxsize=1000)
def group_of(name: str) -> str:
    return next((group for pattern, group in _GROUPS if pattern.match(name)), "phases")


def _key(prefix: str, stage: str, name: str) -> str:
    return "/".join(filter(None, (prefix, stage, name)))


def _tensorboard_writer(logger: MetricsLogger) -> Any:
    experiment = getattr(logger, "experiment", None)
    # Check the class: on ranks that do not log, the experiment is a dummy with every attribute.
    return experiment if hasattr(type(experiment), "add_custom_scalars") else None


def check_loggers(logger: Any) -> list[MetricsLogger]:
    """Return the value of the option `logger` (None, a logger or several) as a list."""
    loggers = logger if isinstance(logger, list | tuple) else [logger]
    loggers = [] if logger is None else [*loggers]
    for candidate in loggers:
        if not callable(getattr(candidate, "log_metrics", None)):
            raise TypeError(
                "logger must have a method log_metrics(metrics, step), got"
                f" {format_value(candidate)};"
                " Lightning's loggers have it, such as TensorBoardLogger"
            )
    return loggers
