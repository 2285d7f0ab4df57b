"""Stand-ins for what reads and resets the counters of an allocator, while these are metered."""

import functools
from collections.abc import Callable
from typing import Any

from lightning_gputime._boundaries.attach import StandIn, listen
from lightning_gputime._record.memory import DeviceMemory, Meter
from lightning_gputime._untraced import untraced


@untraced
class AllocatorBoundary:
    """Lets others read and reset the peaks of a device as if no meter did.

    Args:
        meter: Is taken back when this is removed.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._stand_ins: list[StandIn] = []
        allocator = meter.memory.allocator
        try:
            for owner, name in allocator.readers:
                self._stand_ins.append(listen(owner, name, meter.memory, _corrected))
            for owner, name in allocator.resetters:
                self._stand_ins.append(listen(owner, name, meter.memory, _told))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        for stand_in in self._stand_ins:
            stand_in.forget(self._meter.memory)
        self._stand_ins.clear()
        self._meter.memory.leave(self._meter)


def _corrected(read: Callable[..., Any], listeners: list[DeviceMemory]) -> Callable[..., Any]:
    @functools.wraps(read)
    def corrected(*args: Any, **kwargs: Any) -> Any:
        stats = read(*args, **kwargs)
        for memory in _of_device(listeners, args):
            memory.correct(stats)
        return stats

    return corrected


def _told(reset: Callable[..., Any], listeners: list[DeviceMemory]) -> Callable[..., Any]:
    @functools.wraps(reset)
    def told(*args: Any, **kwargs: Any) -> Any:
        for memory in _of_device(listeners, args):
            memory.others_reset()
        return reset(*args, **kwargs)

    return told


@untraced
def _of_device(listeners: list[DeviceMemory], args: tuple[Any, ...]) -> list[DeviceMemory]:
    """Returns those of the device that a function is called for, each once."""
    found = [one for one in listeners if args and one.allocator.index == args[0]]
    return found[:1]
