"""The fake GPU, and the steps that ran on it."""

import math
from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from lightning_gputime._phases import StepRecord
from lightning_gputime._timer import Timer
from lightning_gputime.testing import MS as MS
from lightning_gputime.testing import Adder as Adder
from lightning_gputime.testing import FakeEvent as FakeEvent
from lightning_gputime.testing import FakeGPU as FakeGPU
from lightning_gputime.testing import Layer as Layer
from lightning_gputime.testing import Loss as Loss
from lightning_gputime.testing import work as work


def batches(gpu: FakeGPU, n: int, host_ms: float = 0.0, copy_ms: float = 0.0) -> Iterator[Tensor]:
    """Yield batches. Each takes `host_ms` on the host, and `copy_ms` on the device."""
    for _ in range(n):
        gpu.host_work(host_ms)
        gpu.work(copy_ms)
        yield torch.ones(1, 2)


def raw(number: int, host_wait_ms: float = 0.0, /, **phase_ms: float) -> StepRecord:
    """Return a step whose phases took the host as long as the device."""
    ends = accumulate((round(ms * MS) for ms in phase_ms.values()), initial=0)
    labels, device_ms = tuple(phase_ms), tuple(phase_ms.values())
    return StepRecord(
        number, labels, device_ms, tuple(ends), host_wait_ms, finished_ns=0, skipped_update=False
    )


STEP_MS = {
    "data": 1.0,
    "other": 0.125,
    "forward": 4.0,
    "loss": 0.5,
    "backward": 8.0,
    "optimizer": 2.0,
}
"""Phases of a standard step of the fake LightningModule and the fake plain loop."""


def steps(timer: Timer) -> list[dict[str, float]]:
    """Return the phases of each step that ran, without the parts of `data` and `callbacks`.

    Leave out `callbacks` that take no time, because under Lightning each step has that phase.
    """
    found = []
    for row in _rows(timer):
        step = {name: ms for name, ms in row.items() if not name.startswith(("data/", "callbacks"))}
        found.append(step | ({"callbacks": row["callbacks"]} if row.get("callbacks") else {}))
    return found


def between_batches(timer: Timer) -> list[dict[str, float]]:
    """Return `data`, `callbacks` and their parts in each step."""
    names = ("data", "callbacks")
    return [
        {name: ms for name, ms in row.items() if name.startswith(names)} for row in _rows(timer)
    ]


def _rows(timer: Timer) -> list[dict[str, float]]:
    timer.flush()
    history = timer.history()
    names = [name for name in history.dtype.names or () if name.endswith("_ms")]
    return [
        {
            name.removesuffix("_ms"): float(row[name])
            for name in names
            if name not in ("step_ms", "host_wait_ms") and not math.isnan(row[name])
        }
        for row in history
    ]


class CostlyGPU(FakeGPU):
    """A fake GPU whose events cost the host a known time to record."""

    def __init__(self, record_us: float) -> None:
        super().__init__()
        self.record_ms = record_us / 1000

    def event(self) -> FakeEvent:
        self.created += 1
        return CostlyEvent(self)


class CostlyEvent(FakeEvent):
    def record(self) -> None:
        assert isinstance(self._gpu, CostlyGPU)
        self._gpu.host_work(self._gpu.record_ms)
        super().record()
