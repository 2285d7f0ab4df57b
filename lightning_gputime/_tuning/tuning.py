"""Trials of changes, one after another, and their table."""

import math
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from lightning_gputime._measurement.plain import plain
from lightning_gputime._measurement.units import duration
from lightning_gputime._output.table import Table, Tabular
from lightning_gputime._runs.compare import compare_groups
from lightning_gputime._tuning.change import Change
from lightning_gputime._tuning.changes import PROPOSALS
from lightning_gputime._tuning.trials import MIN_SPEED_UP, Result, RunError, Script, Trial

_HEADER = ("change", "promised", "measured", "phase", "losses", "result", "where")
_NOTHING = (
    "No advice on this training can be applied without editing the script. To read the advice, run"
    " `lightning-gputime show` on 001.json.gz in this folder"
)
_NEEDS_PERMISSION = "needs --allow-numerics"
_RESERVE = 0.5  # Fraction of the remaining budget that a trial leaves to later trials.
_MIN_PAIRS = 3  # Number of pairs of runs before a trial must respect the reserve.


@dataclass(slots=True)
class Tuning(Tabular):
    """Trials of changes to a script, one after another, largest promised speed-up first.

    Args:
        script: The script.
        budget_s: Time for all runs (in seconds).
        allow_numerics: Also try changes that alter the numerics of training.
    """

    script: Script
    budget_s: float
    allow_numerics: bool = False
    trials: list[Trial] = field(default_factory=list)
    baseline: Result | None = None
    is_complete: bool = False
    _started: float = field(default_factory=time.monotonic)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def kept(self) -> list[Change]:
        return [trial.change for trial in self.trials if trial.is_kept]

    @property
    def speed_up(self) -> float:
        """Total speed-up of the changes that were kept."""
        return math.prod(trial.speed_up.value for trial in self.trials if trial.is_kept)

    def run(self) -> None:
        """Try changes until there are no more, or the budget ends.

        Raises:
            RunError: If the script fails without changes.
        """
        best = self.baseline = self._result([])
        steps, headline = best.report.steps, best.run.summary().verdict
        print_progress(f"{steps} steps in {duration(1e3 * best.pace_s)}: {headline}")
        while trial := next(self._proposed(best), None):
            self.trials.append(trial)
            if trial.change.effect == "numerics" and not self.allow_numerics:
                trial.give_up(_NEEDS_PERMISSION)
                continue
            self._try(trial)
            print_progress(f"{trial.change.code}: {self._outcome(trial)}, {trial.speed_up}")
            if trial.is_kept:
                best = trial.after[-1]
        self.is_complete = True

    def _proposed(self, best: Result) -> Iterator[Trial]:
        """Yield trials that the advice on a run suggests, without those already made."""
        tried = {trial.change.code for trial in self.trials}
        diagnosis = best.run.summary().diagnosis
        rows = () if diagnosis.time_breakdown is None else diagnosis.time_breakdown.rows
        found = [
            (advice, row.speed_up, row.name)
            for row in sorted(rows, key=lambda row: -(row.speed_up or 0.0))
            for advice in row.advice
        ]
        # Advice on launches belongs to no row.
        found += [(advice, None, diagnosis.entry) for advice in diagnosis.advice]
        for advice, speed_up, entry in found:
            for propose in PROPOSALS:
                for change in propose(advice, best.report):
                    if change.code not in tried:
                        yield Trial(change, speed_up, entry)

    def _try(self, trial: Trial) -> None:
        kept = self.kept
        reserve_s = self._left_s() * _RESERVE
        cost_s = 0.0  # Duration of the newest pair of runs.
        try:
            while not trial.is_decided and self._left_s() > cost_s:
                if len(trial.after) >= _MIN_PAIRS and self._left_s() < reserve_s + cost_s:
                    return
                start = time.monotonic()
                trial.add_pair(
                    lambda: self._result(kept), lambda: self._result([*kept, trial.change])
                )
                cost_s = time.monotonic() - start
                if trial.change.code not in trial.after[-1].report.applied:
                    trial.give_up("not applied: the script does not construct the object to change")
                    return
        except RunError as error:
            trial.give_up(f"failed: {error}")

    def _result(self, changes: list[Change]) -> Result:
        site = "" if self.baseline is None else self.baseline.report.loader_site
        return self.script.run(next(self._numbers), changes, site)

    def _left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self._started)

    def _outcome(self, trial: Trial) -> str:
        if trial.error or not trial.after:
            return trial.error or "not tried: the budget ended"
        if not trial.parity.is_good(trial.change):
            return "rejected: the losses differ"
        if trial.is_kept:
            return "kept"
        if not trial.is_decided:
            return "uncertain: the budget ended"
        is_slower = trial.speed_up.value < MIN_SPEED_UP
        return "rejected: not faster" if is_slower else "uncertain: the gain is within the noise"

    def _table(self) -> Table:
        lines = [_HEADER]
        for trial in self.trials:
            effect = "" if trial.change.effect == "none" else f"; changes {trial.change.effect}"
            cells = (
                trial.change.code,
                "" if trial.promise is None else f"{trial.promise:.2f}x",
                str(trial.speed_up) if trial.after else "",
                _changed_phase(trial),
                str(trial.parity) if trial.after else "",
                f"{self._outcome(trial)}{effect if trial.is_kept else ''}",
                self._where(trial.change),
            )
            lines.append(cells)
        total = f"{self.speed_up:.2f}x"
        lines.append(("all kept changes", "", total, "", "", f"{len(self.kept)} kept", ""))
        steps = self.baseline.report.steps if self.baseline else 0
        title = f"Changes tried on {shlex.join(self.script.command)}, {steps} steps per run"
        notes = [f"The runs and their output are in {self.script.folder}"]
        if not self.is_complete:
            notes.insert(0, "Interrupted: further changes were not tried")
        elif not self.trials:
            notes.insert(0, _NOTHING)
        return Table(title, lines, notes, left=(0, 3, 5, 6))

    def to_dict(self) -> dict[str, Any]:
        """Return the trials as nested dicts, ready for JSON."""
        trials = [
            {
                "change": trial.change.code,
                "where": self._where(trial.change),
                "entry": trial.entry,
                "promised": trial.promise,
                "speed_up": trial.speed_up.value,
                "interval": [trial.speed_up.low, trial.speed_up.high],
                "pairs": len(trial.after),
                "loss_drift": trial.parity.drift if trial.after else None,
                "moved": _changed_phase(trial),
                "is_kept": trial.is_kept,
                "outcome": self._outcome(trial),
                "effect": trial.change.effect,
            }
            for trial in self.trials
        ]
        found: dict[str, Any] = plain(
            {"speed_up": self.speed_up, "is_complete": self.is_complete, "trials": trials}
        )
        return found

    def _where(self, change: Change) -> str:
        return "" if self.baseline is None else self.baseline.report.where(change)


def _changed_phase(trial: Trial) -> str:
    """Return the phase that changed most, such as "data -4.1 ms"; empty if it may be noise."""
    with suppress(ValueError):  # Too few timed steps.
        found = compare_groups([[r.run for r in trial.before], [r.run for r in trial.after]])
        rows = {name: row for name, row in found.rows.items() if "/" not in name}
        name = max(rows, key=lambda name: abs(rows[name].change_ms))
        if rows[name].is_significant:
            sign = "+" if rows[name].change_ms > 0 else "-"
            return f"{name} {sign}{duration(abs(rows[name].change_ms))}"
    return ""


def print_progress(text: str) -> None:
    print(f"tune: {text}", file=sys.stderr, flush=True)
