"""Means over a window of steps, and what each kind of logger gets of them."""

import math
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Protocol

from lightning_gputime._measurement.observers import ReadSteps, metrics_of
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.sums import Sums
from lightning_gputime._measurement.untimed import Estimate
from lightning_gputime._messages import format_value, messages
from lightning_gputime._phases import (
    BETWEEN_BATCHES,
    CALLBACK_WAIT,
    CALLBACKS,
    COMM,
    StepRecord,
    StepTimes,
    is_wait,
)

# What single callbacks begin with, which are not logged. Each log asks: no call of a function.
_ONE_CALLBACK = f"{CALLBACKS}/"

# By the name of a value, its group where that is not the one of the phases.
_GROUPS = (
    (re.compile(r"step_ms$"), "step"),
    (re.compile(r"host_wait_ms$"), "host"),
    (re.compile(r"items_per_sec$|(for|back)ward_tflops$|mfu$"), "work"),
    (re.compile(r".+_gpu_busy_ms$|step_launch_gap_ms$"), "gaps"),
    (re.compile(r"slow(_excess_ms$|/)|lasting_change_ms$"), "slow"),
    (re.compile(r"ranks/"), "ranks"),
    (re.compile(r"fit/"), "fit"),
    (re.compile(rf".+/{COMM}_ms$"), "comm"),
    (re.compile(r".+/"), "parts"),
)
GROUPS = ("phases", *(group for _, group in _GROUPS))


class MetricsLogger(Protocol):
    """What a logger must have. Lightning's and Fabric's loggers do, and the module `mlflow`."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> Any:
        """Store `metrics` under `step`."""


class MeanLog:
    """Send the means since the last log to the loggers, every n steps.

    Args:
        prefix: First part of each key.
        every_n_steps: The steps `n - 1`, `2 n - 1`, ... are logged, as Lightning counts them, or
            the next one where such a number is skipped; with 0 none is.
        loggers: Get the means, under keys with their own separator.
        publish: Also gets them, under keys with "/".
        stage: Second part of each key, such as "val"; empty for training.
        row: What loggers also get in the row of a step, under keys as they are.
        kept: Gets all values of each log, as JSON.
    """

    def __init__(
        self,
        prefix: str,
        every_n_steps: int,
        loggers: Sequence[MetricsLogger],
        publish: Callable[[Mapping[str, float]], None] | None = None,
        *,
        stage: str = "",
        row: Mapping[str, float] = MappingProxyType({}),
        kept: deque[dict[str, Any]] | None = None,
    ) -> None:
        self._prefix, self._stage, self._row, self._kept = prefix, stage, row, kept
        self.every_n_steps = every_n_steps
        self.loggers = loggers
        self._publish = publish
        self.on_logged: Callable[[], object] = lambda: None
        """Called where steps that were read are logged."""
        # What is logged beside the means: slow steps, work, probes and observers of these.
        self.results: Results | None = None
        self.groups: Collection[str] = GROUPS  # Of the values that are logged.
        self.newest: int | None = None
        """The number of the newest step that was added, or of the one before the first."""
        self.is_owed = False  # Whether a step that is to be logged has finished, and is not read.
        self.is_sampled = False
        """True where not every step is timed: then `log_at` logs, and not what is read."""
        self._logged_until: int | None = None  # Where sampled: the number of the last step logged.
        self._host_wait_ms = math.nan
        self._sums = Sums()
        self._logged = -1
        self._failed = False

    def begin(self) -> None:
        for one in self.loggers:
            self._try(partial(add_charts, one, self._prefix))

    def start(self, before: int) -> None:
        if self.newest is None:
            self.newest = self._logged_until = before

    def next_due(self, step: int) -> float:
        """Return the number from which on a step is logged, if `step` is the last before."""
        every = self.every_n_steps
        return ((step + 1) // every + 1) * every - 1 if every else math.inf

    def note_finished(self, step: int) -> None:
        """Note the number of the newest step that has finished: a log may be owed by now."""
        before = self._logged_until if self.is_sampled else self.newest
        self.is_owed = before is not None and step >= self.next_due(before)

    def log_at(self, step: int) -> None:
        """Log the steps since the last log up to this number, of which some were timed."""
        self.newest, self._logged_until, self.is_owed = step, step, False
        self.log_means()

    def steps_read(self, steps: ReadSteps) -> None:
        if self.is_sampled:
            self._take(steps.records, steps.sums)
        elif self.add(steps.records, steps.sums):
            self.is_owed = False
            self.on_logged()

    def add(self, steps: Sequence[StepRecord], sums: Sums | None = None) -> bool:
        """Take the next steps, and their sums if these are known. Return whether one was logged."""
        due = self.next_due(steps[0].number - 1 if self.newest is None else self.newest)
        first = 0
        if steps[-1].number >= due:
            # A loop and no recursion: one batch may hold more logs than calls may nest.
            for i, step in enumerate(steps, 1):
                if step.number >= due:
                    self._take(steps[first:i], sums if i - first == len(steps) else None)
                    self.log_means()
                    first, due = i, self.next_due(step.number)
        if first < len(steps):
            self._take(steps[first:], None if first else sums)
        return first > 0

    def _take(self, steps: Sequence[StepRecord], sums: Sums | None) -> None:
        self._sums.merge(Sums(steps) if sums is None else sums)
        self.newest = steps[-1].number

    def log_means(self, *, only_publish: bool = False) -> None:
        """Log the steps since the last log, if there are any, under the newest one's number.

        With `only_publish` their means are published, and kept for the next log.
        """
        timed, untimed = self._sums, Estimate()
        if self.is_sampled and self.results is not None:
            has_timed = timed.step.n > 0
            untimed = self.results.untimed_since_log(restart=not only_publish, has_timed=has_timed)
        if not only_publish:
            self._sums = Sums()
            if not self.every_n_steps:
                return
        sums = timed.plus(untimed.sums)
        steps = sums.step.n + untimed.unsampled_steps
        if sums.step.n and self.newest is not None:
            means = {name: phase.device_ms / phase.n for name, phase in sums.phases.items()}
            means |= {"step": (sums.step.device_ms + untimed.unsampled_ms) / steps}
            if timed.step.n:
                self._host_wait_ms = timed.wait_ms / timed.step.n
            if self._host_wait_ms == self._host_wait_ms:
                means |= {"host_wait": self._host_wait_ms}
            beside, own = dict[str, float](), dict[str, float]()
            if (results := self.results) is not None:
                if results.newest_probed is not None and not results.probe_failure:
                    means |= _busy_means(means, results.newest_probed.times())
                if results.slow.is_followed:
                    means |= results.slow.metrics(
                        self.newest, int(timed.step.n) or 1, keep=only_publish
                    )
                if (change := results.slowdown) is not None:
                    means["lasting_change"] = change.change * change.before_ms
                beside = results.throughput.metrics(sums)
                if results.memory is not None and not only_publish:
                    results.memory.read()
            values = {
                f"{name}_ms": ms
                for name, ms in means.items()
                if not name.startswith(_ONE_CALLBACK) or name == CALLBACK_WAIT
            }
            values |= beside
            if results is not None and results.observers:
                own = metrics_of(results.observers, values)
            self.log_values(values, self.newest, own, only_publish=only_publish)

    def log_values(
        self,
        values: Mapping[str, float],
        step: int,
        own: Mapping[str, float] = MappingProxyType({}),
        *,
        only_publish: bool = False,
    ) -> None:
        """Log `values`, of the groups that are wanted, and a user's `own`.

        They are logged under the number of the step, or of the last log if that is newer.
        """
        if self._kept is not None:
            self._kept.append({"stage": self._stage, "step": step, **values, **own})
        wanted = {name: one for name, one in values.items() if group_of(name) in self.groups}
        wanted |= own
        if not wanted:
            return
        if not only_publish:
            # Some loggers drop what comes under a number that is behind.
            step = self._logged = max(step, self._logged)
            # With one call: CSV writes a row a call, W&B counts a step, MLflow sends a request.
            for one in self.loggers:
                self._try(partial(send, one, self._prefix, self._stage, wanted, step, self._row))
        if self._publish is not None:
            metrics = {key(self._prefix, self._stage, name): ms for name, ms in wanted.items()}
            self._try(partial(self._publish, metrics))

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # As of one whose server is away: training goes on.
            if not self._failed:
                messages.warning("Cannot log phase times: %r", error)
            self._failed = True


@lru_cache(maxsize=1000)
def group_of(name: str) -> str:
    return next((group for pattern, group in _GROUPS if pattern.match(name)), "phases")


def _busy_means(means: Mapping[str, float], probed: StepTimes) -> dict[str, float]:
    """Return the times of a step that was probed, and how long the device waits for launches."""
    busy = {**probed.phase_ms, "step": probed.step_ms}
    # Between batches the device waits for the loader or for callbacks, in `comm` for other ranks.
    as_run_ms, busy_ms = (
        of["step"] - sum(of.get(name, 0.0) for name in BETWEEN_BATCHES) for of in (means, busy)
    )
    waits = (name for name in means if is_wait(name))
    comm_ms = sum(means[name] for name in waits if name.partition("/")[0] not in BETWEEN_BATCHES)
    gap_ms = max(as_run_ms - comm_ms - busy_ms, 0.0)
    return {**{f"{name}_gpu_busy": ms for name, ms in busy.items()}, "step_launch_gap": gap_ms}


def add_charts(logger: MetricsLogger, prefix: str) -> None:
    """Give TensorBoard its charts of all phases. Call as training begins.

    Of several layouts TensorBoard shows the last: one of the user's own may come later.
    """
    writer = _tensorboard_writer(logger)
    if writer is not None:
        own = re.escape(prefix)  # It finds phases by regular expressions.
        charts = {
            "phases (ms)": ["Multiline", [rf"^{own}/(?!step_ms$)[^/]+_ms$"]],
            "step (ms)": ["Multiline", [rf"^{own}/step_ms$"]],
        }
        writer.add_custom_scalars({prefix: charts})


def send(
    logger: MetricsLogger,
    prefix: str,
    stage: str,
    values: Mapping[str, float],
    step: int,
    beside: Mapping[str, float],
) -> None:
    """Log `values` under keys with the prefix, and `beside` in the same row under keys as they are.

    TensorBoard groups its charts by what stands before the first "/" of a tag. So that the phases
    stand alone there, all else has a group of its own: "phase_time_val/forward_ms".
    """
    if _tensorboard_writer(logger) is None:
        separator = getattr(logger, "group_separator", "/")
        own = {key(prefix, stage, name): value for name, value in values.items()}
        own = {name.replace("/", separator): value for name, value in own.items()} | {**beside}
    else:
        # Lightning logs there what stands beside, at every step that it logs itself.
        own = {_tag(prefix, stage, name): value for name, value in values.items()}
    # By keyword, as Lightning and Fabric do: what stands in for a logger may look for it.
    logger.log_metrics(metrics=own, step=step)


def _tag(prefix: str, stage: str, name: str) -> str:
    group = stage or group_of(name)
    if group in ("phases", "step"):
        return key(prefix, "", name)
    first, slash, rest = prefix.partition("/")
    return f"{first}_{group}{slash}{rest}/{name.removeprefix(f'{group}/')}"


def key(prefix: str, stage: str, name: str) -> str:
    return "/".join(filter(None, (prefix, stage, name)))


def _tensorboard_writer(logger: MetricsLogger) -> Any:
    """Return what writes TensorBoard's files, if the logger has one."""
    experiment = getattr(logger, "experiment", None)
    # Of the class: on ranks that log nothing an experiment has whatever one asks for.
    return experiment if hasattr(type(experiment), "add_custom_scalars") else None


def check_loggers(logger: Any) -> list[MetricsLogger]:
    """Return the loggers of an option that takes none, one or several; raise for what is none."""
    several = logger if isinstance(logger, list | tuple) else [logger]
    several = [] if logger is None else [*several]
    for one in several:
        if not callable(getattr(one, "log_metrics", None)):
            raise TypeError(
                f"logger must have a method log_metrics(metrics, step), got {format_value(one)};"
                " Lightning's loggers have it, such as TensorBoardLogger"
            )
    return several
