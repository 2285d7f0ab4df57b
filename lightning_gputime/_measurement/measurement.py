"""Facts about a run, as an immutable snapshot."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_gputime._measurement.changes import Slowdown
from lightning_gputime._measurement.culprits import Culprit
from lightning_gputime._measurement.loader import LoaderTimes
from lightning_gputime._measurement.memory import MemorySummary
from lightning_gputime._measurement.observers import Section
from lightning_gputime._measurement.ranks import RankSummary
from lightning_gputime._measurement.slow import SlowSummary
from lightning_gputime._measurement.stats import PhaseStats
from lightning_gputime._measurement.sums import WorkSummary
from lightning_gputime._measurement.wall_clock import WallClockBreakdown
from lightning_gputime._phases import BETWEEN_BATCHES, is_wait


@dataclass(frozen=True, slots=True)
class Measurement:
    """Facts that a timer has measured, without a diagnosis.

    Attributes:
        rows: Statistics of each phase that ran, in the order of a step. If some steps were not
            timed, these are estimates for all steps.
        step: Statistics of whole steps.
        steps: Number of timed steps, without the warm-up.
        warmup_steps: Number of first steps, which are excluded.
        host_wait_mean_ms: Mean time per step that the host waited for the GPU to finish a step (in
            milliseconds). Near zero, the host cannot keep the GPU busy.
        skipped_updates: Number of steps whose update was skipped, including the warm-up.
        on_host_clock: True if all times are from the host clock, because there was no GPU.
        ranks: On rank zero of a distributed run, the comparison of all ranks.
        probed_steps: Number of steps that were probed; no other statistic includes them.
        probe_failure: Reason why no step can be probed; empty if none.
        untimed_steps: Number of steps that were not timed, or were probed.
        not_sampled_steps: Number of long steps that no timed step represents.
        not_sampled_share: Their fraction of the time of all steps, from 0 to 1.
        timed_every_n_steps: With `every_n_steps="auto"`, 1 of this many steps was timed at the end.
        timing_share: Cost of timing every step as a fraction of the step; None unless "auto" has
            measured it.
        added_share: Cost of timing 1 of `timed_every_n_steps` steps, as a fraction of the step;
            None unless "auto" has measured it.
        each_timed_for: With `every_n_steps="auto"`, option that requires timing every step.
        is_warmup: True if only warm-up steps were timed. Then the statistics include them.
        hint: Advice if no step was timed.
        slow: Cost of slow steps; None if no step was slow.
        slowdown: Lasting change of the step time; None if it did not change.
        wall_clock: Host time of the training run by entry; None if unknown.
        memory: Peak memory of the device; None on a CPU.
        stage: "validation", "test" or "prediction"; empty for training.
        work: Work per second and its fraction of the GPU's peak; None if unknown.
        sections: Sections that observers add to the summary.
        not_measured: Sentences on quantities that could not be measured.
        blurred: Phases whose times could therefore not be separated from each other.
        culprits: Code that takes the time of phases and entries, if known.
        loaders: Times of the workers of each loader.
    """

    rows: Mapping[str, PhaseStats] = field(default_factory=dict)
    step: PhaseStats = field(default_factory=lambda: PhaseStats(0))
    steps: int = 0
    warmup_steps: int = 0
    host_wait_mean_ms: float = math.nan
    skipped_updates: int = 0
    on_host_clock: bool = False
    ranks: RankSummary | None = None
    probed_steps: int = 0
    probe_failure: str = ""
    untimed_steps: int = 0
    not_sampled_steps: int = 0
    not_sampled_share: float = 0.0
    timed_every_n_steps: int = 1
    timing_share: float | None = None
    added_share: float | None = None
    each_timed_for: str = ""
    is_warmup: bool = False
    hint: str = ""
    slow: SlowSummary | None = None
    slowdown: Slowdown | None = None
    wall_clock: WallClockBreakdown | None = None
    memory: MemorySummary | None = None
    stage: str = ""
    work: WorkSummary | None = None
    sections: tuple[Section, ...] = ()
    not_measured: tuple[str, ...] = ()
    blurred: tuple[str, ...] = ()
    culprits: tuple[Culprit, ...] = ()
    loaders: tuple[LoaderTimes, ...] = ()

    @property
    def items_per_sec(self) -> float | None:
        """Items per second; None if unknown."""
        return self.work.items_per_sec if self.work is not None else None

    @property
    def mfu(self) -> float | None:
        """The model's FLOPs as a fraction of the peak, from 0 to 1; None if unknown."""
        return self.work.mfu if self.work is not None else None

    @property
    def launch_gap_share(self) -> float | None:
        """Fraction of the step in which the GPU waits for launches, from 0 to 1.

        It excludes waiting for the loader, callbacks and other ranks. None if no step was probed.
        """
        if not self.probed_steps or not self.steps or not self.step.mean_ms:
            return None
        gaps_ms = 0.0
        for name, row in self.rows.items():
            if name.partition("/")[0] in BETWEEN_BATCHES:
                continue
            if is_wait(name):
                gaps_ms -= row.frequency * row.mean_ms
            elif "/" not in name and row.gpu_busy_mean_ms is not None:
                gaps_ms += row.frequency * (row.mean_ms - row.gpu_busy_mean_ms)
        return max(gaps_ms / self.step.mean_ms, 0.0)

    def share(self, name: str) -> float:
        """Return the fraction of the step that a phase takes, from 0 to 1."""
        return self.rows[name].share if name in self.rows else 0.0

    def host_share(self, name: str) -> float:
        """Return the host time of a phase as a fraction of the step."""
        row = self.rows.get(name)
        if row is None or not self.step.mean_ms or row.host_mean_ms != row.host_mean_ms:
            return 0.0
        return row.frequency * row.host_mean_ms / self.step.mean_ms
