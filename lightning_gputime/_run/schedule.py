"""Which steps are timed, and how: decided by their index alone, so that all ranks agree."""

from dataclasses import dataclass
from enum import Enum
from typing import Self

from lightning_gputime._options import Options

# Successive multiples of it, modulo 1, lie as evenly as can be.
_GOLDEN = 0.6180339887498949


class Kind(Enum):
    """What becomes of a step.

    ======== ===============================================================================
    kind     meaning
    ======== ===============================================================================
    TIMED    its times count
    PROBED   it is launched while the device is kept busy, and counts apart
    SKIPPED  it is not timed, as one of the steps between those that are
    LEFT_OUT it is not timed, because it is not like the others: the one after a probed step
             starts with an empty queue, and one that other ranks probe waits for them
    ======== ===============================================================================
    """

    TIMED, PROBED, SKIPPED, LEFT_OUT = range(4)


# As globals: they are looked up at every step.
TIMED, PROBED, SKIPPED, LEFT_OUT = Kind


@dataclass(frozen=True, slots=True)
class Schedule:
    """The plan of a run's steps. Their indices count every step, timed or not, from 0.

    Attributes:
        every_n_steps: One step in so many is timed, the last of them.
        probe_every_n_steps: One step in so many is probed; with 0 none is. They lie unevenly, so
            that they do not all fall on steps that the loop does something special in.
        warmup_steps: How many of the first steps are not probed.
    """

    every_n_steps: int = 1
    probe_every_n_steps: int = 0
    warmup_steps: int = 0

    @classmethod
    def of(cls, options: Options) -> Self:
        """Returns the plan that a timer begins with."""
        return cls(options.every_n_steps, options.probe_every_n_steps, options.warmup_steps)

    @property
    def is_plain(self) -> bool:
        """Whether all steps are timed, and all alike."""
        return self.every_n_steps == 1 and not self.probe_every_n_steps

    def kind(self, index: int) -> Kind:
        """Returns what becomes of the step of this index, if nothing prevents its probe."""
        if self._is_probed(index):
            return PROBED
        return LEFT_OUT if self._is_probed(index - 1) else self.kind_unprobed(index)

    def kind_unprobed(self, index: int) -> Kind:
        """Returns what becomes of it where no step is probed."""
        return TIMED if index == self.next_timed(index) else SKIPPED

    def next_timed(self, index: int) -> int:
        """Returns the index of the first step from this one on that is timed without a probe."""
        n = self.every_n_steps
        return index + n - 1 - index % n

    def _is_probed(self, index: int) -> bool:
        n = self.probe_every_n_steps
        if not n or index < self.warmup_steps:
            return False
        # Never the last of n: the step after a probed one is not probed.
        return index % n == _place(index // n, n - 1)


def _place(turn: int, n: int) -> int:
    """Returns one of the numbers below `n`, another one in each turn, all of them as often."""
    return int((turn + 1) * _GOLDEN % 1 * n)
