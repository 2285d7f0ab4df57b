"""Machine-readable results, the output of `--json` and `--brief`; see docs/reference/schema.md."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightning_gputime._messages import plain
from lightning_gputime._runs.compare import RunComparison
from lightning_gputime._runs.saved import Run

VERSION, MINOR = 3, 0
"""Increment `MINOR` to add a key, and `VERSION` to rename or remove a key."""

# Limits of a brief result.
_MIN_SHARE = 0.01  # Shorter entries and phases are omitted.
_MAX_ITEMS, _MAX_KEYS, _MAX_LETTERS, _DIGITS = 8, 24, 300, 4
_ENTRY_KEYS = ("name", "seconds", "share", "error", "speed_up", "code", "pace", "phases_ms")
_LINE_KEYS = ("function", "file", "line", "last_line", "modules", "phases")


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
    diagnosis = content["diagnosis"]
    if breakdown := diagnosis["time_breakdown"]:
        entries = [
            _selected(row, _ENTRY_KEYS)
            | {
                "line": row["line"] and _selected(row["line"], _LINE_KEYS),
                "lines": [_selected(line, _LINE_KEYS) for line in row["lines"][:_MAX_ITEMS]],
            }
            for row in breakdown["rows"]
            if row["share"] >= _MIN_SHARE
        ]
        breakdown = _selected(breakdown, ("scope", "wall_s", "unknown")) | {"rows": entries}
    return {
        "diagnosis": _selected(diagnosis, ("code", "grade", "entry", "headline"))
        | {"time_breakdown": breakdown, "advice": diagnosis["advice"]},
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
