"""Figures of what was measured, with matplotlib."""

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gputime._phases import COLOURS, Timeline, in_order
from lightning_gputime._results.history import list_top_phases
from lightning_gputime._results.results import Results

# Of phases that a user has named. Readable on a dark page, too, where black is not.
_USERS_COLOURS = ("#D55E00", "#F0E442", "#9467BD")
_MAX_STEPS = 500  # Of more, single steps cannot be seen: they are drawn in bins.
_BINS = 200


def plot_steps(results: Results, ax: Any = None) -> tuple[Any, Any]:
    """Draw the phases of each step, stacked; those of many steps in bins."""
    history, warmup = results.history_and_warmup()
    ax = new_axes(is_shown=True) if ax is None else ax
    title = "Phases of each step"
    if len(history):
        bins = _bins(len(history), warmup)
        if len(bins) < len(history):
            title = f"Median phases of {bins[-1] - bins[-2]} steps each"
        _draw_steps(ax, history, bins, warmup)
        handles, labels = ax.get_legend_handles_labels()
        _add_legend(ax, handles[::-1], labels[::-1])
    ax.set(xlabel="step", ylabel="time per step (ms)", title=title)
    return ax.figure, ax


def _draw_steps(ax: Any, history: npt.NDArray[Any], bins: Sequence[int], warmup: int) -> None:
    names = list_top_phases(history)
    edges = [*(int(history["step"][first]) for first in bins), int(history["step"][-1]) + 1]
    # A phase that did not run took no time.
    columns = [np.split(np.nan_to_num(history[f"{name}_ms"]), bins[1:]) for name in names]
    heights = [[float(np.median(part)) for part in column] for column in columns]
    # The last is drawn as wide as the others, up to where a next one would begin.
    drawn = [[*height, height[-1]] for height in heights]
    colours = [colour(name, names) for name in names]
    ax.stackplot(edges, drawn, labels=map(_label, names), colors=colours, step="post")
    tops = [*np.add.reduce(heights)]
    if len(bins) < len(history):
        p95 = [np.percentile(part, 95) for part in np.split(history["step_ms"], bins[1:])]
        style = {"color": "#444444", "linewidth": 0.8, "label": "step, 95th\npercentile"}
        ax.step(edges, [*p95, p95[-1]], where="post", **style)
        tops += p95
    if warmup:
        end = edges[-1] if warmup >= len(history) else int(history["step"][warmup])
        ax.axvspan(edges[0], end, color="#000000", alpha=0.12, linewidth=0, label="warm-up")
    # A first step of a second would flatten all others.
    median = float(np.median(history["step_ms"]))
    ax.set_ylim(0, 1.1 * min(max(tops), 3 * median) or 1.0)
    ax.set_xlim(edges[0], edges[-1])


def _bins(steps: int, warmup: int) -> list[int]:
    """Return the index of the first step of each bin; no bin mixes the warm-up with others."""
    each, first = -(-steps // _BINS) if steps > _MAX_STEPS else 1, min(warmup, steps)
    return [*range(0, first, each), *range(first, steps, each)]


def plot_step(results: Results, number: int, ax: Any = None) -> tuple[Any, Any]:
    """Draw one step of the history, on the device's clock and on the host's."""
    steps = results.newest()
    step = next((one for one in steps if one.step == number), None)
    if step is None:
        raise ValueError(f"step {number} is not in the history of {len(steps)} steps")
    line = step.timeline
    if line is None:
        raise ValueError(f"step {step.step} has no timeline to draw")
    names = in_order([name for name in step.phase_ms if "/" not in name])
    ax = new_axes(2.4, is_shown=True) if ax is None else ax
    device = "CPU" if results.on_host_clock else "GPU"
    _draw_lane(ax, 0, line, list(accumulate(line.device_ms, initial=0.0)), names)
    _draw_lane(ax, 1, line, [(ns - line.host_ns[0]) / 1e6 for ns in line.host_ns], names)
    ax.set_yticks(range(2), [device, "host"])
    ax.invert_yaxis()
    ax.set(xlabel="time since the step began (ms)", title=f"Step {step.step}")
    handles = {handle.get_label(): handle for handle in ax.get_legend_handles_labels()[0]}
    labels = [label for label in map(_label, names) if label in handles]
    _add_legend(ax, [handles[label] for label in labels], labels)
    return ax.figure, ax


def _draw_lane(
    ax: Any, y: int, line: Timeline, times: Sequence[float], names: Sequence[str]
) -> None:
    for phases, start, end in zip(line.names, times, times[1:], strict=False):
        if phases:
            name = phases[0]
            of_phase, label = colour(name, names), _label(name)
            ax.barh(y, end - start, left=start, height=0.7, color=of_phase, label=label)


def _add_legend(ax: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    ax.legend(handles, labels, loc="center left", bbox_to_anchor=(1, 0.5))


def _label(name: str) -> str:
    """Return a name as a legend shows it: no formula, and not hidden for a leading `_`."""
    return re.sub("^_", " _", name.replace("$", r"\$"))


def colour(name: str, names: Sequence[str]) -> str:
    """Return the colour of a phase; those of a user's own go by their order in `names`."""
    if name in COLOURS:
        return COLOURS[name]
    own = [other for other in names if other not in COLOURS]
    return _USERS_COLOURS[own.index(name) % len(_USERS_COLOURS)]


def new_axes(height: float = 4.0, *, is_shown: bool = False) -> Any:
    """Return the axes of a figure; unless it is shown, pyplot does not keep it open."""
    try:
        if is_shown:
            import matplotlib.pyplot as plt

            return plt.subplots(figsize=(9, height), layout="constrained")[1]
        from matplotlib.figure import Figure

        return Figure(figsize=(9, height), layout="constrained").add_subplot()
    except ImportError as error:
        raise ImportError("plots need matplotlib: python -m pip install matplotlib") from error
