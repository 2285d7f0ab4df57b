"""Summary of a run: a measurement and its diagnosis, as tables and as JSON."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from lightning_gputime._diagnosis.diagnose import diagnose
from lightning_gputime._diagnosis.diagnosis import Diagnosis, Entry, TimeBreakdown
from lightning_gputime._ledger.rows import LineRow
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
from lightning_gputime._output.loader import loader_table
from lightning_gputime._output.table import Table, Tabular
from lightning_gputime._phases import BACKWARD, FIRST_STEPS, FORWARD, MAX_STEPS_PER_TIMED

_RANKS = "min - max (rank)"  # Title of the column with the means of the ranks.
# Columns to drop from a table that is too wide, in this order.
_DROPS = ("max", "steps", "host", "p95", "p50", "share", "host-paced", _RANKS)
_SPEED_UP = "speed-up if removed"
_MIN_ROW = 0.01  # Entries of the time breakdown with a smaller share are combined in one row.
_MAX_ROWS = 12  # So are the smallest entries beyond this number.
_MIN_CORE_WAIT = 0.05  # Minimum fraction of the elapsed time that is reported.
_MIN_VARIATION = 0.05  # Minimum share of unexplained slow steps that is reported.

_BOUNDARY_MS = 0.02
"""Host time that the timer takes at a phase boundary, from `benchmarks/cold_cost.py`."""
_MIN_COST = 0.01
"""Minimum cost of timing that is reported, as a fraction of the step."""

# Fields of the measurement that the JSON omits if they are empty or zero.
_OMITTED_IF_EMPTY = (
    "sections",
    "loaders",
    "untimed_steps",
    "each_timed_for",
    "slowdown",
    "not_measured",
    "blurred",
    "not_sampled_steps",
    "not_sampled_share",
)


T = TypeVar("T")


class _Fact(Generic[T]):
    """Attribute of a summary that returns the attribute of the same name of its measurement."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, summary: "PhaseSummary", owner: type) -> T:
        fact: T = getattr(summary.measurement, self._name)
        return fact


@dataclass(frozen=True, slots=True, repr=False)
class PhaseSummary(Tabular):
    """Statistics and diagnosis of a run; `print` shows them as tables.

    Attributes:
        measurement: All measured facts. Most of them are also attributes of the summary.
        setup: Training setup; unknown fields are None.
    """

    measurement: Measurement
    setup: TrainingSetup = field(default_factory=TrainingSetup)

    @property
    def diagnosis(self) -> Diagnosis:
        """Bottleneck, time breakdown and advice, derived from the measurement and the setup."""
        return diagnose(self.measurement, self.setup)

    @property
    def code(self) -> str:
        """Verdict code, such as "input-bound"; empty if unknown."""
        return self.diagnosis.code

    @property
    def verdict(self) -> str:
        """One sentence on the bottleneck; empty if unknown."""
        return self.diagnosis.headline

    @property
    def time_breakdown(self) -> TimeBreakdown | None:
        """Wall clock of the training by entry; None if unknown."""
        return self.diagnosis.time_breakdown

    @property
    def advice(self) -> tuple[str, ...]:
        """Recommended actions, the bottleneck first; empty if the numbers support none."""
        return tuple(advice.text for advice in self.diagnosis.advice)

    # Facts of the measurement, which documents them.
    rows = _Fact[Mapping[str, PhaseStats]]()
    step = _Fact[PhaseStats]()
    steps = _Fact[int]()
    untimed_steps = _Fact[int]()
    warmup_steps = _Fact[int]()
    is_warmup = _Fact[bool]()
    host_wait_mean_ms = _Fact[float]()
    skipped_updates = _Fact[int]()
    on_host_clock = _Fact[bool]()
    timed_every_n_steps = _Fact[int]()
    timing_share = _Fact[float | None]()
    not_sampled_steps = _Fact[int]()
    not_sampled_share = _Fact[float]()
    host_paced = _Fact[Mapping[str, float]]()
    examined_steps = _Fact[int]()
    lines = _Fact[tuple[LineRow, ...]]()
    lines_unavailable = _Fact[str]()
    ranks = _Fact[RankSummary | None]()
    slow = _Fact[SlowSummary | None]()
    slowdown = _Fact[Slowdown | None]()
    wall_clock = _Fact[WallClockBreakdown | None]()
    memory = _Fact[MemorySummary | None]()
    work = _Fact[WorkSummary | None]()
    items_per_sec = _Fact[float | None]()
    mfu = _Fact[float | None]()
    sections = _Fact[tuple[Section, ...]]()
    not_measured = _Fact[tuple[str, ...]]()
    blurred = _Fact[tuple[str, ...]]()
    stage = _Fact[str]()
    hint = _Fact[str]()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the measurement, such as steps that were not timed."""
        if not self.steps:
            return (self._title(),)
        if self.is_warmup:
            return ("all of these steps are warm-up: a diagnosis needs more steps",)
        return tuple(filter(None, self._sentences()))

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts of numbers for JSON, with None for NaN."""
        diagnosis = self.diagnosis
        derived = {"verdict": diagnosis.headline, "advice": self.advice}
        found: dict[str, Any] = plain(
            {**asdict(self.measurement), **derived, "diagnosis": asdict(diagnosis)}
        )
        for name in _OMITTED_IF_EMPTY:
            if not getattr(self.measurement, name):
                del found[name]
        return found

    def _table(self) -> Table:
        m = self.measurement
        if not m.steps:
            return Table(self._title(), [], [])
        below = self.notes
        diagnosis = self.diagnosis
        above = None
        if diagnosis.time_breakdown is not None:
            advice = _advice_lines(diagnosis)
            above = diagnosis.headline, _breakdown_table(diagnosis.time_breakdown, advice)
        loader = None if m.is_warmup else loader_table(m, self.setup)
        return Table(
            self._title(),
            self._lines(),
            below,
            above=above,
            drops=_DROPS,
            lanes=self._lanes(),
            below=loader,
        )

    def _lanes(self) -> dict[str, dict[str, float]]:
        """Return the mean time of each phase over all steps (in milliseconds), per device."""
        rows = {name: row for name, row in self.rows.items() if "/" not in name}
        # `mean_ms` is the mean over steps with the phase, `frequency` the fraction of such steps.
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
        time = f"Time per {self.stage} step" if self.stage else "Time per step"
        all_steps = self.steps + self.untimed_steps
        of_all = f" of {all_steps}" if self.untimed_steps else ""
        title = f"{time} in {unit} over {self.steps}{of_all} step{'s' * (all_steps != 1)}"
        if self.is_warmup:
            return f"{title} of the warm-up; no other step was timed"
        skipped = f"; {self.skipped_updates} updates skipped" if self.skipped_updates else ""
        timed_steps = self.steps + n
        if 2 * self.skipped_updates >= timed_steps:
            skipped = f"; {self.skipped_updates} of {timed_steps} timed steps have no update"
        return f"{title}{excluded}{skipped}"

    def _lines(self) -> list[tuple[str, ...]]:
        """Return the header and the rows of the phase table, the step last."""
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
            del columns["host"]  # It equals the mean.
        if self.host_paced:
            columns["host-paced"] = [
                f"{self.host_paced[name]:.0%}" if name in self.host_paced else "" for name in names
            ]
        if self.ranks is not None:
            of_ranks = self.ranks.rows
            columns[_RANKS] = [self._range_of_ranks(of_ranks.get(name)) for name in names]
        return [tuple(columns), *zip(*columns.values(), strict=True)]

    def _times(self, times_ms: Iterable[float | None]) -> list[str]:
        unit = unit_of(self.step.mean_ms)
        return ["" if ms is None or math.isnan(ms) else unit.cell(ms) for ms in times_ms]

    def _with_error(self, mean_ms: float, error_ms: float) -> str:
        unit = unit_of(self.step.mean_ms)
        mean = self._times([mean_ms])[0]
        error = unit.cell(error_ms) if error_ms else ""
        is_visible = error.strip("0.") != ""  # Not rounded to zero.
        return f"{mean} ± {error}" if mean and is_visible else mean

    def _range_of_ranks(self, row: RankStats | None) -> str:
        if row is None:
            return ""
        shortest, longest = self._times((row.min_ms, row.max_ms))
        return f"{shortest} - {longest} ({row.slowest_rank})"

    def _sentences(self) -> Iterator[str]:
        step_ms = self.step.mean_ms
        unit = unit_of(step_ms)
        step = unit.of(step_ms)
        if any(2 * row.n <= self.steps for name, row in self.rows.items() if "/" not in name):
            yield (
                "share: fraction of the time of all steps; other columns: only steps in which the"
                " phase ran"
            )
        if self.examined_steps:
            n = self.examined_steps
            yield f"lines: timed in {n} step{'s' * (n != 1)}, and scaled to the phases of all steps"
        elif self.lines_unavailable:
            yield f"lines of code are not timed, because {self.lines_unavailable}"
        for summary in (self.memory, self.work):
            yield from summary.sentences if summary is not None else ()
        every = self.timed_every_n_steps
        cost = self.timing_share  # Cost of timing every step, as a fraction.
        if every > 1 and cost is not None:
            added = self.measurement.added_share or 0.0
            is_added_much = added > _MIN_COST
            now = f", which adds {percent(added)} to the training" if is_added_much else ""
            can_time_fewer = is_added_much and every < MAX_STEPS_PER_TIMED
            fewer = "; increase log_every_n_steps to time fewer steps" if can_time_fewer else ""
            yield (
                f"timed the first {FIRST_STEPS} steps, then 1 of every {every}{now}: timing every"
                f" step would add {percent(cost)} to a step of {step}{fewer}"
            )
        elif cost is not None and self.untimed_steps:
            yield f"{self.untimed_steps} steps were not timed, to measure the cost of timing"
        if self.not_sampled_steps:
            n = self.not_sampled_steps
            long = "1 long step" if n == 1 else f"{n} long steps"
            share = percent(self.not_sampled_share)
            was = "was" if n == 1 else "were"
            text = f"{long} ({share} of the time) {was} not sampled"
            yield f"{text}: pass every_n_steps=1 to time all steps"

        # Each phase has a boundary at its start, and the step has another at its end.
        timing_ms = (len(self.rows) + 1) * _BOUNDARY_MS
        is_costly = timing_ms > max(_MIN_COST * step_ms, self.host_wait_mean_ms)
        reason = self.measurement.each_timed_for
        if reason and is_costly and not self.on_host_clock:
            yield (
                f"every step is timed because of {reason}, which takes the CPU about"
                f" {unit.of(timing_ms)} of {step}; remove it to time fewer steps"
            )
        if self.slow is not None and self.slow.unexplained_share >= _MIN_VARIATION:
            spread = f"{unit.of(self.step.p5_ms)} to {unit.of(self.step.p95_ms)}"
            yield f"step times vary: 90 % of the steps take {spread}"
        waited = 0.0 if self.wall_clock is None else self.wall_clock.core_wait_share
        if waited >= _MIN_CORE_WAIT:
            yield (
                f"the loop waited {percent(waited)} of the elapsed time for a CPU core, which other"
                " threads or processes used: all times above are without these waits"
            )
        # If the slowdown is expensive, the verdict already mentions it.
        slowdown, change = str(self.slowdown or ""), self.measurement.work_change
        if slowdown not in self.verdict:
            yield f"{slowdown}: {change}" if change else slowdown
        yield from self.slow.sentences if self.slow is not None else ()
        yield self.ranks.sentence if self.ranks is not None else ""
        for section in self.sections:
            yield from section.sentences
        yield from self.not_measured


def summary_of(results: Results, stage: str = "") -> PhaseSummary:
    """Return the summary of the steps so far."""
    return PhaseSummary(results.measurement(stage), results.setup)


def _percent_with_error(share: float, error: float) -> str:
    if math.isnan(share):
        return ""
    return f"{share:.1%} ± {error:.1%}" if error >= 0.0005 else f"{share:.1%}"


def _breakdown_table(breakdown: TimeBreakdown, advice: Sequence[str]) -> Table:
    """Return the time breakdown as a table. Combine small entries in one row."""
    small = [row for row in breakdown.rows if row.share < _MIN_ROW]
    shown = [row for row in breakdown.rows if row.share >= _MIN_ROW][:_MAX_ROWS]
    small += [row for row in breakdown.rows if row.share >= _MIN_ROW][_MAX_ROWS:]
    if len(small) == 1:
        shown, small = [*shown, *small], []
    lines: list[tuple[str, ...]] = [
        ("where", "per step", "time", "share", FORWARD, BACKWARD, "pace", _SPEED_UP)
    ]
    lines += [_entry_line(row) for row in shown]
    if small:
        seconds, share = sum(row.seconds for row in small), sum(row.share for row in small)
        lines.append(
            (f"{len(small)} others", "", duration(1e3 * seconds), f"{share:.1%}", *[""] * 4)
        )
    if breakdown.peak_share is not None:
        lines.append(("  at peak FLOP/s", "", "", f"{breakdown.peak_share:.1%}", *[""] * 4))
    wall = duration(1e3 * breakdown.wall_s)
    lines.append(("total", duration(breakdown.step_ms), wall, "100.0%", *[""] * 4))
    below = [f"Not measured: {breakdown.unknown}"] if breakdown.unknown else []
    title = f"Time breakdown of the {breakdown.scope}"
    drops = (FORWARD, BACKWARD, "time", "pace", _SPEED_UP)
    return Table(title, _without_empty_columns(lines), below, drops=drops, steps=advice)


def _without_empty_columns(lines: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Drop columns without any content below the header."""
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    return [*zip(*columns, strict=True)]


def _entry_line(row: Entry) -> tuple[str, ...]:
    speed_up = f"up to {row.speed_up:.2f}x" if row.speed_up is not None else ""
    if row.name in ONCE:
        speed_up = "occurs once"
    forward, backward = (
        duration(row.phases_ms[name]) if row.phases_ms.get(name, 0.0) > 0 else ""
        for name in (FORWARD, BACKWARD)
    )
    modules = row.line.modules if row.line is not None else ""
    return (
        row.name.replace(f"({modules}, ", "(") if modules else row.name,
        duration(row.ms_per_step) if row.ms_per_step else "",
        duration(1e3 * row.seconds),
        _percent_with_error(row.share, row.error),
        forward,
        backward,
        row.pace,
        speed_up,
    )


def _advice_lines(diagnosis: Diagnosis) -> list[str]:
    """Return the advice as lines that start with the name of an entry of the time breakdown."""
    breakdown = diagnosis.time_breakdown
    rows = breakdown.rows if breakdown is not None else ()
    # Reversed, so that the largest entry with an advice is its prefix.
    entries = {advice.text: row.name for row in reversed(rows) for advice in row.advice}
    in_code = {row.name for row in rows if row.line is not None}
    lines = []
    for advice in diagnosis.advice:
        # Advice on code contains its name. Advice on a slowdown or on launches has no entry.
        entry = entries.get(advice.text, "slowdown" if advice.code == "slowdown" else "launches")
        lines.append(advice.text if entry in in_code else f"{entry}: {advice.text}")
    return lines
