"""Summary of a run: a measurement and its diagnosis, as tables and as JSON."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from lightning_gputime._attribution import OUTSIDE_CODES
from lightning_gputime._diagnosis import Diagnosis, TimeBreakdown
from lightning_gputime._diagnosis.diagnose import diagnose
from lightning_gputime._ledger.rows import LineRow
from lightning_gputime._loader.advice import loader_table
from lightning_gputime._measurement.changes import Slowdown
from lightning_gputime._measurement.measurement import Measurement, TrainingSetup
from lightning_gputime._measurement.memory import MemorySummary
from lightning_gputime._measurement.results import Results
from lightning_gputime._measurement.slow import SlowSummary
from lightning_gputime._measurement.sums import STEP, PhaseStats, WorkSummary
from lightning_gputime._measurement.wall_clock import ONCE, WallClockBreakdown
from lightning_gputime._messages import duration, percent, plain, unit_of
from lightning_gputime._output.table import Table, Tabular
from lightning_gputime._phases import BACKWARD, FIRST_STEPS, FORWARD, SAVES, of_one_callback
from lightning_gputime._ranks.comparison import RankSummary
from lightning_gputime._ranks.over_time import heat_maps

_RANKS = "min - max (rank)"  # Title of the column with the means of the ranks.
# Columns to drop from a table that is too wide, in this order.
_DROPS = ("max", "steps", "host", "p95", "p50", "share", "host-paced", _RANKS)
_SPEED_UP = "speed-up if removed"
_MIN_ROW = 0.01  # Entries of the time breakdown with a smaller share are combined in one row.
_MAX_ROWS = 12  # So are the smallest entries beyond this number.
_MIN_COST = 0.01  # Minimum cost of timing that is reported, as a fraction of the step.
# Fields of the measurement that the JSON omits if they are empty or zero.
_OMITTED_IF_EMPTY = (
    *("sections", "loaders", "untimed_steps", "each_timed_for", "slowdown", "not_measured"),
    *("blurred", "not_sampled_steps", "not_sampled_share", "outside", "gpu_mhz"),
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
    skipped_updates = _Fact[int]()
    timed_every_n_steps = _Fact[int]()
    host_paced = _Fact[Mapping[str, float]]()
    lines = _Fact[tuple[LineRow, ...]]()
    ranks = _Fact[RankSummary | None]()
    slow = _Fact[SlowSummary | None]()
    slowdown = _Fact[Slowdown | None]()
    wall_clock = _Fact[WallClockBreakdown | None]()
    memory = _Fact[MemorySummary | None]()
    work = _Fact[WorkSummary | None]()
    items_per_sec = _Fact[float | None]()
    mfu = _Fact[float | None]()
    not_measured = _Fact[tuple[str, ...]]()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the measurement, such as steps that were not timed."""
        if not self.steps:
            return (self._title(),)
        if self.measurement.is_warmup:
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
        diagnosis = self.diagnosis
        above = None
        if diagnosis.time_breakdown is not None:
            above = diagnosis.headline, _breakdown_table(diagnosis.time_breakdown, diagnosis)
        rows = {name: row for name, row in m.rows.items() if "/" not in name}
        # Mean over all steps: `mean_ms` is that over steps with the phase, `frequency` their share.
        device_ms = {name: row.frequency * row.mean_ms for name, row in rows.items()}
        host_ms = {name: row.frequency * row.host_mean_ms for name, row in rows.items()}
        ranks, picture = m.ranks, None
        if ranks is not None and ranks.history is not None:
            is_late = ranks.pattern or ranks.stragglers or ranks.suspect is not None
            picture = partial(heat_maps, ranks.ranks, ranks.history) if is_late else None
        return Table(
            self._title(),
            self._lines(),
            self.notes,
            above=above,
            drops=_DROPS,
            lanes={"CPU": device_ms} if m.on_host_clock else {"GPU": device_ms, "host": host_ms},
            picture=picture,
            below=None if m.is_warmup else loader_table(m, self.setup),
        )

    def _title(self) -> str:
        m = self.measurement
        n = m.warmup_steps
        excluded = f" ({n} warm-up step{'s' * (n != 1)} excluded)" if n else ""
        if not m.steps:
            return f"No step was timed{excluded}. {m.hint}".rstrip()
        unit = unit_of(m.step.mean_ms).name
        time = f"Time per {m.stage} step" if m.stage else "Time per step"
        all_steps = m.steps + m.untimed_steps
        of_all = f" of {all_steps}" if m.untimed_steps else ""
        title = f"{time} in {unit} over {m.steps}{of_all} step{'s' * (all_steps != 1)}"
        if m.is_warmup:
            return f"{title} of the warm-up; no other step was timed"
        skipped = f"; {m.skipped_updates} updates skipped" if m.skipped_updates else ""
        timed_steps = m.steps + n
        if 2 * m.skipped_updates >= timed_steps:
            skipped = f"; {m.skipped_updates} of {timed_steps} timed steps have no update"
        return f"{title}{excluded}{skipped}"

    def _lines(self) -> list[tuple[str, ...]]:
        m = self.measurement
        unit = unit_of(m.step.mean_ms)

        def time(ms: float | None) -> str:
            return "" if ms is None or math.isnan(ms) else unit.cell(ms)

        cells: dict[str, str] = {}
        lines = []
        for name, row in (*m.rows.items(), (STEP, m.step)):
            # There may be many single callbacks, and the time breakdown names the long ones.
            if of_one_callback(name) and name != SAVES:
                continue
            _, _, part = name.partition("/")
            mean, error = time(row.mean_ms), time(row.error_ms)
            is_visible = error.strip("0.") != ""  # Not rounded to zero.
            cells = {
                "phase": f"  {part}" if part else name,
                "mean": f"{mean} ± {error}" if mean and is_visible else mean,
                "share": _percent_with_error(row.share, row.share_error),
                "p50": time(row.p50_ms),
                "p95": time(row.p95_ms),
                "max": time(row.max_ms),
                "host": time(row.host_mean_ms),
                "steps": str(row.n or ""),
            }
            if m.on_host_clock:
                del cells["host"]  # It equals the mean.
            if m.host_paced:
                share = m.host_paced.get(name)
                cells["host-paced"] = "" if share is None else f"{share:.0%}"
            if m.ranks is not None:
                times = m.ranks.rows.get(name)
                cells[_RANKS] = (
                    f"{time(times.min_ms)} - {time(times.max_ms)} ({times.max_rank})"
                    if times is not None
                    else ""
                )
            lines.append(tuple(cells.values()))
        return [tuple(cells), *lines]

    def _sentences(self) -> Iterator[str]:
        m = self.measurement
        step_ms, unit = m.step.mean_ms, unit_of(m.step.mean_ms)
        step = unit.of(step_ms)
        if any(2 * row.n <= m.steps for name, row in m.rows.items() if "/" not in name):
            yield (
                "share: fraction of the time of all steps; other columns: only steps in which the"
                " phase ran"
            )
        if n := m.examined_steps:
            yield f"lines: timed in {n} step{'s' * (n != 1)}, and scaled to the phases of all steps"
        elif m.lines_unavailable:
            yield f"lines of code are not timed, because {m.lines_unavailable}"
        for summary in (m.memory, m.work):
            yield from summary.sentences if summary is not None else ()
        every = m.timed_every_n_steps
        cost = m.timing_share  # Cost of timing every step, as a fraction.
        if every > 1 and cost is not None:
            added = m.added_share or 0.0
            now = f", which adds {percent(added)} to the training" if added > _MIN_COST else ""
            yield (
                f"timed the first {FIRST_STEPS} steps, then 1 of every {every}{now}: timing every"
                f" step would add {percent(cost)} to a step of {step}"
            )
        elif cost is not None and m.untimed_steps:
            yield f"{m.untimed_steps} steps were not timed, to measure the cost of timing"
        if n := m.not_sampled_steps:
            long = "1 long step" if n == 1 else f"{n} long steps"
            text = f"{long} ({percent(m.not_sampled_share)} of the time)"
            was = "was" if n == 1 else "were"
            yield f"{text} {was} not sampled: pass every_n_steps=1 to time all steps"

        # Each phase has a boundary at its start, and the step has another at its end. The timer
        # takes 0.02 ms of the host at each, see `benchmarks/cold_cost.py`.
        timing_ms = 0.02 * (len(m.rows) + 1)
        is_costly = timing_ms > max(_MIN_COST * step_ms, m.host_wait_mean_ms)
        reason = m.each_timed_for
        if reason and is_costly and not m.on_host_clock:
            yield (
                f"every step is timed because of {reason}, which takes the CPU about"
                f" {unit.of(timing_ms)} of {step}; remove it to time fewer steps"
            )
        if m.slow is not None and m.slow.unexplained_share >= 0.05:
            spread = f"{unit.of(m.step.p5_ms)} to {unit.of(m.step.p95_ms)}"
            yield f"step times vary: 90 % of the steps take {spread}"
        waited = 0.0 if m.wall_clock is None else m.wall_clock.core_wait_share
        if waited >= 0.05:
            yield (
                f"the loop waited {percent(waited)} of the elapsed time for a CPU core, which other"
                " threads or processes used: all times above are without these waits"
            )
        # If the slowdown is expensive, the verdict already mentions it.
        slowdown, change = str(m.slowdown or ""), m.work_change
        if slowdown not in self.verdict:
            yield f"{slowdown}: {change}" if change else slowdown
        yield from m.slow.sentences if m.slow is not None else ()
        yield from m.outside.sentences if m.outside is not None else ()
        if m.ranks is not None:
            yield from (m.ranks.sentence, *m.ranks.notes)
        for section in m.sections:
            yield from section.sentences
        yield from m.not_measured


def summary_of(results: Results, stage: str = "") -> PhaseSummary:
    return PhaseSummary(results.measurement(stage), results.setup)


def _percent_with_error(share: float, error: float) -> str:
    if math.isnan(share):
        return ""
    return f"{share:.1%} ± {error:.1%}" if error >= 0.0005 else f"{share:.1%}"


def _breakdown_table(breakdown: TimeBreakdown, diagnosis: Diagnosis) -> Table:
    """Return the time breakdown and the advice. Combine small entries in one row."""
    shown = [row for row in breakdown.rows if row.share >= _MIN_ROW][:_MAX_ROWS]
    small = [row for row in breakdown.rows if row not in shown]
    if len(small) == 1:
        shown, small = [*shown, *small], []
    header = ("where", "per step", "time", "share", FORWARD, BACKWARD, "pace", _SPEED_UP)
    lines: list[tuple[str, ...]] = [header]
    for row in shown:
        speed_up = f"up to {row.speed_up:.2f}x" if row.speed_up is not None else ""
        modules = row.line.modules if row.line is not None else ""
        phases_ms = [row.phases_ms.get(name, 0.0) for name in (FORWARD, BACKWARD)]
        cells = (
            row.name.replace(f"({modules}, ", "(") if modules else row.name,
            duration(row.ms_per_step) if row.ms_per_step else "",
            duration(1e3 * row.seconds),
            _percent_with_error(row.share, row.error),
            *(duration(ms) if ms > 0 else "" for ms in phases_ms),
            row.pace,
            "occurs once" if row.name in ONCE else speed_up,
        )
        lines.append(cells)
    rest = [""] * 4
    if small:
        seconds, share = sum(row.seconds for row in small), sum(row.share for row in small)
        others = f"{len(small)} others", "", duration(1e3 * seconds), f"{share:.1%}"
        lines.append((*others, *rest))
    if breakdown.peak_share is not None:
        lines.append(("  at peak FLOP/s", "", "", f"{breakdown.peak_share:.1%}", *rest))
    wall = duration(1e3 * breakdown.wall_s)
    lines.append(("total", duration(breakdown.step_ms), wall, "100.0%", *rest))
    # Drop columns without any content below the header.
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]

    # Advice starts with its entry. If several entries have the same advice, name the largest: it
    # comes last here, and replaces the others.
    rows = breakdown.rows
    entries = {advice.text: row.name for row in reversed(rows) for advice in row.advice}
    in_code = {row.name for row in rows if row.line is not None}
    steps = []
    for advice in diagnosis.advice:
        # Advice without an entry is on a slowdown, on launches, or on causes outside of the loop,
        # whose names it contains, as advice on code does.
        entry = entries.get(advice.text, "slowdown" if advice.code == "slowdown" else "launches")
        is_outside = advice.text not in entries and advice.code in OUTSIDE_CODES
        has_name = entry in in_code or is_outside
        steps.append(advice.text if has_name else f"{entry}: {advice.text}")
    return Table(
        f"Time breakdown of the {breakdown.scope}",
        [*zip(*columns, strict=True)],
        [f"Not measured: {breakdown.unknown}"] if breakdown.unknown else [],
        drops=(FORWARD, BACKWARD, "time", "pace", _SPEED_UP),
        steps=steps,
    )
