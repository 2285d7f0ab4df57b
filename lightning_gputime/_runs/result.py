"""Machine-readable results, the output of `--json` and `--brief`; see docs/reference/schema.md."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightning_gputime._ledger.rows import LineRow
from lightning_gputime._messages import plain
from lightning_gputime._runs.compare import RunComparison
from lightning_gputime._runs.saved import Run

VERSION, MINOR = 3, 0
"""Increment `MINOR` to add a key, and `VERSION` to rename or remove a key."""

# Limits of a brief result.
_MIN_SHARE = 0.01  # Shorter entries and phases are omitted.
_MAX_ITEMS, _MAX_KEYS, _MAX_LETTERS, _DIGITS = 8, 24, 300, 4


def result_of(found: Run | RunComparison, *, brief: bool = False, **added: str) -> dict[str, Any]:
    """Return the result of a run or a comparison, with the `added` keys.

    A `brief` result has under 2,000 tokens, for coding agents.
    """
    content = _of_run(found, brief) if isinstance(found, Run) else _of_comparison(found, brief)
    return {
        "format": "lightning_gputime result",
        "version": VERSION,
        "minor": MINOR,
        "kind": "run" if isinstance(found, Run) else "comparison",
        "brief": brief,
        **added,
        **(_short(content) if brief else content),
    }


def _of_run(run: Run, brief: bool) -> dict[str, Any]:
    summary, environment = run.summary(), asdict(run.environment)
    content = summary.to_dict() | {
        "notes": summary.notes,
        "environment": environment,
        "slow_steps": [asdict(step) for step in run.slow_steps],
        "warnings": run.warnings,
    }
    if not brief:
        found: dict[str, Any] = plain(content)
        return found
    del environment["options"]
    diagnosis, breakdown = summary.diagnosis, summary.time_breakdown
    keys = ("name", "seconds", "share", "error", "speed_up", "code", "pace", "phases_ms")
    entries = [
        {key: getattr(row, key) for key in keys}
        | {"line": row.line and _brief_line(row.line)}
        | {"lines": [*map(_brief_line, row.lines[:_MAX_ITEMS])]}
        for row in (breakdown.rows if breakdown else ())
        if row.share >= _MIN_SHARE
    ]
    return {
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
                "rows": entries,
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
        and _selected(content["ranks"], ("straggler", "phase", "line", "excess_ms")),
        "notes": summary.notes,
        "warnings": run.warnings,
        "environment": {
            name: value for name, value in environment.items() if value not in (None, "", False)
        },
    }


def _of_comparison(comparison: RunComparison, brief: bool) -> dict[str, Any]:
    content = comparison.to_dict()
    if not brief:
        return content
    keys = ("direction", "sentence", "runs", "steps", "step", "mean", "notes")
    return _selected(content, keys) | {"rows": _selected(content["rows"], comparison.judged)}


def _selected(content: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: content[key] for key in keys}


def _brief_line(line: LineRow) -> dict[str, Any]:
    keys = ("function", "file", "line", "last_line", "modules", "phases")
    found: dict[str, Any] = plain(_selected(asdict(line), keys))
    return found


def _short(value: Any) -> Any:
    """Return JSON with numbers rounded, and long texts, lists and objects truncated."""
    if isinstance(value, Mapping):
        return {name: _short(item) for name, item in [*value.items()][:_MAX_KEYS]}
    if isinstance(value, list | tuple):
        return [*map(_short, value[:_MAX_ITEMS])]
    if isinstance(value, str):
        return value if len(value) <= _MAX_LETTERS else f"{value[:_MAX_LETTERS]}..."
    if isinstance(value, float) and value and math.isfinite(value):
        value = round(value, _DIGITS - 1 - math.floor(math.log10(abs(value))))
    return plain(value)
