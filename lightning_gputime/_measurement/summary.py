"""The statistics of a run, for a person and for a program."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_gputime._measurement.changes import Slowdown
from lightning_gputime._measurement.ranks import STEP, RankStats, RankSummary
from lightning_gputime._measurement.slow import SlowSummary
from lightning_gputime._measurement.stats import PhaseStats, table_rows
from lightning_gputime._measurement.sums import WorkSummary
from lightning_gputime._measurement.table import Section, Table, Tabular, percent, unit_of
from lightning_gputime._measurement.verdict import (
    INPUT,
    LONGEST,
    UNEVEN,
    Verdict,
    judge,
    without_blurred,
)
from lightning_gputime._measurement.wall_time import Losses, WallTimeBreakdown
from lightning_gputime._memory import MemorySummary
from lightning_gputime._phases import BETWEEN_BATCHES, FIRST_STEPS, is_wait

_RANKS = "min - max (rank)"
_PEAK = "peak MiB"
# The columns to leave out where a table is too wide, in this order.
_DROPS = ("max", "steps", "host", "p95", "p50", "share", "busy", _PEAK, _RANKS)

_FEWEST_BATCHES = 20  # Of a shorter evaluation nothing is judged.
_OTHER_MEAN = 0.1  # From this difference on the mean over all steps is told, as a fraction.
_BOUNDARY_MS, _DEAR = 0.02, 0.01
"""What a boundary takes the host where its code is cold, see `benchmarks/README.md`; and from which
fraction of a step on that is said."""


@dataclass(frozen=True, slots=True, repr=False)
class PhaseSummary(Tabular):
    """Statistics of a run; `print` shows them as a table.

    Attributes:
        rows: Statistics of each phase that ran, in the order of a step.
        step: Statistics of whole steps.
        steps: Number of steps that the statistics are over.
        warmup_steps: Number of steps before them, which are excluded.
        host_wait_mean_ms: Mean time per step that the host was blocked until the device had
            finished one (in milliseconds). Near zero, the host cannot keep the device busy.
        skipped_updates: Number of steps whose update was skipped, those of the warm-up included.
        on_host_clock: Whether there was no device, and everything is the host's time.
        ranks: On rank zero of a distributed run, all ranks beside each other.
        probed_steps: Number of steps that were probed; they are in none of the other statistics.
        probe_failure: Why no step can be probed, if so.
        untimed_steps: Number of steps that were not timed, or were probed.
        all_steps_mean_ms: Mean of all steps but the first by the wall clock, where some were not
            timed (in milliseconds). NaN elsewhere, and in loops that call `step()`.
        timed_every_n_steps: With `every_n_steps="auto"`: 1 of this many steps was timed in the end.
        timing_share: What timing every step would take, as a fraction of the step (0 to 1), where
            "auto" has measured it; else None.
        each_timed_for: With `every_n_steps="auto"`: what looks at each step, so that each is timed.
        is_warmup: Whether these are the steps of the warm-up, where there are no others.
        hint: What to do where no step was timed.
        slow: What slow steps cost; None where none was slow.
        slowdown: Since when steps take longer, or shorter, than at the start; None if they do not.
        wall_time: What the wall clock of a fit went to: `entries_s` (in seconds); else None.
        memory: The most memory that was allocated in each phase; None where it was not measured.
        stage: What the steps are of, where not of training: "validation", "test" or "prediction".
        is_uneven: Whether few steps hold most of `data`, and no loader is known, so that it may be
            other code between two steps.
        losses: Where the wall clock went, and what to do about it; None of the warm-up.
        work: Work per second, and what it is of the GPU's peak.
        sections: What other observers add.
        not_measured: What could not be measured, and why: a sentence each.
        blurred: Phases whose times are not separated because of that. No verdict rests on them.
    """

    rows: Mapping[str, PhaseStats]
    step: PhaseStats
    steps: int
    warmup_steps: int
    host_wait_mean_ms: float
    skipped_updates: int = 0
    on_host_clock: bool = False
    ranks: RankSummary | None = None
    probed_steps: int = 0
    probe_failure: str = ""
    untimed_steps: int = 0
    all_steps_mean_ms: float = math.nan
    timed_every_n_steps: int = 1
    timing_share: float | None = None
    each_timed_for: str = ""
    is_warmup: bool = False
    hint: str = ""
    slow: SlowSummary | None = None
    slowdown: Slowdown | None = None
    wall_time: WallTimeBreakdown | None = None
    memory: MemorySummary | None = None
    stage: str = ""
    is_uneven: bool = False
    losses: Losses | None = None
    work: WorkSummary | None = None
    sections: tuple[Section, ...] = ()
    not_measured: tuple[str, ...] = ()
    blurred: tuple[str, ...] = ()

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do next, about the dearest loss first; nothing where no number backs it."""
        return self.losses.advice if self.losses is not None else ()

    @property
    def items_per_sec(self) -> float | None:
        """Items per second; None where they are not known."""
        return self.work.items_per_sec if self.work is not None else None

    @property
    def mfu(self) -> float | None:
        """The model's FLOPs as a fraction of the peak, from 0 to 1; None if not known."""
        return self.work.mfu if self.work is not None else None

    @property
    def verdict(self) -> str:
        """One sentence on what bounds the training, with its grounds; empty if there are none."""
        if self.losses is None:
            return str(self._judged)
        # The longest phase need not be what can be made shorter.
        gain = self.losses.largest_gain if self._judged.bound == LONGEST else ""
        return self.losses.verdict or f"{self._judged}{gain}"

    @property
    def _judged(self) -> Verdict:
        """What bounds the training."""
        is_short = self.stage and self.steps < _FEWEST_BATCHES
        if self.is_warmup or is_short or not self.steps or not self.step.mean_ms:
            return Verdict()
        host_wait_ms = None if self.on_host_clock else self.host_wait_mean_ms
        found = judge(self.rows, self.step, host_wait_ms, self.launch_gap_share)
        found = without_blurred(found, self.blurred)
        if self.is_uneven and found.bound == INPUT:
            return replace(found, bound=UNEVEN, grounds=f"{found.grounds}, most of it in few steps")
        return found

    @property
    def launch_gap_share(self) -> float | None:
        """The fraction of the step in which the device waits for launches, from 0 to 1.

        Waits in `data` for the loader, in `callbacks`, and in `backward/comm` for other ranks are
        not counted. None if no step was probed.
        """
        if not self.probed_steps or not self.steps or not self.step.mean_ms:
            return None
        gaps_ms = 0.0
        for name, row in self.rows.items():
            if name.partition("/")[0] in BETWEEN_BATCHES:
                continue
            if is_wait(name):
                gaps_ms -= row.n / self.steps * row.mean_ms
            elif "/" not in name and row.gpu_busy_mean_ms is not None:
                gaps_ms += row.n / self.steps * (row.mean_ms - row.gpu_busy_mean_ms)
        return max(gaps_ms / self.step.mean_ms, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts of numbers, ready for JSON; None where there is no number."""
        derived = {"verdict": self.verdict, "advice": self.advice}
        found: dict[str, Any] = plain({**asdict(self), **derived})
        rare = ("sections", "untimed_steps", "all_steps_mean_ms", "is_uneven", "each_timed_for")
        gaps = ("not_measured", "blurred")
        for name in (*rare, *gaps, "slowdown"):
            if not found[name]:
                del found[name]
        return found

    def _table(self) -> Table:
        if not self.steps:
            return Table(self._title(), [], [])
        below = [] if self.is_warmup else [*filter(None, self._sentences())]
        losses = self.losses
        if losses is not None and self.stage:
            losses = replace(losses, unknown="")  # No evaluation is probed.
        above = None if losses is None else (self.verdict, losses._table())
        lanes = self._lanes()
        return Table(self._title(), self._lines(), below, above=above, drops=_DROPS, lanes=lanes)

    def _lanes(self) -> dict[str, dict[str, float]]:
        """Return the phases of the mean step as the device ran them, and as the host did."""
        rows = {name: row for name, row in self.rows.items() if "/" not in name}
        device_ms = {name: row.n * row.mean_ms / self.steps for name, row in rows.items()}
        if self.on_host_clock:
            return {"CPU": device_ms}
        host_ms = {name: row.n * row.host_mean_ms / self.steps for name, row in rows.items()}
        return {"GPU": device_ms, "host": host_ms}

    def _title(self) -> str:
        n = self.warmup_steps
        excluded = f" ({n} warm-up step{'s' * (n != 1)} excluded)" if n else ""
        if not self.steps:
            return f"No step was timed{excluded}. {self.hint}".rstrip()
        unit = unit_of(self.step.mean_ms).name
        of = f"Time per {self.stage} step" if self.stage else "Time per step"
        all_steps = self.steps + self.untimed_steps
        part = f" of {all_steps}" if self.untimed_steps else ""
        over = f"{of} in {unit} over {self.steps}{part} step{'s' * (all_steps != 1)}"
        if self.is_warmup:
            are = "is" if self.steps == 1 else "are"
            return f"{over}, which {are} warm-up: no other was timed"
        skipped = f"; {self.skipped_updates} updates skipped" if self.skipped_updates else ""
        if 2 * self.skipped_updates >= self.steps + n:
            skipped = f"; {self.skipped_updates} of {self.steps + n} timed steps have no update"
        return f"{over}{excluded}{skipped}"

    def _lines(self) -> list[tuple[str, ...]]:
        names, titles, rows = zip(*table_rows(self.rows), (STEP, STEP, self.step), strict=True)
        columns: dict[str, Sequence[str]] = {
            "phase": titles,
            "mean": self._times(row.mean_ms for row in rows),
            "share": ["" if math.isnan(row.share) else f"{row.share:.1%}" for row in rows],
            "p50": self._times(row.p50_ms for row in rows),
            "p95": self._times(row.p95_ms for row in rows),
            "max": self._times(row.max_ms for row in rows),
            "host": self._times(row.host_mean_ms for row in rows),
            "steps": [str(row.n or "") for row in rows],
        }
        if self.on_host_clock:
            del columns["host"]  # It is the mean.
        if self.probed_steps:
            columns["busy"] = self._times(row.gpu_busy_mean_ms for row in rows)
        if self.memory is not None:
            peaks = [row.peak_mib for row in rows]
            columns[_PEAK] = ["" if peak is None else f"{peak:,.1f}" for peak in peaks]
        if self.ranks is not None:
            of_ranks = self.ranks.rows
            columns[_RANKS] = [self._bounds(of_ranks.get(name)) for name in names]
        return [tuple(columns), *zip(*columns.values(), strict=True)]

    def _times(self, times_ms: Iterable[float | None]) -> list[str]:
        unit = unit_of(self.step.mean_ms)
        return ["" if ms is None or math.isnan(ms) else unit.cell(ms) for ms in times_ms]

    def _bounds(self, row: RankStats | None) -> str:
        if row is None:
            return ""
        least, most = self._times((row.min_ms, row.max_ms))
        return f"{least} - {most} ({row.slowest_rank})"

    def _sentences(self) -> Iterator[str]:
        step_ms = self.step.mean_ms
        unit = unit_of(step_ms)
        step = unit.of(step_ms)
        if any(2 * row.n <= self.steps for name, row in self.rows.items() if "/" not in name):
            yield "share is of all steps; the other columns are of the steps in which a phase ran"
        yield self.probe_failure
        for feature in (self.memory, self.work):
            yield from feature.sentences if feature is not None else ()
        n, cost = self.timed_every_n_steps, self.timing_share
        if n > 1 and cost is not None:
            # As many as fit a window between two logs, of which each has a timed step.
            fewer = "; a larger log_every_n_steps times fewer" if cost > n * _DEAR else ""
            yield (
                f"timed the first {FIRST_STEPS} steps, in the end 1 in {n}: timing every step would"
                f" add {percent(cost)} to a step of {step}{fewer}"
            )
        elif cost is not None and self.untimed_steps:
            yield (
                f"{self.untimed_steps} steps were not timed, while it was measured what timing adds"
            )
        # Probes take time, too.
        is_sampled = self.untimed_steps and self.steps >= FIRST_STEPS and not self.probed_steps
        if is_sampled and abs(self.all_steps_mean_ms / step_ms - 1) >= _OTHER_MEAN:
            mean = unit.of(self.all_steps_mean_ms)
            yield (
                f"by the wall clock the mean of all steps, timed or not, is {mean}, with what is"
                " paused inside of them: every_n_steps=1 times each"
            )
        timing_ms = (len(self.rows) + 1) * _BOUNDARY_MS
        is_dear = timing_ms > max(_DEAR * step_ms, self.host_wait_mean_ms)
        if self.each_timed_for and is_dear and not self.on_host_clock:
            yield (
                f"every step is timed because of {self.each_timed_for}: this takes the CPU about"
                f" {unit.of(timing_ms)} of {step}; remove it to time fewer steps"
            )
        yield str(self.slowdown or "")
        yield from self.slow.sentences if self.slow is not None else ()
        yield self.ranks.sentence if self.ranks is not None else ""
        for section in self.sections:
            yield from section.sentences
        yield from self.not_measured


def plain(value: Any) -> Any:
    """Return `value` in types that JSON has words for, with None for a number that is none."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
