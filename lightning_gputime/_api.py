"""The public names that need torch, and neither Lightning nor torchmetrics."""

from lightning_gputime._boundaries.named import phase
from lightning_gputime._memory import MemorySummary
from lightning_gputime._options import TimerOptions
from lightning_gputime._phases import StepTimes
from lightning_gputime._record.clock import Clock, TimingEvent
from lightning_gputime._results.ledger import Ledger
from lightning_gputime._results.means import MetricsLogger
from lightning_gputime._results.observers import StepObserver
from lightning_gputime._results.ranks import RankStats, RankSummary
from lightning_gputime._results.slow import Cause, SlowStep
from lightning_gputime._results.stats import PhaseStats
from lightning_gputime._results.summary import PhaseSummary
from lightning_gputime._results.table import Section
from lightning_gputime._saved_runs.compare import Difference, RunComparison, compare
from lightning_gputime._saved_runs.environment import Environment
from lightning_gputime._saved_runs.saved import Run, load
from lightning_gputime.hooks import GPUPhaseHooks

__all__ = [
    "Cause",
    "Clock",
    "Difference",
    "Environment",
    "GPUPhaseHooks",
    "Ledger",
    "MemorySummary",
    "MetricsLogger",
    "PhaseStats",
    "PhaseSummary",
    "RankStats",
    "RankSummary",
    "Run",
    "RunComparison",
    "Section",
    "SlowStep",
    "StepObserver",
    "StepTimes",
    "TimerOptions",
    "TimingEvent",
    "compare",
    "load",
    "phase",
]
