"""Timed steps: the newest steps in a compact form, and sums over all of them."""

from array import array
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gputime._measurement.sums import Sums
from lightning_gputime._messages import suggest
from lightning_gputime._phases import StepRecord, StepTimes, in_order, resolve_labels

MIN_PACKED_MARKS = 40
"""Minimum number of marks of a step to `pack`, which takes a microsecond."""


class StepLog:
    """Newest timed steps, and sums over all timed steps but the first `warmup_steps`."""

    def __init__(self, capacity: int, warmup_steps: int) -> None:
        self.newest: deque[StepRecord] = deque(maxlen=capacity)
        self._max_warmup_steps = warmup_steps
        self.n = 0
        """Number of all timed steps, including the warm-up."""
        self.sums = Sums()
        self.skipped_warmup_updates = 0
        """Number of warm-up steps without an update."""

    def __getstate__(self) -> dict[str, Any]:
        # `copy.copy` calls this, too. A copy must not change while steps are added.
        return {**self.__dict__, "newest": self.newest.copy(), "sums": self.sums.copy()}

    def add(self, steps: Sequence[StepRecord], sums: Sums | None = None) -> tuple[int, Sums]:
        """Add the next steps, with their sums if known.

        Return how many of them are warm-up, and the sums over the others.
        """
        # The marks of lines would take much memory.
        kept = [step._replace(lines=None) if step.lines else step for step in steps]
        self.newest += [
            pack(step) if len(step.labels) >= MIN_PACKED_MARKS else step for step in kept
        ]
        warmup = max(self._max_warmup_steps - self.n, 0)
        self.n += len(steps)
        if warmup:
            self.skipped_warmup_updates += sum(step.skipped_update for step in steps[:warmup])
        measured = Sums(steps[warmup:]) if warmup or sums is None else sums
        self.sums.merge(measured)
        return warmup, measured

    @property
    def last(self) -> StepTimes | None:
        newest = self.newest
        return unpack(newest[-1]).times() if newest else None

    @property
    def warmup_steps(self) -> int:
        """Number of steps that were excluded so far."""
        return min(self.n, self._max_warmup_steps)

    @property
    def warmup_in_history(self) -> int:
        """Number of steps at the start of `newest` that are warm-up."""
        dropped_steps = self.n - len(self.newest)
        return max(self._max_warmup_steps - dropped_steps, 0)

    def unpacked(self) -> list[StepRecord]:
        return [*map(unpack, self.newest)]


def pack(step: StepRecord) -> StepRecord:
    """Return a step whose numbers take 8 bytes each; a float in a tuple takes 32."""
    # Convert arrays to bytes, because the garbage collector tracks arrays.
    device_ms, host_ns = array("d", step.device_ms), array("q", step.host_ns)
    return step._replace(device_ms=device_ms.tobytes(), host_ns=host_ns.tobytes())


def unpack(step: StepRecord) -> StepRecord:
    """Return a packed step with numbers instead of bytes, and any other step unchanged."""
    if not isinstance(step.device_ms, bytes) or not isinstance(step.host_ns, bytes):
        return step
    device_ms, host_ns = memoryview(step.device_ms).cast("d"), memoryview(step.host_ns).cast("q")
    return step._replace(device_ms=device_ms, host_ns=host_ns)


def history(steps: Sequence[StepRecord]) -> npt.NDArray[Any]:
    """Return steps as a structured array; see the timers' `history`."""
    step_ms = np.zeros(len(steps))
    phases: dict[str, npt.NDArray[np.float64]] = {}  # NaN in steps in which a phase did not run.
    # Vectorized over all steps with the same marks.
    indices = defaultdict[tuple[str, ...], list[int]](list)
    for i, step in enumerate(steps):
        indices[step.labels].append(i)
    for labels, at in indices.items():
        marks_ms = np.array([steps[i].device_ms for i in at]).reshape(len(at), len(labels))
        started = set[str]()  # Phases of earlier marks.
        for names, ms in zip(resolve_labels(labels), marks_ms.T, strict=True):
            if names:
                step_ms[at] += ms
            for name in names:
                column = phases.setdefault(name, np.full(len(steps), np.nan))
                if name in started:
                    column[at] += ms
                else:
                    column[at] = ms
                    started.add(name)
    return structured(
        {
            "step": np.array([step.number for step in steps], np.int64),
            "step_ms": step_ms,
            "host_wait_ms": np.array([step.wait_ms for step in steps], np.float64),
            **{f"{name}_ms": phases[name] for name in in_order(list(phases))},
        }
    )


def list_phases(history: npt.NDArray[Any]) -> list[str]:
    """Return the phases and sub-phases, in the order of the columns."""
    others = ("step", "step_ms", "host_wait_ms")
    names = history.dtype.names or ()
    return [name.removesuffix("_ms") for name in names if name not in others]


def list_top_phases(history: npt.NDArray[Any]) -> list[str]:
    """Return the top-level phases, which add up to the step, in execution order."""
    return in_order([name for name in list_phases(history) if "/" not in name])


class History(np.ndarray[Any, Any]):
    """Structured array that suggests the nearest name for an unknown field."""

    def __getitem__(self, at: Any) -> Any:
        names = self.dtype.names
        if isinstance(at, str) and names and at not in names:
            raise ValueError(f"no field named {at!r}: {suggest(at, names)}")
        found = super().__getitem__(at)
        return found.view(np.ndarray) if isinstance(at, str) else found


def structured(columns: dict[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return columns of equal length as a `History`."""
    dtype = [(name, column.dtype) for name, column in columns.items()]
    array = np.empty(len(columns["step"]), np.dtype(dtype))
    for name, column in columns.items():
        array[name] = column
    return array.view(History)
