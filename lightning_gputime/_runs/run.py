"""A run that was saved: what was measured, and on what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from lightning_gputime._results.ledger import Ledger
from lightning_gputime._results.summary import PhaseSummary
from lightning_gputime._runs.environment import Environment


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What a timer has measured of a run, as `save` writes it and `load` reads it.

    Attributes:
        environment: What it ran on.
        history: The newest steps, see the timers' `history`; to 0.0001 ms.
        warmup_steps: How many of the first steps of the history are warm-up.
        summary: The statistics of all steps but the warm-up; of that where there are no others.
        slow_steps: The slowest steps with their causes, each a JSON object.
        evaluations: The means of each evaluation, each a JSON object.
        name: What it is called, such as its file.
    """

    environment: Environment
    history: npt.NDArray[Any]
    warmup_steps: int
    summary: PhaseSummary
    slow_steps: Sequence[Mapping[str, Any]] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()
    name: str = ""

    @property
    def ledger(self) -> Ledger | None:
        """Where the whole fit went; None where no trainer told."""
        return self.summary.ledger

    @property
    def measured(self) -> npt.NDArray[Any]:
        """The history without the warm-up."""
        return self.history[self.warmup_steps :]
