"""The diagnosis of a training run: time breakdown, bottleneck and advice."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_gputime._ledger.rows import LineRow

Grade = Literal["bound", "worth a look", "balanced", "unknown"]


@dataclass(frozen=True, slots=True)
class Advice:
    """Recommended action."""

    code: str  # Machine-readable name, such as "num_workers".
    text: str  # Advice as a sentence.
    # Values such as `{"now": 0, "suggested": 4}`.
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the time breakdown."""

    name: str  # Such as "data/fetch", "validation" or "EMA.update (ema.py:12)".
    seconds: float  # Wall-clock time.
    share: float  # Fraction of the wall clock, from 0 to 1.
    # Half-width of the 95 % confidence interval of `share`; 0.0 if it was not estimated.
    error: float = 0.0
    # Maximum speed-up of the training if the entry is removed, such as 1.25; None if it cannot be
    # removed, occurs once, or is unknown.
    speed_up: float | None = None
    code: str = ""  # Verdict code if it is the bottleneck; empty if it cannot be the bottleneck.
    # "host" or "GPU" if one of them sets the pace for most of the time in steps, else "both"; empty
    # outside of steps, and on the host's clock.
    pace: str = ""
    # Time per step by top-level phase, for entries in steps.
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    host_share: float = 0.0  # Part of `share` in which the host sets the pace.
    # Code that the entry is about; None for a phase, or time outside of steps.
    line: LineRow | None = None
    lines: tuple[LineRow, ...] = ()  # Code that runs in the entry, the longest first.
    advice: tuple[Advice, ...] = ()

    @property
    def ms_per_step(self) -> float:
        """Time per step (in milliseconds); 0 outside of steps."""
        return sum(self.phases_ms.values())


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """Wall clock of a training run, divided into entries. The shares of all rows add up to 1."""

    rows: tuple[Entry, ...]  # The largest first.
    wall_s: float  # Total time (in seconds).
    scope: str  # "fit" or "training" if the whole training is included, else "timed steps".
    step_ms: float = 0.0  # Mean time of a step (in milliseconds).
    steps_share: float = 1.0  # Fraction of the wall clock that all steps take.
    # Fraction of the wall clock that the model's FLOPs would take at the GPU's peak FLOP/s, that
    # is, MFU over the whole run; None if unknown.
    peak_share: float | None = None
    unknown: str = ""  # Quantities that were not measured, with the options that measure them.

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
    """Bottleneck of a training run, and advice."""

    code: str = ""  # Verdict code, such as "input-bound"; empty if unknown.
    # "bound" from 20 % of the wall clock on, "worth a look" from 5 %, "balanced" below and for the
    # model's own work; "unknown" if it cannot be decided.
    grade: Grade = "unknown"
    # Name of the entry that is the bottleneck; empty if it is the model's work at many lines, or
    # unknown.
    entry: str = ""
    headline: str = ""  # Verdict as a sentence.
    time_breakdown: TimeBreakdown | None = None  # Wall clock by entry; None if unknown.
    advice: tuple[Advice, ...] = ()  # Recommended actions, on the bottleneck first.
