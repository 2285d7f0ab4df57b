"""The statistics of a run, for a person and for a program."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PhaseStats:
    """Statistics of one phase over the steps in which it ran.

    Attributes:
        n: Number of those steps.
        mean_ms: Mean device time a step (in milliseconds).
        p50_ms: Median, over the steps in the history (in milliseconds).
        p95_ms: 95th percentile, over the steps in the history (in milliseconds).
        max_ms: Longest (in milliseconds).
        share: Part of the device time of all steps, from 0 to 1.
        host_mean_ms: Mean host time a step between the same marks (in milliseconds).
    """

    n: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    max_ms: float
    share: float
    host_mean_ms: float


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """Statistics of a run; `print` shows them as a table.

    Attributes:
        rows: Statistics of each phase that ran, in the order of a step.
        step: Statistics of whole steps.
        steps: Number of steps that the statistics are over.
        warmup_steps: Number of steps before them, which are left out.
        host_wait_mean_ms: Mean time a step that the host was blocked until the device had finished
            one (in milliseconds). Near zero, the host cannot keep the device busy.
        skipped_updates: Number of steps whose update was skipped, those of the warm-up included.
    """

    rows: Mapping[str, PhaseStats]
    step: PhaseStats
    steps: int
    warmup_steps: int
    host_wait_mean_ms: float
    skipped_updates: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns nested dicts of numbers, ready for JSON; None where there is no number."""
        return asdict(self, dict_factory=_without_nan)

    def __str__(self) -> str:
        left_out = f"{self.warmup_steps} warm-up step{'s' * (self.warmup_steps != 1)} left out"
        if not self.steps:
            return f"No step was timed ({left_out})."
        title = (
            f"Time per step in ms over {self.steps} step{'s' * (self.steps != 1)} ({left_out});"
            f" the host waited {self.host_wait_mean_ms:.3f} ms a step for the device"
        )
        if self.skipped_updates:
            title += f"; {self.skipped_updates} updates skipped"
        header = ("phase", "mean", "share", "p50", "p95", "max", "host", "steps")
        body = [_cells(_indented(name), row) for name, row in self.rows.items()]
        lines = [header, *body, _cells("step", self.step)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        text = [
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        rule = "-" * len(text[0])
        return "\n".join([title, "", text[0], rule, *text[1:-1], rule, text[-1]])


def _without_nan(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: None if value != value else value for key, value in items}


def _indented(name: str) -> str:
    _, slash, part = name.partition("/")
    return f"  {part}" if slash else name


def _cells(name: str, row: PhaseStats) -> tuple[str, ...]:
    times = (f"{ms:.3f}" for ms in (row.p50_ms, row.p95_ms, row.max_ms, row.host_mean_ms))
    return (name, f"{row.mean_ms:.3f}", f"{row.share:.1%}", *times, str(row.n))
