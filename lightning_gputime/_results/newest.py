"""The newest steps, kept in little memory."""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from lightning_gputime._record.steps import StepRecord

_MANY = 40
"""From so many marks on, as with many modules, a step is packed: that costs the host a microsecond
or more."""


class _Packed(NamedTuple):
    """A step whose numbers take 8 bytes each.

    An object of its own takes 24 to 32, and its place in a tuple 8.
    """

    number: int
    labels: tuple[str, ...]
    device_ms: bytes
    host_ns: bytes
    rest: tuple[Any, ...]


class Newest:
    """The newest steps.

    Args:
        capacity: How many it holds.
    """

    def __init__(self, capacity: int) -> None:
        self._steps: deque[StepRecord | _Packed] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._steps)

    def copy(self) -> "Newest":
        """Returns another one with the same steps."""
        copied = Newest(0)
        copied._steps = self._steps.copy()
        return copied

    def extend(self, steps: Iterable[StepRecord]) -> None:
        """Takes the next steps; the oldest go where there are too many."""
        self._steps.extend([one if len(one.labels) < _MANY else _packed(*one) for one in steps])

    def last(self) -> StepRecord:
        """Returns the newest."""
        return _as_record(self._steps[-1])

    def steps(self) -> Sequence[StepRecord]:
        """Returns all, the oldest first."""
        return [_as_record(one) for one in self._steps.copy()]


def _packed(
    number: int,
    labels: tuple[str, ...],
    device_ms: Sequence[float],
    host_ns: Sequence[int],
    *rest: Any,
) -> _Packed:
    ms, ns = array("d", device_ms).tobytes(), array("q", host_ns).tobytes()
    return _Packed(number, labels, ms, ns, rest)


def _as_record(one: StepRecord | _Packed) -> StepRecord:
    if isinstance(one, StepRecord):
        return one
    # Views, which take as little.
    device_ms, host_ns = memoryview(one.device_ms).cast("d"), memoryview(one.host_ns).cast("q")
    return StepRecord(one.number, one.labels, device_ms, host_ns, *one.rest)
