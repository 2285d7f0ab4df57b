"""The diagnosis of a training run: time breakdown, bottleneck and advice."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_gputime._ledger.rows import LineRow

Grade = Literal["bound", "worth a look", "balanced", "unknown"]


@dataclass(frozen=True, slots=True)
class Advice:
    """Recommended action.

    Attributes:
        code: Machine-readable name, such as "num_workers".
        text: Advice as a sentence.
        parameters: Values such as `{"now": 0, "suggested": 4}`.
    """

    code: str
    text: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the time breakdown.

    Attributes:
        name: Name, such as "data/fetch", "validation" or "EMA.update (ema.py:12)".
        seconds: Wall-clock time (in seconds).
        share: Fraction of the wall clock, from 0 to 1.
        error: Half-width of the 95 % confidence interval of `share`; 0.0 if it was not estimated.
        speed_up: Maximum speed-up of the training if the entry is removed, such as 1.25; None if it
            cannot be removed, occurs once, or is unknown.
        code: Verdict code if this is the bottleneck; empty if it cannot be the bottleneck.
        pace: "host" or "GPU" if one of them sets the pace for most of the time in steps, else
            "both"; empty outside of steps, and on the host's clock.
        phases_ms: Time per step by top-level phase, for entries in steps.
        host_share: Part of `share` in which the host sets the pace.
        line: Code that the entry is about; None for a phase, or time outside of steps.
        lines: Code that runs in the entry, the longest first.
        advice: Recommended actions.
    """

    name: str
    seconds: float
    share: float
    error: float = 0.0
    speed_up: float | None = None
    code: str = ""
    pace: str = ""
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    host_share: float = 0.0
    line: LineRow | None = None
    lines: tuple[LineRow, ...] = ()
    advice: tuple[Advice, ...] = ()

    @property
    def ms_per_step(self) -> float:
        """Time per step (in milliseconds); 0 outside of steps."""
        return sum(self.phases_ms.values())


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """Wall clock of a training run, divided into entries. The shares of all rows add up to 1.

    Attributes:
        rows: Entries, the largest first.
        wall_s: Total time (in seconds).
        scope: "fit" or "training" if the whole training is included, else "timed steps".
        step_ms: Mean time of a step (in milliseconds).
        steps_share: Fraction of the wall clock that all steps take.
        peak_share: Fraction of the wall clock that the model's FLOPs would take at the GPU's peak
            FLOP/s, that is, MFU over the whole run; None if unknown.
        unknown: Quantities that were not measured, with the options that measure them.
    """

    rows: tuple[Entry, ...]
    wall_s: float
    scope: str
    step_ms: float = 0.0
    steps_share: float = 1.0
    peak_share: float | None = None
    unknown: str = ""

    def __getitem__(self, name: str) -> Entry:
        """Return the entry with this name, or an entry of zero seconds if it did not occur."""
        return next((row for row in self.rows if row.name == name), Entry(name, 0.0, 0.0))

    # Without these two, Python would call `__getitem__` with 0, 1, 2, ... forever.

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the entries, the largest first."""
        return (row.name for row in self.rows)

    def __contains__(self, name: object) -> bool:
        """Return True if the entry occurred."""
        return any(row.name == name for row in self.rows)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Bottleneck of a training run, and advice.

    Attributes:
        code: Verdict code, such as "input-bound"; empty if unknown.
        grade: "bound" from 20 % of the wall clock on, "worth a look" from 5 %, "balanced" below and
            for the model's own work; "unknown" if it cannot be decided.
        entry: Name of the entry that is the bottleneck; empty if it is the model's work at many
            lines, or unknown.
        headline: Verdict as a sentence.
        time_breakdown: Wall clock by entry; None if unknown.
        advice: Recommended actions, on the bottleneck first.
    """

    code: str = ""
    grade: Grade = "unknown"
    entry: str = ""
    headline: str = ""
    time_breakdown: TimeBreakdown | None = None
    advice: tuple[Advice, ...] = ()
