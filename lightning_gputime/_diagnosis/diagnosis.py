"""The diagnosis of a training: one time breakdown, one bottleneck, and advice."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_gputime._diagnosis.culprit import EntryCulprit

Grade = Literal["bound", "worth a look", "balanced", "unknown"]


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do next.

    Attributes:
        code: Machine-readable name, such as "num_workers".
        text: The advice as a sentence.
        parameters: Values such as `{"now": 0, "suggested": 4}`.
    """

    code: str
    text: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the time breakdown.

    Attributes:
        name: Name, such as "data/fetch" or "validation".
        seconds: Its part of the wall clock (in seconds).
        share: The same as a fraction of the wall clock, from 0 to 1.
        error: Half the width of the 95 % interval of `share`; 0.0 where it was not sampled.
        speed_up: Maximum speed-up of the training if it is removed, such as 1.25; None where it
            cannot be removed, occurs once, or is unknown.
        code: Verdict code if this is the bottleneck; empty if it cannot be one.
        advice: What to do about it.
        culprits: Code in which its time is spent, the most important first.
    """

    name: str
    seconds: float
    share: float
    error: float = 0.0
    speed_up: float | None = None
    code: str = ""
    advice: tuple[Advice, ...] = ()
    culprits: tuple[EntryCulprit, ...] = ()


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """Where the wall clock went. The shares of all rows add up to 1.

    Attributes:
        rows: The entries, the largest first.
        wall_s: Time that the shares are fractions of (in seconds).
        scope: "fit", "training" or "loops" if that is the whole training, else "timed steps".
        work: Name of the entry of the model's work, "GPU work" or "CPU work".
        peak_share: Fraction of the wall clock that the model's FLOPs take at the peak of the GPU,
            which is MFU over the whole training; None if unknown.
        unknown: What was not measured, and the options that measure it.
    """

    rows: tuple[Entry, ...]
    wall_s: float
    scope: str
    work: str
    peak_share: float | None = None
    unknown: str = ""

    def __getitem__(self, name: str) -> Entry:
        """Return the entry of this name; one without time if there is none."""
        return next((row for row in self.rows if row.name == name), Entry(name, 0.0, 0.0))


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What limits a training.

    Attributes:
        code: Verdict code, such as "input-bound"; empty if nothing can be said.
        grade: "bound" from 20 % of the wall clock on, "worth a look" from 5 %, "balanced" below,
            "unknown" if nothing can be said.
        entry: Name of the entry that the code is about; empty if it is about the whole step.
        headline: One sentence.
        time_breakdown: Where the wall clock went; None if nothing can be said.
        advice: What to do, about the largest entries first.
    """

    code: str = ""
    grade: Grade = "unknown"
    entry: str = ""
    headline: str = ""
    time_breakdown: TimeBreakdown | None = None
    advice: tuple[Advice, ...] = ()
