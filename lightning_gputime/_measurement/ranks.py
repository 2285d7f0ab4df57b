"""Comparison of the ranks of a distributed run."""

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from lightning_gputime._ledger.rows import LineRow
from lightning_gputime._measurement.sums import Sums, largest_part
from lightning_gputime._messages import duration, messages, percent
from lightning_gputime._phases import (
    BACKWARD,
    BETWEEN_BATCHES,
    COMM,
    DATA,
    StepRecord,
    in_order,
    is_wait,
    of_one_callback,
    resolve_labels,
)

STEP = "step"
LOCAL = "local"

_MIN_EXCESS = 0.05  # A straggler exceeds the median of the others by this fraction of their step,
_MIN_ERRORS = 4.0  # and by this number of standard errors.
# The speed of a host drifts for seconds, so each second is one sample of it.
_HOST_SAMPLE_MS = 1000.0
_MIN_PHASE = 0.1  # A phase with this fraction of the step shows the speed of a host.
_MIN_FACTOR = 1.15  # A host or a GPU that needs this multiple for every line is slower.
_MIN_CORE_WAIT = 0.1  # Fraction of the time that waits for a core must take to be a reason.
_MIN_HOST_BOUND = 0.8  # The host is busy for this fraction of the step where it sets the pace.
_MIN_LINE, _MIN_WHOLE = 0.5, 0.85  # Fraction of the excess in a line that is named.
_MIN_OWN = 0.1  # A line of this fraction of the step, alone, makes a rank the straggler.
_MAX_LINES = 12  # Number of lines that a rank sends.
_MAX_WINDOWS, _N_NEWEST = 64, 32  # Number of windows of steps, and of steps, that a rank sends.
_MIN_COST = 0.01  # A pattern of a few windows is named if it costs this fraction of the run.
_MIN_WINDOWS = 8  # Number of windows, or steps, that show how the straggler changes.

# Total time of each phase and of "step" (in milliseconds), and the number of steps in which it ran.
PhaseTotals = Mapping[str, tuple[float, int]]


# Totals of one rank


class LineTime(NamedTuple):
    """Times of a line or a function on a rank, per step (in milliseconds)."""

    text: str  # Its name, such as "`Augment.__call__` (data.py:31)".
    function: str  # Qualified names of the function, and of the function that calls it.
    caller: str
    host_ms: float  # Local time in which the host set the pace, and in which the GPU did.
    gpu_ms: float
    busy_ms: float  # Time of the host without waits for the GPU.
    error_ms: float  # Half the width of the 95 % interval of the time.
    wait_ms: float  # Its longest wait for other ranks in a phase, and this phase.
    wait_phase: str

    @property
    def local_ms(self) -> float:
        return self.host_ms + self.gpu_ms

    @property
    def longest_ms(self) -> float:
        return max(self.local_ms, self.busy_ms) + self.wait_ms


def _sums_of(lines: Sequence[LineTime]) -> list[float]:
    """Return the sums of `host_ms`, `gpu_ms` and `busy_ms`."""
    return [
        sum([line.host_ms for line in lines], 0.0),
        sum([line.gpu_ms for line in lines], 0.0),
        sum([line.busy_ms for line in lines], 0.0),
    ]


class BatchContent(NamedTuple):
    """Mean content of the batches of a timed step on a rank."""

    unit: str = ""  # "non-padding tokens", else "tokens", else "elements"; empty if unknown.
    amount: float = 0.0


_UNKNOWN = BatchContent()


class StepWindows(NamedTuple):
    """Mean times of a rank in windows of consecutive timed steps (in milliseconds)."""

    steps: int  # Number of steps in each window.
    first: Sequence[int]  # Number of the first step of each window; only on rank zero.
    local_ms: Sequence[float]
    wait_ms: Sequence[float]  # Waits for other ranks.
    newest_ms: Sequence[float]  # Local time of each of the newest steps.
    n: int  # Number of all steps.


@dataclass(frozen=True, slots=True)
class RankTotals:
    """Sums over the steps of a rank, which the rank sends to rank zero.

    Attributes:
        phases: See `PhaseTotals`.
        deviation_ms: See `BatchMeans.deviation_ms`.
        host_shares: Fraction of each phase in which the host set the pace; empty if unknown. Then
            the host may have set the pace of all of it.
        lines: Its longest lines; empty if unknown.
        busy_ms: Time of the host per step without waits for the GPU (in milliseconds); None if
            unknown, and without a GPU.
        core_wait: Fraction of the time in which the loop waited for a CPU core; None if unknown.
        batch: Content of its batches.
        windows: Its times over the run. None if the details were not sent: these times,
            `host_shares`, `lines`, `busy_ms`, `core_wait` and `batch`.
    """

    phases: PhaseTotals
    deviation_ms: float = 0.0
    host_shares: Mapping[str, float] = field(default_factory=dict)
    lines: Sequence[LineTime] = ()
    busy_ms: float | None = None
    core_wait: float | None = None
    batch: BatchContent = _UNKNOWN
    windows: StepWindows | None = None

    @property
    def steps(self) -> int:
        return self.phases.get(STEP, (0.0, 0))[1]

    @property
    def error_ms(self) -> float:
        """Standard error of the mean local time (in milliseconds); infinite for a single step."""
        return self.deviation_ms / math.sqrt(self.steps) if self.steps > 1 else math.inf


class BatchMeans:
    """Local time of a rank, and its waits for other ranks, in blocks of steps.

    They show the noise of the local time. Delays of a rank may last for hundreds of steps, so
    successive steps are correlated, but means over long blocks are not. The block length doubles as
    the run grows: "dynamic batch means", Yeh and Schmeiser (2000).
    """

    def __init__(self) -> None:
        self._length = 1  # Number of steps in a block.
        # Mean local time and mean wait of each full block, and the number of its first step.
        self._means_ms, self._waits_ms = list[float](), list[float]()
        self._first: list[int] = []
        # Local time, wait, and number of steps after these blocks.
        self._open_ms, self._open_wait_ms, self._n_open = 0.0, 0.0, 0
        self._open_first = 0
        self._newest_ms = deque[float](maxlen=_N_NEWEST)
        self._n = 0

    def add(self, steps: Iterable[StepRecord]) -> None:
        for step in steps:
            local, waits = _local_marks(step.labels)
            ms = step.device_ms
            local_ms = sum(map(ms.__getitem__, local))
            self.take(local_ms, sum(map(ms.__getitem__, waits)) if waits else 0.0, step.number)

    def take(self, local_ms: float, wait_ms: float = 0.0, number: int = 0) -> None:
        """Add the local time and the wait of the next step, which has this number."""
        if not self._n_open:
            self._open_first = number
        self._open_ms += local_ms
        self._open_wait_ms += wait_ms
        self._n_open += 1
        self._n += 1
        self._newest_ms.append(local_ms)
        if self._n_open < self._length:
            return
        self._means_ms.append(self._open_ms / self._length)
        self._waits_ms.append(self._open_wait_ms / self._length)
        self._first.append(self._open_first)
        self._open_ms, self._open_wait_ms, self._n_open = 0.0, 0.0, 0
        if len(self._means_ms) == _MAX_WINDOWS:
            self._means_ms = _pair_means(self._means_ms)
            self._waits_ms = _pair_means(self._waits_ms)
            self._first = self._first[::2]
            self._length *= 2

    @property
    def windows(self) -> StepWindows:
        """The blocks, rounded to microseconds."""
        times_ms = self._means_ms, self._waits_ms, self._newest_ms
        local_ms, waits_ms, newest_ms = ([round(ms, 3) for ms in each_ms] for each_ms in times_ms)
        return StepWindows(self._length, [*self._first], local_ms, waits_ms, newest_ms, self._n)

    @property
    def deviation_ms(self) -> float:
        """Standard deviation of a step, increased to account for correlation (in milliseconds).

        Divided by the square root of n, it is the standard error of the mean over n steps. It is
        the maximum of the estimates from blocks of the current length, twice that length, and so
        on. 0 if there are too few blocks.
        """
        means, length = self._means_ms, self._length
        largest_ms = 0.0
        while (n := len(means)) >= (4 if length > 1 else 2):
            # Delays of a rank last for several steps, so count at least 10 steps as one sample.
            deviation_ms = statistics.stdev(means) * math.sqrt(max(length, 10))
            # The deviation of a few blocks may be too small by chance.
            largest_ms = max(largest_ms, deviation_ms * (1 + 2 / (n - 1)))
            means, length = _pair_means(means), 2 * length
        return largest_ms


def _pair_means(means: list[float]) -> list[float]:
    """Return the mean of each pair of neighbors, without an odd last value."""
    return [sum(pair) / 2 for pair in zip(means[::2], means[1::2], strict=False)]


@lru_cache(maxsize=256)
def _local_marks(labels: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the indices of the marks that start local time, and that start a wait."""
    phases_of_marks = [(i, names) for i, names in enumerate(resolve_labels(labels)) if names]
    waits = tuple(i for i, names in phases_of_marks if is_wait(names[-1]))
    return tuple(i for i, _ in phases_of_marks if i not in waits), waits


def totals_of(sums: Sums, deviation_ms: float = 0.0) -> RankTotals:
    """Return the totals of a rank, without the sub-phases of single callbacks."""
    phases = {**sums.phases, STEP: sums.step}
    return RankTotals(
        {
            name: (phase.device_ms, int(phase.n))
            for name, phase in phases.items()
            if not of_one_callback(name)
        },
        deviation_ms,
    )


def line_times(rows: Iterable[LineRow]) -> list[LineTime]:
    """Return the times of the longest lines in steps."""
    found = []
    for row in rows:
        if row.entry or not row.function:
            continue
        local = [part for name, part in row.phases.items() if not is_wait(name)]
        waits_ms = {name: part.ms for name, part in row.phases.items() if is_wait(name)}
        host_ms = sum(part.host_ms for part in local)
        wait = max(waits_ms, key=waits_ms.__getitem__, default="")
        found.append(
            LineTime(
                str(row),
                row.function,
                row.path[-1].partition(" (")[0] if row.path else "",
                round(host_ms, 3),
                round(sum(part.gpu_ms for part in local), 3),
                round(row.busy_ms or host_ms, 3),  # Only known on a GPU.
                round(row.error_ms, 3),
                round(waits_ms.get(wait, 0.0), 3),
                wait.rpartition("/")[0],
            )
        )
    return sorted(found, key=lambda line: -line.longest_ms)[:_MAX_LINES]


def since(now: RankTotals, before: RankTotals | None) -> RankTotals:
    """Return a rank's totals minus its totals `before`."""
    if before is None:
        return now
    phases = {}
    for name, (ms, n) in now.phases.items():
        ms_before, n_before = before.phases.get(name, (0.0, 0))
        if n > n_before:
            phases[name] = ms - ms_before, n - n_before
    return replace(now, phases=phases)


# Comparison of all ranks


@dataclass(frozen=True, slots=True)
class RankStats:
    """Mean times of a phase on all ranks.

    Attributes:
        min_ms: Shortest of the ranks' means (in milliseconds).
        mean_ms: Mean over the steps of all ranks (in milliseconds).
        max_ms: Longest of the ranks' means (in milliseconds).
        max_rank: Rank with the longest mean.
    """

    min_ms: float
    mean_ms: float
    max_ms: float
    max_rank: int


@dataclass(frozen=True, slots=True)
class RankHistory:
    """Times of each rank over the run, in windows of consecutive timed steps.

    Attributes:
        steps: Number of timed steps in each window.
        first: Number of the first step of each window.
        local_ms: Mean local time by rank and window (in milliseconds). NaN if it did not arrive.
        wait_ms: Mean wait for other ranks by rank and window (in milliseconds).
    """

    steps: int
    first: tuple[int, ...]
    local_ms: tuple[tuple[float, ...], ...]
    wait_ms: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class RankSummary:
    """Comparison of all ranks.

    The local time of a rank is its step time without `backward/comm` and similar phases, in which
    it waits for other ranks. In a pipeline, the rank with the longest stage is the straggler.

    Attributes:
        rows: Statistics of each phase that ran, of "step" and of "local".
        ranks: Ranks that took part, in order.
        straggler: Rank with the longest local time, if it exceeds the median of the other ranks by
            5 % of their median step or more, and by more than 4 standard errors; else None. The
            standard error is estimated from means over blocks of steps ("batch means"). If the host
            sets the pace, it includes how much the speed of a host may drift.
        excess_ms: Longest local time minus the median of the other ranks (in milliseconds). If the
            host sets the pace, only the part that the hosts of the others do not need: while they
            wait for the straggler, their work is hidden, and is not in their local time.
        phase: Phase with the largest part of this difference; for `data`, a sub-phase if known.
        sentence: Sentence on the stragglers; empty if there is none.
        stragglers: All ranks whose local time is closer to the straggler than to the median; empty
            if `straggler` is None. Several stragglers point to a common cause, such as a longer
            stage of a pipeline.
        suspect: Rank with the longest local time, if it exceeds the median by 5 % or more as above,
            but not by enough standard errors to be the `straggler`; else None.
        error_ms: Standard error of `excess_ms` (in milliseconds; None if unknown).
        line: Line with at least half of the excess, such as "`Augment.__call__` (data.py:31)";
            empty if unknown.
        line_ms: Excess of the straggler in this line (in milliseconds).
        factor: Multiple of the others' time that the straggler needs for every line; None if its
            lines differ.
        batch: How much more content the straggler's batches have, such as "1.6 times the tokens of
            the others (1,638 and 1,024 per step)"; empty if that does not explain the excess.
        pattern: "same" if one rank is last all the time, "rotating" if it is another rank each
            time, "transient" if a rank is last in a few steps only; empty if unknown.
        notes: Sentences on the batches, on the pattern, and on the line in which other ranks wait.
        history: Times over the run, by rank.
    """

    rows: Mapping[str, RankStats]
    ranks: tuple[int, ...]
    straggler: int | None
    excess_ms: float
    phase: str
    sentence: str = ""
    stragglers: tuple[int, ...] = ()
    suspect: int | None = None
    error_ms: float | None = None
    line: str = ""
    line_ms: float = 0.0
    factor: float | None = None
    batch: str = ""
    pattern: str = ""
    notes: tuple[str, ...] = ()
    history: RankHistory | None = None

    @property
    def where(self) -> str:
        """Line of the straggler, or its phase if the line is unknown."""
        return self.line or f"`{self.phase}`"

    def metrics(self) -> dict[str, float]:
        """Return the values to log; `straggler` is -1 if there is none."""
        metrics: dict[str, float] = {}
        for name, row in self.rows.items():
            metrics |= {f"{name}_max_ms": row.max_ms, f"{name}_min_ms": row.min_ms}
        metrics["straggler"] = -1.0 if self.straggler is None else float(self.straggler)
        return metrics


class RankResults:
    """Newest comparison of the ranks."""

    def __init__(self) -> None:
        self._summary: RankSummary | None = None
        self._totals: dict[int, RankTotals] | None = None  # Not compared yet.
        self._complete: Callable[[], object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_complete": None}

    def add(self, summary: RankSummary | None) -> None:
        self._summary, self._totals = summary, None

    def compare_later(self, totals: Mapping[int, RankTotals]) -> None:
        """Compare these totals when they are read: with many ranks, that takes 0.1 s."""
        self._totals = dict(totals)

    def complete_later(self, complete: Callable[[], object]) -> None:
        """Set a function for the next `complete` to call: it waits for late ranks and adds them."""
        self._complete = complete

    def complete(self) -> RankSummary | None:
        """Return the comparison, after waiting for late ranks if necessary."""
        complete, self._complete = self._complete, None
        if complete is not None:
            complete()
        if (totals := self._totals) is not None:
            try:
                self.add(compare(totals))
            except Exception as error:
                self.add(None)
                messages.warning("The times of the ranks are no longer compared: %r", error)
        return self._summary


class _LastRank(NamedTuple):
    """The last rank: the one with the longest local time, compared with the other ranks."""

    rank: int
    others: Sequence[int]
    total_ms: float  # Its local time minus the median of the others.
    by_phase_ms: Mapping[str, float]  # The same of each phase, and of each sub-phase of `data`.
    step_ms: float  # Median step time of the others.
    # Time in which the host sets the pace: of the last rank, and the median of the others.
    host_ms: Mapping[str, tuple[float, float]]
    # Part of `total_ms` in which the others' hosts do the same work. It is local time of the last
    # rank only, because the others do it while they wait for that rank.
    hidden_ms: float

    @property
    def own_ms(self) -> float:
        """Excess that the last rank would not have with the hosts of the others."""
        return self.total_ms - self.hidden_ms

    @property
    def min_ms(self) -> float:
        return _MIN_EXCESS * self.step_ms

    @property
    def is_of_host(self) -> bool:
        """True if the host sets the pace of at least half of the excess."""
        return _host_excess_ms(self.host_ms) >= 0.5 * self.total_ms


def _host_excess_ms(host_ms: Mapping[str, tuple[float, float]]) -> float:
    return sum(ms - usual_ms for ms, usual_ms in host_ms.values())


class _Cause(NamedTuple):
    """Why the last rank takes longer. `where` ends a sentence. See `RankSummary`."""

    where: str
    line: str = ""
    line_ms: float = 0.0
    factor: float | None = None
    is_own: bool = False  # True if the other ranks have no such line, or need half of its time.


def compare(totals: Mapping[int, RankTotals]) -> RankSummary | None:
    """Compare the ranks by their totals; return None if no step was timed."""
    totals = {rank: total for rank, total in sorted(totals.items()) if total.steps}
    if not totals:
        return None
    # With waits included, a step takes equally long on all ranks, so compare local work. Example:
    # under DDP with one straggler, backward took 20.8 and 20.9 ms, of which 3.5 and 20.5 ms were
    # local work.
    local_ms = {rank: _local_ms(total) for rank, total in totals.items()}
    late = _last_rank(totals, local_ms)
    last, total_ms = late.rank, late.total_ms
    is_large = late.own_ms >= late.min_ms
    more_content = _more_content(totals, late)
    batch = _more_batch(totals, late, more_content) if is_large else ""
    cause = _cause(totals, late, batch) if is_large else None
    is_certain, error_ms = _certainty(totals, late, more_content)
    is_certain = is_certain or (cause is not None and cause.is_own)
    is_straggler = is_large and is_certain

    # Ranks that are closer to the last rank than to the median of the others are slow as well.
    threshold_ms = local_ms[last][LOCAL] - total_ms / 2
    slow = tuple(rank for rank in totals if local_ms[rank][LOCAL] >= threshold_ms)
    stragglers = slow if is_straggler else ()

    rows, phase = _rows(totals, local_ms), largest_part(late.by_phase_ms)
    has_waits = f"{phase}/{COMM}" in rows and phase.partition("/")[0] not in BETWEEN_BATCHES
    cause = cause or _Cause(f"in {phase} compute" if has_waits else f"in {phase}")

    history = _history(totals)
    pattern, note = "", ""
    if history is not None:
        pattern, note = _pattern(totals, history, stragglers, late)
    content = f"rank {last} has {batch}" if is_straggler and batch not in cause.where else ""
    notes = content, note, _waits(totals, stragglers, late.step_ms)
    return RankSummary(
        rows=rows,
        ranks=tuple(totals),
        straggler=last if is_straggler else None,
        excess_ms=late.own_ms,
        phase=phase,
        sentence=_sentence(last, stragglers, late.own_ms, cause.where),
        stragglers=stragglers,
        suspect=last if is_large and not is_straggler else None,
        error_ms=error_ms if math.isfinite(error_ms) else None,
        line=cause.line,
        line_ms=cause.line_ms,
        factor=cause.factor,
        batch=batch,
        pattern=pattern,
        notes=tuple(filter(None, notes)),
        history=history,
    )


def _local_ms(totals: RankTotals) -> dict[str, float]:
    """Return a rank's time per step without waits for other ranks.

    By phase, by sub-phase of `data`, and of "local". It is divided by the number of all steps, even
    for a phase that ran in only a few of them, so that the phases add up to the local time.
    """
    ms = {name: total_ms / totals.steps for name, (total_ms, _) in totals.phases.items()}
    local_ms = {LOCAL: ms.pop(STEP)}
    waits_ms = {name: ms.pop(name) for name in [*ms] if is_wait(name)}
    for name in ms:
        if "/" not in name or name.startswith(f"{DATA}/"):
            local_ms[name] = ms[name]
    for name, wait_ms in waits_ms.items():
        local_ms[name.partition("/")[0]] -= wait_ms
        local_ms[LOCAL] -= wait_ms
    return local_ms


def _last_rank(
    totals: Mapping[int, RankTotals], local_ms: Mapping[int, Mapping[str, float]]
) -> _LastRank:
    last = max(totals, key=lambda rank: local_ms[rank][LOCAL])
    # Exclude this rank from the median. With two ranks, it would make up half of the median.
    others = [rank for rank in totals if rank != last] or [last]

    def host_ms(rank: int, name: str) -> float:
        shares = totals[rank].host_shares
        return local_ms[rank].get(name, 0.0) * (shares.get(name, 0.0) if shares else 1.0)

    excess_ms, both_host_ms = {}, {}
    for name, ms in local_ms[last].items():
        usual_ms = statistics.median(local_ms[rank].get(name, 0.0) for rank in others)
        excess_ms[name] = ms - usual_ms
        if "/" not in name and name != LOCAL:
            usual_host_ms = statistics.median(host_ms(rank, name) for rank in others)
            both_host_ms[name] = host_ms(last, name), usual_host_ms
    total_ms = excess_ms.pop(LOCAL)
    hidden_ms, busy_ms = 0.0, [totals[rank].busy_ms for rank in (last, *others)]
    known_ms = [ms for ms in busy_ms if ms is not None]
    if len(known_ms) == len(busy_ms):
        more_busy_ms = max(known_ms[0] - statistics.median(known_ms[1:]), 0.0)
        hidden_ms = max(_host_excess_ms(both_host_ms) - more_busy_ms, 0.0)
    return _LastRank(
        rank=last,
        others=others,
        total_ms=total_ms,
        by_phase_ms=excess_ms,
        step_ms=statistics.median(
            totals[rank].phases[STEP][0] / totals[rank].steps for rank in others
        ),
        host_ms=both_host_ms,
        hidden_ms=min(hidden_ms, max(total_ms, 0.0)),
    )


def _certainty(
    totals: Mapping[int, RankTotals], late: _LastRank, more_content: float
) -> tuple[bool, float]:
    """Return whether the excess is more than noise, and its standard error (in milliseconds).

    If the host of the last rank needs longer for its other phases, too, then its speed differs.
    That may be by chance: in 40 steps bound by the host, one of two equal hosts needed 2.7 times as
    long as the other. So this difference, the drift, counts as an error that shrinks with the time
    measured. The content of its batches, if larger, explains a part of the drift.

    Args:
        totals: Totals of each rank.
        late: The last rank.
        more_content: Result of `_more_content`.
    """
    usual_error_ms = statistics.median(totals[rank].error_ms for rank in late.others)
    error_ms = math.hypot(totals[late.rank].error_ms, usual_error_ms)

    host_ms = late.host_ms
    longest = max(host_ms, key=lambda name: host_ms[name][0] - host_ms[name][1], default="")
    ratios = [
        ms / usual_ms
        for name, (ms, usual_ms) in host_ms.items()
        if name != longest and usual_ms >= _MIN_PHASE * late.step_ms
    ]
    drift = max(max([1.0, *ratios]) - 1.0 - more_content, 0.0)
    usual_host_ms = sum(usual_ms for _, usual_ms in host_ms.values())
    drift_ms = min(drift * usual_host_ms, max(late.own_ms, 0.0))
    if late.hidden_ms:
        # The rest is measured in the few examined steps only, so all of it may be drift.
        drift_ms = max(late.own_ms, 0.0)
    samples = totals[late.rank].phases[STEP][0] / _HOST_SAMPLE_MS
    both_errors_ms = math.hypot(error_ms, drift_ms / math.sqrt(max(samples, 1.0)))
    is_beyond_all_errors = late.own_ms > _MIN_ERRORS * both_errors_ms
    # Also certain if the rest is more than all of the drift, which is not the same in all phases.
    rest_ms = late.own_ms - drift_ms
    is_beyond_drift = rest_ms >= max(late.min_ms, drift_ms) and rest_ms > _MIN_ERRORS * error_ms
    return is_beyond_all_errors or is_beyond_drift, both_errors_ms


def _more_content(totals: Mapping[int, RankTotals], late: _LastRank) -> float:
    """Return how much more the last rank has in its batches: 0.6 for 1.6 times the tokens.

    Return 0.0 if it does not, or if that is unknown.
    """
    unit, amount = totals[late.rank].batch
    others = [totals[rank].batch for rank in late.others]
    usual = statistics.median(other.amount for other in others)
    if not unit or not usual or any(other.unit != unit for other in others):
        return 0.0
    return max(amount / usual - 1, 0.0)


def _more_batch(totals: Mapping[int, RankTotals], late: _LastRank, more_content: float) -> str:
    """Return how much more its batches contain; empty if that explains less than half."""
    if more_content < max(_MIN_FACTOR - 1, 0.5 * late.own_ms / late.step_ms):
        return ""
    unit, amount = totals[late.rank].batch
    both = f"({amount:,.0f} and {amount / (1 + more_content):,.0f} per step)"
    return f"{1 + more_content:.1f} times the {unit} of the others {both}"


def _cause(totals: Mapping[int, RankTotals], late: _LastRank, batch: str) -> _Cause | None:
    """Return the factor of all lines, or the line, that makes the last rank late; None if unknown.

    `batch` says how much more it has in its batches; empty if that does not explain the excess.
    """
    with_lines = [rank for rank in late.others if totals[rank].lines]
    if 2 * len(with_lines) < len(late.others):
        return None
    last, own_ms, is_host = late.rank, late.own_ms, late.is_of_host
    if (factor := _factor(totals, last, with_lines, own_ms, is_host)) is not None:
        if batch:
            why = f"it has {batch}"
        elif is_host:
            why = _core_waits(totals, late) or "its CPU is shared or slower"
        else:
            why = "its clocks are lower"
            why += "" if totals[last].batch.unit else ", or its batches larger"
        need = f"its {'host' if is_host else 'GPU'} needs {factor:.1f} times as long for every line"
        return _Cause(f"because {need}: {why}", factor=factor)
    line, line_ms = _longest_line(totals, last, with_lines)
    if line is None or line_ms < _MIN_LINE * own_ms:
        return None
    where = f"in {line.text}" if line_ms >= _MIN_WHOLE * own_ms else f"mostly in {line.text}"
    # Without a GPU, the host sets the pace of all lines.
    if any(item.gpu_ms for total in totals.values() for item in total.lines):
        where += ", host-paced" if line.host_ms >= line.gpu_ms else ", GPU-paced"
    # The speed of a host, or how collectives share a GPU, rarely doubles the time of a line.
    beyond_ms = line_ms - (line.local_ms - line_ms)
    is_own = beyond_ms >= max(_MIN_OWN * late.step_ms, _MIN_ERRORS * line.error_ms / 2)
    return _Cause(where, line.text, line_ms, is_own=is_own)


def _core_waits(totals: Mapping[int, RankTotals], late: _LastRank) -> str:
    """Return how much longer the last rank waits for a CPU core; empty if it does not."""
    share = totals[late.rank].core_wait or 0.0
    usual = statistics.median(totals[rank].core_wait or 0.0 for rank in late.others)
    if share < _MIN_CORE_WAIT or share < 2 * usual:
        return ""
    return f"it waits for a CPU core for {percent(share)} of the time (others {percent(usual)})"


def _sentence(last: int, stragglers: Sequence[int], excess_ms: float, where: str) -> str:
    if not stragglers:
        return ""
    subject = f"rank {last} is"
    if len(stragglers) > 1:
        more = f" and {len(stragglers) - 8} more" if len(stragglers) > 8 else ""
        subject = f"ranks {', '.join(map(str, stragglers[:8]))}{more} are up to"
    return f"{subject} {duration(excess_ms)} per step slower than the median of the others, {where}"


def _longest_line(
    totals: Mapping[int, RankTotals], last: int, others: Sequence[int]
) -> tuple[LineTime | None, float]:
    """Return the line in which the last rank exceeds the others the most, and by how much.

    Return None if it does not by more than the errors. As in `_LastRank.own_ms`, where the host
    sets the pace, the excess is at most that of the host's own time.
    """
    own = totals[last].lines
    texts = {line.text for line in own}

    def usual_ms(rank: int, line: LineTime) -> list[float]:
        """Return the times of a line on another rank, whose rows may be divided in another way."""
        lines = totals[rank].lines
        same = [other for other in lines if other.text == line.text]
        if not same:
            named = [other for other in lines if other.function == line.function]
            same = [other for other in named if other.text not in texts]
        if same:
            return _sums_of(same)
        # Its time may be part of the line that calls it.
        callers = _sums_of([other for other in lines if other.function == line.caller])
        of_own = _sums_of([other for other in own if other.function == line.caller])
        # If not all lines were sent, it is at most as long as the shortest of them.
        shortest_ms = lines[-1].longest_ms if len(lines) == _MAX_LINES else 0.0
        host_ms, gpu_ms, busy_ms = map(float.__sub__, callers, of_own)
        return [max(host_ms, shortest_ms), max(gpu_ms, 0.0), max(busy_ms, shortest_ms)]

    longest, longest_ms = None, 0.0
    for line in own:
        usual = map(statistics.median, zip(*(usual_ms(rank, line) for rank in others), strict=True))
        host_ms, gpu_ms, busy_ms = map(float.__sub__, _sums_of([line]), usual)
        ms = min(min(host_ms, max(busy_ms, 0.0)) + gpu_ms, line.local_ms)
        if ms > max(longest_ms, line.error_ms):
            longest, longest_ms = line, ms
    return longest, longest_ms


def _factor(
    totals: Mapping[int, RankTotals],
    last: int,
    others: Sequence[int],
    own_ms: float,
    is_host: bool,
) -> float | None:
    """Return the multiple of the others' time that the last rank needs for every line, or None.

    With `is_host`, compare the time of the host, else that of the GPU.
    """
    by_rank = {
        rank: {line.text: line.busy_ms if is_host else line.gpu_ms for line in total.lines}
        for rank, total in totals.items()
    }
    both_ms = [
        (ms, statistics.median(by_rank[rank].get(text, 0.0) for rank in others))
        for text, ms in by_rank[last].items()
    ]
    usual_ms = sum(usual for _, usual in both_ms)
    both_ms = [(ms, usual) for ms, usual in both_ms if usual > 0 and usual >= 0.05 * usual_ms]
    if len(both_ms) < 3:
        return None
    factor = sum(ms for ms, _ in both_ms) / sum(usual for _, usual in both_ms)
    more = factor - 1
    is_uniform = all(1 + 0.5 * more <= ms / usual <= 1 + 2 * more for ms, usual in both_ms)
    explains = more * usual_ms >= _MIN_LINE * own_ms
    return factor if factor >= _MIN_FACTOR and is_uniform and explains else None


def _history(totals: Mapping[int, RankTotals]) -> RankHistory | None:
    """Return the windows of all ranks; None if those of fewer than two ranks have arrived.

    Windows must have as many steps as those of the rank that knows their numbers, rank zero; else
    they cover other steps, and count as not arrived.
    """
    numbered = next((total.windows for total in totals.values() if total.windows), None)
    if numbered is None or not numbered.first:
        return None
    n = len(numbered.first)

    def to_n(values_ms: Sequence[float]) -> tuple[float, ...]:
        """Return values of exactly n windows: NaN for those that have not arrived."""
        return tuple([*values_ms, *[math.nan] * n][:n])

    local_ms, wait_ms = list[tuple[float, ...]](), list[tuple[float, ...]]()
    for total in totals.values():
        each = total.windows
        has_arrived = each is not None and each.steps == numbered.steps
        local_ms.append(to_n(each.local_ms if each is not None and has_arrived else ()))
        wait_ms.append(to_n(each.wait_ms if each is not None and has_arrived else ()))
    if sum(not math.isnan(row[0]) for row in local_ms) < 2:
        return None
    return RankHistory(numbered.steps, tuple(numbered.first), tuple(local_ms), tuple(wait_ms))


def _pattern(
    totals: Mapping[int, RankTotals],
    history: RankHistory,
    stragglers: Sequence[int],
    late: _LastRank,
) -> tuple[str, str]:
    """Return how the rank that is last changes over the run, and a sentence on it and its cost.

    See `RankSummary.pattern`.
    """
    arrived = {
        rank: local_ms
        for rank, local_ms in zip(totals, history.local_ms, strict=True)
        if not math.isnan(local_ms[0])
    }
    found = _LastOverTime(arrived, late.step_ms)
    windows = f"windows of {history.steps} steps" if history.steps > 1 else "steps"
    own = late.own_ms / late.total_ms if late.hidden_ms else 1.0
    if pattern := found.same(stragglers, windows, own):
        return pattern
    if _is_host_bound(totals, late.step_ms):
        return "", ""  # The work of any rank's host may be hidden in any window.
    if pattern := found.rotating(windows) or found.transient(history, windows):
        return pattern
    # Means over windows hide a straggler that changes in each step.
    newest = [totals[rank].windows for rank in arrived]
    if not stragglers and len({each.n for each in newest if each}) == 1:
        newest_ms = {
            rank: each.newest_ms for rank, each in zip(arrived, newest, strict=True) if each
        }
        pattern = _LastOverTime(newest_ms, late.step_ms).rotating("steps", "the newest ")
    return pattern or ("", "")


def _is_host_bound(totals: Mapping[int, RankTotals], step_ms: float) -> bool:
    busy_ms = [total.busy_ms for total in totals.values() if total.busy_ms is not None]
    return bool(busy_ms) and statistics.median(busy_ms) >= _MIN_HOST_BOUND * step_ms


class _LastOverTime:
    """In which windows of steps a rank is late, and which.

    A rank is late in a window if its excess over the median of the others is more than noise.

    Args:
        by_rank: Local time of each rank in each window (in milliseconds). Windows are left out from
            the first that has not arrived from each rank, which is NaN.
        step_ms: Usual step time.
    """

    def __init__(self, by_rank: Mapping[int, Sequence[float]], step_ms: float) -> None:
        self.ranks = [*by_rank]
        self.n = min(sum(not math.isnan(ms) for ms in each_ms) for each_ms in by_rank.values())
        self.step_ms = step_ms
        local_ms = np.array([each_ms[: self.n] for each_ms in by_rank.values()])
        self.local_ms, self.is_late = local_ms, np.zeros(self.n, bool)
        self.culprits, self.cost_ms = Counter[int](), 0.0  # Windows in which each rank is late.
        if self.n < _MIN_WINDOWS:
            return
        excess_ms = local_ms.max(axis=0) - np.median(np.sort(local_ms, axis=0)[:-1], axis=0)
        # Delays make windows longer, so the shorter half of a rank's windows shows its noise. 0.97
        # is the distance of these quantiles in a normal distribution of unit deviation.
        low_ms, high_ms = np.quantile(local_ms, (0.05, 0.25), axis=1)
        noise_ms = float(np.median(high_ms - low_ms)) / 0.97
        self.is_late = excess_ms > max(_MIN_EXCESS * step_ms, 6 * noise_ms)
        self.culprits.update(self.ranks[i] for i in local_ms.argmax(axis=0)[self.is_late])
        self.cost_ms = float(excess_ms[self.is_late].sum()) / self.n

    @property
    def n_late(self) -> int:
        return int(self.is_late.sum())

    def cost(self, own: float = 1.0) -> str:
        """Return a clause on the cost, which is the fraction `own` of the excess."""
        return f"which costs {duration(own * self.cost_ms)} per step"

    # Each pattern with its sentence; None if it is not this pattern.

    def same(self, stragglers: Sequence[int], windows: str, own: float) -> tuple[str, str] | None:
        count = sum(self.culprits[rank] for rank in stragglers)
        if not count or count < 0.8 * self.n:
            return None
        who = "the same rank is" if len(stragglers) == 1 else "the same ranks are"
        return "same", f"{who} last in {count} of {self.n} {windows}, {self.cost(own)}"

    def rotating(self, windows: str, which: str = "") -> tuple[str, str] | None:
        if not self.n_late or self.n_late < 0.5 * self.n:
            return None
        if max(self.culprits.values()) > 0.7 * self.n_late:
            return None
        who = f"the straggler changes: {len(self.culprits)} ranks are last in turn"
        return "rotating", f"{who} in {self.n_late} of {which}{self.n} {windows}, {self.cost()}"

    def transient(self, history: RankHistory, windows: str) -> tuple[str, str] | None:
        if not 0 < self.n_late <= 0.25 * self.n or self.cost_ms < _MIN_COST * self.step_ms:
            return None
        [(rank, count)] = self.culprits.most_common(1)
        local_ms = self.local_ms
        beyond_ms = local_ms[self.ranks.index(rank)] - np.median(local_ms, axis=0)
        # If the rank is last in the other windows, too, they may only be too noisy to show it.
        is_usual = beyond_ms[~self.is_late].mean() < 0.2 * beyond_ms[self.is_late].mean()
        if count < 0.8 * self.n_late or not is_usual:
            return None
        at = np.flatnonzero(self.is_late)
        where = f"{self.n_late} of {self.n} {windows}"
        if at[-1] - at[0] == self.n_late - 1:  # Consecutive.
            ends = [*history.first[1:], history.first[-1] + history.steps]
            first, end = history.first[at[0]], ends[at[-1]] - 1
            where = f"steps {first} to {end}" if end > first else f"step {first}"
        return "transient", f"rank {rank} is last only in {where}, {self.cost()} over the run"


def _waits(totals: Mapping[int, RankTotals], stragglers: Sequence[int], step_ms: float) -> str:
    """Return a sentence on the line in which ranks wait the longest; empty if waits are short."""
    waiting = [
        {(line.text, line.wait_phase): line.wait_ms for line in total.lines}
        for rank, total in totals.items()
        if total.lines and rank not in stragglers
    ]
    # Lines that do not wait on most of the ranks have a median of 0.
    usual_ms = {
        place: statistics.median(waits_ms.get(place, 0.0) for waits_ms in waiting)
        for place in dict.fromkeys(place for waits_ms in waiting for place in waits_ms)
    }
    place = max(usual_ms, key=usual_ms.__getitem__, default=None)
    if place is None or usual_ms[place] < _MIN_EXCESS * step_ms:
        return ""
    who = "the other ranks wait" if stragglers else "ranks wait for each other"
    text, phase = place
    where = f"the backward of {text}" if phase.startswith(BACKWARD) else f"{text}, in {phase}"
    return f"{who} {duration(usual_ms[place])} per step in {where}"


def _rows(
    all_totals: Mapping[int, RankTotals], local_ms: Mapping[int, Mapping[str, float]]
) -> dict[str, RankStats]:
    """Return the statistics of each phase, in execution order, and of "step" and "local"."""
    phases = {
        rank: {**totals.phases, LOCAL: (local_ms[rank][LOCAL] * totals.steps, totals.steps)}
        for rank, totals in all_totals.items()
    }
    names = dict.fromkeys(name for totals in phases.values() for name in totals)
    ordered = in_order([name for name in names if name not in (STEP, LOCAL)])
    rows = {}
    for name in (*ordered, STEP, LOCAL):
        by_rank = {rank: totals[name] for rank, totals in phases.items() if name in totals}
        means_ms = {rank: ms / n for rank, (ms, n) in by_rank.items()}
        longest = max(means_ms, key=means_ms.__getitem__)
        all_ms, steps = map(sum, zip(*by_rank.values(), strict=True))
        rows[name] = RankStats(
            min_ms=min(means_ms.values()),
            mean_ms=all_ms / steps,
            max_ms=means_ms[longest],
            max_rank=longest,
        )
    return rows
