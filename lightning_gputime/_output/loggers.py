"""Values for loggers: their groups, their keys, and how each kind of logger is called."""

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol

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
    def has_destination(self) -> bool:
        return bool(self._loggers) or self._publish is not None or self._kept is not None

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
