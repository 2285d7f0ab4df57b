"""Per-phase GPU times of PyTorch and Lightning training steps."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_gputime._attribution import OutsideCause as OutsideCause
    from lightning_gputime._attribution import OutsideSummary as OutsideSummary
    from lightning_gputime._diagnosis import Advice as Advice
    from lightning_gputime._diagnosis import Diagnosis as Diagnosis
    from lightning_gputime._diagnosis import Entry as Entry
    from lightning_gputime._diagnosis import TimeBreakdown as TimeBreakdown
    from lightning_gputime._instrumentation.traced import phase as phase
    from lightning_gputime._ledger.rows import LineRow as LineRow
    from lightning_gputime._ledger.rows import PhasePart as PhasePart
    from lightning_gputime._loader import Culprit as Culprit
    from lightning_gputime._loader import LoaderTimes as LoaderTimes
    from lightning_gputime._loader import Source as Source
    from lightning_gputime._loader import WorkerTimes as WorkerTimes
    from lightning_gputime._measurement.changes import Slowdown as Slowdown
    from lightning_gputime._measurement.measurement import CostlySetting as CostlySetting
    from lightning_gputime._measurement.measurement import Environment as Environment
    from lightning_gputime._measurement.measurement import Measurement as Measurement
    from lightning_gputime._measurement.measurement import TrainingSetup as TrainingSetup
    from lightning_gputime._measurement.memory import MemorySummary as MemorySummary
    from lightning_gputime._measurement.observers import Section as Section
    from lightning_gputime._measurement.observers import StepObserver as StepObserver
    from lightning_gputime._measurement.slow import Cause as Cause
    from lightning_gputime._measurement.slow import SlowStep as SlowStep
    from lightning_gputime._measurement.slow import SlowSummary as SlowSummary
    from lightning_gputime._measurement.sums import PhaseStats as PhaseStats
    from lightning_gputime._measurement.sums import WorkSummary as WorkSummary
    from lightning_gputime._measurement.wall_clock import WallClockBreakdown as WallClockBreakdown
    from lightning_gputime._options import TimerOptions as TimerOptions
    from lightning_gputime._output.loggers import MetricsLogger as MetricsLogger
    from lightning_gputime._output.summary import PhaseSummary as PhaseSummary
    from lightning_gputime._output.table import Table as Table
    from lightning_gputime._phases import StepTimes as StepTimes
    from lightning_gputime._phases import Timeline as Timeline
    from lightning_gputime._ranks.comparison import RankStats as RankStats
    from lightning_gputime._ranks.comparison import RankSummary as RankSummary
    from lightning_gputime._ranks.over_time import RankHistory as RankHistory
    from lightning_gputime._runs.compare import LineChange as LineChange
    from lightning_gputime._runs.compare import RunComparison as RunComparison
    from lightning_gputime._runs.compare import compare as compare
    from lightning_gputime._runs.estimates import Difference as Difference
    from lightning_gputime._runs.estimates import ProportionalStep as ProportionalStep
    from lightning_gputime._runs.saved import Run as Run
    from lightning_gputime._runs.saved import load as load
    from lightning_gputime.callback import GPUPhaseTimer as GPUPhaseTimer
    from lightning_gputime.hooks import GPUPhaseHooks as GPUPhaseHooks
    from lightning_gputime.metric import PhaseTimeMetric as PhaseTimeMetric

_NAMES = {
    "_attribution": ("OutsideCause", "OutsideSummary"),
    "_diagnosis": ("Advice", "Diagnosis", "Entry", "TimeBreakdown"),
    "_instrumentation.traced": ("phase",),
    "_ledger.rows": ("LineRow", "PhasePart"),
    "_loader": ("Culprit", "LoaderTimes", "Source", "WorkerTimes"),
    "_measurement.changes": ("Slowdown",),
    "_measurement.measurement": ("CostlySetting", "Environment", "Measurement", "TrainingSetup"),
    "_measurement.memory": ("MemorySummary",),
    "_measurement.observers": ("Section", "StepObserver"),
    "_measurement.slow": ("Cause", "SlowStep", "SlowSummary"),
    "_measurement.sums": ("PhaseStats", "WorkSummary"),
    "_measurement.wall_clock": ("WallClockBreakdown",),
    "_options": ("TimerOptions",),
    "_output.loggers": ("MetricsLogger",),
    "_output.summary": ("PhaseSummary",),
    "_output.table": ("Table",),
    "_phases": ("StepTimes", "Timeline"),
    "_ranks.comparison": ("RankStats", "RankSummary"),
    "_ranks.over_time": ("RankHistory",),
    "_runs.compare": ("LineChange", "RunComparison", "compare"),
    "_runs.estimates": ("Difference", "ProportionalStep"),
    "_runs.saved": ("Run", "load"),
    "callback": ("GPUPhaseTimer",),
    "hooks": ("GPUPhaseHooks",),
    "metric": ("PhaseTimeMetric",),
}
"""Public names by module. They are imported when they are first used: torch takes seconds."""

__version__ = "0.2.0"

_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        from lightning_gputime._messages import suggest

        fix = "" if name.startswith("_") else f": {suggest(name, __all__)}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{fix}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    found = globals()[name] = getattr(module, name)
    if isinstance(found, type):
        found.__module__ = __name__  # Users import the class from here.
    return found


def __dir__() -> list[str]:
    return __all__
