"""The statistics of a run, for a person and for a program."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_gputime._phases import DATA, WAIT, is_wait, of_one_callback
from lightning_gputime._results.advice import sentence
from lightning_gputime._results.cells import DROPS, PEAK, RANKS, busy, cells, of_ranks, peak
from lightning_gputime._results.ledger import Ledger
from lightning_gputime._results.peaks import MemorySummary
from lightning_gputime._results.ranks import RankSummary
from lightning_gputime._results.rows import shown
from lightning_gputime._results.slow import SlowSummary
from lightning_gputime._results.stats import PhaseStats
from lightning_gputime._results.table import Table, Tabular
from lightning_gputime._results.throughput import WorkSummary
from lightning_gputime._results.totals import STEP
from lightning_gputime._results.units import unit_of
from lightning_gputime._results.verdict import (
    Verdict,
    held_up_between_batches,
    held_up_by_ranks,
    longest,
    pace,
    wait_sentence,
)

# From this part of a step on a callback is named.
_LONG_CALLBACK = 0.1


@dataclass(frozen=True, slots=True)
class PhaseSummary(Tabular):
    """Statistics of a run; `print` shows them as a table.

    Attributes:
        rows: Statistics of each phase that ran, in the order of a step.
        step: Statistics of whole steps.
        steps: Number of steps that the statistics are over.
        warmup_steps: Number of steps before them, which are left out.
        host_wait_mean_ms: Mean time a step that the host was blocked until the device had finished
            one (in milliseconds). Near zero, the host cannot keep the device busy.
        skipped_updates: Number of steps whose update was skipped, those of the warm-up included.
        on_host_clock: Whether there was no device, and everything is the host's time.
        ranks: On rank zero of a distributed run, all ranks beside each other.
        run_ahead_mean_ms: How far the host is ahead of the device, the mean over all boundaries of
            the steps in the history (in milliseconds). None where the two clocks did not meet in
            half of the steps, because the host did not have to wait.
        probed_steps: Number of steps that were probed; they are in none of the other statistics.
        probe_failure: Why none can be, if so.
        one_in: With `every_n_steps="auto"`: 1 of this many steps was timed in the end.
        max_overhead: What timing every step would take, as a fraction of the step (0 to 1), where
            "auto" has measured it; else None.
        is_warmup: Whether these are the steps of the warm-up, where there are no others.
        hint: What to do where no step was timed.
        slow: What slow steps cost; None where none was slow.
        ledger: Where the whole of a fit went, where a trainer tells it.
        memory: The most memory that was allocated in each phase; None where it was not measured.
        stage: What the steps are of, where not of training: "validation", "test" or "prediction".
        advice: What to do next, the most promising first; nothing where no number backs it.
        work: Work per second, and what it is of the GPU's peak.
    """

    rows: Mapping[str, PhaseStats]
    step: PhaseStats
    steps: int
    warmup_steps: int
    host_wait_mean_ms: float
    skipped_updates: int = 0
    on_host_clock: bool = False
    ranks: RankSummary | None = None
    run_ahead_mean_ms: float | None = None
    probed_steps: int = 0
    probe_failure: str = ""
    one_in: int = 1
    max_overhead: float | None = None
    is_warmup: bool = False
    hint: str = ""
    slow: SlowSummary | None = None
    ledger: Ledger | None = None
    memory: MemorySummary | None = None
    stage: str = ""
    advice: tuple[str, ...] = ()
    work: WorkSummary | None = None

    @property
    def items_per_s(self) -> float | None:
        """Items in a second; None where they are not known."""
        return self.work.items_per_s if self.work is not None else None

    @property
    def mfu(self) -> float | None:
        """The part of the peak that the model's FLOPs are, from 0 to 1; None if not known."""
        return self.work.mfu if self.work is not None else None

    @property
    def verdict(self) -> str:
        """One sentence on what bounds the training, with its grounds; empty if there are none."""
        return str(self._judged())

    def _judged(self) -> Verdict:
        if not self.steps or not self.step.mean_ms:
            return Verdict()
        for held_up in (held_up_between_batches(self.rows, self.step), held_up_by_ranks(self.rows)):
            if held_up.bound:
                return held_up
        if self.on_host_clock:
            return longest(self.rows)
        return pace(self.rows, self.step, self.host_wait_mean_ms, self.gap_share)

    @property
    def gap_share(self) -> float | None:
        """The part of the step in which the device waits for launches, from 0 to 1.

        Not counted is what it waits for in `data`, which is the loader's, and in `backward/comm`,
        which is the other ranks'. None if no step was probed.
        """
        if not self.probed_steps or not self.steps or not self.step.mean_ms:
            return None
        gaps_ms = 0.0
        for name, row in self.rows.items():
            if is_wait(name) and name != WAIT:
                gaps_ms -= row.n / self.steps * row.mean_ms
            elif "/" not in name and name != DATA and row.busy_mean_ms is not None:
                gaps_ms += row.n / self.steps * (row.mean_ms - row.busy_mean_ms)
        return max(gaps_ms / self.step.mean_ms, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Returns nested dicts of numbers, ready for JSON; None where there is no number."""
        return {**asdict(self, dict_factory=with_none), "verdict": self.verdict}

    def _table(self) -> Table:
        if not self.steps:
            return Table(self._title(), [], [])
        lead = [] if self.is_warmup else [self.verdict, sentence(self.advice)]
        told = [one for one in lead if one]
        return Table(self._title(), self._cells(), self._sentences(), lead=told, drops=DROPS)

    def _title(self) -> str:
        n = self.warmup_steps
        left_out = f" ({n} warm-up step{'s' * (n != 1)} left out)" if n else ""
        if not self.steps:
            return f"No step was timed{left_out}. {self.hint}".rstrip()
        unit = unit_of(self.step.mean_ms).name
        of = f"Time per {self.stage} step" if self.stage else "Time per step"
        over = f"{of} in {unit} over {self.steps} step{'s' * (self.steps != 1)}"
        if self.is_warmup:
            are = "is" if self.steps == 1 else "are"
            return f"{over}, which {are} warm-up: no other was timed"
        skipped = f"; {self.skipped_updates} updates skipped" if self.skipped_updates else ""
        if 2 * self.skipped_updates >= self.steps + self.warmup_steps:
            skipped = f"; {self.skipped_updates} have no update"
        return f"{over}{left_out}{skipped}"

    def _cells(self) -> list[tuple[str, ...]]:
        header = ("phase", "mean", "share", "p50", "p95", "max", "host", "steps")
        unit = unit_of(self.step.mean_ms)
        rows = {name: (title, row) for name, title, row in shown(self.rows)}
        body = [cells(title, row, unit) for title, row in rows.values()]
        lines = [header, *body, cells("step", self.step, unit)]
        columns: list[list[str]] = []
        stats = [*(row for _, row in rows.values()), self.step]
        if self.probed_steps:
            columns.append(["busy", *(busy(row, unit) for row in stats)])
        if self.memory is not None:
            columns.append([PEAK, *map(peak, stats)])
        if self.ranks is not None:
            bounds = [of_ranks(self.ranks.rows.get(name), unit) for name in (*rows, STEP)]
            columns.append([RANKS, *bounds])
        return [(*line, *more) for line, *more in zip(lines, *columns, strict=True)]

    def _sentences(self) -> list[str]:
        if self.is_warmup:
            return []
        ranks = self.ranks.sentence if self.ranks is not None else ""
        ledger = self.ledger.sentence if self.ledger is not None else ""
        return [
            sentence
            for sentence in (
                self._callback_sentence(),
                wait_sentence(self.rows, self.step),
                self._lead_sentence(),
                self._gap_sentence(),
                self.probe_failure,
                self.memory.sentence if self.memory is not None else "",
                *(self.work.sentences if self.work is not None else ()),
                self._pace_sentence(),
                *(self.slow.sentences if self.slow is not None else ()),
                ranks,
                ledger,
            )
            if sentence
        ]

    def _callback_sentence(self) -> str:
        took = {
            callback: row
            for name, row in self.rows.items()
            if (callback := of_one_callback(name)) and row.share >= _LONG_CALLBACK
        }
        if not took:
            return ""
        callback, row = max(took.items(), key=lambda one: one[1].share)
        unit = unit_of(self.step.mean_ms)
        ms = unit.number(row.share * self.step.mean_ms)
        return f"another callback takes {ms} of {unit.of(self.step.mean_ms)}: `{callback}`"

    def _lead_sentence(self) -> str:
        lead_ms = self.run_ahead_mean_ms
        if lead_ms is None or self.on_host_clock or lead_ms < 0.05 * self.step.mean_ms:
            return ""
        return f"the host runs {unit_of(self.step.mean_ms).of(lead_ms)} ahead of the GPU"

    def _gap_sentence(self) -> str:
        share = self.gap_share
        return "" if share is None else f"{share:.0%} of this step is launch gaps"

    def _pace_sentence(self) -> str:
        n, share = self.one_in, self.max_overhead
        if n == 1 or share is None:
            return ""
        step = unit_of(self.step.mean_ms).of(self.step.mean_ms)
        return f"timed 1 in {n} steps: timing each would take {share:.0%} of a step of {step}"


def with_none(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a dict that JSON has words for, with None for a number that is none."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in items
    }
