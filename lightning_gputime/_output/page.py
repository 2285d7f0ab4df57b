"""HTML page of one or two runs, in a single file without external resources."""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import Environment, StrictUndefined  # A dependency of torch.
from markupsafe import Markup

from lightning_gputime._measurement.history import list_top_phases
from lightning_gputime._messages import duration, unit_of
from lightning_gputime._output.table import marked
from lightning_gputime._phases import colours_of
from lightning_gputime._ranks.over_time import LOCAL_COLOURS, WAIT_COLOURS, percentages

_LEGEND_COLUMNS = 4
_TERMS = {
    "mean": "Mean over the steps in which the phase ran",
    "share": "Fraction of the device time of all steps",
    "p50": "Median: half of the steps take less",
    "p95": "95 % of the steps take less",
    "host": "Time that the CPU takes to launch the phase, or waits in it",
    "host-paced": "Fraction of the phase in which the GPU waited for the CPU",
    "95 %": "Half the width of the 95 % confidence interval",
}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00")
Floats = npt.NDArray[np.float64]
Columns = dict[str, npt.NDArray[Any]]
_INK = "#808890"  # Readable in light and dark mode.


def page(runs: Sequence[Any], comparison: Any = None) -> str:
    """Return the page of one run, or of two and their `RunComparison`. All texts are escaped."""
    resources = _bokeh().resources.Resources(mode="inline", components=["bokeh"])
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "asdict": asdict,
        "colours": lambda run: colours_of(list_top_phases(run.history)),
        "duration": duration,
        "main_phase": lambda entry: max(
            entry.phases_ms, key=entry.phases_ms.__getitem__, default=entry.name.partition("/")[0]
        ),
        "marked": lambda text: Markup(marked(text)),
        "share": lambda part: f"{100 * part:.4f}%",
        # A script converts the content of `<time>` tags to the local time zone.
        "timed": lambda text: Markup(
            _TIME.sub(r'<time datetime="\g<0>">\g<0></time>', str(Markup.escape(text)))
        ),
        "table": lambda run: run._table(),
        "three_digits": lambda ms: unit_of(ms).fitted(ms),
        "unit": unit_of,
    }
    template = environment.from_string(
        files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    )
    # Limit the y-axis of all charts, because a first step of one second would flatten other steps.
    steps = [run.history["step_ms"] for run in runs if len(run.history)]
    limit_ms = max((min(float(ms.max()), 3 * float(np.median(ms))) for ms in steps), default=0.0)
    breakdowns = [run.summary().time_breakdown for run in runs]
    return template.render(
        runs=runs,
        title=" and ".join(run.about or "run" for run in runs),
        comparison=comparison,
        charts=[_charts(run, limit_ms) if len(run.history) else None for run in runs],
        rank_charts=[*map(_rank_charts, runs)],
        limit_ms=limit_ms,
        terms=_TERMS,
        wall_ms=max((1e3 * part.wall_s for part in breakdowns if part), default=0.0),
        library=Markup(resources.render_js()),
    )


def _bokeh() -> Any:
    try:
        import bokeh.embed
        import bokeh.models
        import bokeh.plotting
        import bokeh.resources
        import bokeh.transform
    except ImportError as error:
        raise ImportError("the page of a run needs bokeh: python -m pip install bokeh") from error
    return bokeh


def _charts(run: Any, limit_ms: float) -> tuple[Markup, Markup, int]:
    """Return charts of the phases in ms and in percent, and the number of steps per point."""
    points, steps_per_point = thin_out(run.history)
    in_ms, in_percent = (
        Markup("".join(_bokeh().embed.components(phases_over_steps(run, points, limit_ms, share))))
        for share in (False, True)
    )
    return in_ms, in_percent, steps_per_point


def _rank_charts(run: Any) -> tuple[Markup, int] | None:
    """Return heat maps of the ranks, and the number of steps per window; None without a history."""
    ranks = run.summary().ranks
    history = ranks.history if ranks is not None else None
    if history is None or not history.first:
        return None
    models, first = _bokeh().models, [*history.first]
    # Windows have equally many timed steps. The end of the last is unknown.
    end = 2 * first[-1] - first[-2] if len(first) > 1 else first[0] + history.steps
    figures = []
    titles = ("local time above the median of the ranks", "waits for other ranks, of the step")
    palettes = (LOCAL_COLOURS, WAIT_COLOURS)
    for title, palette, shares in zip(titles, palettes, percentages(history), strict=True):
        # A row for each rank, also for those that did not take part.
        image = np.full((max(ranks.ranks) + 1, len(first)), np.nan, np.float32)
        image[[*ranks.ranks]] = np.round(shares, 1)
        figure = _figure(
            title=f"{title} (%)",
            x_axis_label="step",
            y_axis_label="rank",
            height=min(160 + 12 * len(image), 560),
            y_range=models.Range1d(len(image) - 0.5, -0.5),
        )
        colours = models.LinearColorMapper(palette=[*palette], low=0, high=100)
        box = {"x": first[0], "y": -0.5, "dw": max(end - first[0], 1), "dh": len(image)}
        # The axis points down, but the first row of an image is at its lowest y.
        drawn = figure.image(image=[image], color_mapper=colours, **box)
        tips = [("rank", "$y{0}"), ("step", "$x{0}"), ("%", "@image{0.0}")]
        figure.add_tools(models.HoverTool(renderers=[drawn], tooltips=tips))
        figure.add_layout(models.ColorBar(color_mapper=colours), "right")
        figures.append(figure)
    parts = ("".join(_bokeh().embed.components(figure)) for figure in figures)
    return Markup("".join(parts)), history.steps


def thin_out(history: npt.NDArray[Any]) -> tuple[Columns, int]:
    """Return at most 2000 points of a history, each a mean, and the number of steps per point."""
    steps_per_point = max(math.ceil(len(history) / 2000), 1)
    starts = np.arange(0, len(history), steps_per_point)
    counts = np.diff(np.append(starts, len(history)))
    columns = {
        name: np.add.reduceat(np.nan_to_num(history[name]), starts) / counts
        for name in history.dtype.names or ()
    }
    return {**columns, "step": history["step"][starts]}, steps_per_point


def trend(columns: Columns) -> tuple[Floats, Floats, int]:
    """Return step numbers, medians of groups of points with NaN in gaps, and points per group."""
    steps, times_ms = columns["step"].astype(float), columns["step_ms"]
    size = max(len(steps) // 40, 1)  # For about 40 points, each a median.
    starts = range(0, len(steps), size)
    medians_ms = np.array([np.median(times_ms[start : start + size]) for start in starts])
    centers = np.array([np.mean(steps[start : start + size]) for start in starts])
    gapped = with_gaps({"step": centers, "step_ms": medians_ms}, math.nan)
    return gapped["step"], gapped["step_ms"], size


def with_gaps(columns: Columns, fill: float = 0.0) -> Columns:
    """Return the columns with two rows of `fill` inserted into each gap between timed steps.

    Example: steps 0, 1, 2, 50, 51 become 0, 1, 2, 3, 49, 50, 51, so that the chart is empty from
    step 3 to 49.
    """
    steps = columns["step"].astype(float)
    if len(steps) < 3:
        return columns
    distances = np.diff(steps)
    usual = float(np.percentile(distances, 90, method="lower"))
    # Show no gap shorter than 2 % of the axis.
    is_gap = distances > max(3.0 * usual, 0.02 * (steps[-1] - steps[0]))
    rows = np.repeat(np.flatnonzero(is_gap) + 1, 2)
    # The two inserted rows are one usual distance from the timed steps at the ends of the gap.
    ends = np.column_stack((steps[:-1][is_gap] + usual, steps[1:][is_gap] - usual)).ravel()
    gapped = {
        name: np.insert(np.asarray(column, float), rows, fill) for name, column in columns.items()
    }
    return {**gapped, "step": np.insert(steps, rows, ends)}


def phases_over_steps(run: Any, points: Columns, limit_ms: float, in_percent: bool = False) -> Any:
    """Return a stacked chart of the phases of each step; in ms, also of trend and slow steps."""
    models, stack = _bokeh().models, _bokeh().transform.stack
    colours = colours_of(list_top_phases(run.history))
    columns = with_gaps(points)
    unit = "%" if in_percent else "ms"
    scale = 100 / np.maximum(columns["step_ms"], 1e-9) if in_percent else 1.0
    # Number the columns: tooltips refer to columns, and a phase name may contain any character.
    shown = {f"p{i}": f"{name}_ms" for i, name in enumerate(colours)}
    shown |= {"whole": "step_ms", "wait": "host_wait_ms"}
    data = {key: np.round(columns[name] * scale, 4) for key, name in shown.items()}
    source = models.ColumnDataSource({"step": columns["step"], **data})
    figure = _figure(
        x_axis_label="step",
        y_axis_label=f"time per step ({unit})",
        height=320,
        y_range=models.Range1d(0, 100 if in_percent else 1.1 * limit_ms or 1.0),
    )
    tips = [("step", "@step"), (f"step ({unit})", "@whole{0.000}")]
    tips += [(f"{name} ({unit})", f"@p{i}{{0.000}}") for i, name in enumerate(colours)]
    tips += [(f"host waited ({unit})", "@wait{0.000}")]
    items = []
    for i, (name, colour) in enumerate(colours.items()):
        between = {"y1": stack(*[*data][:i]), "y2": stack(*[*data][: i + 1])}
        step_wise = {"x": "step", "step_mode": "center", "source": source, "color": colour}
        items.append((name, [figure.varea_step(**between, **step_wise)]))
    whole = figure.line("step", "whole", source=source, line_alpha=0.0)
    figure.add_tools(models.HoverTool(renderers=[whole], tooltips=tips, mode="vline"))
    if not in_percent:
        steps, medians_ms, size = trend(points)
        if size > 1:
            line = figure.line(steps, medians_ms, color=_INK, line_width=2)
            items.append((f"median of {size} points", [line]))
        if slow_steps := [step for step in run.slow_steps if step.step in run.history["step"]]:
            # Draw slow steps above the limit at the upper end of the axis.
            places = {
                "step": [step.step for step in slow_steps],
                "ms": [min(step.step_ms, 1.06 * limit_ms) for step in slow_steps],
                "why": [str(step) for step in slow_steps],
            }
            ring = {"color": "white", "line_color": "black", "size": 7}
            dots = figure.scatter("step", "ms", source=models.ColumnDataSource(places), **ring)
            figure.add_tools(models.HoverTool(renderers=[dots], tooltips="@why"))
            items.append(("slow steps", [dots]))

    legend = models.Legend(
        items=items,
        click_policy="hide",
        location="center",
        orientation="horizontal",
        ncols=_LEGEND_COLUMNS,
        spacing=6,
        label_text_color=_INK,
        background_fill_alpha=0.0,
        border_line_alpha=0.0,
    )
    figure.add_layout(legend, "below")
    figure.height += 28 * math.ceil(len(items) / _LEGEND_COLUMNS)  # Of a row, in pixels.
    return figure


def _figure(**options: Any) -> Any:
    """Return an empty chart that is readable in light and dark mode."""
    figure = _bokeh().plotting.figure(
        tools="xpan,xwheel_zoom,box_zoom,reset",
        sizing_mode="stretch_width",
        toolbar_location="above",
        outline_line_color=_INK,
        background_fill_alpha=0.0,
        border_fill_alpha=0.0,
        **options,
    )
    figure.toolbar.logo = None
    figure.toolbar.active_scroll = figure.select_one(_bokeh().models.WheelZoomTool)
    figure.xaxis.formatter.use_scientific = False
    figure.title.text_color = _INK
    for part in ("axis_line", "axis_label_text", "major_label_text", "major_tick_line"):
        setattr(figure.axis, f"{part}_color", _INK)
    figure.grid.grid_line_color, figure.grid.grid_line_alpha = _INK, 0.3
    return figure
