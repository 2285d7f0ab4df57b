"""Pictures of what was measured, with matplotlib."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from lightning_gputime._phases import PHASES, StepTimes, Timeline, in_order

# Okabe and Ito's colours, which people with colour blindness can tell apart.
_COLOURS = {
    "data": "#E69F00",
    "forward": "#0072B2",
    "loss": "#CC79A7",
    "backward": "#56B4E9",
    "optimizer": "#009E73",
    "other": "#BBBBBB",
}
_MISSING = "plots need matplotlib: python -m pip install 'lightning-gputime[plot]'"
_USERS = ("#D55E00", "#F0E442", "#000000")


def plot_steps(steps: Sequence[StepTimes], ax: Any = None) -> tuple[Any, Any]:
    """Draws the phases of each step, stacked. Returns figure and axes."""
    names = in_order(list({name for step in steps for name in step.phase_ms if "/" not in name}))
    ax = _axes(ax)
    if steps:
        # The last step is drawn as wide as the others, up to where a next one would begin.
        drawn = [*steps, steps[-1]]
        numbers = [*(step.step for step in steps), steps[-1].step + 1]
        heights = [[step.phase_ms.get(name, 0.0) for step in drawn] for name in names]
        colours = [colour(name, names) for name in names]
        ax.stackplot(numbers, heights, labels=names, colors=colours, step="post")
        # A first step of a second would flatten all others.
        totals = [step.step_ms for step in steps]
        ax.set_ylim(0, 1.1 * min(max(totals), 3 * float(np.median(totals))) or 1.0)
    ax.set(xlabel="step", ylabel="time per step (ms)", title="Phases of each step")
    handles, labels = ax.get_legend_handles_labels()
    if steps:
        ax.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5))
    return ax.figure, ax


def plot_step(step: StepTimes, ax: Any = None) -> tuple[Any, Any]:
    """Draws one step, on the device's clock and on the host's. Returns figure and axes."""
    line = step.timeline
    if line is None:
        raise ValueError(f"step {step.step} has no timeline to draw")
    names = in_order([name for name in step.phase_ms if "/" not in name])
    ax = _axes(ax, height=2.4)
    host_ms = [(ns - line.host_ns[0]) / 1e6 for ns in line.host_ns]
    lanes = {"GPU": list(accumulate(line.device_ms, initial=0.0)), "host": host_ms}
    for y, times in enumerate(lanes.values()):
        _draw_lane(ax, y, line, times, names)
    ax.set_yticks(range(len(lanes)), list(lanes))
    ax.invert_yaxis()
    ax.set(xlabel="time since the step began (ms)", title=f"Step {step.step}")
    handles = {handle.get_label(): handle for handle in ax.get_legend_handles_labels()[0]}
    ax.legend(
        [handles[name] for name in names if name in handles],
        [name for name in names if name in handles],
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
    return ax.figure, ax


def _draw_lane(
    ax: Any, y: int, line: Timeline, times: Sequence[float], names: Sequence[str]
) -> None:
    for phases, start, end in zip(line.names, times, times[1:], strict=False):
        if phases:
            of_phase = colour(phases[0], names)
            ax.barh(y, end - start, left=start, height=0.7, color=of_phase, label=phases[0])


def colour(name: str, names: Sequence[str]) -> str:
    """Returns the colour of a phase; those of a user's own go by their order in `names`."""
    if name in _COLOURS:
        return _COLOURS[name]
    own = [other for other in names if other not in PHASES]
    return _USERS[own.index(name) % len(_USERS)]


def new_axes() -> Any:
    """Returns the axes of a figure that pyplot does not keep open.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(_MISSING) from error
    return Figure(figsize=(9, 4), layout="constrained").add_subplot()


def _axes(ax: Any, height: float = 4.0) -> Any:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(_MISSING) from error
    return plt.subplots(figsize=(9, height), layout="constrained")[1]
