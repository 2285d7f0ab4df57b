"""Changes that the advice suggests, and the alternating runs that show their effect.

`_auto_instrumentation.tuned` applies a change inside the script's process. The advice itself
belongs to `_diagnosis`. A change that cannot be applied from outside stays advice.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lightning_gputime._auto_instrumentation.command import new_folder
from lightning_gputime._auto_instrumentation.environment import TUNE
from lightning_gputime._auto_instrumentation.tuned import LIGHTNING, LOADER, TRANSFORMERS
from lightning_gputime._diagnosis import Advice
from lightning_gputime._measurement.wall_clock import ONCE
from lightning_gputime._messages import duration, plain
from lightning_gputime._output.table import Table, Tabular
from lightning_gputime._runs.compare import compare
from lightning_gputime._runs.estimates import quantile_of_t
from lightning_gputime._runs.saved import Run, load

Effect = Literal["none", "rounding", "random numbers", "numerics"]
"""Effect of a change on the losses, which decides how far the mean loss may move.

"none": no further than between runs without the change. "rounding": twice as far, or by 0.1 %.
"random numbers": also by 3 standard errors. "numerics": any distance, so the change is tried only
with `--allow-numerics`.
"""

_FIRST_WORKERS = 4  # Proposed number of workers of a loader that has none.
_LOOKS = (3, 5, 8, 12)  # Numbers of pairs after which a trial may end.
_CONFIDENCE = 1 - 0.01 / len(_LOOKS)  # Per look, so that at most 1 % of useless changes pass.
_MIN_SPEED_UP = 1.01  # A smaller gain does not pay for a change of the script.
_MAX_DRIFT = 1e-3  # Relative difference of the mean loss that different rounding may cause.
_RESERVE = 0.5  # Fraction of the remaining budget that a trial leaves to later trials.
_MIN_STEPS = 50  # The first steps are warm-up.


@dataclass(frozen=True, slots=True)
class Change:
    """A change that can be applied without editing the script."""

    code: str  # Text to write into the script, such as "num_workers=4".
    target: str = ""  # Class that gets the arguments, as "module:Class"; empty for none.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # Global settings of torch.
    effect: Effect = "none"


@dataclass(frozen=True, slots=True)
class Report:
    """Observations of the script's process in one run."""

    # Places where objects of each target were constructed, as "file:line".
    sites: Mapping[str, list[str]] = field(default_factory=dict)
    loader_site: str = ""  # Place where the training loader was constructed; empty if unknown.
    loader: Mapping[str, Any] = field(default_factory=dict)  # Its options; empty if unknown.
    applied: list[str] = field(default_factory=list)  # Codes of the changes that were applied.
    losses: list[float] = field(default_factory=list)  # Scalars on which backward was called.
    steps: int = 0  # Number of updates of the first optimizer.


_LOG_LESS = {  # Lightning's default. Loggers then get fewer values.
    LIGHTNING: Change("log_every_n_steps=50", LIGHTNING, {"log_every_n_steps": 50}),
    TRANSFORMERS: Change("logging_steps=50", TRANSFORMERS, {"logging_steps": 50}),
}
_BF16 = {"precision": "bf16-mixed"}
_COMPILED = {"torch_compile": True}
_HIGH = 'torch.set_float32_matmul_precision("high")'
_BENCHMARK = "torch.backends.cudnn.benchmark = True"
# Changes by the code of an advice or the setting that it names, then by the class that the script
# must construct; empty for none.
_CHANGES: Mapping[str, Mapping[str, Change]] = {
    "log_less": _LOG_LESS,
    "log_every_n_steps": _LOG_LESS,
    "logging_steps": _LOG_LESS,
    "precision": {
        LIGHTNING: Change('precision="bf16-mixed"', LIGHTNING, _BF16, effect="numerics"),
        TRANSFORMERS: Change("bf16=True", TRANSFORMERS, {"bf16": True}, effect="numerics"),
    },
    "compile": {
        LIGHTNING: Change(
            "fit(torch.compile(model))", settings={"compile": True}, effect="numerics"
        ),
        TRANSFORMERS: Change("torch_compile=True", TRANSFORMERS, _COMPILED, effect="numerics"),
    },
    "float32_matmul_precision": {
        "": Change(_HIGH, settings={"float32_matmul_precision": "high"}, effect="rounding")
    },
    "cudnn.benchmark": {
        "": Change(_BENCHMARK, settings={"cudnn.benchmark": True}, effect="rounding")
    },
}
_LOADER_OPTIONS: Mapping[str, Effect] = {
    "num_workers": "random numbers",  # Random transforms draw different numbers in other workers.
    "persistent_workers": "random numbers",
    "pin_memory": "none",
    "prefetch_factor": "none",
}
_SLOW_LOADER = ("iterate_over_steps", "workers", "num_workers", "cheaper_transforms")
"""Codes of advice for a slow loader. If it suggests no number, propose to double the workers."""


def propose(advice: Advice, report: Report) -> Iterator[Change]:
    """Yield the changes that an advice suggests, if the script constructs the object to change."""
    for target, change in _CHANGES.get(advice.parameters.get("setting", advice.code), {}).items():
        if not target or target in report.sites:
            yield change
    if advice.code == "fused":
        name = str(advice.parameters["optimizer"]).rpartition(".")[2]
        if (target := f"torch.optim:{name}") in report.sites:
            yield Change(f"{name}(fused=True)", target, {"fused": True}, effect="rounding")
    options: dict[str, Any] = {}
    suggested = advice.parameters.get("suggested")
    if advice.code in _LOADER_OPTIONS and suggested is not None:
        options[advice.code] = suggested
    if advice.code in _SLOW_LOADER and report.loader:
        # It imports torch, which most calls of `tune` need only in their subprocesses.
        from lightning_gputime._runs.environment import cores_of_rank

        workers, cores = report.loader["num_workers"], cores_of_rank(1) or 1
        if suggested is None and workers < cores:
            options["num_workers"] = min(2 * workers or _FIRST_WORKERS, cores)
        if workers and not report.loader["persistent_workers"]:
            options["persistent_workers"] = True
    # The transformers Trainer constructs its loader from `TrainingArguments`.
    is_transformers = TRANSFORMERS in report.sites
    target, prefix = (TRANSFORMERS, "dataloader_") if is_transformers else (LOADER, "")
    for name, value in options.items():
        option = f"{prefix}{name}"
        yield Change(f"{option}={value}", target, {option: value}, effect=_LOADER_OPTIONS[name])


@dataclass(frozen=True, slots=True)
class Result:
    """One run of the script: its saved run, and the report of its process."""

    run: Run
    report: Report

    @property
    def recurring_s(self) -> float:
        """Wall-clock time without entries that occur once, such as set-up (in seconds).

        Runs have the same number of steps, so their ratio is the speed-up of a long training.
        """
        wall_clock = self.run.summary().wall_clock
        assert wall_clock is not None
        return sum(s for name, s in wall_clock.entries_s.items() if name not in ONCE)


class RunError(Exception):
    """The script failed, or trained nothing."""


@dataclass(frozen=True, slots=True)
class Script:
    """The script to tune. Each run applies changes to it in a new process."""

    command: Sequence[str]  # The script and its arguments, or a command that starts it.
    folder: Path  # Folder for the saved runs.
    steps: int  # Number of steps after which the script is ended.

    def run(self, number: int, changes: Sequence[Change], loader_site: str) -> Result:
        """Run the script with changes. Raise RunError if it fails, or no step was timed."""
        path, report, output = (
            self.folder / f"{number:03}{end}" for end in (".json.gz", "-report.json", ".txt")
        )
        orders = {
            "steps": self.steps,
            "report": str(report),
            "changes": [asdict(change) for change in changes],
            "loader_site": loader_site,  # Place of the loader to change; empty for all.
        }
        run = [sys.executable, "-m", "lightning_gputime", "run", "--save-path", str(path)]
        with output.open("w") as text:
            code = subprocess.call(
                [*run, *self.command],
                stdout=text,
                stderr=text,
                stdin=subprocess.DEVNULL,
                env={**os.environ, TUNE: json.dumps(orders)},
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
        """Return the speed-up of pairs of runs, with Student's t interval of the log ratios.

        Example: 2.0, 2.2 and 1.8 s before, and 1 s after, are ratios of 2.0, 2.2 and 1.8. Their
        geometric mean is 1.99, and their logarithms have a standard error of 0.058.
        """
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


@dataclass(frozen=True, slots=True)
class Parity:
    """Agreement of the losses of runs without and with a change."""

    drift: float  # Difference of the mean losses, relative to the mean without the change.
    # Difference that chance explains, if the script sets no seed: the largest difference between
    # two runs without the change, or the 99 % bound for the difference between the mean losses of
    # both sides. Infinite if each side has only one run.
    noise: float
    error: float  # Standard error of the drift, from the spread over steps.
    is_bitwise: bool  # All runs have exactly the same losses.

    @classmethod
    def of(cls, before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> "Parity":
        """Return the agreement of the losses of each run, by step.

        Example: mean losses of 1.0, 1.1 and 1.0 before, and 1.1, 1.2 and 1.05 after. They drift by
        8 %. Runs without the change differ by up to 9.7 %, and the 99 % bound is 24.6 %, so chance
        explains the drift.
        """
        n = min(map(len, (*before, *after)))
        if not n:
            return cls(0.0, 0.0, 0.0, is_bitwise=False)
        # Arrays of shape (runs, steps).
        first, second = (np.array([losses[:n] for losses in runs]) for runs in (before, after))
        means = first.mean(axis=1), second.mean(axis=1)  # Of each run.
        chance = math.inf
        if freedom := len(before) + len(after) - 2:  # Student's test with pooled variance.
            variance = sum(((runs - runs.mean()) ** 2).sum() for runs in means) / freedom
            error = math.sqrt(variance * (1 / len(before) + 1 / len(after)))
            # Each pair of runs is followed by a test. By simulation, 12 tests reject 3 % of the
            # changes that do not affect the loss (with 95 % instead of 99 %: 8 %).
            chance = float(quantile_of_t(freedom, 0.99)) * error
        scale = abs(float(first.mean())) or 1.0
        difference = (second.mean(axis=0) - first.mean(axis=0)) / scale
        return cls(
            drift=float(difference.mean()),
            noise=max(float(np.ptp(means[0])), chance) / scale,
            error=float(difference.std()) / math.sqrt(n),
            is_bitwise=bool((first == first[0]).all() and (second == first[0]).all()),
        )

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


@dataclass(slots=True)
class Trial:
    """A change and the pairs of runs without and with it, one pair per index."""

    change: Change
    promise: float | None  # Maximum speed-up according to the time breakdown; None if unknown.
    entry: str  # Entry of the time breakdown that the change should shorten.
    before: list[Result] = field(default_factory=list)
    after: list[Result] = field(default_factory=list)
    error: str = ""  # Reason why the trial has no result.

    @property
    def speed_up(self) -> SpeedUp:
        return SpeedUp.of([r.recurring_s for r in self.before], [r.recurring_s for r in self.after])

    @property
    def parity(self) -> Parity:
        return Parity.of(
            [r.report.losses for r in self.before], [r.report.losses for r in self.after]
        )

    @property
    def outcome(self) -> str:
        if self.error or not self.after:
            return self.error or "not tried: the budget ended"
        if not self.parity.is_good(self.change):
            return "rejected: the losses differ"
        speed_up = self.speed_up
        if speed_up.low > _MIN_SPEED_UP:
            return "kept"
        n = len(self.after)
        if n in _LOOKS and speed_up.high < _MIN_SPEED_UP:
            return "rejected: not faster"
        if n == _LOOKS[-1]:
            return "uncertain: the gain is within the noise"
        return "uncertain: the budget ended"

    @property
    def is_kept(self) -> bool:
        return self.outcome == "kept"

    @property
    def is_decided(self) -> bool:
        """True if no further pair of runs is needed."""
        n = len(self.after)
        is_kept_at_look = n in _LOOKS and self.is_kept
        return n == _LOOKS[-1] or is_kept_at_look or self.outcome.startswith("rejected")


@dataclass(slots=True)
class Tuning(Tabular):
    """Trials of changes to a script, one after another, largest promised speed-up first."""

    script: Script
    budget_s: float  # Time for all runs (in seconds).
    allow_numerics: bool = False  # Also try changes that alter the numerics of training.
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
        """Try changes until there are no more. Raise RunError if the script fails without any."""
        best = self.baseline = self._result([])
        steps, headline = best.report.steps, best.run.summary().verdict
        _print_progress(f"{steps} steps in {duration(1e3 * best.recurring_s)}: {headline}")
        while trial := next(self._proposed(best), None):
            self.trials.append(trial)
            if trial.change.effect == "numerics" and not self.allow_numerics:
                trial.error = "needs --allow-numerics"
                continue
            try:
                self._try(trial)
            except RunError as error:
                trial.error = f"failed: {error}"
            _print_progress(f"{trial.change.code}: {trial.outcome}, {trial.speed_up}")
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
            for change in propose(advice, best.report):
                if change.code not in tried:
                    yield Trial(change, speed_up, entry)

    def _try(self, trial: Trial) -> None:
        sides = {"before": self.kept, "after": [*self.kept, trial.change]}
        reserve_s = self._left_s() * _RESERVE
        cost_s = 0.0  # Duration of the newest pair of runs, and an estimate for the next.
        while not trial.is_decided:
            # Before the first look, a trial may use the reserve: it would have no result at all.
            kept_s = reserve_s if len(trial.after) >= _LOOKS[0] else 0.0
            if self._left_s() <= kept_s + cost_s:
                return
            start = time.monotonic()
            # The first pair starts with the change, the next without it.
            order = sides if len(trial.after) % 2 else reversed(sides)
            pair = {side: self._result(sides[side]) for side in order}
            # Add both at once: if a run fails or is interrupted, the other has no counterpart.
            trial.before.append(pair["before"])
            trial.after.append(pair["after"])
            cost_s = time.monotonic() - start
            if trial.change.code not in pair["after"].report.applied:
                trial.error = "not applied: the script does not construct the object to change"
                return

    def _result(self, changes: list[Change]) -> Result:
        site = "" if self.baseline is None else self.baseline.report.loader_site
        return self.script.run(next(self._numbers), changes, site)

    def _left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self._started)

    def _table(self) -> Table:
        lines = [("change", "promised", "measured", "phase", "losses", "result", "where")]
        for trial in self.trials:
            change, is_tried = trial.change, bool(trial.after)
            is_changing = trial.is_kept and change.effect != "none"
            cells = (
                change.code,
                "" if trial.promise is None else f"{trial.promise:.2f}x",
                str(trial.speed_up) if is_tried else "",
                _changed_phase(trial),
                str(trial.parity) if is_tried else "",
                trial.outcome + (f"; changes {change.effect}" if is_changing else ""),
                self._where(change),
            )
            lines.append(cells)
        total = f"{self.speed_up:.2f}x"
        lines.append(("all kept changes", "", total, "", "", f"{len(self.kept)} kept", ""))
        steps = self.baseline.report.steps if self.baseline else 0
        title = f"Changes tried on {shlex.join(self.script.command)}, {steps} steps per run"
        note = ""
        if not self.is_complete:
            note = "Interrupted: further changes were not tried"
        elif not self.trials:
            note = (
                "No advice on this training can be applied without editing the script. To read the"
                " advice, run `lightning-gputime show` on 001.json.gz in this folder"
            )
        where = f"The runs and their output are in {self.script.folder}"
        return Table(title, lines, [note, where] if note else [where], left=(0, 3, 5, 6))

    def to_dict(self) -> dict[str, Any]:
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
                "outcome": trial.outcome,
                "effect": trial.change.effect,
            }
            for trial in self.trials
        ]
        kept = {"speed_up": self.speed_up, "is_complete": self.is_complete}
        found: dict[str, Any] = plain({**kept, "trials": trials})
        return found

    def _where(self, change: Change) -> str:
        """Return the place in the script where a change belongs; empty if it can go anywhere."""
        report = self.baseline.report if self.baseline else Report()
        if change.target == LOADER and report.loader_site:
            return report.loader_site
        return next(iter(report.sites.get(change.target, ())), "")


def _changed_phase(trial: Trial) -> str:
    """Return the phase that changed most, such as "data -4.1 ms"; empty if it may be noise."""
    with suppress(ValueError):  # Too few timed steps.
        found = compare([r.run for r in trial.before], [r.run for r in trial.after])
        rows = {name: row for name, row in found.rows.items() if "/" not in name}
        name = max(rows, key=lambda name: abs(rows[name].change_ms))
        if rows[name].is_significant:
            sign = "+" if rows[name].change_ms > 0 else "-"
            return f"{name} {sign}{duration(abs(rows[name].change_ms))}"
    return ""


def _print_progress(text: str) -> None:
    print(f"tune: {text}", file=sys.stderr, flush=True)


def tune(args: argparse.Namespace) -> Tuning:
    """Run the trials of a script; on Ctrl-C, return the trials so far."""
    if not args.script:
        raise ValueError("no script is given: write tune train.py")
    if args.steps < _MIN_STEPS:
        raise ValueError(
            f"--steps must be {_MIN_STEPS} or more, got {args.steps}: the first steps are warm-up"
        )
    script = Script(args.script, new_folder(args.out, "tune"), args.steps)
    tuning = Tuning(script, args.budget, args.allow_numerics)
    try:
        tuning.run()
    except RunError as error:
        raise ValueError(f"the script failed without any change: {error}") from None
    except KeyboardInterrupt:
        _print_progress("interrupted")
    return tuning
