"""Per-phase GPU times of PyTorch and Lightning training steps."""

# ruff: noqa: F403, F405  # At runtime `__getattr__` imports names.

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_gputime._api import *
    from lightning_gputime._instrumentation.traced import phase as phase
    from lightning_gputime.callback import GPUPhaseTimer
    from lightning_gputime.hooks import GPUPhaseHooks as GPUPhaseHooks
    from lightning_gputime.metric import PhaseTimeMetric

__all__ = [
    "Advice",
    "Cause",
    "CostlySetting",
    "Culprit",
    "Diagnosis",
    "Difference",
    "Entry",
    "Environment",
    "GPUPhaseHooks",
    "GPUPhaseTimer",
    "LineChange",
    "LineRow",
    "LoaderTimes",
    "Measurement",
    "MemorySummary",
    "MetricsLogger",
    "OutsideCause",
    "OutsideSummary",
    "PhasePart",
    "PhaseStats",
    "PhaseSummary",
    "PhaseTimeMetric",
    "ProportionalStep",
    "RankHistory",
    "RankStats",
    "RankSummary",
    "Run",
    "RunComparison",
    "Section",
    "SlowStep",
    "SlowSummary",
    "Slowdown",
    "Source",
    "StepObserver",
    "StepTimes",
    "Table",
    "TimeBreakdown",
    "Timeline",
    "TimerOptions",
    "TrainingSetup",
    "WallClockBreakdown",
    "WorkSummary",
    "WorkerTimes",
    "compare",
    "load",
    "phase",
]

__version__ = "0.2.0"

_HEAVY = {
    "GPUPhaseHooks": "hooks",
    "GPUPhaseTimer": "callback",
    "PhaseTimeMetric": "metric",
    "phase": "_instrumentation.traced",
}
"""Modules of the names that need torch or Lightning. All other names are in `_api`."""


def __getattr__(name: str) -> Any:
    # Import lazily: importing torch takes seconds, and the command line may not need it.
    if name not in __all__:
        from lightning_gputime._messages import suggest

        fix = "" if name.startswith("_") else f": {suggest(name, __all__)}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{fix}")
    module = importlib.import_module(f"{__name__}.{_HEAVY.get(name, '_api')}")
    found = globals()[name] = getattr(module, name)
    if isinstance(found, type):
        found.__module__ = __name__
    return found


def __dir__() -> list[str]:
    return __all__
