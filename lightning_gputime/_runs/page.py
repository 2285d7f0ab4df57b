"""The page of a run, or of two: one file that needs nothing else."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined  # torch needs it, too
from markupsafe import Markup

from lightning_gputime._results.table import Table, marked
from lightning_gputime._results.units import duration
from lightning_gputime._results.verdict import advice_sentence
from lightning_gputime._runs import charts
from lightning_gputime._runs.compare import RunComparison
from lightning_gputime._runs.saved import Run

_MAX_ROWS = 10

_MAX_BAR = 25
"""The length of the bar of a whole (in characters)."""


def page(runs: Sequence[Run], comparison: RunComparison | None = None) -> str:
    """Return the page of a run, or of two side by side.

    Every name and text in it is escaped, and it loads nothing.

    Args:
        runs: One, or the one before and the one after.
        comparison: Of the two.

    Raises:
        ImportError: If bokeh is not installed (extra `report`).
    """
    resources = charts.bokeh().resources.Resources(mode="inline", components=["bokeh"])
    verdict, sentences = _verdict(runs, comparison)
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    )
    return template.render(
        title=" and ".join(run.name or "run" for run in runs),
        verdict=Markup(marked(verdict)),
        sentences=[Markup(marked(one)) for one in sentences if one],
        sections=[*_sections(runs, comparison)],
        library=Markup(resources.render_js()),
    )


def _verdict(runs: Sequence[Run], comparison: RunComparison | None) -> tuple[str, list[str]]:
    if comparison is not None:
        return comparison.sentence, [comparison.mean_sentence, *comparison.notes]
    [run] = runs
    took = f"a step takes {duration(run.summary.step.mean_ms)}"
    ledger = run.ledger.sentence if run.ledger is not None else ""
    if run.summary.is_warmup:
        return f"{took}, of the warm-up", [ledger]
    verdict = run.summary.verdict or (took if run.summary.steps else "no step was timed")
    return verdict, [advice_sentence(run.summary.advice), ledger]


def _sections(
    runs: Sequence[Run], comparison: RunComparison | None
) -> Iterator[tuple[str, list[str]]]:
    """Yield the headings, each with what stands below it: one thing, or one for each run."""
    limit_ms = charts.axis_limit_ms(runs)
    versus = _scrolled(comparison._repr_html_()) if comparison is not None else ""
    found = {
        "Before and after": [versus],
        "Phases over steps": [_steps(run, limit_ms, len(runs) > 1) for run in runs],
        "How long the steps took": [_distribution(runs)],
        "Phases": [_scrolled(run.summary._repr_html_()) for run in runs],
        "Slowest steps": [_slow(run) for run in runs],
        "What the peak is lost to": [_losses(run) for run in runs],
        "Ranks": [_ranks(run) for run in runs],
        "Evaluation": [_evaluations(run.evaluations) for run in runs],
        "Launch gaps": [_gaps(run) for run in runs],
        "Where the whole fit went": [_ledger(run) for run in runs],
        "Environment": [_environment(run) for run in runs],
    }
    return ((heading, bodies) for heading, bodies in found.items() if any(bodies))


def _steps(run: Run, limit_ms: float, named: bool) -> str:
    if not len(run.history):
        return ""
    heading = Markup("<h3>{}</h3>").format(run.name) if named else ""
    n, every = len(run.history), charts.thin_out(run.history)[1]
    note = (
        f"{n} steps, thinned out: each point is the mean of {every} steps, and the line is the"
        " longest of them."
    )
    chart = _drawn(charts.phases_over_steps(run, limit_ms))
    return heading + chart + (_note(note) if every > 1 else "")


def _distribution(runs: Sequence[Run]) -> str:
    # A figure with nothing in it is warned of.
    if not any(len(run.measured) for run in runs):
        return ""
    note = _note("Without the warm-up, and without the slowest percent.")
    return _drawn(charts.distribution(runs)) + note


def _slow(run: Run) -> str:
    """Return the slow steps of the file; where it has none, the longest of its history."""
    header = ("step", "took (ms)", "usually (ms)", "grew in", "causes")
    rows = [
        (
            str(one.get("step", "")),
            _ms(one.get("step_ms")),
            _ms(one.get("usual_ms")),
            str(one.get("phase", "")),
            _causes(one),
        )
        for one in run.slow_steps[:_MAX_ROWS]
    ]
    return _table(header, rows or [*_longest(run)], left=(4,))


def _causes(step: Mapping[str, Any]) -> str:
    causes = [
        f"{_ms(one.get('reached_ms'))} ms {one.get('name', '')} {one.get('detail') or ''}".strip()
        for one in step.get("causes") or ()
    ]
    if unexplained := _ms(step.get("unexplained_ms")):
        causes.append(f"{unexplained} ms unexplained")
    return ", ".join(causes)


def _longest(run: Run) -> Iterator[tuple[str, ...]]:
    steps, names = run.measured, charts.list_top_phases(run)
    if not len(steps) or not names:
        return
    times = np.nan_to_num(np.stack([steps[f"{name}_ms"] for name in names], axis=1))
    growth = times - np.median(times, axis=0)
    usual = _ms(float(np.median(steps["step_ms"])))
    for i in steps["step_ms"].argsort()[::-1][:_MAX_ROWS]:
        step = steps[i]
        yield str(step["step"]), _ms(float(step["step_ms"])), usual, names[growth[i].argmax()], ""


def _losses(run: Run) -> str:
    """Return what the peak is lost to, down to what the model computes."""
    work = run.summary.work
    if work is None or work.mfu is None or not work.lost:
        return ""
    lost = sorted(work.lost.items(), key=lambda one: -one[1])
    shares = [*((name, share) for name, share in lost if share), ("MFU", work.mfu)]
    rows = [(name, f"{100 * share:.1f}", _bar(share)) for name, share in shares]
    return _table(("", "points of the peak", ""), rows, left=(2,))


def _ranks(run: Run) -> str:
    ranks = run.summary.ranks
    if ranks is None:
        return ""
    header = ("phase", "shortest (ms)", "mean (ms)", "longest (ms)", "of rank")
    rows = [
        (name, _ms(row.min_ms), _ms(row.mean_ms), _ms(row.max_ms), str(row.slowest))
        for name, row in ranks.rows.items()
    ]
    return _table(header, rows, f"{len(ranks.ranks)} ranks", [ranks.sentence])


def _evaluations(evaluations: Sequence[Mapping[str, Any]]) -> str:
    names = tuple(dict.fromkeys(name for one in evaluations for name in one))
    rows = [
        tuple(
            _ms(one.get(name)) if name.endswith(("_ms", "_per_s")) else str(one.get(name, ""))
            for name in names
        )
        for one in evaluations[-_MAX_ROWS:]
    ]
    return _table(names, rows, "The newest")


def _gaps(run: Run) -> str:
    share = run.summary.gap_share
    if share is None or math.isnan(share):
        return run.summary.probe_failure
    steps = run.summary.probed_steps
    return f"{share:.0%} of a step is launch gaps ({steps} steps were probed)"


def _ledger(run: Run) -> str:
    if run.ledger is None:
        return ""
    shares = run.ledger.shares
    rows = [
        (name, f"{s:.3g} s", f"{100 * shares[name]:.1f} %", _bar(shares[name]))
        for name, s in run.ledger.entries_s.items()
    ]
    return _table(("", "time", "share", ""), rows, left=(3,))


def _environment(run: Run) -> str:
    found = asdict(run.environment)
    options = found.pop("options")
    found |= {f"option {name}": value for name, value in options.items()}
    rows = [(name, str(value)) for name, value in found.items() if value not in ("", None, [])]
    return Markup('<div class="text">{}</div>').format(_table(("", ""), rows, left=(1,)))


def _table(
    header: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    title: str = "",
    sentences: Sequence[str] = (),
    left: Sequence[int] = (),
) -> str:
    if not rows:
        return ""
    return _scrolled(Table(title, [header, *rows], sentences, left=(0, *left)).html())


def _bar(share: float) -> str:
    return "█" * round(_MAX_BAR * share)


def _scrolled(table: str) -> str:
    """Return HTML that a narrow screen can scroll."""
    return Markup(f'<div class="wide">{table}</div>')


def _note(text: str) -> str:
    return Markup('<p class="note">{}</p>').format(text)


def _drawn(figure: Any) -> str:
    return Markup("".join(charts.bokeh().embed.components(figure, wrap_script=True)))


def _ms(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else ""
