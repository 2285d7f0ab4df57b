"""Heat maps of the ranks over the run: their local time, and their waits for other ranks."""

from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gputime._output.table import bar
from lightning_gputime._ranks.comparison import RankSummary
from lightning_gputime._ranks.over_time import RankHistory

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


def heat_maps(ranks: RankSummary, width: int, in_colour: bool) -> str:
    """Return both heat maps side by side, as text of this width; empty without a history."""
    history = ranks.history
    if history is None or not history.first:
        return ""
    n, per_row = len(ranks.ranks), -(-len(ranks.ranks) // _MAX_ROWS)
    groups = [ranks.ranks[i : i + per_row] for i in range(0, n, per_row)]
    labels = ["-".join(map(str, dict.fromkeys((group[0], group[-1])))) for group in groups]
    label_width = max(len("rank"), *map(len, labels))
    n_windows = len(history.first)
    per_column = -(-n_windows // max((width - label_width - 4) // 2, 1))
    n_columns = -(-n_windows // per_column)
    lines = [label.rjust(label_width) for label in labels]
    both_levels = _LEVELS, _WAIT_LEVELS
    both_colours = LOCAL_COLOURS, WAIT_COLOURS
    maps = zip(percentages(history), both_colours, both_levels, strict=True)
    for shares, colours, levels in maps:
        shares = np.nan_to_num(shares)
        # The mean of several windows, and the largest mean of several ranks.
        columns = np.arange(0, n_windows, per_column)
        counts = np.diff([*columns, n_windows])
        shares = np.add.reduceat(shares, columns, axis=1) / counts
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
