"""The newest steps, kept in little memory."""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import Any

from lightning_gputime._record.steps import StepRecord

_Packed = tuple[int, tuple[str, ...], bytes, bytes, tuple[Any, ...]]


class Newest:
    """The newest steps.

    A number takes 8 bytes, where an object of its own would take 24 to 32 and its place in a tuple
    8: that counts where steps have hundreds of marks. No garbage collection looks into it.

    Args:
        capacity: How many it holds.
    """

    def __init__(self, capacity: int) -> None:
        self._packed: deque[_Packed] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._packed)

    def copy(self) -> "Newest":
        """Returns another one with the same steps."""
        copied = Newest(0)
        copied._packed = self._packed.copy()
        return copied

    def extend(self, steps: Iterable[StepRecord]) -> None:
        """Takes the next steps; the oldest go where there are too many."""
        self._packed.extend(starmap(_packed, steps))

    def last(self) -> StepRecord:
        """Returns the newest."""
        return _unpacked(*self._packed[-1])

    def steps(self) -> Sequence[StepRecord]:
        """Returns all, the oldest first."""
        return [*starmap(_unpacked, [*self._packed])]


def _packed(
    number: int,
    labels: tuple[str, ...],
    device_ms: Sequence[float],
    host_ns: Sequence[int],
    *rest: Any,
) -> _Packed:
    return number, labels, array("d", device_ms).tobytes(), array("q", host_ns).tobytes(), rest


def _unpacked(
    number: int, labels: tuple[str, ...], ms: bytes, ns: bytes, rest: tuple[Any, ...]
) -> StepRecord:
    # Views, which take as little.
    return StepRecord(number, labels, memoryview(ms).cast("d"), memoryview(ns).cast("q"), *rest)
