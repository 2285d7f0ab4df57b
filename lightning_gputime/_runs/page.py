"""The page of a run, or of two: one file that needs nothing else."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import numpy as np

from lightning_gputime._results.advice import sentence
from lightning_gputime._results.table import Table, marked
from lightning_gputime._results.units import duration
from lightning_gputime._runs import charts
from lightning_gputime._runs.compare import RunComparison
from lightning_gputime._runs.saved import Run

_SLOWEST = 10


def page(runs: Sequence[Run], comparison: RunComparison | None = None) -> str:
    """Returns the page of a run, or of two side by side.

    Every name and text in it is escaped, and it loads nothing.

    Args:
        runs: One, or the one before and the one after.
        comparison: Of the two.

    Raises:
        ImportError: If bokeh is not installed (extra `report`).
    """
    lib = charts.bokeh()
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    highest = charts.highest_ms(runs)
    plots = [charts.phases_over_steps(run, highest) for run in runs if len(run.history)]
    falls = [charts.waterfall(run) for run in runs if _has_waterfall(run)]
    # A figure with nothing in it is warned of.
    spread = [charts.distribution(runs)] if any(len(run.measured) for run in runs) else []
    script, divs = "", []
    if drawn := [*plots, *falls, *spread]:
        script, [*divs] = lib.embed.components(drawn, wrap_script=True)
    chart_of = iter(divs)
    views = [
        {**_view(run), "chart": Markup(next(chart_of)) if len(run.history) else ""} for run in runs
    ]
    for run, view in zip(runs, views, strict=True):
        view["work"] = Markup(next(chart_of)) if _has_waterfall(run) else ""
    verdict, sentences = _verdict(runs, comparison)
    resources = lib.resources.Resources(mode="inline", components=["bokeh"])
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    )
    return template.render(
        title=" and ".join(run.name or "run" for run in runs),
        verdict=Markup(marked(verdict)),
        sentences=[Markup(marked(one)) for one in sentences],
        comparison="" if comparison is None else Markup(comparison._repr_html_()),
        runs=views,
        distribution=Markup(next(chart_of, "")),
        script_of_library=Markup(resources.render_js()),
        script_of_charts=Markup(script),
    )


def _verdict(runs: Sequence[Run], comparison: RunComparison | None) -> tuple[str, list[str]]:
    if comparison is not None:
        return comparison.sentence, [*filter(None, (comparison.mean_sentence,)), *comparison.notes]
    [run] = runs
    step = run.summary.step
    took = f"a step takes {duration(step.mean_ms)}" if run.summary.steps else "no step was timed"
    ledger = run.ledger.sentence if run.ledger is not None else ""
    if run.summary.is_warmup:
        return f"{took}, of the warm-up", [one for one in (ledger,) if one]
    told = (sentence(run.summary.advice), ledger)
    return run.summary.verdict or took, [one for one in told if one]


def _has_waterfall(run: Run) -> bool:
    work = run.summary.work
    return work is not None and work.mfu is not None and bool(work.lost)


def _view(run: Run) -> dict[str, Any]:
    """Returns what the template shows of a run."""
    from markupsafe import Markup

    return {
        "name": run.name,
        "steps": len(run.history),
        "every": charts.thinned(run.history)[1] if len(run.history) else 1,
        "table": Markup(run.summary._repr_html_()),
        "slow": _slow(run),
        "ranks": _ranks(run),
        "evaluations": _evaluations(run.evaluations),
        "gaps": _gaps(run),
        "ledger": [
            (name, f"{s:.3g}", f"{100 * run.ledger.shares[name]:.1f}")
            for name, s in run.ledger.entries_s.items()
        ]
        if run.ledger is not None
        else [],
        "environment": _environment(run),
    }


def _slow(run: Run) -> list[dict[str, Any]]:
    """Returns the slow steps of the file; where it has none, the longest of its history."""
    if run.slow_steps:
        return [
            {
                "step": one.get("step", ""),
                "took": _ms(one.get("step_ms")),
                "usual": _ms(one.get("usual_ms")),
                "phase": one.get("phase", ""),
                "causes": _causes(one),
            }
            for one in run.slow_steps[:_SLOWEST]
        ]
    times = run.measured["step_ms"]
    usual = _ms(float(np.median(times))) if len(times) else ""
    longest = run.measured[times.argsort()[::-1][:_SLOWEST]]
    usually = {
        name: float(np.median(np.nan_to_num(run.measured[f"{name}_ms"])))
        for name in charts.top_phases(run)
        if len(times)
    }
    return [
        {
            "step": int(row["step"]),
            "took": _ms(float(row["step_ms"])),
            "usual": usual,
            "phase": _grown(row, usually),
            "causes": "",
        }
        for row in longest
    ]


def _causes(step: Mapping[str, Any]) -> str:
    causes = step.get("causes")
    told = [
        f"{_ms(one.get('reached_ms'))} ms {one.get('name', '')} {one.get('detail') or ''}".strip()
        for one in (causes if isinstance(causes, list | tuple) else ())
        if isinstance(one, Mapping)
    ]
    unexplained = step.get("unexplained_ms")
    if isinstance(unexplained, int | float):
        told.append(f"{_ms(unexplained)} ms unexplained")
    return ", ".join(told)


def _ranks(run: Run) -> Any:
    from markupsafe import Markup

    ranks = run.summary.ranks
    if ranks is None:
        return ""
    header = ("phase", "shortest (ms)", "mean (ms)", "longest (ms)", "of rank")
    body = [
        (name, f"{row.min_ms:.3f}", f"{row.mean_ms:.3f}", f"{row.max_ms:.3f}", str(row.slowest))
        for name, row in ranks.rows.items()
    ]
    return Markup(Table(f"{len(ranks.ranks)} ranks", [header, *body], [ranks.sentence]).html())


def _evaluations(evaluations: Sequence[Mapping[str, Any]]) -> Any:
    from markupsafe import Markup

    if not evaluations:
        return ""
    names = list(dict.fromkeys(name for one in evaluations for name in one))
    body = [
        tuple(
            _ms(one.get(name)) if name.endswith(("_ms", "_per_s")) else str(one.get(name, ""))
            for name in names
        )
        for one in evaluations[-_SLOWEST:]
    ]
    return Markup(Table("The newest", [tuple(names), *body], []).html())


def _gaps(run: Run) -> str:
    share = run.summary.gap_share
    if share is None or math.isnan(share):
        return run.summary.probe_failure
    steps = run.summary.probed_steps
    return f"{share:.0%} of a step is launch gaps ({steps} steps were probed)"


def _environment(run: Run) -> list[tuple[str, str]]:
    found = asdict(run.environment)
    options = found.pop("options")
    found |= {f"option {name}": value for name, value in options.items()}
    return [(name, str(value)) for name, value in found.items() if value not in ("", None, [])]


def _ms(value: Any) -> str:
    if not isinstance(value, int | float):
        return ""
    try:
        return f"{value:.3f}"
    except OverflowError:  # A whole number that is no time.
        return ""


def _grown(row: Any, usually: Mapping[str, float]) -> str:
    """Returns the phase of a step that is most above its median."""
    more = {name: float(np.nan_to_num(row[f"{name}_ms"])) - ms for name, ms in usually.items()}
    return max(more, key=more.__getitem__, default="")
