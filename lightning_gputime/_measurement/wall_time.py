"""Where the whole of a training went: its wall time, and what each loss of it costs."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_gputime._measurement.table import Table, Tabular, duration, percent
from lightning_gputime._measurement.verdict import HELD_UP
from lightning_gputime._phases import EXCLUDED, SAVES

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
_OF_PHASE = {EXCLUDED: PAUSED, SAVES: CHECKPOINTS}
ONCE = (SET_UP, SANITY_CHECK, FIRST_STEP, REST)  # However long the fit is.

_AT_MOST, _WHAT_TO_DO = "without it, at most", "what to do"
_WORTH_NAMING = 0.1  # From this fraction of the wall clock on, the verdict names a loss.
_SHOWN = 0.01  # From this fraction of the wall clock on, an entry has a line of its own.
# The verdict by the dearest loss, where it lies outside of the steps.
_HOLD_UP = {
    VALIDATION: "validation-bound",
    EVALUATION: "evaluation-bound",
    CHECKPOINTS: "checkpoint-bound",
    BETWEEN_LOOPS: "outside of steps",
    PAUSED: "outside of steps",
}


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
        after_batches_s: What of `validation`, or `evaluation`, came after its last batch, such as
            metrics (in seconds).
    """

    entries_s: Mapping[str, float]
    saves_in_steps_s: float = 0.0
    after_batches_s: float = 0.0

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
        self._ns = defaultdict[str, int](int)
        self.entry = SET_UP  # What the time goes to, but for what lies inside of it.
        self._inside: list[str] = []  # Such as saves; the innermost last.
        self.has_stepped = False  # Whether `step_ends` was called.
        self._saves_in_steps_ns = 0
        self.after_batches_ns = 0  # In evaluations.
        self._since_ns = now_ns() if now_ns is not None else 0

    def __getstate__(self) -> dict[str, Any]:
        self._add_elapsed()  # A copy is of the time up to here: it has no clock.
        return {**self.__dict__, "_ns": self._ns.copy(), "_now_ns": None, "_clock": None}

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

    @property
    def steps_ms(self) -> float:
        """How long all steps but the first took, timed or not, without pauses by hand."""
        self._add_elapsed()
        return (self._ns.get(STEPS, 0) + self._saves_in_steps_ns) / 1e6

    def summary(self) -> WallTimeBreakdown | None:
        """Return where the time went; None of plain loops with nothing but steps."""
        self._add_elapsed()
        entries_s = {name: ns / 1e9 for name, ns in self._ns.copy().items() if ns}
        if not self._is_fit and entries_s.keys() <= {FIRST_STEP, STEPS}:
            return None
        others_ns = self._saves_in_steps_ns, self.after_batches_ns
        return WallTimeBreakdown(entries_s, *(ns / 1e9 for ns in others_ns))

    def _add_elapsed(self) -> None:
        if self._now_ns is not None:
            now_ns = self._now_ns()
            elapsed_ns, self._since_ns = now_ns - self._since_ns, now_ns
            entry = self._inside[-1] if self._inside else self.entry
            self._ns[_OF_PHASE.get(entry, entry)] += elapsed_ns
            if self._inside == [SAVES] and self.entry == STEPS:
                self._saves_in_steps_ns += elapsed_ns


@dataclass(frozen=True, slots=True)
class Loss:
    """One entry of the wall clock.

    Attributes:
        name: What takes the time, such as "data/fetch" or "validation".
        share: Fraction of the wall clock, from 0 to 1.
        advice: What to do about it; empty where no number backs any.
    """

    name: str
    share: float
    advice: tuple[str, ...] = ()

    @property
    def at_most(self) -> float | None:
        """How many times as fast it is at most without this entry.

        None of what a fit does once, such as its set-up: a longer fit does not lose more.
        """
        if self.name in ONCE:
            return None
        return 1 / (1 - self.share) if self.share < 1 else float("inf")


@dataclass(frozen=True, slots=True)
class Losses(Tabular):
    """Where the wall clock went; `print` shows it as a table.

    The shares of all rows and of the work add up to 1. No time is in two of them.

    Attributes:
        rows: The losses, the dearest first.
        work: The work that is left: of the GPU, or of the CPU where there is none.
        wall_s: The time that they are shares of (in seconds): that of the whole fit, where a
            trainer shows it; that of plain loops and of what lies between them, where something
            does; else that of the steps that were timed.
        is_fit: Whether it is that of a fit.
        peak_share: Fraction of the wall clock that the model's FLOPs take at the peak of the GPU,
            which is MFU over the fit. None where FLOPs are not known.
        unknown: What this run has not measured, and what it needs for it.
    """

    rows: tuple[Loss, ...]
    work: Loss
    wall_s: float
    is_fit: bool
    peak_share: float | None = None
    unknown: str = ""

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do next, about what takes longest first."""
        rows = sorted((self.work, *self.rows), key=lambda row: -row.share)
        return tuple(dict.fromkeys(one for row in rows for one in row.advice))

    @property
    def verdict(self) -> str:
        """What bounds the training where it is none of the steps; else empty."""
        dearest = next((row for row in self.rows if row.name not in ONCE), self.work)
        if dearest.name not in _HOLD_UP or dearest.share < HELD_UP:
            return ""
        share = f"{percent(dearest.share)} of the {self._whole}"
        return f"{_HOLD_UP[dearest.name]}: {share} is `{dearest.name}`"

    @property
    def largest_gain(self) -> str:
        """What to say of the dearest loss with advice; empty where it is small."""
        found = [row for row in self.rows if row.advice and row.share >= _WORTH_NAMING]
        if not found or found[0].at_most is None:
            return ""
        return f"; the most to gain is in `{found[0].name}`: at most {found[0].at_most:.2f}x faster"

    @property
    def _whole(self) -> str:
        """What the shares are of."""
        if self.is_fit:
            return "fit"
        outside = (EVALUATION, PAUSED, BETWEEN_LOOPS)
        return "loops" if any(row.name in outside for row in self.rows) else "timed steps"

    def __getitem__(self, name: str) -> float:
        """Return the share of an entry, 0 where there is none."""
        return next((row.share for row in (*self.rows, self.work) if row.name == name), 0.0)

    def _table(self) -> Table:
        few = [row for row in self.rows if row.share < _SHOWN]
        shown = self.rows[: -len(few)] if len(few) > 1 else self.rows
        body = [line for row in shown for line in self._lines(row)]
        if len(few) > 1:
            few_share = f"{sum(row.share for row in few):.1%}"
            body.append((f"{len(few)} more, below 1 % each", few_share, "", ""))
        body += self._lines(self.work)
        if self.peak_share is not None:
            body.append(("  at the peak", f"{self.peak_share:.1%}", "", ""))
        lines = [(f"of the {self._whole}", "share", _AT_MOST, _WHAT_TO_DO), *body]
        lines.append((duration(1e3 * self.wall_s), "100.0%", "", ""))
        below = [f"Not measured: {self.unknown}"] if self.unknown else []
        return Table("", lines, below, left=(0, 3), drops=(_AT_MOST, _WHAT_TO_DO))

    def _lines(self, row: Loss) -> list[tuple[str, ...]]:
        once = f"{duration(1e3 * row.share * self.wall_s)}, once"
        gain = once if row.at_most is None else f"{row.at_most:.2f}x faster"
        first, *more = row.advice or ("",)
        line = (row.name, f"{row.share:.1%}", "" if row is self.work else gain, first)
        return [line, *(("", "", "", one) for one in more)]
