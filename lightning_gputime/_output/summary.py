"""The summary of a run: a measurement, and the diagnosis of it, as tables and as JSON."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lightning_gputime._diagnosis.culprit import parts_of_other
from lightning_gputime._diagnosis.diagnose import diagnose
from lightning_gputime._diagnosis.diagnosis import Diagnosis, Entry, TimeBreakdown
from lightning_gputime._measurement.changes import Slowdown
from lightning_gputime._measurement.measurement import Measurement
from lightning_gputime._measurement.memory import MemorySummary
from lightning_gputime._measurement.observers import Section
from lightning_gputime._measurement.plain import plain
from lightning_gputime._measurement.ranks import STEP, RankStats, RankSummary
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.setup import TrainingSetup
from lightning_gputime._measurement.slow import SlowSummary
from lightning_gputime._measurement.stats import PhaseStats, table_rows
from lightning_gputime._measurement.sums import WorkSummary
from lightning_gputime._measurement.units import duration, percent, unit_of
from lightning_gputime._measurement.wall_clock import ONCE, WallClockBreakdown
from lightning_gputime._output.table import Table, Tabular
from lightning_gputime._phases import FIRST_STEPS

_RANKS = "min - max (rank)"
# The columns to leave out where a table is too wide, in this order.
_DROPS = ("max", "steps", "host", "p95", "p50", "share", "busy", _RANKS)
_SPEED_UP, _WHAT_TO_DO = "maximum speed-up", "what to do"
_MIN_ROW = 0.01  # Smaller entries of the time breakdown share one line.
_MIN_VARIATION = 0.05  # From this share of the time on, unexplained slow steps are reported.

_BOUNDARY_MS, _MIN_COST = 0.02, 0.01
"""Host time of a boundary in a loop that does real work (`benchmarks/cold_cost.py`), and the
smallest share of a step that is reported."""

# Fields that the JSON has only where they say something.
_RARE = (
    "sections",
    "untimed_steps",
    "each_timed_for",
    "slowdown",
    "not_measured",
    "blurred",
    "not_sampled_steps",
    "not_sampled_share",
)


@dataclass(frozen=True, slots=True, repr=False)
class PhaseSummary(Tabular):
    """Statistics of a run and what they mean; `print` shows them as tables.

    Attributes:
        measurement: The facts, see `Measurement`. The most used ones are also attributes here.
        setup: What is known of how the training is set up.
    """

    measurement: Measurement
    setup: TrainingSetup = field(default_factory=TrainingSetup)

    @property
    def diagnosis(self) -> Diagnosis:
        """What limits the training: a pure function of the measurement and the set-up."""
        return diagnose(self.measurement, self.setup)

    @property
    def code(self) -> str:
        """Verdict code, such as "input-bound"; empty if nothing can be said."""
        return self.diagnosis.code

    @property
    def verdict(self) -> str:
        """One sentence on the bottleneck; empty if nothing can be said."""
        return self.diagnosis.headline

    @property
    def time_breakdown(self) -> TimeBreakdown | None:
        """Where the wall clock went; None if nothing can be said."""
        return self.diagnosis.time_breakdown

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do next, about the bottleneck first; empty where no number supports any."""
        return tuple(advice.text for advice in self.diagnosis.advice)

    @property
    def rows(self) -> Mapping[str, PhaseStats]:
        """Statistics of each phase that ran, in the order of a step."""
        return self.measurement.rows

    @property
    def step(self) -> PhaseStats:
        """Statistics of whole steps."""
        return self.measurement.step

    @property
    def steps(self) -> int:
        """Number of timed steps, without the warm-up."""
        return self.measurement.steps

    @property
    def untimed_steps(self) -> int:
        """Number of steps that were not timed."""
        return self.measurement.untimed_steps

    @property
    def warmup_steps(self) -> int:
        """Number of timed steps that are excluded."""
        return self.measurement.warmup_steps

    @property
    def is_warmup(self) -> bool:
        """True if only the warm-up was timed."""
        return self.measurement.is_warmup

    @property
    def host_wait_mean_ms(self) -> float:
        """Mean time per step that the host waited for the device (in milliseconds)."""
        return self.measurement.host_wait_mean_ms

    @property
    def skipped_updates(self) -> int:
        """Number of steps whose update was skipped."""
        return self.measurement.skipped_updates

    @property
    def on_host_clock(self) -> bool:
        """True if there was no device."""
        return self.measurement.on_host_clock

    @property
    def timed_every_n_steps(self) -> int:
        """1 of this many steps was timed in the end."""
        return self.measurement.timed_every_n_steps

    @property
    def timing_share(self) -> float | None:
        """Cost of timing every step, as a fraction of the step."""
        return self.measurement.timing_share

    @property
    def not_sampled_steps(self) -> int:
        """Number of long steps that no timed step represents."""
        return self.measurement.not_sampled_steps

    @property
    def not_sampled_share(self) -> float:
        """Fraction of the time of all steps that these took, from 0 to 1."""
        return self.measurement.not_sampled_share

    @property
    def probed_steps(self) -> int:
        """Number of probed steps."""
        return self.measurement.probed_steps

    @property
    def probe_failure(self) -> str:
        """Reason why no step can be probed."""
        return self.measurement.probe_failure

    @property
    def launch_gap_share(self) -> float | None:
        """Fraction of the step in which the device waits for launches."""
        return self.measurement.launch_gap_share

    @property
    def ranks(self) -> RankSummary | None:
        """The comparison of all ranks."""
        return self.measurement.ranks

    @property
    def slow(self) -> SlowSummary | None:
        """Cost of slow steps."""
        return self.measurement.slow

    @property
    def slowdown(self) -> Slowdown | None:
        """Lasting change of the step time."""
        return self.measurement.slowdown

    @property
    def wall_clock(self) -> WallClockBreakdown | None:
        """Host time of the training by entry."""
        return self.measurement.wall_clock

    @property
    def memory(self) -> MemorySummary | None:
        """Peak memory of the device."""
        return self.measurement.memory

    @property
    def work(self) -> WorkSummary | None:
        """Work per second."""
        return self.measurement.work

    @property
    def items_per_sec(self) -> float | None:
        """Items per second."""
        return self.measurement.items_per_sec

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, from 0 to 1."""
        return self.measurement.mfu

    @property
    def sections(self) -> tuple[Section, ...]:
        """What observers add."""
        return self.measurement.sections

    @property
    def not_measured(self) -> tuple[str, ...]:
        """What could not be measured, and why."""
        return self.measurement.not_measured

    @property
    def blurred(self) -> tuple[str, ...]:
        """Phases whose times are not separated because of that."""
        return self.measurement.blurred

    @property
    def stage(self) -> str:
        """Kind of evaluation, such as "validation"; empty for training."""
        return self.measurement.stage

    @property
    def hint(self) -> str:
        """What to do if no step was timed."""
        return self.measurement.hint

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts of numbers, ready for JSON; None where there is no number."""
        diagnosis = self.diagnosis
        facts = {one.name: getattr(self.measurement, one.name) for one in fields(Measurement)}
        derived = {"verdict": diagnosis.headline, "advice": self.advice}
        found: dict[str, Any] = plain(
            {**asdict(self.measurement), **derived, "diagnosis": asdict(diagnosis)}
        )
        for name in _RARE:
            if not facts[name]:
                del found[name]
        return found

    def _table(self) -> Table:
        m = self.measurement
        if not m.steps:
            return Table(self._title(), [], [])
        below = [] if m.is_warmup else [*filter(None, self._sentences())]
        diagnosis = self.diagnosis
        breakdown = diagnosis.time_breakdown
        above = None if breakdown is None else (diagnosis.headline, _breakdown_table(breakdown))
        return Table(
            self._title(), self._lines(), below, above=above, drops=_DROPS, lanes=self._lanes()
        )

    def _lanes(self) -> dict[str, dict[str, float]]:
        """Return the phases of the mean step as the device ran them, and as the host did."""
        rows = {name: row for name, row in self.rows.items() if "/" not in name}
        device_ms = {name: row.frequency * row.mean_ms for name, row in rows.items()}
        if self.on_host_clock:
            return {"CPU": device_ms}
        host_ms = {name: row.frequency * row.host_mean_ms for name, row in rows.items()}
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
            "mean": [self._with_error(row.mean_ms, row.error_ms) for row in rows],
            "share": [_percent_with_error(row.share, row.share_error) for row in rows],
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
        if self.ranks is not None:
            of_ranks = self.ranks.rows
            columns[_RANKS] = [self._bounds(of_ranks.get(name)) for name in names]
        return [tuple(columns), *zip(*columns.values(), strict=True)]

    def _times(self, times_ms: Iterable[float | None]) -> list[str]:
        unit = unit_of(self.step.mean_ms)
        return ["" if ms is None or math.isnan(ms) else unit.cell(ms) for ms in times_ms]

    def _with_error(self, mean_ms: float, error_ms: float) -> str:
        unit = unit_of(self.step.mean_ms)
        mean = self._times([mean_ms])[0]
        error = unit.cell(error_ms) if error_ms else ""
        return f"{mean} ± {error}" if mean and error.strip("0.") else mean

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
        yield parts_of_other(self.measurement)
        yield self.probe_failure
        for feature in (self.memory, self.work):
            yield from feature.sentences if feature is not None else ()
        n, cost = self.timed_every_n_steps, self.timing_share
        if n > 1 and cost is not None:
            fewer = "; a larger log_every_n_steps times fewer" if cost > n * _MIN_COST else ""
            yield (
                f"timed the first {FIRST_STEPS} steps, in the end 1 in {n}: timing every step would"
                f" add {percent(cost)} to a step of {step}{fewer}"
            )
        elif cost is not None and self.untimed_steps:
            yield f"{self.untimed_steps} steps were not timed, to measure what timing adds"
        if self.not_sampled_steps:
            yield (
                f"not sampled: {self.not_sampled_steps} long steps,"
                f" {percent(self.not_sampled_share)} of the time; every_n_steps=1 times them"
            )
        timing_ms = (len(self.rows) + 1) * _BOUNDARY_MS
        is_costly = timing_ms > max(_MIN_COST * step_ms, self.host_wait_mean_ms)
        reason = self.measurement.each_timed_for
        if reason and is_costly and not self.on_host_clock:
            yield (
                f"every step is timed because of {reason}: this takes the CPU about"
                f" {unit.of(timing_ms)} of {step}; remove it to time fewer steps"
            )
        if self.slow is not None and self.slow.unexplained_share >= _MIN_VARIATION:
            spread = f"{unit.of(self.step.p5_ms)} to {unit.of(self.step.p95_ms)}"
            yield f"step times vary: 90 % of the steps take {spread}"
        # A slowdown that costs much is part of the verdict.
        slowdown = str(self.slowdown or "")
        yield slowdown if slowdown not in self.verdict else ""
        yield from self.slow.sentences if self.slow is not None else ()
        yield self.ranks.sentence if self.ranks is not None else ""
        for section in self.sections:
            yield from section.sentences
        yield from self.not_measured


def summary_of(results: Results, stage: str = "") -> PhaseSummary:
    """Return the summary of what was measured so far."""
    return PhaseSummary(results.measurement(stage), results.setup)


def _percent_with_error(share: float, error: float) -> str:
    if math.isnan(share):
        return ""
    return f"{share:.1%} ± {error:.1%}" if error >= 0.0005 else f"{share:.1%}"


def _breakdown_table(breakdown: TimeBreakdown) -> Table:
    """Return the time breakdown as a table, small entries on one line."""
    removable = [row for row in breakdown.rows if row.name != breakdown.work]
    small = [row for row in removable if row.share < _MIN_ROW]
    shown = [row for row in removable if row.share >= _MIN_ROW] if len(small) > 1 else removable
    lines: list[tuple[str, ...]] = [
        (f"of the {breakdown.scope}", "time", "share", _SPEED_UP, _WHAT_TO_DO)
    ]
    lines += [line for row in shown for line in _entry_lines(row)]
    if len(small) > 1:
        seconds, share = sum(row.seconds for row in small), sum(row.share for row in small)
        name = f"{len(small)} more, below 1 % each"
        lines.append((name, duration(1e3 * seconds), f"{share:.1%}", "", ""))
    lines += _entry_lines(breakdown[breakdown.work])
    if breakdown.peak_share is not None:
        lines.append(("  at the peak", "", f"{breakdown.peak_share:.1%}", "", ""))
    lines.append(("total", duration(1e3 * breakdown.wall_s), "100.0%", "", ""))
    below = [f"Not measured: {breakdown.unknown}"] if breakdown.unknown else []
    return Table("", lines, below, left=(0, 4), drops=("time", _SPEED_UP, _WHAT_TO_DO))


def _entry_lines(row: Entry) -> list[tuple[str, ...]]:
    speed_up = f"{row.speed_up:.2f}x" if row.speed_up is not None else ""
    if row.name in ONCE:
        speed_up = "once"
    first, *more = [advice.text for advice in row.advice] or [""]
    share = _percent_with_error(row.share, row.error)
    line = (row.name, duration(1e3 * row.seconds), share, speed_up, first)
    return [line, *(("", "", "", "", text) for text in more)]
