"""Means over a window of steps, sent to loggers."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lightning_gputime._events import log
from lightning_gputime._phases import StepTimes


class MetricsLogger(Protocol):
    """What a logger must have. Lightning's and Fabric's loggers do, and the module `mlflow`."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> Any:
        """Stores `metrics` under `step`."""


class PhaseLog:
    """Sends the means since the last log to the loggers, once every so many steps.

    Args:
        prefix: First part of each key.
        every_n_steps: The steps `n - 1`, `2 n - 1`, ... are logged, as Lightning counts them, or
            the next one where such a number is skipped; with 0 none is.
        loggers: Where to.
        publish: Also gets the metrics, under keys with "/".
    """

    def __init__(
        self,
        prefix: str,
        every_n_steps: int,
        loggers: Sequence[MetricsLogger],
        publish: Callable[[Mapping[str, float]], None] | None = None,
    ) -> None:
        self._prefix = prefix
        self._every_n_steps = every_n_steps
        self._loggers = loggers
        self._publish = publish
        # For each phase, the step and the wait: the sum of its times, and how many they are.
        self._sums: dict[str, list[float]] = {}
        self._newest: int | None = None
        self._failed = False

    def is_due(self, step: int, before: int) -> bool:
        """Tells whether the means are logged under the number `step`, if `before` is the last."""
        every = self._every_n_steps
        return bool(every) and (step + 1) // every > (before + 1) // every

    def add(self, times: StepTimes) -> bool:
        """Takes the times of the next step, and logs if it is one that is due. Tells if it did."""
        if not self._every_n_steps:
            return False
        before = times.step - 1 if self._newest is None else self._newest
        self._newest = times.step
        self._sum(times.phase_ms)
        self._sum({"step": times.step_ms, "host_wait": times.host_wait_ms})
        if is_due := self.is_due(times.step, before):
            self.log()
        return is_due

    def _sum(self, values: Mapping[str, float]) -> None:
        sums = self._sums
        for name, ms in values.items():
            if name in sums:
                sums[name][0] += ms
                sums[name][1] += 1
            else:
                sums[name] = [ms, 1]

    def log(self) -> None:
        """Logs the steps since the last log, if there are any, under the newest one's number."""
        if not self._sums:
            return
        means = {f"{name}_ms": ms / n for name, (ms, n) in self._sums.items()}
        self._sums.clear()
        self.log_now(means)

    def log_now(self, values: Mapping[str, float]) -> None:
        """Logs `values` under the number of the newest step, if there is one."""
        if self._newest is None:
            return
        step = self._newest
        metrics = {f"{self._prefix}/{name}": value for name, value in values.items()}
        for logger in self._loggers:
            separator = getattr(logger, "group_separator", "/")
            own = {key.replace("/", separator): value for key, value in metrics.items()}
            self._try(functools.partial(logger.log_metrics, own, step=step))
        if self._publish is not None:
            self._try(functools.partial(self._publish, metrics))

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            if not self._failed:
                log.warning("Phase times could not be logged: %r", error)
            self._failed = True
