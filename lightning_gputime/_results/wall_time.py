"""Where the whole of a training went: its wall time, by what the trainer or the loop did."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_gputime._phases import EXCLUDED

SET_UP = "set-up"
SANITY_CHECK = "sanity check"
FIRST_STEP = "first step"
STEPS = "steps"
VALIDATION = "validation"
EVALUATION = "evaluation"
CHECKPOINTS = "checkpoints"
EPOCH_ENDS = "epoch ends"
PAUSED = "paused"
BETWEEN_LOOPS = "between loops"
REST = "the rest"
OUTSIDE_STEPS = (EVALUATION, PAUSED, BETWEEN_LOOPS)
"""What lies outside of the steps of a plain loop."""
_ENTRIES = (
    *(SET_UP, SANITY_CHECK, FIRST_STEP, STEPS, VALIDATION, EVALUATION, CHECKPOINTS, EPOCH_ENDS),
    *(PAUSED, BETWEEN_LOOPS, REST),
)
ONCE = (SET_UP, SANITY_CHECK, FIRST_STEP, REST)  # However long the fit is.


@dataclass(frozen=True, slots=True)
class WallTimeBreakdown:
    """Where the wall time of a fit, or of plain loops, went. Its entries add up to it.

    Attributes:
        entries_s: Host time of each entry that there was (in seconds): `set-up` until the first
            batch is fetched, the `sanity check` left out; the `first step`, with what is compiled
            and allocated in it; all other `steps`, with their `data` and `callbacks`; `validation`,
            or `evaluation` by another trainer than Lightning's; `checkpoints`, wherever they are
            saved; `epoch ends`, the hooks at the start and end of epochs; what was `paused` by
            hand; `between loops` over `steps()`; `the rest`, such as the tear-down.
        saves_in_steps_s: What of `checkpoints` was saved inside a step (in seconds).
    """

    entries_s: Mapping[str, float]
    saves_in_steps_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """How long it took, or has taken so far (in seconds)."""
        return sum(self.entries_s.values())

    @property
    def shares(self) -> dict[str, float]:
        """The fraction of each entry, from 0 to 1."""
        wall_s = self.wall_s
        return {name: s / wall_s if wall_s else 0.0 for name, s in self.entries_s.items()}

    def metrics(self) -> dict[str, float]:
        """Return what is logged: the fraction of each entry, and the wall time."""
        keys = {name: name.replace(" ", "_").replace("-", "_") for name in self.entries_s}
        shares = {f"fit/{keys[name]}_share": share for name, share in self.shares.items()}
        return {**shares, "fit/wall_s": self.wall_s}


class WallTimeRecorder:
    """Attribute all time of a training to the entry that is open; without `now_ns` do nothing.

    Args:
        now_ns: The host's clock.
        is_fit: Whether to start now, as in a fit; else with the first loop.
    """

    def __init__(self, now_ns: Callable[[], int] | None, *, is_fit: bool = True) -> None:
        self._clock, self._is_fit = now_ns, is_fit
        self._now_ns = now_ns if is_fit else None  # None while time belongs to nothing.
        self._loops = 0  # The number of plain loops that are open.
        self._ns = dict.fromkeys(_ENTRIES, 0)
        self.entry = SET_UP  # What the time goes to, but for what lies inside of it.
        self._inside: list[str] = []  # Such as saves; the innermost last.
        self.has_stepped = False  # Whether `step_ends` was called.
        self._saves_in_steps_ns = 0
        self._since_ns = now_ns() if now_ns is not None else 0

    def __getstate__(self) -> dict[str, Any]:
        self._add_elapsed()  # A copy is of the time up to here: it has no clock.
        return {**self.__dict__, "_ns": dict(self._ns), "_now_ns": None, "_clock": None}

    def switch_to(self, entry: str) -> None:
        if entry != self.entry:
            self._add_elapsed()
            self.entry = entry

    def steps_go_on(self) -> None:
        """Attribute time to steps: a batch is fetched, or trained on."""
        self.switch_to(STEPS if self.has_stepped else FIRST_STEP)

    def step_ends(self) -> None:
        self.has_stepped = True
        self.steps_go_on()

    def epoch_turns(self) -> None:
        self.switch_to(EPOCH_ENDS if self.has_stepped else SET_UP)

    # As of a recorder: a `NamedPhase` of both is a pause by hand.

    def enter_phase(self, entry: str) -> None:
        """Attribute time to another entry until `leave_phase`, inside of whatever is open."""
        self._add_elapsed()
        self._inside.append(entry)

    def leave_phase(self, entry: str) -> None:
        self._add_elapsed()
        if entry in self._inside:
            self._inside.remove(entry)

    # Plain loops: what is before the first one, or behind the last, belongs to nothing.

    def loop_begins(self) -> None:
        self._loops += 1
        if self._loops == 1 and self._clock is not None:
            if not any(self._ns.values()):
                self._since_ns = self._clock()
            self._now_ns, self.entry = self._clock, BETWEEN_LOOPS
            self.steps_go_on()

    def loop_ends(self) -> None:
        self._loops -= 1
        if not self._loops:
            self._add_elapsed()
            self._now_ns = None

    def remove(self) -> None:
        """Stop: what follows belongs to nothing. Safe to call twice."""
        self._add_elapsed()
        self._now_ns = self._clock = None

    def summary(self) -> WallTimeBreakdown | None:
        """Return where the time went; None of plain loops with nothing but steps."""
        self._add_elapsed()
        entries_s = {name: ns / 1e9 for name, ns in self._ns.items() if ns}
        if not self._is_fit and entries_s.keys() <= {FIRST_STEP, STEPS}:
            return None
        return WallTimeBreakdown(entries_s, self._saves_in_steps_ns / 1e9)

    def _add_elapsed(self) -> None:
        if self._now_ns is not None:
            now_ns = self._now_ns()
            elapsed_ns, self._since_ns = now_ns - self._since_ns, now_ns
            entry = self._inside[-1] if self._inside else self.entry
            self._ns[PAUSED if entry == EXCLUDED else entry] += elapsed_ns
            if self._inside == [CHECKPOINTS] and self.entry == STEPS:
                self._saves_in_steps_ns += elapsed_ns
