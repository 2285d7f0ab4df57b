"""Phase times as a torchmetrics metric."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_gputime._measurement.sums import STEP
from lightning_gputime._messages import messages
from lightning_gputime._phases import (
    PHASES,
    SUB_PHASES,
    StepTimes,
    check_name,
    is_wait,
    of_one_callback,
)
from lightning_gputime._ranks import BatchMeans, RankTotals
from lightning_gputime._ranks.comparison import compare


class PhaseTimeMetric(Metric):
    """Mean time of each phase over all ranks, with the smallest and largest mean of a rank.

    Pass it to a timer: `GPUPhaseTimer(observers=[metric])`.

    Each state has one number per phase and for the step, and a last one. When synchronized, states
    are stacked: (ranks, numbers). States keep their precision and stay on the CPU, even if the
    model that contains the metric is moved, so the host never waits for the device. A checkpoint
    contains the states of the rank that wrote it.

    Args:
        phases: Names of the phases to count. The default has no custom phases and no modules.
        kwargs: Arguments of `torchmetrics.Metric`, such as `sync_on_compute`.

    Raises:
        ValueError: If `phases` is not a list of valid phase names.

    Examples:
        >>> metric = PhaseTimeMetric()
        >>> with GPUPhaseHooks(model, optimizer, observers=[metric]) as timer:
        ...     train(model, timer.steps(loader))
        >>> metric.compute()["backward_ms"]
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = True  # Partial states must not be merged: a merge would stack them.

    sums_ms: Tensor
    counts: Tensor

    def __init__(self, phases: Sequence[str] = (*PHASES, *SUB_PHASES), **kwargs: Any) -> None:
        super().__init__(**{"dist_sync_fn": _gather, **kwargs})
        if isinstance(phases, str) or not phases:
            raise ValueError(f"phases must be a list of names such as ['forward'], got {phases!r}")
        self._reported: set[str] = set()  # Phases that are not counted, and were reported.
        self._phases = [check_name(name) for name in phases]
        self._names = (*self._phases, STEP)
        self._local = BatchMeans()  # Noise of the step without waits for other ranks.
        # Double precision adds up a million steps exactly.
        for state, dtype in (("sums_ms", torch.float64), ("counts", torch.int64)):
            # One element per name, and a last element: `sums_ms` ends with `_local.deviation_ms`,
            # which is not a sum, and `counts` with the number of steps.
            zeros = torch.zeros(len(self._names) + 1, dtype=dtype)
            self.add_state(state, zeros, dist_reduce_fx=None, persistent=True)

    def update(self, times: StepTimes) -> None:
        """Add the times of a step."""
        new = times.phase_ms.keys() - {*self._names} - self._reported
        self._reported |= new
        if uncounted := sorted(name for name in new if not of_one_callback(name)):
            messages.warning(
                "Phases %s are not counted by the metric. Pass PhaseTimeMetric(phases=%s).",
                uncounted,
                [*self._phases, *uncounted],
            )
        ms = {**times.phase_ms, STEP: times.step_ms}
        self._local.take(times.step_ms - sum(ms[name] for name in ms if is_wait(name)))
        added_ms = [*(ms.get(name, 0.0) for name in self._names), 0.0]
        # Do not change the state in place: a loaded state may also belong to the checkpoint.
        self.sums_ms = self.sums_ms + torch.tensor(added_ms, dtype=torch.float64)
        # It is 0 until there are enough steps. Until then, keep that of a checkpoint.
        if deviation_ms := self._local.deviation_ms:
            self.sums_ms[-1] = deviation_ms
        counts = [*(int(name in ms) for name in self._names), 1]
        self.counts = self.counts + torch.tensor(counts)

    def compute(self) -> dict[str, Tensor]:
        """Return the means of the phases that ran, of `step` and of `local`, as scalars.

        `<phase>_ms` is the mean over all steps of all ranks. `<phase>_min_ms` and `<phase>_max_ms`
        are the smallest and the largest mean of a rank (all in milliseconds), and
        `<phase>_max_rank` is the rank of the largest. `local` is the step without its `comm`.
        `straggler` is the rank whose local time exceeds the others' by 5 % of a step or more
        and by more than the ranks' noise; else -1. See `RankSummary.straggler`.
        """
        shape = (-1, len(self._names) + 1)
        rows = zip(
            self.sums_ms.reshape(shape).tolist(), self.counts.reshape(shape).tolist(), strict=True
        )
        totals = {}
        for rank, ((*sums_ms, deviation_ms), counts) in enumerate(rows):
            named = zip(self._names, sums_ms, counts[:-1], strict=True)
            phases = {name: (sum_ms, count) for name, sum_ms, count in named if count}
            totals[rank] = RankTotals(phases, deviation_ms)
        ranks = compare(totals)
        if ranks is None:
            return {}
        values: dict[str, float] = {}
        for name, row in ranks.rows.items():
            values |= {f"{name}_ms": row.mean_ms, f"{name}_max_rank": row.max_rank}
            values |= {f"{name}_min_ms": row.min_ms, f"{name}_max_ms": row.max_ms}
        values["straggler"] = -1 if ranks.straggler is None else ranks.straggler
        return {key: torch.tensor(value) for key, value in values.items()}

    def _apply(self, fn: Any, exclude_state: Sequence[str] = "") -> "PhaseTimeMetric":
        # Called by `model.to(...)` and `model.half()`. The states stay on the host.
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        loaded = state_dict.get(f"{prefix}counts")
        if loaded is not None and loaded.shape[-1] != len(self._names) + 1:
            n_phases = loaded.shape[-1] - 2  # See `__init__`: `step` and the last are no phases.
            raise ValueError(
                f"the checkpoint has {n_phases} phases, but the metric has {len(self._phases)}:"
                f" pass the phases= of the saved metric, got {self._phases}"
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _gather(state: Tensor, group: Any) -> list[Tensor]:
    """Gather a state of all ranks, on the device that the group's backend works on."""
    device = torch.device("cpu")
    if torch.distributed.get_backend(group) not in ("gloo", "mpi"):
        device = torch.accelerator.current_accelerator() or device
    gathered = gather_all_tensors(state.to(device), group)
    return [state.cpu() for state in gathered]
