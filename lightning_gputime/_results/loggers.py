"""What each kind of logger gets: keys with its separator; in TensorBoard groups, and a chart."""

import re
from collections.abc import Mapping
from typing import Any, Protocol

from lightning_gputime._messages import shown
from lightning_gputime._phases import COMM


class MetricsLogger(Protocol):
    """What a logger must have. Lightning's and Fabric's loggers do, and the module `mlflow`."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> Any:
        """Store `metrics` under `step`."""


_GROUPS = (
    (re.compile(r"host_wait_ms$"), "host"),
    (re.compile(r".+_peak_mb$"), "memory"),
    (re.compile(r"items_per_s$|.+_tflops$|[mh]fu$"), "work"),
    (re.compile(r".+_busy_ms$|step_gap_ms$"), "gaps"),
    (re.compile(r"slow(_ms$|/)"), "slow"),
    (re.compile(r"ranks/"), "ranks"),
    (re.compile(r"fit/"), "fit"),
    (re.compile(rf".+/{COMM}_ms$"), "comm"),
    (re.compile(r".+/"), "parts"),
)
"""By the name of a value, its group where that is not the one of the phases."""


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
    """Log values.

    TensorBoard groups its charts by what stands before the first "/" of a tag. So that the phases
    stand alone there, all else has a group of its own: "phase_time_val/forward_ms".

    Args:
        logger: The logger.
        prefix: First part of the keys.
        stage: Second part of the keys, such as "val"; empty for training.
        values: They are logged under keys with the prefix.
        step: The number that they are logged under.
        beside: They are logged in the same row, under keys as they are.
    """
    if _tensorboard_writer(logger) is None:
        separator = getattr(logger, "group_separator", "/")
        own = {key(prefix, stage, name): value for name, value in values.items()}
        own = {name.replace("/", separator): value for name, value in own.items()} | {**beside}
    else:
        # Lightning logs there what stands beside, at every step that it logs itself.
        own = {_tag(prefix, stage, name): value for name, value in values.items()}
    logger.log_metrics(own, step=step)


def _tag(prefix: str, stage: str, name: str) -> str:
    group = stage or next((one for has, one in _GROUPS if has.match(name)), "")
    if not group:
        return key(prefix, "", name)
    first, slash, rest = prefix.partition("/")
    return f"{first}_{group}{slash}{rest}/{name.removeprefix(f'{group}/')}"


def key(prefix: str, stage: str, name: str) -> str:
    """Return the key of a value."""
    return "/".join(part for part in (prefix, stage, name) if part)


def _tensorboard_writer(logger: MetricsLogger) -> Any:
    """Return what writes TensorBoard's files, if the logger has one."""
    experiment = getattr(logger, "experiment", None)
    # Of the class: on ranks that log nothing an experiment has whatever one asks for.
    return experiment if hasattr(type(experiment), "add_custom_scalars") else None


def check_loggers(logger: Any) -> list[MetricsLogger]:
    """Return the loggers of an option that takes none, one or several.

    Raises:
        TypeError: If one of them is none.
    """
    if logger is None:
        return []
    several = logger if isinstance(logger, list | tuple) else [logger]
    for one in several:
        if not callable(getattr(one, "log_metrics", None)):
            raise TypeError(
                f"logger must have a method log_metrics(metrics, step), got {shown(one)};"
                " Lightning's loggers have it, such as TensorBoardLogger"
            )
    return list(several)
