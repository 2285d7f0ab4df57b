"""Comparison of the ranks of a distributed run: finds the straggler, its excess, and the cause."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_gputime._measurement.sums import STEP, largest_part
from lightning_gputime._messages import duration, messages, percent
from lightning_gputime._phases import BACKWARD, BETWEEN_BATCHES, COMM, DATA, in_order, is_wait
from lightning_gputime._ranks import MAX_LINES, BatchContent, LineTime, RankTotals
from lightning_gputime._ranks.over_time import MIN_EXCESS, RankHistory, history_of, pattern_of

LOCAL = "local"
"""Key of a rank's step time without waits for other ranks."""

# Chosen: smaller ones name ranks and lines that differ by noise, larger ones miss causes. With
# these, 48 of 48 stragglers and 40 of 40 lines are right (`benchmarks/results/ranks.json`).
# A host or a GPU that needs this multiple of the time is slower: the speed of equal ones differs by
# less, as clocks do.
_MIN_FACTOR = 1.15
_MIN_ERRORS = 4.0  # The last of 1,024 equal ranks exceeds the median by 3 errors by chance.
# The speed of a host drifts for seconds, so each second is one sample of it.
_HOST_SAMPLE_MS = 1000.0
_MIN_PHASE = 0.1  # A phase with this fraction of the step shows the speed of a host.
# A cause must explain this fraction of the excess: a line, the factor of all lines, or the batches.
_MIN_CAUSE = 0.5
_MIN_WHOLE = 0.85  # A line with this fraction of the excess is the place of all of it.
# A line makes a rank the straggler if it exceeds twice the others' time by this fraction of a step.
_MIN_OWN = 0.1
_MIN_CORE_WAIT = 0.1  # Fraction of the time that waits for a core must take to be a reason.


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
class RankSummary:
    """Comparison of all ranks.

    The local time of a rank is its step time without `backward/comm` and similar phases, in which
    it waits for other ranks. In a pipeline, the rank with the longest stage is the straggler.

    Attributes:
        rows: Statistics of each phase that ran, of "step" and of "local".
        ranks: Ranks that took part, in order.
        straggler: Rank with the longest local time, if it exceeds the median of the other ranks by
            5 % of their median step or more, and if that is certain; else None. It is certain by
            more than 4 standard errors, which are estimated from means over blocks of steps ("batch
            means"). If the host sets the pace, the error includes how much the speed of a host may
            drift, and two other signs count: a rest beyond all of the drift, or a line that takes
            the others less than half as long.
        excess_ms: Longest local time minus the median of the other ranks (in milliseconds). If the
            host sets the pace, only the part that the hosts of the others do not need: while they
            wait for the straggler, their work is hidden, and is not in their local time.
        phase: Phase of `line` in which it exceeds the other ranks the most. Without a line, the
            phase with the largest part of the difference. For `data`, a sub-phase if known.
        sentence: Sentence on the stragglers; empty if there is none.
        stragglers: All ranks whose local time is closer to the straggler than to the median; empty
            if `straggler` is None. Several stragglers point to a common cause, such as a longer
            stage of a pipeline.
        suspect: Rank with the longest local time, if it exceeds the median by 5 % or more as above,
            but not certainly enough to be the `straggler`; else None.
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
        totals, self._totals = self._totals, None
        if totals is not None:
            try:
                self._summary = compare(totals)
            except Exception as error:
                self._summary = None
                messages.warning("The times of the ranks are no longer compared: %r", error)
        return self._summary


def compare(totals: Mapping[int, RankTotals]) -> RankSummary | None:
    """Compare the ranks by their totals; return None if no step was timed."""
    totals = {rank: total for rank, total in sorted(totals.items()) if total.steps}
    if not totals:
        return None

    # 1. Find the last rank, and its excess. With waits included, a step takes equally long on all
    # ranks, so compare local times. Example: under DDP with one straggler, backward took 20.8 and
    # 20.9 ms, of which 3.5 and 20.5 ms were local work.
    local_ms = {rank: _local_ms(total) for rank, total in totals.items()}
    last = max(totals, key=lambda rank: local_ms[rank][LOCAL])
    # Exclude this rank from the median. With two ranks, it would make up half of the median.
    others = [rank for rank in totals if rank != last] or [last]
    # Example: with local times of 15, 15.2, 15.4 and 18 ms, the total is 18 - 15.2 = 2.8 ms.
    by_phase_ms = {
        name: ms - statistics.median(local_ms[rank].get(name, 0.0) for rank in others)
        for name, ms in local_ms[last].items()
    }
    total_ms = by_phase_ms.pop(LOCAL)
    step_ms = statistics.median(
        totals[rank].phases[STEP][0] / totals[rank].steps for rank in others
    )

    # 2. Subtract what the hosts of the others hide.
    host_ms: dict[str, tuple[float, float]] = {}  # Of the last rank, and the median of the others.
    for name in by_phase_ms:
        if "/" not in name:
            own_ms, *others_ms = (_host_ms(totals[r], local_ms[r], name) for r in (last, *others))
            host_ms[name] = own_ms, statistics.median(others_ms)
    host_excess_ms = sum(ms - usual_ms for ms, usual_ms in host_ms.values())
    busy_ms = [totals[rank].busy_ms for rank in (last, *others)]
    hidden_ms = min(_hidden_ms(host_excess_ms, busy_ms), max(total_ms, 0.0))
    excess_ms = total_ms - hidden_ms
    min_excess_ms = MIN_EXCESS * step_ms
    is_large = excess_ms >= min_excess_ms

    # 3. Look for a cause: larger batches, a factor that all lines have in common, or a line.
    content = totals[last].batch
    more = _more_content(content, [totals[rank].batch for rank in others])
    batch = ""
    if is_large and more >= max(_MIN_FACTOR - 1, _MIN_CAUSE * excess_ms / step_ms):
        both = f"({content.amount:,.0f} and {content.amount / (1 + more):,.0f} per step)"
        batch = f"{1 + more:.1f} times the {content.unit} of the others {both}"
    factor: float | None = None
    found: _LineExcess | None = None
    lines = totals[last].lines
    others_lines = [totals[rank].lines for rank in others if totals[rank].lines]
    is_host = host_excess_ms >= 0.5 * total_ms  # The host sets the pace of most of the excess.
    if is_large and 2 * len(others_lines) >= len(others):
        min_cause_ms = _MIN_CAUSE * excess_ms
        factor = _common_factor(lines, others_lines, min_cause_ms, is_host=is_host)
        if factor is None:
            found = _longest_excess(lines, others_lines, min_cause_ms)

    # 4. Estimate the error. Example: two ranks with standard errors of 0.3 and 0.4 ms differ with
    # an error of sqrt(0.3 ** 2 + 0.4 ** 2) = 0.5 ms.
    usual_error_ms = statistics.median(totals[rank].error_ms for rank in others)
    noise_ms = math.hypot(totals[last].error_ms, usual_error_ms)
    # Where hosts hide work, the rest is measured in the few examined steps only, so all of it may
    # be drift. Drift of 3 ms is an error of 3 / sqrt(9) = 1 ms after 9 s.
    drift_ms = math.inf if hidden_ms else _drift_ms(host_ms, step_ms, more)
    drift_ms = min(drift_ms, max(excess_ms, 0.0))
    n_samples = max(totals[last].phases[STEP][0] / _HOST_SAMPLE_MS, 1.0)
    error_ms = math.hypot(noise_ms, drift_ms / math.sqrt(n_samples))

    # 5. Decide. It is certain if the excess is beyond both errors; also if the rest is more than
    # all of the drift, which is not the same in all phases.
    rest_ms = excess_ms - drift_ms
    is_certain = excess_ms > _MIN_ERRORS * error_ms or (
        rest_ms >= max(min_excess_ms, drift_ms) and rest_ms > _MIN_ERRORS * noise_ms
    )
    if found is not None:
        # The speed of a host, or how collectives share a GPU, rarely doubles the time of a line.
        # Example: a line takes 9 ms, and 2 ms on the others. Beyond twice 2 ms, these are 5 ms.
        beyond_ms = found.ms - (found.line.local_ms - found.ms)
        # `error_ms` of a line is half the width of its 95 % interval: two standard errors.
        line_error_ms = found.line.error_ms / 2
        is_certain |= beyond_ms >= max(_MIN_OWN * step_ms, _MIN_ERRORS * line_error_ms)
    is_straggler = is_large and is_certain
    stragglers: tuple[int, ...] = ()
    if is_straggler:
        # All ranks that are closer to the last rank than to the median of the others.
        threshold_ms = local_ms[last][LOCAL] - total_ms / 2
        stragglers = tuple(rank for rank in totals if local_ms[rank][LOCAL] >= threshold_ms)

    # 6. Say where the excess is.
    rows = _rows(totals, local_ms)
    # Where hosts hide their work, a phase with hidden work may differ more than that of the line.
    phase = found.phase if found is not None else largest_part(by_phase_ms)
    if found is not None:
        where = f"{'in' if found.ms >= _MIN_WHOLE * excess_ms else 'mostly in'} {found.line.text}"
        # Without a GPU, the host sets the pace of all lines.
        if any(line.gpu_ms for total in totals.values() for line in total.lines):
            where += f", {'host' if found.line.host_ms >= found.line.gpu_ms else 'GPU'}-paced"
    elif factor is not None:
        side = "host" if is_host else "GPU"
        if batch:
            reason = f"it has {batch}"
        elif is_host:
            reason = _reason_of_host([totals[rank].core_wait or 0.0 for rank in (last, *others)])
        else:
            reason = "its clocks are lower" + ("" if content.unit else ", or its batches larger")
        where = f"because its {side} needs {factor:.1f} times as long for every line: {reason}"
    else:
        has_waits = f"{phase}/{COMM}" in rows and phase.partition("/")[0] not in BETWEEN_BATCHES
        where = f"in {phase} compute" if has_waits else f"in {phase}"
    sentence = ""
    if is_straggler:
        who = f"rank {last} is"
        if len(stragglers) > 1:
            n_more = len(stragglers) - 8
            more_ranks = f" and {n_more} more" if n_more > 0 else ""
            who = f"ranks {', '.join(map(str, stragglers[:8]))}{more_ranks} are up to"
        excess = f"{duration(excess_ms)} per step slower than the median of the others"
        sentence = f"{who} {excess}, {where}"

    # 7. Find how the last rank changes over the run, and in which line ranks wait for others.
    batch_note = f"rank {last} has {batch}" if is_straggler and batch not in where else ""
    history, pattern, pattern_note = history_of(totals), "", ""
    if history is not None:
        own_share = excess_ms / total_ms if hidden_ms else 1.0
        pattern, pattern_note = pattern_of(totals, history, stragglers, step_ms, own_share)
    waiting = [total.lines for rank, total in totals.items() if rank not in stragglers]
    wait_line, wait_phase, wait_ms = _longest_wait([lines for lines in waiting if lines])
    wait_note = ""
    if wait_line and wait_ms >= MIN_EXCESS * step_ms:
        waiters = "the other ranks wait" if stragglers else "ranks wait for each other"
        is_backward = wait_phase.startswith(BACKWARD)
        at = f"the backward of {wait_line}" if is_backward else f"{wait_line}, in {wait_phase}"
        wait_note = f"{waiters} {duration(wait_ms)} per step in {at}"

    return RankSummary(
        rows=rows,
        ranks=tuple(totals),
        straggler=last if is_straggler else None,
        excess_ms=excess_ms,
        phase=phase,
        sentence=sentence,
        stragglers=stragglers,
        suspect=last if is_large and not is_straggler else None,
        error_ms=error_ms if math.isfinite(error_ms) else None,
        line=found.line.text if found is not None else "",
        line_ms=found.ms if found is not None else 0.0,
        factor=factor,
        batch=batch,
        pattern=pattern,
        notes=tuple(filter(None, (batch_note, pattern_note, wait_note))),
        history=history,
    )


def _hidden_ms(host_excess_ms: float, busy_ms: Sequence[float | None]) -> float:
    """Return the part of the last rank's excess that the hosts of the others hide.

    They do the same work while they wait for the last rank, so only there it is local time.
    Example: the host sets the pace for 9 ms on the last rank, and for 1 ms on the others, but it is
    busy for 10.4 and 10 ms. It needs only 0.4 ms more, so 8 - 0.4 = 7.6 ms are hidden.

    Args:
        host_excess_ms: Excess of the last rank in time for which the host sets the pace.
        busy_ms: Time in which the host is busy, of the last rank and of each other rank.
    """
    known_ms = [ms for ms in busy_ms if ms is not None]
    if len(known_ms) < len(busy_ms):
        return 0.0
    more_busy_ms = max(known_ms[0] - statistics.median(known_ms[1:]), 0.0)
    return max(host_excess_ms - more_busy_ms, 0.0)


def _drift_ms(host_ms: Mapping[str, tuple[float, float]], step_ms: float, more: float) -> float:
    """Return how much of an excess may be due to the speed of the last rank's host.

    If that host needs longer for all of its phases, then its speed differs. That may be by chance:
    in 40 steps bound by the host, one of two equal hosts needed 2.7 times as long as the other.
    Example: it needs 5 ms for forward instead of 2, and 6 ms for backward instead of 4. Forward has
    the excess. In backward, it needs 0.5 times as much in addition, so the drift is
    0.5 * (2 + 4) = 3 ms.

    Args:
        host_ms: Host-paced time of the last rank, and the median of the others, by phase.
        step_ms: Median step of the others. Phases that are short in comparison do not count.
        more: How much more content the batches of the last rank have, as a fraction. It explains
            as much of the drift.
    """
    longest = max(host_ms, key=lambda name: host_ms[name][0] - host_ms[name][1], default="")
    ratios = [
        ms / usual_ms
        for name, (ms, usual_ms) in host_ms.items()
        if name != longest and usual_ms >= _MIN_PHASE * step_ms
    ]
    drift = max(max([1.0, *ratios]) - 1.0 - more, 0.0)
    return drift * sum(usual_ms for _, usual_ms in host_ms.values())


def _reason_of_host(core_waits: Sequence[float]) -> str:
    """Return why the host of a rank is slower at every line.

    `core_waits` has the fraction of the time in which the host waits for a core, of this rank and
    of each other rank.
    """
    own_wait, usual_wait = core_waits[0], statistics.median(core_waits[1:])
    if own_wait < max(_MIN_CORE_WAIT, 2 * usual_wait):
        return "its CPU is shared or slower"
    others_wait = f"(others {percent(usual_wait)})"
    return f"it waits for a CPU core for {percent(own_wait)} of the time {others_wait}"


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


def _host_ms(totals: RankTotals, local_ms: Mapping[str, float], phase: str) -> float:
    """Return the local time of a phase in which the host sets the pace; all of it if unknown.

    The share is of the phase with its waits, in which the GPU sets the pace, or the host if there
    is no GPU. Example: the host sets the pace in 0.25 of 8 ms, of which 6 ms are waits. These are
    all of the 2 ms of local time.
    """
    shares, (ms, _) = totals.host_shares, totals.phases.get(phase, (0.0, 0))
    host_ms = shares.get(phase, 0.0) * ms / totals.steps if shares else math.inf
    return min(host_ms, local_ms.get(phase, 0.0))


def _more_content(content: BatchContent, others: Sequence[BatchContent]) -> float:
    """Return how much more content batches have: 0.6 for 1.6 times the tokens of the others.

    Return 0.0 if they do not, or if that is unknown.
    """
    usual = statistics.median(other.amount for other in others)
    if not content.unit or not usual or any(other.unit != content.unit for other in others):
        return 0.0
    return max(content.amount / usual - 1, 0.0)


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


# Lines of code: the line that is slower on a rank, and the line of the waits


class _LineExcess(NamedTuple):
    """A line of a rank, the time by which it exceeds that of the others, and the phase of most."""

    line: LineTime
    ms: float
    phase: str


def _longest_excess(
    own: Sequence[LineTime], others: Sequence[Sequence[LineTime]], min_excess_ms: float
) -> _LineExcess | None:
    """Return the line in which a rank exceeds the median of the other ranks the most.

    Return None if it is less than `min_excess_ms`, or not more than the errors. The excess in which
    the host sets the pace is at most that of the host's own time: the others may do that work while
    they wait.

    Example: the host sets the pace for 9 ms of a line, and of 1 ms on the other ranks. If it is
    busy for 10 ms on all ranks, the others do 8 ms of the line while they wait, and its excess is
    min(9 - 1, 10 - 10) = 0 ms.
    """
    longest = None
    for line in own:
        phases = [name for name in line.phases_ms if not is_wait(name)]
        by_rank_ms = [_usual_ms(line, own, lines, phases) for lines in others]
        usual_ms = map(statistics.median, zip(*by_rank_ms, strict=True))
        host_ms, gpu_ms, busy_ms, *phases_ms = map(
            float.__sub__, _sums_of([line], phases), usual_ms
        )
        ms = min(min(host_ms, max(busy_ms, 0.0)) + gpu_ms, line.local_ms)
        if ms > max(longest.ms if longest is not None else 0.0, line.error_ms):
            _, phase = max(zip(phases_ms, phases, strict=True))
            longest = _LineExcess(line, ms, phase)
    return longest if longest is not None and longest.ms >= min_excess_ms else None


def _usual_ms(
    line: LineTime, own: Sequence[LineTime], lines: Sequence[LineTime], phases: Sequence[str]
) -> list[float]:
    """Return the times of a line on another rank, whose rows may be divided in another way.

    Args:
        line: A line of the rank that is compared.
        own: All lines of this rank.
        lines: All lines of the other rank.
        phases: Phases to return the times of. See `_sums_of`.
    """
    same = [other for other in lines if other.text == line.text]
    if not same:
        # A row without its line numbers may be the same code, unless this rank has it, too.
        texts = {each.text for each in own}
        named = [other for other in lines if other.function == line.function]
        same = [other for other in named if other.text not in texts]
    if same:
        return _sums_of(same, phases)
    # Its time may be part of the line that calls it. Example: `outer` takes 10 ms there and 4 ms
    # here, so 6 ms of it are `inner`, which has a line here only.
    callers = _sums_of([other for other in lines if other.function == line.caller], phases)
    own_callers = _sums_of([each for each in own if each.function == line.caller], phases)
    host_ms, gpu_ms, busy_ms, *phases_ms = map(float.__sub__, callers, own_callers)
    # If not all lines were sent, this line takes at most as long as the shortest of them. Count
    # that once, as host time, because the caller adds host and GPU time.
    shortest_ms = lines[-1].longest_ms if len(lines) == MAX_LINES else 0.0
    paced_ms = max(host_ms, shortest_ms), max(gpu_ms, 0.0), max(busy_ms, shortest_ms)
    return [*paced_ms, *(max(ms, 0.0) for ms in phases_ms)]


def _sums_of(lines: Sequence[LineTime], phases: Sequence[str]) -> list[float]:
    """Return the sums of `host_ms`, `gpu_ms` and `busy_ms`, and of the times in phases."""
    sums_ms = [0.0] * (3 + len(phases))
    for line in lines:
        of_phases = (line.phases_ms.get(name, 0.0) for name in phases)
        each_ms = line.host_ms, line.gpu_ms, line.busy_ms, *of_phases
        sums_ms = [sum_ms + ms for sum_ms, ms in zip(sums_ms, each_ms, strict=True)]
    return sums_ms


def _common_factor(
    own: Sequence[LineTime],
    others: Sequence[Sequence[LineTime]],
    min_excess_ms: float,
    *,
    is_host: bool,
) -> float | None:
    """Return the multiple of the others' time that a rank needs for every line.

    Return None if it does not differ, if it is not the same for all lines, or if it explains less
    than `min_excess_ms`. With `is_host`, compare the time of the host, else that of the GPU.

    Example: lines of 9, 2 and 1 ms take 11.25, 2.5 and 1.25 ms on this rank. The factor is
    15 / 12 = 1.25, and explains 0.25 * 12 = 3 ms.
    """

    def by_text(lines: Sequence[LineTime]) -> dict[str, float]:
        return {line.text: line.busy_ms if is_host else line.gpu_ms for line in lines}

    others_ms = [*map(by_text, others)]
    both_ms = [
        (ms, statistics.median(each_ms.get(text, 0.0) for each_ms in others_ms))
        for text, ms in by_text(own).items()
    ]
    usual_ms = sum(usual for _, usual in both_ms)
    # The ratio of a short line is uncertain. Two lines may differ by the same factor by chance.
    both_ms = [(ms, usual) for ms, usual in both_ms if usual > 0 and usual >= 0.05 * usual_ms]
    if len(both_ms) < 3:
        return None
    factor = sum(ms for ms, _ in both_ms) / sum(usual for _, usual in both_ms)
    more = factor - 1
    is_uniform = all(1 + 0.5 * more <= ms / usual <= 1 + 2 * more for ms, usual in both_ms)
    explains = more * usual_ms >= min_excess_ms
    return factor if factor >= _MIN_FACTOR and is_uniform and explains else None


def _longest_wait(waiting: Sequence[Sequence[LineTime]]) -> tuple[str, str, float]:
    """Return the line and the phase in which ranks wait for others the longest.

    Args:
        waiting: Lines of each rank that waits.

    Returns:
        The text of the line, the phase, and the median of the ranks' waits (in milliseconds), which
        is 0.0 for a line that does not wait on most of the ranks.
    """
    by_rank = [
        {
            (line.text, name.rpartition("/")[0]): ms
            for line in lines
            for name, ms in line.phases_ms.items()
            if is_wait(name)
        }
        for lines in waiting
    ]
    usual_ms = {
        place: statistics.median(waits_ms.get(place, 0.0) for waits_ms in by_rank)
        for place in dict.fromkeys(place for waits_ms in by_rank for place in waits_ms)
    }
    if not usual_ms:
        return "", "", 0.0
    text, phase = max(usual_ms, key=usual_ms.__getitem__)
    return text, phase, usual_ms[text, phase]
