"""Ranks over the run: their times, how the rank that is last changes, and heat maps of both."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_gputime._messages import duration
from lightning_gputime._output.table import bar
from lightning_gputime._ranks import RankTotals

MIN_EXCESS = 0.05
"""A late rank exceeds the median of the others by this fraction of a step: less costs little."""
_MIN_WINDOWS = 8  # Chosen: of fewer windows, a pattern may be chance; more need longer runs.
_MIN_COST = 0.01  # A pattern of a few windows that costs a smaller fraction of the run is left out.
# The host is busy for this fraction of the step where it sets the pace. Chosen: smaller ones name
# no pattern in some GPU-bound runs, larger ones name work that hosts hide.
_MIN_HOST_BOUND = 0.8


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


def history_of(totals: Mapping[int, RankTotals]) -> RankHistory | None:
    """Return the windows of all ranks; None if those of fewer than two ranks have arrived.

    Windows must have as many steps as those of the rank that knows their numbers, rank zero; else
    they cover other steps, and count as not arrived.
    """
    numbered = next((total.windows for total in totals.values() if total.windows), None)
    if numbered is None or not numbered.first:
        return None
    n = len(numbered.first)
    local_ms, wait_ms = list[tuple[float, ...]](), list[tuple[float, ...]]()
    absent = [math.nan] * n
    for total in totals.values():
        windows = total.windows
        arrived: tuple[Sequence[float], Sequence[float]] = (), ()
        if windows is not None and windows.steps == numbered.steps:
            arrived = windows.local_ms, windows.wait_ms
        for rows, each_ms in zip((local_ms, wait_ms), arrived, strict=True):
            rows.append(tuple([*each_ms, *absent][:n]))  # Exactly n windows; absent ones are NaN.
    if sum(not math.isnan(row[0]) for row in local_ms) < 2:
        return None
    return RankHistory(numbered.steps, tuple(numbered.first), tuple(local_ms), tuple(wait_ms))


def pattern_of(
    totals: Mapping[int, RankTotals],
    history: RankHistory,
    stragglers: Sequence[int],
    step_ms: float,
    own_share: float,
) -> tuple[str, str]:
    """Return how the rank that is last changes over the run, and a sentence on it and its cost.

    Args:
        totals: Totals of each rank.
        history: Their times over the run.
        stragglers: See `RankSummary`.
        step_ms: Usual step time.
        own_share: Fraction of the stragglers' excess that the hosts of the others do not hide.

    Returns:
        See `RankSummary.pattern`; and the sentence. Both are empty if there is no pattern.
    """
    by_rank = {
        rank: local_ms
        for rank, local_ms in zip(totals, history.local_ms, strict=True)
        if not math.isnan(local_ms[0])
    }
    late = _late_windows(by_rank, step_ms)
    n, n_late = late.n, late.n_late
    windows = f"windows of {history.steps} steps" if history.steps > 1 else "steps"

    count = sum(late.culprits[rank] for rank in stragglers)
    # Its cost is the only one that contains work that hosts hide: others are excluded below.
    if count and count >= 0.8 * n:
        who = "the same rank is" if len(stragglers) == 1 else "the same ranks are"
        cost = f"which costs {duration(own_share * late.cost_ms)} per step"
        return "same", f"{who} last in {count} of {n} {windows}, {cost}"

    # If the hosts set the pace, the work of any rank's host may be hidden in any window.
    busy_ms = [total.busy_ms for total in totals.values() if total.busy_ms is not None]
    if busy_ms and statistics.median(busy_ms) >= _MIN_HOST_BOUND * step_ms:
        return "", ""

    if late.is_rotating:
        return "rotating", _rotating_note(late, f"{n} {windows}")

    if 0 < n_late <= 0.25 * n and late.cost_ms >= _MIN_COST * step_ms:
        [(rank, count)] = late.culprits.most_common(1)
        all_ms = np.array([local_ms[:n] for local_ms in by_rank.values()])
        beyond_ms = np.array(by_rank[rank][:n]) - np.median(all_ms, axis=0)
        # If the rank is last in the other windows, too, they may only be too noisy to show it.
        is_usual = beyond_ms[~late.is_late].mean() < 0.2 * beyond_ms[late.is_late].mean()
        if count >= 0.8 * n_late and is_usual:
            where = f"{n_late} of {n} {windows}"
            at = np.flatnonzero(late.is_late)
            if at[-1] - at[0] == n_late - 1:  # Consecutive.
                # The last window is as long as the one before it. If not every step is timed, it
                # spans more steps than it has timed steps.
                ends = [*history.first[1:], 2 * history.first[-1] - history.first[-2]]
                first, end = history.first[at[0]], ends[at[-1]] - 1
                where = f"steps {first} to {end}" if end > first else f"step {first}"
            cost = f"which costs {duration(late.cost_ms)} per step over the run"
            return "transient", f"rank {rank} is last only in {where}, {cost}"

    # Means over windows hide a straggler that changes in each step.
    newest = {rank: found for rank in by_rank if (found := totals[rank].windows) is not None}
    if not stragglers and len({found.n for found in newest.values()}) == 1:
        late = _late_windows({rank: found.newest_ms for rank, found in newest.items()}, step_ms)
        if late.is_rotating:
            return "rotating", _rotating_note(late, f"the newest {late.n} steps")
    return "", ""


class _LateWindows(NamedTuple):
    """Windows in which a rank is late: its excess over the median of the others is no noise."""

    n: int  # Number of windows that have arrived from all ranks.
    is_late: npt.NDArray[np.bool_]
    culprits: Counter[int]  # Number of windows in which each rank is late.
    cost_ms: float  # Excess of the late ranks, as a mean over all windows.

    @property
    def n_late(self) -> int:
        return self.culprits.total()

    @property
    def is_rotating(self) -> bool:
        """True if a rank is late in at least half of the windows, and no rank in most of them."""
        is_often = self.n_late > 0 and self.n_late >= 0.5 * self.n
        return is_often and max(self.culprits.values()) <= 0.7 * self.n_late


def _rotating_note(late: _LateWindows, windows: str) -> str:
    who = f"the straggler changes: {len(late.culprits)} ranks are last in turn"
    return f"{who} in {late.n_late} of {windows}, which costs {duration(late.cost_ms)} per step"


def _late_windows(by_rank: Mapping[int, Sequence[float]], step_ms: float) -> _LateWindows:
    """Return the windows in which a rank is late, by the local times of each rank.

    Windows are left out from the first that has not arrived from each rank, which is NaN.

    Example: the local times of two ranks are 15.00 to 15.03 ms in most windows. The noise is about
    0.01 ms, so 6 times the noise is less than 5 % of a step, which is 0.75 ms. If rank 1 takes 23
    ms in 2 of 20 windows, it is late there, which costs 2 * 8 / 20 = 0.8 ms per step.
    """
    n = min(sum(not math.isnan(ms) for ms in each_ms) for each_ms in by_rank.values())
    if n < _MIN_WINDOWS:
        return _LateWindows(n, np.zeros(n, np.bool_), Counter(), 0.0)
    local_ms = np.array([each_ms[:n] for each_ms in by_rank.values()])
    excess_ms = local_ms.max(axis=0) - np.median(np.sort(local_ms, axis=0)[:-1], axis=0)
    # Delays make windows longer, so the shorter half of a rank's windows shows its noise. In a
    # normal distribution of unit deviation, these quantiles are -1.64 and -0.67: 0.97 apart.
    low_ms, high_ms = np.quantile(local_ms, (0.05, 0.25), axis=1)
    noise_ms = float(np.median(high_ms - low_ms)) / 0.97
    # The longest of 64 windows of 1,024 ranks exceeds the median by 4 to 5 deviations by chance.
    is_late = excess_ms > max(MIN_EXCESS * step_ms, 6 * noise_ms)
    ranks = [*by_rank]
    culprits = Counter(ranks[i] for i in local_ms.argmax(axis=0)[is_late])
    return _LateWindows(n, is_late, culprits, float(excess_ms[is_late].sum()) / n)


# Heat maps: local time of the ranks, and their waits for other ranks

LOCAL_COLOURS = ("#e8e8e8", "#ffe08a", "#ffb347", "#f4702b", "#c01f1f")
WAIT_COLOURS = ("#e8e8e8", "#c6dbef", "#6baed6", "#2171b5", "#08306b")
_LEVELS = (5.0, 20.0, 50.0, 100.0)  # Smallest percentages of the colors after the first.
_WAIT_LEVELS = (5.0, 20.0, 40.0, 60.0)
_BLOCKS = ".-+*#"  # Characters of the levels if there are no colors.
_MAX_ROWS = 16  # Maximum in a terminal. With more ranks, a row shows several.

Floats = npt.NDArray[np.float64]


def percentages(history: RankHistory) -> tuple[Floats, Floats]:
    """Return two arrays of percentages, by rank and window. NaN if the times did not arrive.

    The first is the local time beyond the median of the ranks, relative to this median; negative
    numbers are 0. The second is the wait for other ranks, relative to the step.
    """
    local_ms, wait_ms = np.array(history.local_ms), np.array(history.wait_ms)
    # Not `nanmedian`, which warns about windows of which nothing has arrived.
    masked: Any = np.ma  # Its functions have no types.
    median_ms = masked.median(masked.masked_invalid(local_ms), axis=0).filled(np.nan)
    beyond = np.maximum(local_ms - median_ms, 0.0) / np.maximum(median_ms, 1e-9)
    return 100 * beyond, 100 * wait_ms / np.maximum(local_ms + wait_ms, 1e-9)


def heat_maps(ranks: Sequence[int], history: RankHistory, width: int, in_colour: bool) -> str:
    """Return both heat maps side by side, as text of this width."""
    n, per_row = len(ranks), -(-len(ranks) // _MAX_ROWS)
    groups = [ranks[i : i + per_row] for i in range(0, n, per_row)]
    labels = ["-".join(map(str, dict.fromkeys((group[0], group[-1])))) for group in groups]
    label_width = max(len("rank"), *map(len, labels))
    n_windows = len(history.first)
    per_column = -(-n_windows // max((width - label_width - 4) // 2, 1))
    n_columns = -(-n_windows // per_column)
    columns = np.arange(0, n_windows, per_column)  # Index of the first window of each.
    lines = [label.rjust(label_width) for label in labels]
    both_levels = _LEVELS, _WAIT_LEVELS
    both_colours = LOCAL_COLOURS, WAIT_COLOURS
    maps = zip(percentages(history), both_colours, both_levels, strict=True)
    for shares, colours, levels in maps:
        # The mean of several windows, and the largest mean of several ranks.
        shares = np.add.reduceat(np.nan_to_num(shares), columns, axis=1)
        shares /= np.diff([*columns, n_windows])
        shares = np.maximum.reduceat(shares, np.arange(0, n, per_row), axis=0)
        for i, row in enumerate(np.digitize(shares, levels)):
            cells = (bar(colours[level], 1) if in_colour else _BLOCKS[level] for level in row)
            lines[i] += "  " + "".join(cells)
    steps = history.steps * per_column
    each = f"each block is {steps} timed steps" if steps > 1 else "each block is a step"
    if per_row > 1:
        each += f" and the latest of {per_row} ranks"
    local, waits = "local time", "waits"
    header = f"{'rank':>{label_width}}  {local[:n_columns]:<{n_columns}}  {waits[:n_columns]}"

    def legend(title: str, colours: tuple[str, ...], levels: tuple[float, ...]) -> str:
        samples = [bar(colour, 1) for colour in colours] if in_colour else [*_BLOCKS]
        parts = [
            f"{sample} {level:.0f} %" for sample, level in zip(samples[1:], levels, strict=True)
        ]
        return f"{title}: {'  '.join(parts)}"

    return "\n".join(
        [
            f"Ranks over the run ({each})",
            "",
            header,
            *lines,
            "",
            legend("local time above the median, from", LOCAL_COLOURS, _LEVELS),
            legend("waits, as a fraction of the step, from", WAIT_COLOURS, _WAIT_LEVELS),
        ]
    )
