"""Public names that need neither torch nor Lightning. `__init__` imports them lazily."""

from lightning_gputime._attribution import OutsideCause as OutsideCause
from lightning_gputime._attribution import OutsideSummary as OutsideSummary
from lightning_gputime._diagnosis import Advice as Advice
from lightning_gputime._diagnosis import Diagnosis as Diagnosis
from lightning_gputime._diagnosis import Entry as Entry
from lightning_gputime._diagnosis import TimeBreakdown as TimeBreakdown
from lightning_gputime._ledger.rows import LineRow as LineRow
from lightning_gputime._ledger.rows import PhasePart as PhasePart
from lightning_gputime._loader import LoaderTimes as LoaderTimes
from lightning_gputime._loader import WorkerTimes as WorkerTimes
from lightning_gputime._measurement.changes import Slowdown as Slowdown
from lightning_gputime._measurement.culprits import Culprit as Culprit
from lightning_gputime._measurement.culprits import Source as Source
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

for found in [value for value in vars().values() if isinstance(value, type)]:
    found.__module__ = "lightning_gputime"  # Users import the classes from there.
