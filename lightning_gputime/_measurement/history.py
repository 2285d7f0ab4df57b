"""The newest steps, kept in little memory and read as columns."""

from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gputime._messages import suggest
from lightning_gputime._phases import StepRecord, in_order, resolve_labels

# Steps with this many marks, as with many modules, are packed, which takes a microsecond.
MIN_PACKED_MARKS = 40


def pack(step: StepRecord) -> StepRecord:
    """Return a step of many marks in 8 bytes per number; a float in a tuple takes 32."""
    # Bytes, because the garbage collector tracks arrays.
    device_ms, host_ns = array("d", step.device_ms), array("q", step.host_ns)
    return step._replace(device_ms=device_ms.tobytes(), host_ns=host_ns.tobytes())


def unpack(step: StepRecord) -> StepRecord:
    if not isinstance(step.device_ms, bytes) or not isinstance(step.host_ns, bytes):
        return step
    device_ms, host_ns = memoryview(step.device_ms).cast("d"), memoryview(step.host_ns).cast("q")
    return step._replace(device_ms=device_ms, host_ns=host_ns)


def history(steps: Sequence[StepRecord]) -> npt.NDArray[Any]:
    """Return steps as a structured array; see the timers' `history`."""
    step_ms = np.zeros(len(steps))
    phases: dict[str, npt.NDArray[np.float64]] = {}
    # All steps with the same marks at once, not step by step.
    indices = defaultdict[tuple[str, ...], list[int]](list)
    for i, step in enumerate(steps):
        indices[step.labels].append(i)
    for labels, at in indices.items():
        of_mark = np.array([steps[i].device_ms for i in at]).reshape(len(at), len(labels))
        started = set[str]()
        for names, ms in zip(resolve_labels(labels), of_mark.T, strict=True):
            if names:
                step_ms[at] += ms
            for name in names:
                column = phases.setdefault(name, np.full(len(steps), np.nan))
                column[at] = column[at] + ms if name in started else ms
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
    others = ("step", "step_ms", "host_wait_ms")
    names = history.dtype.names or ()
    return [name.removesuffix("_ms") for name in names if name not in others]


def list_top_phases(history: npt.NDArray[Any]) -> list[str]:
    """Return the phases that add up to the step, in its order."""
    return in_order([name for name in list_phases(history) if "/" not in name])


class History(np.ndarray[Any, Any]):
    """A structured array that answers an unknown field with the nearest one."""

    def __getitem__(self, at: Any) -> Any:
        names = self.dtype.names
        if isinstance(at, str) and names and at not in names:
            raise ValueError(f"no field of name {at!r}: {suggest(at, names)}")
        found = super().__getitem__(at)
        return found.view(np.ndarray) if isinstance(at, str) else found


def structured(columns: dict[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    dtype = [(name, column.dtype) for name, column in columns.items()]
    whole = np.empty(len(columns["step"]), np.dtype(dtype))
    for name, column in columns.items():
        whole[name] = column
    return whole.view(History)
