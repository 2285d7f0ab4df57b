"""Alternating runs without and with a change, and the speed-up that they show."""

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from lightning_gputime._auto_instrumentation import TUNE
from lightning_gputime._measurement.wall_clock import ONCE
from lightning_gputime._runs.estimates import Floats, quantile_of_t
from lightning_gputime._runs.run import Run
from lightning_gputime._runs.saved import load
from lightning_gputime._tuning.change import Change, Report

_LOOKS = (3, 5, 8, 12)  # Numbers of pairs after which a trial may end.
_CONFIDENCE = 1 - 0.01 / len(_LOOKS)  # Per look, so that at most 1 % of useless changes pass.
MIN_SPEED_UP = 1.01
_MAX_DRIFT = 1e-3  # Relative difference of the mean loss that different rounding may cause.


@dataclass(frozen=True, slots=True)
class Result:
    """One run of the script: its saved run, and the report of its process."""

    run: Run
    report: Report

    @property
    def pace_s(self) -> float:
        """Wall-clock time without entries that occur once, such as set-up (in seconds)."""
        wall_clock = self.run.summary().wall_clock
        assert wall_clock is not None
        return sum(s for name, s in wall_clock.entries_s.items() if name not in ONCE)


class RunError(Exception):
    """The script failed, or trained nothing."""


@dataclass(frozen=True, slots=True)
class Script:
    """The script to tune. Each run applies changes to it in a new process.

    Attributes:
        command: The script and its arguments, or a command that starts it.
        folder: Folder for the saved runs.
        steps: Number of steps after which the script is ended.
    """

    command: Sequence[str]
    folder: Path
    steps: int

    def run(self, number: int, changes: Sequence[Change], loader_site: str) -> Result:
        """Run the script with changes, until its last step.

        Raises:
            RunError: If the script fails, or no step was timed.
        """
        path = self.folder / f"{number:03}.json.gz"
        report = path.with_name(f"{number:03}-report.json")
        output = path.with_name(f"{number:03}.txt")
        orders = {
            "steps": self.steps,
            "report": str(report),
            "changes": [asdict(change) for change in changes],
            "loader_site": loader_site,
        }
        environment = {**os.environ, TUNE: json.dumps(orders)}
        run = [sys.executable, "-m", "lightning_gputime", "run", "--save-path", str(path)]
        with output.open("w") as text:
            code = subprocess.call(
                [*run, *self.command],
                stdout=text,
                stderr=text,
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        if code:
            lines = output.read_text(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "no output")
            raise RunError(f"exit code {code}: {last.strip()} ({output})")
        if not path.is_file() or not report.is_file():
            raise RunError(
                f"`{shlex.join(self.command)}` trained no step that was timed ({output})"
            )
        return Result(load(path), Report(**json.loads(report.read_text())))


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Ratio of the times without and with a change, with a confidence interval."""

    value: float = 1.0
    low: float = 0.0
    high: float = math.inf

    @classmethod
    def of(cls, before_s: Sequence[float], after_s: Sequence[float]) -> "SpeedUp":
        """Return the speed-up of pairs of runs, with Student's t interval of the log ratios."""
        logs = np.log(before_s) - np.log(after_s)
        n = len(logs)
        if not n:
            return cls()
        mean = float(logs.mean())
        if n == 1:
            return cls(math.exp(mean))
        error = float(quantile_of_t(n - 1, _CONFIDENCE) * logs.std(ddof=1) / math.sqrt(n))
        return cls(math.exp(mean), math.exp(mean - error), math.exp(min(mean + error, 50)))

    def __str__(self) -> str:
        interval = f" ({self.low:.2f} to {self.high:.2f})" if math.isfinite(self.high) else ""
        return f"{self.value:.2f}x{interval}"


@dataclass(slots=True)
class Trial:
    """A change and the pairs of runs without and with it, one pair per index.

    Attributes:
        change: The change.
        promise: Maximum speed-up according to the time breakdown; None if unknown.
        entry: Entry of the time breakdown that the change should shorten.
        before: Runs without the change.
        after: Runs with the change.
        error: Reason why the trial has no result; empty if it has a result.
    """

    change: Change
    promise: float | None
    entry: str
    before: list[Result] = field(default_factory=list)
    after: list[Result] = field(default_factory=list)
    error: str = ""

    @property
    def speed_up(self) -> SpeedUp:
        return SpeedUp.of([r.pace_s for r in self.before], [r.pace_s for r in self.after])

    @property
    def parity(self) -> "Parity":
        return Parity.of(
            [r.report.losses for r in self.before], [r.report.losses for r in self.after]
        )

    @property
    def is_kept(self) -> bool:
        # Without a pair of runs, `low` is 0.
        is_faster = not self.error and self.speed_up.low > MIN_SPEED_UP
        return is_faster and self.parity.is_good(self.change)

    def give_up(self, error: str) -> None:
        """End the trial without a result."""
        self.error = error

    def add_pair(self, run_before: Callable[[], Result], run_after: Callable[[], Result]) -> None:
        """Run both sides once. The first pair starts with the change, the next without it."""
        if len(self.after) % 2:
            before, after = run_before(), run_after()
        else:
            after, before = run_after(), run_before()
        # Add both at once: if one run fails or is interrupted, the other has nothing to compare to.
        self.before.append(before)
        self.after.append(after)

    @property
    def is_decided(self) -> bool:
        n = len(self.after)
        if n and not self.parity.is_good(self.change):
            return True
        speed_up = self.speed_up
        # A change that seems to gain nothing is not worth further runs.
        is_certain = speed_up.low > MIN_SPEED_UP or speed_up.value < MIN_SPEED_UP
        return n >= _LOOKS[-1] or (n in _LOOKS and is_certain)


@dataclass(frozen=True, slots=True)
class Parity:
    """Agreement of the losses of runs without and with a change.

    Attributes:
        drift: Difference of the mean losses, relative to the mean without the change.
        noise: Difference that chance explains, if the script sets no seed: the largest difference
            between two runs without the change, or the 95 % bound for the difference between the
            mean losses of both sides. Infinite if each side has only one run.
        error: Standard error of the drift, from the spread over steps.
        is_bitwise: True if all runs have exactly the same losses.
    """

    drift: float
    noise: float
    error: float
    is_bitwise: bool

    @classmethod
    def of(cls, before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> "Parity":
        n = min(map(len, (*before, *after)))
        if not n:
            return cls(0.0, 0.0, 0.0, is_bitwise=False)
        sides = [np.array([losses[:n] for losses in runs]) for runs in (before, after)]
        scale = abs(float(sides[0].mean())) or 1.0
        difference = sides[1].mean(axis=0) - sides[0].mean(axis=0)
        noise = max(float(np.ptp(sides[0].mean(axis=1))), _chance(*sides)) / scale
        error = float(difference.std()) / math.sqrt(n) / scale
        is_bitwise = bool((sides[0] == sides[0][0]).all() and (sides[1] == sides[0][0]).all())
        return cls(float(difference.mean()) / scale, noise, error, is_bitwise)

    def is_good(self, change: Change) -> bool:
        """Return True if the losses differ no more than the effect of the change allows."""
        limits = {
            "none": self.noise,
            "rounding": max(2 * self.noise, _MAX_DRIFT),
            "random numbers": max(2 * self.noise, 3 * self.error, _MAX_DRIFT),
        }
        return change.effect == "numerics" or abs(self.drift) <= limits[change.effect]

    def __str__(self) -> str:
        return "bitwise equal" if self.is_bitwise else f"{self.drift:+.2%}"


def _chance(before: Floats, after: Floats) -> float:
    """Return the 95 % bound for the difference between the mean losses of runs, one per row."""
    means = [before.mean(axis=1), after.mean(axis=1)]
    freedom = len(before) + len(after) - 2
    if not freedom:
        return math.inf
    variance = sum(((runs - runs.mean()) ** 2).sum() for runs in means) / freedom
    error = math.sqrt(variance * (1 / len(before) + 1 / len(after)))
    return float(quantile_of_t(freedom, 0.95)) * error
