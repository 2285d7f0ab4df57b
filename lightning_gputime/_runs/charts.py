"""The charts of a run's page, with bokeh."""

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gputime._phases import in_order
from lightning_gputime._results.plot import colour
from lightning_gputime._runs.saved import Run, list_phases

MAX_POINTS = 2000
"""A chart has no more points: of more steps it shows the means of neighbours."""

_MISSING = "the page of a run needs bokeh: python -m pip install bokeh"

_MAX_LINE = 20
"""Lines of the legend have no more characters: what they take, the chart lacks."""

_INK = "#808892"
"""Readable on white and on black: a chart cannot ask which it is on."""

_LEGEND = {
    "background_fill_alpha": 0.0,
    "border_line_alpha": 0.0,
    "label_text_color": _INK,
    "click_policy": "hide",
}


def bokeh() -> Any:
    """Return the library.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        import bokeh.embed
        import bokeh.models
        import bokeh.plotting
        import bokeh.resources
    except ImportError as error:
        raise ImportError(_MISSING) from error
    return bokeh


def thin_out(history: npt.NDArray[Any]) -> tuple[dict[str, npt.NDArray[Any]], int]:
    """Return the columns of a history, and how many steps each point is the mean of.

    The column `longest_ms` has the longest step of each point.
    """
    every = max(-(-len(history) // MAX_POINTS), 1)
    starts = np.arange(0, len(history), every)
    counts = np.diff(np.append(starts, len(history)))
    columns = {"step": history["step"][starts]}
    for name in history.dtype.names or ():
        if name != "step":
            sums = np.add.reduceat(np.nan_to_num(history[name]), starts)
            columns[name] = sums / counts
    columns["longest_ms"] = np.maximum.reduceat(history["step_ms"], starts)
    return columns, every


def list_top_phases(run: Run) -> list[str]:
    """Return the phases that add up to the step."""
    return in_order([name for name in list_phases(run.history) if "/" not in name])


def axis_limit_ms(runs: Sequence[Run]) -> float:
    """Return up to where the charts of some runs go, so that they can be compared."""
    # A first step of a second would flatten all others.
    steps = [run.history["step_ms"] for run in runs if len(run.history)]
    return max((min(float(ms.max()), 3 * float(np.median(ms))) for ms in steps), default=0.0)


def phases_over_steps(run: Run, limit_ms: float) -> Any:
    """Draw the phases of each step, stacked, to zoom in and point at.

    Args:
        run: The run.
        limit_ms: Where the axis ends (in milliseconds).
    """
    lib = bokeh()
    columns, every = thin_out(run.history)
    names = list_top_phases(run)
    # By numbers, because a name may have any character.
    data: dict[str, Any] = {"step": columns["step"], "whole": columns["step_ms"]}
    data |= {"wait": columns["host_wait_ms"], "longest": columns["longest_ms"]}
    data |= {f"p{i}": columns[f"{name}_ms"] for i, name in enumerate(names)}
    source = lib.models.ColumnDataSource({key: np.round(one, 4) for key, one in data.items()})
    figure = _new_figure(lib, "step", "time per step (ms)", tools="xpan,xwheel_zoom,box_zoom,reset")
    areas = figure.varea_stack(
        [f"p{i}" for i in range(len(names))],
        x="step",
        color=[colour(name, names) for name in names],
        source=source,
    )
    whole = figure.line("step", "whole", source=source, color=_INK, line_alpha=0.0)
    items = [
        ("\n".join(textwrap.wrap(name, _MAX_LINE) or [name]), [area])
        for name, area in zip(names, areas, strict=True)
    ]
    if every > 1:
        line = figure.line("step", "longest", source=source, color=_INK, line_width=0.7)
        items.append((f"longest of {every} steps", [line]))
    lines = sum(name.count("\n") + 1 for name, _ in items)
    # A legend that is higher than its chart lies over what follows.
    figure.height = max(figure.height, 90 + 19 * lines)
    legend = lib.models.Legend(items=items[::-1], **_LEGEND, spacing=0, padding=0)
    figure.add_layout(legend, "right")
    figure.y_range = lib.models.Range1d(0, 1.1 * limit_ms or 1.0)
    tips = [("step", "@step"), ("whole (ms)", "@whole{0.000}")]
    tips += [(f"{name} (ms)", f"@p{i}{{0.000}}") for i, name in enumerate(names)]
    tips += [("host waited (ms)", "@wait{0.000}")]
    if every > 1:
        tips += [(f"longest of {every} (ms)", "@longest{0.000}")]
    figure.add_tools(lib.models.HoverTool(renderers=[whole], tooltips=tips, mode="vline"))
    return figure


def distribution(runs: Sequence[Run]) -> Any:
    """Draw how often a step took how long, of one run or two."""
    lib = bokeh()
    figure = _new_figure(lib, "time per step (ms)", "part of the steps", tools="xpan,reset")
    times = [run.measured["step_ms"] for run in runs if len(run.measured)]
    everything = np.concatenate(times)
    low, high = np.quantile(everything, (0.001, 0.99))
    edges = np.linspace(low, high + 1e-6, 81)
    for ms, name, fill in zip(times, ("before", "after"), ("#0072B2", "#D55E00"), strict=False):
        counts, _ = np.histogram(ms, edges)
        of_run = {"legend_label": name} if len(times) > 1 else {}
        figure.quad(
            top=counts / len(ms),
            bottom=0,
            left=edges[:-1],
            right=edges[1:],
            fill_color=fill,
            fill_alpha=0.6,
            line_color=None,
            **of_run,
        )
    if len(times) > 1:
        for legend in figure.legend:
            legend.update(**_LEGEND)
    return figure


def _new_figure(lib: Any, x: str, y: str, *, tools: str) -> Any:
    figure = lib.plotting.figure(
        height=320,
        sizing_mode="stretch_width",
        tools=tools,
        toolbar_location="above",
        x_axis_label=x,
        y_axis_label=y,
        background_fill_alpha=0.0,
        border_fill_alpha=0.0,
        outline_line_alpha=0.0,
    )
    figure.toolbar.logo = None
    for grid in figure.grid:
        grid.update(grid_line_color=_INK, grid_line_alpha=0.25)
    for axis in figure.axis:
        axis.update(
            axis_label_text_color=_INK,
            major_label_text_color=_INK,
            axis_line_color=_INK,
            major_tick_line_color=_INK,
            minor_tick_line_color=None,
        )
    figure.xaxis[0].formatter.use_scientific = False
    for tool in figure.tools:
        if isinstance(tool, lib.models.WheelZoomTool):
            figure.toolbar.active_scroll = tool
    return figure
