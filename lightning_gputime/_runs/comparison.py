"""What differs between two runs, or two groups of runs, and how sure that is."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_gputime._results.summary import with_none
from lightning_gputime._results.table import Table, Tabular
from lightning_gputime._results.units import Unit, unit_of

# A part of a phase is named in place of it from this part of its difference on.
_MOST = 0.8

# A side with fewer steps than this has too few to tell how long what slows them down lasts.
_FEW = 200


_DROPS = ("explains", "change", "95 %")
"""The columns that go where the table is too wide, the first of them first."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of one phase, or of the step, between two sides.

    Attributes:
        before_ms: The time before (in milliseconds).
        after_ms: The time after (in milliseconds).
        error_ms: Half the width of the 95 % interval of their difference (in milliseconds).
        error_ratio: The same for the difference as a part of the time before.
    """

    before_ms: float
    after_ms: float
    error_ms: float
    error_ratio: float

    @property
    def change_ms(self) -> float:
        """How much longer it takes after than before (in milliseconds)."""
        return self.after_ms - self.before_ms

    @property
    def ratio(self) -> float:
        """The same as a part of the time before; NaN where that is zero."""
        return self.change_ms / self.before_ms if self.before_ms else math.nan

    @property
    def is_certain(self) -> bool:
        """Whether zero lies outside of the interval."""
        return abs(self.change_ms) > self.error_ms

    def is_above(self, bound: float) -> bool:
        """Tells whether it is longer by more than a part of the time before, for certain."""
        return self.ratio - self.error_ratio > bound and self.is_certain


@dataclass(frozen=True, slots=True)
class RunComparison(Tabular):
    """What differs between two sides of one run or several each; `print` shows it as a table.

    The times of `step` and `rows` are those of a typical step, the mean over the middle half of the
    steps by their length. The phases add up to the step, and their changes to its change.

    Attributes:
        rows: Each phase, in the order of a step; a phase that did not run takes 0 ms.
        step: The typical step.
        mean: The mean over all steps, slow ones included, with an interval of 99.5 %.
        runs: How many runs the sides have, before and after.
        steps: How many steps they have.
        notes: What else differs, such as the version of torch.
    """

    rows: Mapping[str, Difference]
    step: Difference
    mean: Difference
    runs: tuple[int, int]
    steps: tuple[int, int]
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Says "slower" or "faster" where that is certain, else "alike"."""
        if not self.step.is_certain:
            return "alike"
        return "slower" if self.step.change_ms > 0 else "faster"

    @property
    def explains(self) -> dict[str, float]:
        """The part of the step's change that each phase explains; they add up to 1.

        Without sub-phases, whose parts are in their parents'. Empty where nothing is certain.
        """
        if not self.step.is_certain:
            return {}
        changes = {name: row.change_ms for name, row in self.rows.items()}
        return {name: ms / self.step.change_ms for name, ms in changes.items() if "/" not in name}

    @property
    def sentence(self) -> str:
        """Says it in one sentence: by how much, how sure, and which phase explains it."""
        step = self.step
        if not step.is_certain:
            return f"no difference is certain: {_amount(step, sign=True)}"
        name = max(self.explains, key=self.explains.__getitem__)
        most = name
        for part, row in self.rows.items():
            is_most = row.change_ms / self.rows[name].change_ms >= _MOST
            if part.startswith(f"{name}/") and is_most:
                most = part
        share = f"{100 * self.explains[name]:.0f} %"
        return f"{_amount(step)} {self.verdict}: {most} explains {share}"

    @property
    def mean_sentence(self) -> str:
        """Says what slow steps add to it; empty where that is not certain."""
        mean, step = self.mean, self.step
        if not mean.is_certain or abs(mean.ratio - step.ratio) <= mean.error_ratio:
            return ""
        word = "longer" if mean.change_ms > 0 else "shorter"
        return f"with the slowest and fastest steps the mean is {_amount(mean)} {word}"

    def is_above(self, bound: float) -> bool:
        """Tells whether it is slower by more than a part of the time before, for certain.

        Args:
            bound: Such as 0.02 for 2 %. The whole interval, of the typical step or of the mean,
                must lie above it.
        """
        return self.step.is_above(bound) or self.mean.is_above(bound)

    def to_dict(self) -> dict[str, Any]:
        """Returns nested dicts of numbers, ready for JSON; None where there is no number."""
        return {
            **asdict(self, dict_factory=with_none),
            "verdict": self.verdict,
            "explains": self.explains,
            "sentence": self.sentence,
        }

    def markdown(self) -> str:
        """Returns it for a pull request."""
        return self._table().markdown()

    def _table(self) -> Table:
        explains = self.explains
        unit = unit_of(self.step.before_ms)
        header = ("phase", "before", "after", "change", "95 %", "change in %", "explains")
        body = [
            _cells(name, row, unit, f"{explains[name]:.0%}" if name in explains else "")
            for name, row in self.rows.items()
        ]
        before, after = self.steps
        title = f"A typical step in {unit.name}: {_side(self.runs[0], before)} before, " + (
            f"{_side(self.runs[1], after)} after"
        )
        whole = _cells("step", self.step, unit, "100%" if explains else "")
        caution = (
            ""
            if sum(self.runs) > 2
            else ("One run a side: by how much equal runs differ is not seen. Give several a side.")
        )
        few = (
            f"With fewer than {_FEW} steps a side, runs are called different too often where slow"
            " steps follow each other."
            if min(self.steps) < _FEW
            else ""
        )
        told = (self.sentence, self.mean_sentence, *self.notes, caution, few)
        sentences = [one for one in told if one]
        return Table(title, [header, *body, whole], sentences, drops=_DROPS)


def _amount(one: Difference, *, sign: bool = False) -> str:
    digits = 1 if one.error_ratio >= 0.001 else 2
    ratio = one.ratio if sign else abs(one.ratio)
    plus = "+" if sign else ""
    return f"{100 * ratio:{plus}.{digits}f} % ± {100 * one.error_ratio:.{digits}f} %"


def _cells(name: str, row: Difference, unit: Unit, explains: str) -> tuple[str, ...]:
    _, slash, part = name.partition("/")
    return (
        f"  {part}" if slash else name,
        unit.cell(row.before_ms),
        unit.cell(row.after_ms),
        f"{row.change_ms / unit.ms:+.{unit.digits}f}",
        f"± {unit.cell(row.error_ms)}",
        "" if math.isnan(row.ratio) else f"{row.ratio:+.1%}",
        explains,
    )


def _side(runs: int, steps: int) -> str:
    return f"{steps} steps" if runs == 1 else f"{steps} steps of {runs} runs"
