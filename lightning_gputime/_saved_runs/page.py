"""The page of a run, or of two: one file that needs nothing else."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import Environment, StrictUndefined  # torch needs it, too
from markupsafe import Markup

from lightning_gputime._phases import COLOURS
from lightning_gputime._results.history import list_top_phases
from lightning_gputime._results.table import Table, duration, marked
from lightning_gputime._saved_runs.compare import RunComparison
from lightning_gputime._saved_runs.saved import Run

_MAX_ROWS = 10
_MAX_BAR = 25  # The length of the bar of a whole (in characters).
_MAX_POINTS = 2000  # A chart has no more points: of more steps it shows the means of neighbours.
_INK = "#444444"
_USERS_COLOURS = ("#D55E00", "#F0E442", "#9467BD")  # Of phases that a user has named.


def page(runs: Sequence[Run], comparison: RunComparison | None = None) -> str:
    """Return the page of a run, or of two side by side; it loads nothing. Raise without bokeh.

    Every name and text in it is escaped.
    """
    resources = _bokeh().resources.Resources(mode="inline", components=["bokeh"])
    verdict, sentences = _verdict(runs, comparison)
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    )
    return template.render(
        title=" and ".join(run.about or "run" for run in runs),
        verdict=Markup(marked(verdict)),
        sentences=[Markup(marked(one)) for one in sentences if one],
        sections=[*_sections(runs, comparison)],
        library=Markup(resources.render_js()),
    )


def _bokeh() -> Any:
    try:
        import bokeh.embed
        import bokeh.models
        import bokeh.plotting
        import bokeh.resources
    except ImportError as error:
        raise ImportError("the page of a run needs bokeh: python -m pip install bokeh") from error
    return bokeh


def _verdict(runs: Sequence[Run], comparison: RunComparison | None) -> tuple[str, list[str]]:
    if comparison is not None:
        return comparison.sentence, [*comparison.notes]
    [run] = runs
    took = f"a step takes {duration(run.summary().step.mean_ms)}"
    if run.summary().is_warmup:
        return f"{took}, of the warm-up", []
    verdict = run.summary().verdict or (took if run.summary().steps else "no step was timed")
    return verdict, []


def _sections(
    runs: Sequence[Run], comparison: RunComparison | None
) -> Iterator[tuple[str, list[str]]]:
    """Yield the headings, each with what stands below it: one thing, or one for each run."""
    limit_ms = _axis_limit_ms(runs)
    versus = _scrolled(comparison._repr_html_()) if comparison is not None else ""
    found = {
        "Before and after": [versus],
        "Phases over steps": [_steps(run, limit_ms, len(runs) > 1) for run in runs],
        "Where the time went": [_losses(run) for run in runs],
        "Phases": [_phases(run, len(runs) > 1) for run in runs],
        "Slowest steps": [_slow(run) for run in runs],
        "Evaluation": [_evaluations(run.evaluations) for run in runs],
        "Environment": [_environment(run) for run in runs],
    }
    return ((heading, bodies) for heading, bodies in found.items() if any(bodies))


def thin_out(history: npt.NDArray[Any]) -> tuple[dict[str, npt.NDArray[Any]], int]:
    """Return the columns of a history, and how many steps each point is the mean of.

    The column `longest_ms` has the longest step of each point.
    """
    every = max(-(-len(history) // _MAX_POINTS), 1)
    starts = np.arange(0, len(history), every)
    counts = np.diff(np.append(starts, len(history)))
    columns = {
        name: np.add.reduceat(np.nan_to_num(history[name]), starts) / counts
        for name in history.dtype.names or ()
    }
    longest = np.maximum.reduceat(history["step_ms"], starts)
    return {**columns, "step": history["step"][starts], "longest_ms": longest}, every


def _axis_limit_ms(runs: Sequence[Run]) -> float:
    """Return up to where the charts of some runs go, so that they can be compared."""
    # A first step of a second would flatten all others.
    steps = [run.history["step_ms"] for run in runs if len(run.history)]
    return max((min(float(ms.max()), 3 * float(np.median(ms))) for ms in steps), default=0.0)


def _steps(run: Run, limit_ms: float, named: bool) -> str:
    if not len(run.history):
        return ""
    heading = _heading(run.name) if named else ""
    chart = heading + _drawn(phases_over_steps(run, limit_ms))
    n, every = len(run.history), thin_out(run.history)[1]
    each = f"each point is the mean of {every} steps, and the line is the longest of them."
    return chart if every == 1 else chart + _note(f"{n} steps, thinned out: {each}")


def phases_over_steps(run: Run, limit_ms: float) -> Any:
    """Draw the phases of each step, stacked, to zoom in and point at."""
    models = _bokeh().models
    names = list_top_phases(run.history)
    columns, every = thin_out(run.history)
    # By numbers, because a name may have any character.
    shown = {f"p{i}": f"{name}_ms" for i, name in enumerate(names)}
    shown |= {"step": "step", "whole": "step_ms", "wait": "host_wait_ms", "longest": "longest_ms"}
    data = {key: np.round(columns[name], 4) for key, name in shown.items()}
    source = models.ColumnDataSource(data)
    figure = _new_figure("step", "time per step (ms)", "xpan,xwheel_zoom,box_zoom,reset")
    figure.toolbar.active_scroll = figure.select_one(models.WheelZoomTool)
    own = itertools.cycle(_USERS_COLOURS)
    colours = [COLOURS.get(name) or next(own) for name in names]
    stack = [f"p{i}" for i in range(len(names))]
    areas = figure.varea_stack(stack, x="step", color=colours, source=source)
    whole = figure.line("step", "whole", source=source, line_alpha=0.0)
    items = [(name, [area]) for name, area in zip(names, areas, strict=True)]
    tips = [("step", "@step"), ("whole (ms)", "@whole{0.000}")]
    tips += [(f"{name} (ms)", f"@p{i}{{0.000}}") for i, name in enumerate(names)]
    tips += [("host waited (ms)", "@wait{0.000}")]
    if every > 1:
        line = figure.line("step", "longest", source=source, color=_INK, line_width=0.7)
        items.append((f"longest of {every} steps", [line]))
        tips.append((f"longest of {every} (ms)", "@longest{0.000}"))
    # A legend that is higher than its chart lies over what follows.
    figure.height = max(figure.height, 90 + 19 * len(items))
    figure.add_layout(models.Legend(items=items[::-1], click_policy="hide", spacing=0), "right")
    figure.y_range = models.Range1d(0, 1.1 * limit_ms or 1.0)
    figure.add_tools(models.HoverTool(renderers=[whole], tooltips=tips, mode="vline"))
    return figure


def _new_figure(x: str, y: str, tools: str) -> Any:
    wide = {"height": 320, "sizing_mode": "stretch_width", "toolbar_location": "above"}
    figure = _bokeh().plotting.figure(tools=tools, x_axis_label=x, y_axis_label=y, **wide)
    figure.toolbar.logo = None
    figure.xaxis.formatter.use_scientific = False
    return figure


def _drawn(figure: Any) -> str:
    return Markup("".join(_bokeh().embed.components(figure, wrap_script=True)))


def _phases(run: Run, named: bool) -> str:
    # The verdict stands at the top, the losses have a section.
    table = _scrolled(replace(run._table(), above=None).html())
    return _heading(f"{run.name}: {run.summary().verdict}") + table if named else table


def _slow(run: Run) -> str:
    if not run.slow_steps:
        return ""
    return _scrolled(replace(run, slow_steps=run.slow_steps[:_MAX_ROWS]).slow_table.html())


def _evaluations(evaluations: Sequence[Mapping[str, Any]]) -> str:
    names = tuple(dict.fromkeys(name for one in evaluations for name in one))
    rows = [tuple(_value(one.get(name, "")) for name in names) for one in evaluations[-_MAX_ROWS:]]
    return _table(names, rows, "The newest")


def _value(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _losses(run: Run) -> str:
    losses, rows, end = run.summary().losses, [], 0.0
    if losses is None:
        return ""
    for row in (*losses.rows, losses.work):
        start, end = end, end + row.share
        bar = "░" * round(_MAX_BAR * start)
        bar += "█" * (round(_MAX_BAR * end) - len(bar))
        took, advice = duration(1e3 * row.share * losses.wall_s), "; ".join(row.advice)
        rows.append((row.name, took, f"{row.share:.1%}", bar, advice))
    if (peak := losses.peak_share) is not None:
        rows.append(("  at the peak", duration(1e3 * peak * losses.wall_s), f"{peak:.1%}", "", ""))
    return _table(("", "time", "share", "", "what to do"), rows, left=(3, 4))


def _environment(run: Run) -> str:
    found = asdict(run.environment)
    found |= {f"option {name}": value for name, value in found.pop("options").items()}
    rows = [(name, str(value)) for name, value in found.items() if value not in ("", None, [])]
    table = _table(("", ""), rows, left=(1,))
    folded = '<details class="text"><summary>{}</summary>{}</details>'
    return Markup(folded).format(run.about or "run", table)


def _table(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]], title: str = "", left: Any = ()
) -> str:
    return _scrolled(Table(title, [header, *rows], (), (0, *left)).html()) if rows else ""


def _scrolled(table: str) -> str:
    """Return HTML that a narrow screen can scroll."""
    return Markup(f'<div class="wide">{table}</div>')


def _heading(text: str) -> str:
    return Markup("<h3>{}</h3>").format(Markup(marked(text)))


def _note(text: str) -> str:
    return Markup('<p class="note">{}</p>').format(text)
