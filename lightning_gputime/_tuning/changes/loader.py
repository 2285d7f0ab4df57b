"""DataLoader options. Random transforms draw different numbers if the workers change."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_gputime._diagnosis.diagnosis import Advice
from lightning_gputime._tuning.change import LOADER, TRANSFORMERS, Change, Effect, Report

_FIRST_WORKERS = 4
_EFFECTS: Mapping[str, Effect] = {
    "num_workers": "random numbers",
    "persistent_workers": "random numbers",
    "pin_memory": "none",
    "prefetch_factor": "none",
}
_FEW_WORKERS = ("iterate_over_steps", "workers", "num_workers", "cheaper_transforms")
"""Codes of advice for a slow loader. If it suggests no number, propose to double the workers."""


def propose(advice: Advice, report: Report) -> Iterator[Change]:
    name, now = advice.code, report.loader
    value = advice.parameters.get("suggested")
    if name in _EFFECTS and value is not None:
        yield _change(name, value, report)
    if name in _FEW_WORKERS and now:
        yield from (_change(*option, report) for option in _load_faster(now, value))


def _load_faster(now: Mapping[str, Any], suggested: int | None) -> Iterator[tuple[str, Any]]:
    workers, cores = now["num_workers"], len(os.sched_getaffinity(0))
    if suggested is None and workers < cores:
        yield "num_workers", min(2 * workers or _FIRST_WORKERS, cores)
    if workers and not now["persistent_workers"]:
        yield "persistent_workers", True


def _change(name: str, value: Any, report: Report) -> Change:
    # The transformers Trainer constructs its loader from `TrainingArguments`.
    is_transformers = TRANSFORMERS in report.sites
    option = f"dataloader_{name}" if is_transformers else name
    return Change(
        f"{option}={value}",
        TRANSFORMERS if is_transformers else LOADER,
        {option: value},
        effect=_EFFECTS[name],
    )
