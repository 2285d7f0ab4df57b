"""The measurement of one run, which files store and comparisons read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from lightning_gputime._measurement.slow import SlowStep
from lightning_gputime._measurement.units import unit_of
from lightning_gputime._output.summary import PhaseSummary
from lightning_gputime._output.table import Table, Tabular
from lightning_gputime._runs.environment import Environment


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Run(Tabular):
    """Measurement of a run, as `save` writes it and `load` reads it.

    Attributes:
        environment: Environment of the run.
        history: Newest steps, as in `history` of the timers, with times rounded to 0.0001 ms.
        warmup_steps: Number of warm-up steps at the start of the history.
        slow_steps: Slowest steps with their causes.
        evaluations: Means of each evaluation, as JSON objects.
        name: Name of the run, such as its file.
        warnings: Newest warnings of the package during the run.
    """

    environment: Environment
    history: npt.NDArray[Any]
    warmup_steps: int
    _summary: PhaseSummary
    slow_steps: Sequence[SlowStep] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()
    name: str = ""
    warnings: Sequence[str] = ()

    def summary(self) -> PhaseSummary:
        """Return the summary of the steps after the warm-up; if none, of the warm-up steps."""
        return self._summary

    def _table(self) -> Table:
        return self._summary._table()

    @property
    def about(self) -> str:
        """Name and environment of the run in one line."""
        env = self.environment
        device = f"{env.world_size} x {env.device}" if env.world_size > 1 else env.device
        values = {"torch": env.torch, "batch": env.batch_size, "commit": env.commit[:10]}
        named = [f"{name} {value}" for name, value in values.items() if value]
        compiled = "compiled" if env.compiled else ""
        parts = (self.name, device, *named, env.precision, compiled, env.started)
        return " · ".join(filter(None, parts))

    @property
    def slow_table(self) -> Table:
        """Table of the slow steps, the largest excess first."""
        unit, steps = unit_of(self._summary.step.mean_ms), self.slow_steps
        lines = [("step", "time", "baseline", "excess", "most in", "causes")]
        for step in steps:
            took, baseline = unit.cell(step.step_ms), unit.cell(step.baseline_ms)
            excess = unit.cell(step.excess_ms)
            lines.append((str(step.step), took, baseline, excess, step.phase, step.why))
        excess_ms = sum(step.excess_ms for step in steps)
        lines.append((f"all {len(steps)}", "", "", unit.cell(excess_ms), "", ""))
        return Table(f"Slow steps in {unit.name}", lines, (), left=(4, 5))

    @property
    def measured(self) -> npt.NDArray[Any]:
        """History without the warm-up."""
        return self.history[self.warmup_steps :]
