"""Where the whole of a fit went: its wall time, by what the trainer did."""

from collections.abc import Mapping
from dataclasses import dataclass

SET_UP = "set-up"
SANITY_CHECK = "sanity check"
FIRST_STEP = "first step"
STEPS = "steps"
VALIDATION = "validation"
CHECKPOINTS = "checkpoints"
EPOCH_ENDS = "epoch ends"
REST = "the rest"

ENTRIES = (SET_UP, SANITY_CHECK, FIRST_STEP, STEPS, VALIDATION, CHECKPOINTS, EPOCH_ENDS, REST)

# From this part of a fit on, an entry is told in the sentence.
_LARGE = 0.02


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the wall time of a fit went. Its entries add up to it.

    Attributes:
        entries_s: Host time of each entry that there was (in seconds): `set-up` until the first
            batch is fetched, the `sanity check` left out; the `first step`, with what is compiled
            and allocated in it; all other `steps`, with their `data`; `validation`; `checkpoints`,
            wherever they are saved; `epoch ends`, the hooks at the start and end of epochs; `the
            rest`, such as the tear-down.
    """

    entries_s: Mapping[str, float]

    @property
    def wall_s(self) -> float:
        """How long the fit took, or has taken so far (in seconds)."""
        return sum(self.entries_s.values())

    @property
    def shares(self) -> dict[str, float]:
        """The part of each entry, from 0 to 1."""
        wall_s = self.wall_s
        return {name: s / wall_s if wall_s else 0.0 for name, s in self.entries_s.items()}

    @property
    def sentence(self) -> str:
        """Says it in one sentence, of the steps first; empty if nothing was measured."""
        shares = self.shares
        if STEPS not in shares or not self.wall_s:
            return ""
        told = [name for name, share in shares.items() if share >= _LARGE and name != STEPS]
        told.sort(key=lambda name: -shares[name])
        more = "".join(f", {name} {shares[name]:.0%}" for name in told)
        return f"steps were {shares[STEPS]:.0%} of the fit of {_time(self.wall_s)}{more}"

    def metrics(self) -> dict[str, float]:
        """Returns what is logged: the part of each entry, and the wall time."""
        keys = {name: name.replace(" ", "_").replace("-", "_") for name in self.entries_s}
        shares = {f"fit/{keys[name]}_share": share for name, share in self.shares.items()}
        return {**shares, "fit/wall_s": self.wall_s}


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
