"""The statistics of a run, for a person and for a program."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_gputime._phases import CALLBACKS, COMM, COPY, DATA, FETCH, WAIT, of_one_callback
from lightning_gputime._results.ranks import STEP, RankStats, RankSummary
from lightning_gputime._results.slow import SlowSummary
from lightning_gputime._results.table import Table

_HOLDS_UP = {
    DATA: "input-bound",
    FETCH: "input-bound",
    COPY: "copy-bound",
    CALLBACKS: "callback-bound",
    WAIT: "rank-bound",
}
"""What a training is called that waits in a part of `data`."""

# From this part of a step on a callback is named.
_LONG_CALLBACK = 0.1

# From this part of a step on, launch gaps are worth an advice.
_MANY_GAPS = 0.1


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
        busy_mean_ms: Mean device time in the steps that were probed: the work without the gaps in
            which the device waited for launches (in milliseconds). None if none was probed.
    """

    n: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    max_ms: float
    share: float
    host_mean_ms: float
    busy_mean_ms: float | None = None


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
        on_host_clock: Whether there was no device, and everything is the host's time.
        ranks: On rank zero of a distributed run, all ranks beside each other.
        run_ahead_mean_ms: How far the host is ahead of the device, the mean over all boundaries of
            the steps in the history (in milliseconds). None where the two clocks did not meet in
            half of the steps, because the host did not have to wait.
        probed_steps: Number of steps that were probed; they are in none of the other statistics.
        probe_failure: Why none can be, if so.
        is_warmup: Whether these are the steps of the warm-up, where there are no others.
        hint: What to do where no step was timed.
        slow: What slow steps cost; None where none was slow.
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
    is_warmup: bool = False
    hint: str = ""
    slow: SlowSummary | None = None

    @property
    def verdict(self) -> str:
        """One sentence on what bounds the training, with its grounds; empty if there are none."""
        if held_up := self._held_up_between_batches():
            return held_up
        if self.on_host_clock or not self.steps:
            return ""
        waited = f"waited {self.host_wait_mean_ms:.3g} of {self.step.mean_ms:.3g} ms a step"
        if self.host_wait_mean_ms >= 0.1 * self.step.mean_ms:
            return f"GPU-bound: the host {waited} for the GPU"
        # What the device takes longer for than the host is queued behind the host. Where the host
        # takes longer, it works (a fetch) or waits inside the step (a copy, `.item()`).
        behind = {
            name: row.n * (row.mean_ms - row.host_mean_ms) / self.steps
            for name, row in self.rows.items()
            if "/" not in name
        }
        ahead = sum(ms for ms in behind.values() if ms > 0)
        if ahead >= 0.2 * self.step.mean_ms:
            grounds = (
                f"for {ahead:.3g} of {self.step.mean_ms:.3g} ms a step the GPU ran behind the host"
            )
            late = [f"`{name}`" for name, ms in behind.items() if -ms >= 0.05 * self.step.mean_ms]
            if not late:
                return f"GPU-bound: {grounds}"
            return f"mixed: {grounds}, which worked or waited in {', '.join(late)}"
        gaps = self.gap_share
        if gaps is not None and gaps < _MANY_GAPS:
            return "GPU-bound: the GPU hardly waited for launches"
        return f"launch-bound: the GPU waited for the host, which {waited} for the GPU"

    def _held_up_between_batches(self) -> str:
        """Names the part of `data` that is 30 % of the step or more, or `data` itself."""
        # Where the parts are known, the whole says nothing about the loader.
        shares = {name: row.share for name, row in self.rows.items() if name in _HOLDS_UP}
        if len(shares) > 1:
            shares.pop(DATA, None)
        name = max(shares, key=shares.__getitem__, default=DATA)
        share = shares.get(name, 0.0)
        return f"{_HOLDS_UP[name]}: {share:.0%} of the step is `{name}`" if share >= 0.3 else ""

    @property
    def gap_share(self) -> float | None:
        """The part of the step in which the device waits for launches, from 0 to 1.

        Not counted is what it waits for in `data`, which is the loader's, and in `backward/comm`,
        which is the other ranks'. None if no step was probed.
        """
        if not self.probed_steps or not self.steps:
            return None
        gaps_ms = 0.0
        for name, row in self.rows.items():
            if name.endswith(f"/{COMM}") and name != WAIT:
                gaps_ms -= row.n / self.steps * row.mean_ms
            elif "/" not in name and name != DATA and row.busy_mean_ms is not None:
                gaps_ms += row.n / self.steps * (row.mean_ms - row.busy_mean_ms)
        return max(gaps_ms / self.step.mean_ms, 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Returns nested dicts of numbers, ready for JSON; None where there is no number."""
        return asdict(self, dict_factory=_without_nan)

    def __str__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        """Returns the table for a notebook."""
        return self._table().html()

    def __rich__(self) -> Any:
        """Returns the table for rich."""
        return self._table().rich()

    def _table(self) -> Table:
        if not self.steps:
            return Table(self._title(), [], [])
        return Table(self._title(), self._cells(), self._sentences())

    def _title(self) -> str:
        left_out = f"{self.warmup_steps} warm-up step{'s' * (self.warmup_steps != 1)} left out"
        if not self.steps:
            return f"No step was timed ({left_out}). {self.hint}".rstrip()
        if self.is_warmup:
            are = "is" if self.steps == 1 else "are"
            return (
                f"Time per step in ms over {self.steps} step{'s' * (self.steps != 1)}, which {are}"
                " warm-up: no other was timed"
            )
        skipped = f"; {self.skipped_updates} updates skipped" if self.skipped_updates else ""
        if 2 * self.skipped_updates >= self.steps + self.warmup_steps:
            skipped = f"; {self.skipped_updates} have no update"
        return (
            f"Time per step in ms over {self.steps} step{'s' * (self.steps != 1)} ({left_out})"
            f"{skipped}"
        )

    def _cells(self) -> list[tuple[str, ...]]:
        header = ("phase", "mean", "share", "p50", "p95", "max", "host", "steps")
        rows = {name: row for name, row in self.rows.items() if not of_one_callback(name)}
        body = [_cells(_indented(name), row) for name, row in rows.items()]
        lines = [header, *body, _cells("step", self.step)]
        columns: list[list[str]] = []
        if self.probed_steps:
            columns.append(["busy", *map(_busy, (*rows.values(), self.step))])
        if self.ranks is not None:
            of_ranks = [_of_ranks(self.ranks.rows.get(name)) for name in (*rows, STEP)]
            columns.append(["min - max (rank)", *of_ranks])
        return [(*line, *more) for line, *more in zip(lines, *columns, strict=True)]

    def _sentences(self) -> list[str]:
        if self.is_warmup:
            return []
        ranks = self.ranks.sentence if self.ranks is not None else ""
        return [
            sentence
            for sentence in (
                self.verdict,
                self._callback_sentence(),
                self._lead_sentence(),
                self._gap_sentence(),
                self.probe_failure,
                *(self.slow.sentences if self.slow is not None else ()),
                ranks,
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
        ms = row.share * self.step.mean_ms
        return f"another callback takes {ms:.3g} of {self.step.mean_ms:.3g} ms: `{callback}`"

    def _lead_sentence(self) -> str:
        lead_ms = self.run_ahead_mean_ms
        if lead_ms is None or self.on_host_clock or lead_ms < 0.05 * self.step.mean_ms:
            return ""
        return f"the host runs {lead_ms:.3g} ms ahead of the GPU"

    def _gap_sentence(self) -> str:
        share = self.gap_share
        if share is None:
            return ""
        advice = ": batch more, use CUDA graphs or torch.compile" if share >= _MANY_GAPS else ""
        return f"{share:.0%} of this step is launch gaps{advice}"


def _without_nan(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: None if value != value else value for key, value in items}


def _indented(name: str) -> str:
    _, slash, part = name.partition("/")
    return f"  {part}" if slash else name


def _cells(name: str, row: PhaseStats) -> tuple[str, ...]:
    times = (f"{ms:.3f}" for ms in (row.p50_ms, row.p95_ms, row.max_ms, row.host_mean_ms))
    return (name, f"{row.mean_ms:.3f}", f"{row.share:.1%}", *times, str(row.n))


def _busy(row: PhaseStats) -> str:
    return "" if row.busy_mean_ms is None else f"{row.busy_mean_ms:.3f}"


def _of_ranks(row: RankStats | None) -> str:
    return "" if row is None else f"{row.min_ms:.3f} - {row.max_ms:.3f} ({row.slowest})"
