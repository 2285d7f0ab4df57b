"""What each loss costs: the entries of the wall clock, and what to do about them."""

from dataclasses import dataclass

from lightning_gputime._results.table import Table, Tabular, duration, percent
from lightning_gputime._results.verdict import HELD_UP
from lightning_gputime._results.wall_time import (
    BETWEEN_LOOPS,
    CHECKPOINTS,
    EVALUATION,
    ONCE,
    OUTSIDE_STEPS,
    VALIDATION,
)

_AT_MOST, _WHAT_TO_DO = "without it, at most", "what to do"
_SHOWN = 0.01  # From this fraction of the wall clock on, an entry has a line of its own.
# The verdict by the dearest loss, where it lies outside of the steps.
_HOLD_UP = {
    VALIDATION: "validation-bound",
    EVALUATION: "evaluation-bound",
    CHECKPOINTS: "checkpoint-bound",
    BETWEEN_LOOPS: "outside of steps",
}


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
    def _whole(self) -> str:
        """What the shares are of."""
        if self.is_fit:
            return "fit"
        return "loops" if any(row.name in OUTSIDE_STEPS for row in self.rows) else "timed steps"

    def __getitem__(self, name: str) -> float:
        """Return the share of an entry, 0 where there is none."""
        return next((row.share for row in (*self.rows, self.work) if row.name == name), 0.0)

    def _table(self) -> Table:
        few = [row for row in self.rows if row.share < _SHOWN]
        shown = self.rows[: -len(few)] if len(few) > 1 else self.rows
        body = [line for row in shown for line in self._lines(row)]
        if len(few) > 1:
            body.append((f"{len(few)} smaller", f"{sum(row.share for row in few):.1%}", "", ""))
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
