"""Diagnosis of a training run: where its time goes, why, and what to do about it.

`diagnose` returns the `Diagnosis` that every output renders. It is a pure function of a
`Measurement` and a `TrainingSetup`. This module has its types, the verdict codes, and the names of
entries.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_gputime._ledger.rows import LineRow
from lightning_gputime._measurement import wall_clock as wall
from lightning_gputime._measurement.measurement import Measurement, TrainingSetup
from lightning_gputime._messages import duration
from lightning_gputime._phases import (
    BACKWARD,
    COPY,
    DATA,
    FETCH,
    FORWARD,
    GENERATE,
    OPTIMIZER,
    PHASES,
    REWARD,
    TRAINING_STEP,
)

INPUT_BOUND = "input-bound"  # The step waits for data.
HOST_BOUND = "host-bound"  # A line keeps the GPU waiting; on a CPU, a line outside of the model.
LAUNCH_BOUND = "launch-bound"  # The GPU waits for launches of the model's work, at many lines.
GPU_BOUND, COMPUTE_BOUND = "GPU-bound", "compute-bound"  # The model's work, on a GPU or a CPU.
COMMUNICATION_BOUND, STRAGGLER_BOUND = "communication-bound", "straggler-bound"
OVERHEAD_BOUND = "overhead-bound"  # Code outside of steps.

# Names of entries that are neither phases nor code.
TRANSFER_HOOKS = "data (transfer hooks)"  # `data` without its parts fetch and copy.
COMMUNICATION = "communication"
OTHER_RANKS = "other ranks"
STRAGGLER = "the straggler"
SLOW = "slow steps: "
COLLECTIONS, COMPILATIONS = f"{SLOW}garbage collection", f"{SLOW}compilation"
ALLOCATOR, OFF_CPU = f"{SLOW}the allocator", f"{SLOW}off-CPU"  # The second only in older files.
TIMING = "timing itself"
NOT_SAMPLED = "not sampled"
NOT_EXAMINED = " (not examined)"  # Follows the name of a phase: its time in no examined step.

STANDARD_PHASES = (*PHASES, GENERATE, REWARD, TRAINING_STEP)  # All except phases named by the user.
MODEL_PHASES = (FORWARD, BACKWARD, OPTIMIZER, TRAINING_STEP)  # Phases of the model's own work.

# Verdict code of each entry that is not code of the user.
CODES: Mapping[str, str] = {
    **dict.fromkeys((DATA, FETCH, TRANSFER_HOOKS, COPY), INPUT_BOUND),
    COMMUNICATION: COMMUNICATION_BOUND,
    OTHER_RANKS: STRAGGLER_BOUND,
    STRAGGLER: STRAGGLER_BOUND,
    **dict.fromkeys((COLLECTIONS, COMPILATIONS, ALLOCATOR, OFF_CPU), HOST_BOUND),
    **dict.fromkeys(
        (
            *wall.ONCE,
            *(wall.VALIDATION, wall.EVALUATION, wall.CHECKPOINTS),
            *(wall.EPOCH_ENDS, wall.PAUSED, wall.BETWEEN_LOOPS),
        ),
        OVERHEAD_BOUND,
    ),
}
# Minimum fractions of the wall clock for an entry to be the bottleneck, and to be reported. XProf
# uses the same thresholds to grade input pipelines.
MIN_BOTTLENECK, MIN_REPORTED = 0.2, 0.05
# Minimum fraction of an entry for code to be reported as its reason. Chosen: a smaller one blames
# minor code, a larger one finds no reason where three lines share the time.
MIN_OF_ENTRY = 0.25
# Advice ignores parts and code of libraries with a smaller fraction of the time. Chosen: a smaller
# one gives advice that gains little, a larger one hides an update that `fused=True` shortens.
MIN_PART = 0.1

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


@dataclass(frozen=True, slots=True)
class Case:
    """An entry of the time breakdown, with the facts on which its advice depends."""

    entry: Entry
    breakdown: TimeBreakdown
    m: Measurement
    setup: TrainingSetup

    @property
    def phase(self) -> str:
        """Name of the phase that the entry is, or is a part of."""
        return self.entry.name.removesuffix(NOT_EXAMINED)

    @property
    def main_line(self) -> LineRow | None:
        """Longest code of the user in `entry.lines`; None if it takes less than a quarter of all.

        For an entry that is itself code, see `entry.line`.
        """
        lines = self.entry.lines
        min_ms = MIN_OF_ENTRY * sum(line.ms for line in lines)
        return next((line for line in lines if line.file and line.ms >= min_ms), None)

    @property
    def took(self) -> str:
        """Time of the entry, such as "4.1 ms of 9.8 ms per step"."""
        return self.of_step(self.entry.ms_per_step)

    def of_step(self, ms: float) -> str:
        return f"{duration(ms)} of {duration(self.m.step.mean_ms)} per step"
