"""Machine-readable results, the output of `--json` and `--brief`; see docs/reference/schema.md."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightning_gputime._diagnosis.diagnosis import Entry
from lightning_gputime._ledger.rows import LineRow
from lightning_gputime._measurement.plain import plain
from lightning_gputime._runs.compare import RunComparison
from lightning_gputime._runs.environment import Environment
from lightning_gputime._runs.estimates import Difference
from lightning_gputime._runs.run import Run

VERSION, MINOR = 2, 0
"""Increment `MINOR` to add a key, and `VERSION` to rename or remove a key."""

_MIN_SHARE = 0.01  # A brief result omits shorter entries and phases.
_MAX_ITEMS = 8  # Maximum length of lists in a brief result.
_MAX_KEYS = 24  # Maximum number of keys in a brief result.
_MAX_LETTERS = 300  # Maximum length of texts in a brief result.
_DIGITS = 4  # Number of significant digits in a brief result.


def result_of(run: Run, *, brief: bool = False) -> dict[str, Any]:
    """Return the result of a run. A `brief` result has under 2,000 tokens, for coding agents."""
    summary = run.summary()
    content = summary.to_dict() | {
        "notes": summary.notes,
        "environment": asdict(run.environment),
        "slow_steps": [asdict(step) for step in run.slow_steps],
        "warnings": run.warnings,
    }
    if not brief:
        return {**_head("run", brief), **plain(content)}
    diagnosis, breakdown = summary.diagnosis, summary.time_breakdown
    rows = [row for row in breakdown.rows if row.share >= _MIN_SHARE] if breakdown else []
    return _head("run", brief) | _shorten(
        {
            "diagnosis": {
                "code": diagnosis.code,
                "grade": diagnosis.grade,
                "entry": diagnosis.entry,
                "headline": diagnosis.headline,
                "time_breakdown": breakdown
                and {
                    "scope": breakdown.scope,
                    "wall_s": breakdown.wall_s,
                    "unknown": breakdown.unknown,
                    "rows": [_brief_entry(row) for row in rows],
                },
                "advice": content["diagnosis"]["advice"],
            },
            "steps": summary.steps,
            "step": _selected(content["step"], ("mean_ms", "p95_ms", "max_ms")),
            "rows": {
                name: _selected(row, ("mean_ms", "share"))
                for name, row in content["rows"].items()
                if (row["share"] or 0.0) >= _MIN_SHARE
            },
            "ranks": content["ranks"]
            and _selected(content["ranks"], ("slowest_rank", "phase", "behind_median_ms")),
            "notes": summary.notes,
            "warnings": run.warnings,
            "environment": _brief_environment(run.environment),
        }
    )


def comparison_result(
    comparison: RunComparison, outcome: Mapping[str, Any], *, brief: bool = False
) -> dict[str, Any]:
    """Return the result of a comparison, with the keys of `outcome` added."""
    content = comparison.to_dict() | {
        "step": _difference(comparison.step),
        "mean": _difference(comparison.mean),
        "rows": {name: _difference(row) for name, row in comparison.rows.items()},
        "others": [comparison_result(other, {}, brief=brief) for other in comparison.others],
    }
    head = _head("comparison", brief) | dict(outcome)
    if not brief:
        return head | content
    keys = ("verdict", "sentence", "names", "runs", "steps", "step", "mean", "notes", "others")
    rows = _selected(content["rows"], comparison.judged)
    return head | _shorten(_selected(content, keys) | {"rows": rows})


def _head(kind: str, brief: bool) -> dict[str, Any]:
    name = "lightning_gputime result"
    return {"format": name, "version": VERSION, "minor": MINOR, "kind": kind, "brief": brief}


def _selected(content: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: content[key] for key in keys}


def _brief_entry(entry: Entry) -> dict[str, Any]:
    keys = ("name", "seconds", "share", "error", "speed_up", "code", "pace", "phases_ms")
    brief = {key: getattr(entry, key) for key in keys}
    line = entry.line and _brief_line(entry.line)
    return {**brief, "line": line, "lines": [*map(_brief_line, entry.lines[:_MAX_ITEMS])]}


def _brief_line(line: LineRow) -> dict[str, Any]:
    keys = ("function", "file", "line", "last_line", "modules", "phases")
    found: dict[str, Any] = plain({key: asdict(line)[key] for key in keys})
    return found


def _brief_environment(environment: Environment) -> dict[str, Any]:
    known = asdict(environment)
    del known["options"]
    return {name: value for name, value in known.items() if value not in (None, "", False)}


def _difference(row: Difference) -> dict[str, Any]:
    derived = {"change_ms": row.change_ms, "relative_change": row.relative_change}
    difference: dict[str, Any] = plain({**asdict(row), **derived, "verdict": row.verdict})
    return difference


def _shorten(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with numbers rounded, and long texts, lists and objects truncated."""
    return {name: _short(item) for name, item in [*content.items()][:_MAX_KEYS]}


def _short(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _shorten(value)
    if isinstance(value, list | tuple):
        return [*map(_short, value[:_MAX_ITEMS])]
    if isinstance(value, str):
        return value if len(value) <= _MAX_LETTERS else f"{value[:_MAX_LETTERS]}..."
    if isinstance(value, float):
        if not value or not math.isfinite(value):
            return plain(value)
        digits = _DIGITS - 1 - math.floor(math.log10(abs(value)))
        return plain(round(value, digits))
    return value
