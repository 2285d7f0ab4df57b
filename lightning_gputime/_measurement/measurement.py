"""Facts of a run: its measurement, and its setup."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_gputime._attribution import OutsideSummary
from lightning_gputime._ledger.rows import LineRow
from lightning_gputime._loader import Culprit, LoaderTimes
from lightning_gputime._measurement.changes import Slowdown
from lightning_gputime._measurement.memory import MemorySummary
from lightning_gputime._measurement.observers import Section
from lightning_gputime._measurement.slow import SlowSummary
from lightning_gputime._measurement.sums import PhaseStats, WorkSummary
from lightning_gputime._measurement.wall_clock import WallClockBreakdown
from lightning_gputime._ranks.comparison import RankSummary


@dataclass(frozen=True, slots=True)
class Measurement:
    """Facts that a timer has measured, without a diagnosis."""

    # Statistics of each phase that ran, in the order of a step, and of whole steps. If some steps
    # were not timed, these are estimates for all steps.
    rows: Mapping[str, PhaseStats] = field(default_factory=dict)
    step: PhaseStats = field(default_factory=lambda: PhaseStats(0))
    steps: int = 0  # Number of timed steps, without the warm-up.
    warmup_steps: int = 0  # Number of first timed steps, which are excluded.
    # Mean time per step that the host waited for the GPU to finish a step (in milliseconds). Near
    # zero, the host cannot keep the GPU busy.
    host_wait_mean_ms: float = math.nan
    # Fraction of the step that each phase takes in that half of the timed steps in which it takes
    # less; empty if there are too few.
    least_shares: Mapping[str, float] = field(default_factory=dict)
    skipped_updates: int = 0  # Number of steps without an update, including the warm-up.
    on_host_clock: bool = False  # All times are from the host clock, because there was no GPU.
    ranks: RankSummary | None = None  # Comparison of all ranks, on rank zero.
    untimed_steps: int = 0  # Number of steps that were not timed, or only examined.
    # Fraction of each phase in which the host set the pace, from 0 to 1; empty on the host's clock.
    host_paced: Mapping[str, float] = field(default_factory=dict)
    examined_steps: int = 0  # Number of steps in which lines of code were timed.
    lines: tuple[LineRow, ...] = ()  # Lines and functions with their time, the longest first.
    lines_unavailable: str = ""  # Reason why lines cannot be timed; empty if they can.
    not_sampled_steps: int = 0  # Number of long steps that no timed step represents.
    not_sampled_share: float = 0.0  # Time of these steps, as a fraction of the time of all steps.
    # With `every_n_steps="auto"`, 1 of this many steps was timed at the end.
    timed_every_n_steps: int = 1
    # Cost of timing every step, and of timing 1 of `timed_every_n_steps`, as fractions of the step;
    # None if unknown.
    timing_share: float | None = None
    added_share: float | None = None
    each_timed_for: str = ""  # Option that requires timing every step; empty if none.
    # The training was still running. A file that says so may be that of a process that was killed.
    is_running: bool = False
    is_warmup: bool = False  # Only warm-up steps were timed. Then the statistics include them.
    hint: str = ""  # Advice if no step was timed.
    slow: SlowSummary | None = None  # Cost of slow steps; None if no step was slow.
    outside: OutsideSummary | None = None  # Causes outside of the loop's code; None if unknown.
    slowdown: Slowdown | None = None  # Lasting change of the step time; None if it did not change.
    # Change of the work in a step that explains why steps got slower, such as more batches; empty
    # if there is none.
    work_change: str = ""
    gpu_mhz: float | None = None  # Median clock of the GPU; None if unknown.
    wall_clock: WallClockBreakdown | None = None  # Host time of the run by entry.
    memory: MemorySummary | None = None  # Peak memory of the device; None on a CPU.
    stage: str = ""  # "validation", "test" or "prediction"; empty for training.
    work: WorkSummary | None = None  # Work per second, and its fraction of the GPU's peak.
    sections: tuple[Section, ...] = ()  # Added by observers.
    not_measured: tuple[str, ...] = ()  # Sentences on quantities that could not be measured.
    # Phases whose times could therefore not be separated from each other.
    blurred: tuple[str, ...] = ()
    culprits: tuple[Culprit, ...] = ()  # Stages of loaders, and code that starts collections.
    loaders: tuple[LoaderTimes, ...] = ()  # Times of the workers of each loader.

    @property
    def items_per_sec(self) -> float | None:
        """Items per second; None if unknown."""
        return self.work.items_per_sec if self.work is not None else None

    @property
    def mfu(self) -> float | None:
        """The model's FLOPs as a fraction of the peak, from 0 to 1; None if unknown."""
        return self.work.mfu if self.work is not None else None

    def share(self, name: str) -> float:
        """Return the fraction of the step that a phase takes, from 0 to 1."""
        return self.rows[name].share if name in self.rows else 0.0


@dataclass(frozen=True, slots=True)
class CostlySetting:
    """Setting that may cost time; its cost is not measured."""

    name: str  # Such as "detect_anomaly".
    text: str  # Possible cost, and advice.
    entry: str = ""  # Entry of the time breakdown that includes the cost; empty for the model.
    # Attribute of a `LineRow` that shows that a line runs the operations that the setting slows
    # down, such as "convolves"; empty if the cost does not depend on operations.
    operation: str = ""


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """Setup of a training run. Unknown values are None."""

    is_own_loop: bool = False  # No trainer runs the loop.
    has_loader: bool = False  # The timer has read the settings of a loader.
    is_iterable: bool = False  # The dataset is an IterableDataset: each worker has a copy of it.
    is_in_memory: bool = False  # The dataset is a TensorDataset.
    num_workers: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    prefetch_factor: int | None = None
    foreign_loader: str = ""  # Class of a loader whose stages cannot be timed.
    loader_prefix: str = ""  # Prefix of the loader's options, such as "dataloader_".
    cores: int | None = None  # CPU cores per rank.
    batch_size: int | None = None
    precision: str = ""  # Such as "32-true", if a trainer reports it.
    has_bf16: bool = False  # The device multiplies bfloat16 faster than float32.
    compiled: bool = False  # torch compiles at least a part of the model.
    unfused: str = ""  # Class of optimizers that could be fused but are not.
    costly_settings: tuple[CostlySetting, ...] = ()


@dataclass(frozen=True, slots=True)
class Environment:
    """Environment of a run. Unknown values are empty or None.

    Attributes:
        device: Name of the GPU; without a GPU, of the CPU.
        device_type: Type of the device, such as "cuda" or "cpu".
        cuda: Version of CUDA that torch was built with.
        torch: Version of torch.
        lightning: Version of Lightning.
        package: Version of lightning_gputime.
        world_size: Number of processes that train together.
        rank: Rank of this process.
        precision: Precision of the trainer; in a plain loop, dtype of the parameters.
        compiled: True if torch compiles at least a part of the model.
        parameters: Number of parameters of the model.
        batch_size: Batch size of the loader.
        accumulate_grad_batches: Number of batches per step.
        commit: Git commit of the program.
        started: Start of the measurement (UTC, ISO 8601).
        options: Options of the timer that differ from their defaults, if JSON can store them.
    """

    device: str = ""
    device_type: str = ""
    cuda: str = ""
    torch: str = ""
    lightning: str = ""
    package: str = ""
    world_size: int = 1
    rank: int = 0
    precision: str = ""
    compiled: bool = False
    parameters: int = 0
    batch_size: int | None = None
    accumulate_grad_batches: int | None = None
    commit: str = ""
    started: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
