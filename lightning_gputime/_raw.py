"""Steps as they were read, and their sums: many at a time, for little."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, groupby, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_gputime._phases import StepTimes, Timeline, settle


class RawStep(NamedTuple):
    """A step that was read. Nothing in it refers to an object: it costs no garbage collection.

    Attributes:
        number: Its number.
        labels: The labels of its marks but the last, its end.
        device_ms: Device time from each mark to the next (in milliseconds).
        host_ns: Host time of each mark (in nanoseconds).
        wait_ms: How long the host waited for it (in milliseconds).
        met_ns: Host time when a wait for it ended that did block (in nanoseconds); 0 without one.
        skipped_update: Whether no optimizer ran its update.
        filled: Of a step that was probed, whether the device had not begun it when the host had
            launched all of it.
        after_spin: The index of the mark behind what kept the device busy; 0 if nothing did.
    """

    number: int
    labels: tuple[str, ...]
    device_ms: tuple[float, ...]
    host_ns: tuple[int, ...]
    wait_ms: float
    met_ns: int
    skipped_update: bool
    filled: bool | None = None
    after_spin: int = 0

    @property
    def spun_ms(self) -> float:
        """How long the device was kept busy before it (in milliseconds)."""
        return self.device_ms[self.after_spin - 1] if self.after_spin else 0.0

    def times(self) -> StepTimes:
        """Returns the times of its phases."""
        settled = settle(self.labels)
        phase_ms: dict[str, float] = {}
        host_ms: dict[str, float] = {}
        step_ms = 0.0
        for names, ms, (start, end) in zip(
            settled, self.device_ms, pairwise(self.host_ns), strict=True
        ):
            if names:
                step_ms += ms
            for name in names:
                phase_ms[name] = phase_ms.get(name, 0.0) + ms
                host_ms[name] = host_ms.get(name, 0.0) + (end - start) / 1e6
        timeline = Timeline(settled, self.device_ms, self.host_ns, self.met_ns)
        return StepTimes(
            self.number,
            phase_ms,
            host_ms,
            self.wait_ms,
            step_ms,
            self.skipped_update,
            timeline,
        )


class Sums:
    """Sums over steps.

    Attributes:
        phases: Of each phase that ran, see `PhaseSum`.
        step: Of the step.
        wait_ms: Of how long the host waited (in milliseconds).
        skipped_updates: How many updates were skipped.
    """

    def __init__(self) -> None:
        self.phases: dict[str, PhaseSum] = {}
        self.step = PhaseSum()
        self.wait_ms = 0.0
        self.skipped_updates = 0

    def add(self, steps: Iterable[RawStep]) -> None:
        """Adds steps up, those with the same labels in one go."""
        for labels, group in groupby(steps, attrgetter("labels")):
            # Without a loop in Python over the steps.
            _, _, device, host, waits_ms, _, skipped_updates, _, _ = zip(*group, strict=True)
            names, share = _shares(labels)
            n, device_ms = len(device), _array(device, np.float64) @ share
            marked_ns = _array(host, np.int64).sum(0)
            host_ns = (marked_ns[1:] - marked_ns[:-1]) @ share
            of_phases = device_ms.sum(0), host_ns / 1e6, device_ms.max(0)
            sums = zip(*(values.tolist() for values in of_phases), strict=True)
            for name, of_phase in zip(names, sums, strict=True):
                if name is None:
                    self.step.add(n, *of_phase)
                    continue
                phase = self.phases.get(name)
                if phase is None:
                    phase = self.phases[name] = PhaseSum()
                phase.add(n, *of_phase)
            self.wait_ms += sum(waits_ms)
            self.skipped_updates += sum(skipped_updates)


class PhaseSum:
    """Sums of a phase over the steps in which it ran.

    Attributes:
        n: Number of those steps.
        device_ms: Device time (in milliseconds).
        host_ms: Host time (in milliseconds).
        max_ms: The longest device time (in milliseconds).
    """

    __slots__ = ("device_ms", "host_ms", "max_ms", "n")

    def __init__(self) -> None:
        self.n = 0
        self.device_ms = self.host_ms = self.max_ms = 0.0

    def add(self, n: int, device_ms: float, host_ms: float, max_ms: float) -> None:
        """Adds `n` steps."""
        self.n += n
        self.device_ms += device_ms
        self.host_ms += host_ms
        if max_ms > self.max_ms:
            self.max_ms = max_ms


def _array(rows: Sequence[Sequence[float]], dtype: type) -> npt.NDArray[Any]:
    """Returns what `np.array` does, in half the time."""
    n, m = len(rows), len(rows[0])
    return np.fromiter(chain.from_iterable(rows), dtype, n * m).reshape(n, m)


@lru_cache(maxsize=256)
def _shares(labels: tuple[str, ...]) -> tuple[Sequence[str | None], npt.NDArray[np.float64]]:
    """Returns the phases that ran, and None for the step, and which marks count for each."""
    settled = settle(labels)
    names: list[str | None] = list(dict.fromkeys(name for of_mark in settled for name in of_mark))
    share = [[float(name in of_mark) for name in names] for of_mark in settled]
    for row, of_mark in zip(share, settled, strict=True):
        row.append(float(bool(of_mark)))
    return [*names, None], np.array(share)
