"""Plant bottlenecks in small projects, and check the answers of a timer with default options.

    python benchmarks/answers.py --list
    python benchmarks/answers.py --only "slow loss" --only lightning
    python benchmarks/answers.py --json benchmarks/results/answers.json

Each program of `planted_projects.py` runs alternately with and without the bottleneck. The checks:

- code: the verdict code, and the grade of a bottleneck that is worth a look
- entry: the entry of the time breakdown that the diagnosis is about
- speed-up: the maximum speed-up of that entry, compared with the measured speed-up. The latter is
  the wall clock with the bottleneck divided by the wall clock without it and without the rest of
  the entry, such as a cheap loss. They must agree within 10 %, or within their errors if these are
  larger, but at most 20 %
- slowdown: reported where steps get slower, and nowhere else
- culprit: a hook, class, function or line that the output of the first run names

An answer is confidently wrong if it names a different bottleneck, or if the promised speed-up
exceeds the cost of the bottleneck by more than the errors and 10 %.
"""

import argparse
import contextlib
import gc
import io
import json
import logging
import math
import re
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import planted_projects
import torch
from planted_projects import PLANTS, Plant, Run
from record import environment

from lightning_gputime import PhaseSummary

PAIRS, MAX_PAIRS = 3, 6
"""Pairs of runs with and without the bottleneck. More than three if their times vary."""
TOLERANCE, MAX_TOLERANCE = 0.1, 0.2
"""Tolerances of the speed-up, as fractions of the measured gain."""
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57}
"""Student's t for a 95 % interval, by degrees of freedom."""
SOURCE = Path(planted_projects.__file__)


@dataclass(frozen=True)
class Answer:
    """Conclusions of the timer from one run.

    Attributes:
        code: Verdict code.
        grade: "bound", "worth a look", "balanced" or "unknown".
        entry: Entry of the time breakdown that the code is about.
        speed_up: Maximum speed-up if the entry is removed; else None.
        error: Half-width of its 95 % interval.
        has_slowdown: True if a slowdown is reported.
        text: Everything that is printed.
    """

    code: str
    grade: str
    entry: str
    speed_up: float | None
    error: float
    has_slowdown: bool
    text: str


@dataclass(frozen=True)
class Outcome:
    """Answers about a plant, and the measured gain of removing it."""

    plant: Plant
    answers: tuple[Answer, ...]
    gain: float
    gain_error: float
    seconds: float

    @property
    def answer(self) -> Answer:
        """The answer of the first run."""
        return self.answers[0]

    @property
    def speed_up(self) -> float | None:
        """Mean of the reported speed-ups."""
        found = [answer.speed_up for answer in self.answers if answer.speed_up is not None]
        return statistics.mean(found) if found else None

    @property
    def tolerance(self) -> float:
        """Maximum difference between the reported and the measured speed-up."""
        error = statistics.mean(answer.error for answer in self.answers) + self.gain_error
        return min(max(error, TOLERANCE * self.gain), MAX_TOLERANCE * self.gain)

    @property
    def failures(self) -> list[str]:
        """Checks that failed in any of the runs."""
        plant = self.plant
        checks = {
            "code": all(answer.code in plant.codes for answer in self.answers),
            "grade": all(answer.grade == plant.grade for answer in self.answers),
            "entry": all(is_about(plant, answer.entry) for answer in self.answers),
            "speed-up": self._is_speed_up_right(),
            "slowdown": all(answer.has_slowdown == plant.has_slowdown for answer in self.answers),
        }
        return [name for name, is_right in checks.items() if not is_right]

    @property
    def is_confidently_wrong(self) -> bool:
        """True if an answer names a wrong cause as certain, or promises too much."""
        is_misled = any(
            answer.grade == "bound" and answer.code not in self.plant.codes
            for answer in self.answers
        )
        promised = self.speed_up
        promises_too_much = promised is not None and promised - self.gain > self.tolerance
        return is_misled or (promises_too_much and not self.plant.is_balanced)

    @property
    def is_culprit_named(self) -> bool:
        """True if the first run names the culprit."""
        return not self.plant.culprits or any(
            names(self.answer.text, culprit) for culprit in self.plant.culprits
        )

    def _is_speed_up_right(self) -> bool:
        if self.plant.is_balanced:
            return True
        if self.speed_up is None:
            return self.plant.is_once
        return abs(self.speed_up - self.gain) <= self.tolerance

    def __str__(self) -> str:
        answer, failures = self.answer, self.failures
        promised = "no speed-up" if self.speed_up is None else f"{self.speed_up:.2f}x"
        verdict = "right" if not failures else f"wrong: {', '.join(failures)}"
        if self.is_confidently_wrong:
            verdict = f"CONFIDENTLY {verdict}"
        codes = ", ".join(sorted({answer.code or "nothing" for answer in self.answers}))
        culprit = f", culprit {'named' if self.is_culprit_named else 'not named'}"
        gain = f"{self.gain:.2f}x ± {self.gain_error:.2f}"
        return (
            f"{codes} ({answer.grade}; {answer.entry or 'no entry'}), {promised} of {gain}"
            f"{culprit if self.plant.culprits else ''}: {verdict}"
        )


def is_about(plant: Plant, entry: str) -> bool:
    """Return whether an entry of the time breakdown is expected, or part of an expected entry."""
    return not plant.entries or any(
        entry == expected or entry.startswith((f"{expected}/", f"{expected} ("))
        for expected in plant.entries
    )


def names(text: str, culprit: str) -> bool:
    """Return whether a text names a culprit; "line:<code>" is a line of the projects."""
    if not culprit.startswith("line:"):
        return culprit in text
    code = culprit.removeprefix("line:")
    numbers = [
        number
        for number, line in enumerate(SOURCE.read_text().splitlines(), start=1)
        if code in line and culprit not in line and not line.startswith("def ")
    ]
    ranges = re.findall(rf"{SOURCE.name}:(\d+)(?:-(\d+))?", text)
    return any(
        int(first) <= number <= int(last or first) for first, last in ranges for number in numbers
    )


def answer_of(summary: PhaseSummary) -> Answer:
    """Return the conclusions of a summary."""
    diagnosis = summary.diagnosis
    breakdown = diagnosis.time_breakdown
    entry = breakdown[diagnosis.entry] if breakdown is not None else None
    speed_up = entry.speed_up if entry is not None else None
    return Answer(
        code=diagnosis.code,
        grade=diagnosis.grade,
        entry=diagnosis.entry,
        speed_up=speed_up,
        # Propagate the error of the share to 1 / (1 - share).
        error=entry.error * speed_up**2 if entry is not None and speed_up is not None else 0.0,
        has_slowdown=summary.slowdown is not None,
        text="\n".join((str(summary), *summary.advice)),
    )


def run(plant: Plant, *, planted: bool) -> Run:
    """Run a program once, without its output."""
    parts = plant.planted if planted else plant.clean
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return plant.program(**parts)


def check(plant: Plant, pairs: int = PAIRS) -> Outcome:
    """Run a program alternately with and without its bottleneck, more often on a busy machine."""
    start_s = time.perf_counter()
    summaries: list[PhaseSummary] = []
    gains: list[float] = []
    while len(gains) < pairs or (
        pairs > 1 and len(gains) < MAX_PAIRS and error_of_mean(gains) > TOLERANCE * gains[0]
    ):
        slow = run(plant, planted=True)
        # A control has no bottleneck to remove.
        fast = slow if plant.is_balanced else run(plant, planted=False)
        summaries.append(slow.summary)
        # Removing the bottleneck leaves the part of the entry that the program needs.
        rest_s = 0.0 if fast is slow else seconds_of(slow.summary.diagnosis.entry, fast.summary)
        gains.append(slow.wall_s / (fast.wall_s - rest_s))
    return Outcome(
        plant,
        tuple(map(answer_of, summaries)),
        statistics.mean(gains),
        error_of_mean(gains),
        time.perf_counter() - start_s,
    )


def seconds_of(entry: str, summary: PhaseSummary) -> float:
    """Return the time of an entry in a run; 0 if it cannot be removed."""
    breakdown = summary.time_breakdown
    if breakdown is None or breakdown[entry].speed_up is None:
        return 0.0
    return breakdown[entry].seconds


def error_of_mean(values: Sequence[float]) -> float:
    """Return the half-width of the 95 % interval of a mean; 0 for a single value."""
    n = len(values)
    return T_95[n - 1] * statistics.stdev(values) / math.sqrt(n) if n > 1 else 0.0


def warm_up(plants: Sequence[Plant]) -> None:
    """Run each program once, because first runs spend time on imports and initialization."""
    for program in dict.fromkeys(plant.program for plant in plants):
        run(next(plant for plant in plants if plant.program is program), planted=False)
    gc.freeze()  # Otherwise, each collection traverses all imported objects.


def prepare() -> None:
    """Silence the libraries."""
    for name in ("lightning.pytorch", "lightning.fabric", "transformers", "lightning_gputime"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)


def selected(plants: Sequence[Plant], words: Sequence[str]) -> list[Plant]:
    """Return the plants that can run here and whose names contain any of the words."""
    return [
        plant
        for plant in plants
        if (torch.cuda.is_available() or not plant.needs_gpu)
        and (not words or any(word in plant.name for word in words))
    ]


def result(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the counts, and a line for each plant with a failed check or an unnamed culprit.

    `reported_by_measured` is the reported speed-up divided by the measured speed-up: minimum,
    median and maximum.
    """
    ratios = [
        outcome.speed_up / outcome.gain
        for outcome in outcomes
        if outcome.speed_up is not None and not outcome.plant.is_balanced
    ]
    spread = (min(ratios), statistics.median(ratios), max(ratios)) if ratios else ()
    has_culprit = [outcome for outcome in outcomes if outcome.plant.culprits]
    return {
        **environment(
            *(["gpu"] if torch.cuda.is_available() else []), "host", "torch", "lightning"
        ),
        "plants": len(outcomes),
        "right": sum(not outcome.failures for outcome in outcomes),
        "confidently_wrong": sum(outcome.is_confidently_wrong for outcome in outcomes),
        "culprits": len(has_culprit),
        "culprits_named": sum(outcome.is_culprit_named for outcome in has_culprit),
        "seconds": round(sum(outcome.seconds for outcome in outcomes)),
        "reported_by_measured": [round(ratio, 3) for ratio in spread],
        "others": {
            outcome.plant.name: str(outcome)
            for outcome in outcomes
            if outcome.failures or not outcome.is_culprit_named
        },
    }


def main() -> None:
    """Check the selected plants."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], help="plants with this in the name")
    parser.add_argument("--list", action="store_true", help="list the plants, and run none")
    parser.add_argument("--pairs", type=int, default=PAIRS, choices=range(1, MAX_PAIRS + 1))
    parser.add_argument("--show", action="store_true", help="print the output of each first run")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    plants = selected(PLANTS, arguments.only)
    if arguments.list:
        print(*(plant.name for plant in plants), sep="\n")
        return
    prepare()
    warm_up(plants)
    outcomes = []
    for plant in plants:
        outcomes.append(check(plant, arguments.pairs))
        if arguments.show:
            print(outcomes[-1].answer.text)
        print(f"{plant.name} ({outcomes[-1].seconds:.1f} s)\n    {outcomes[-1]}", flush=True)
    found = result(outcomes)
    print(
        f"{found['right']} of {found['plants']} right, {found['confidently_wrong']} confidently"
        f" wrong; {found['culprits_named']} of {found['culprits']} culprits named"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    sys.exit(found["right"] < len(plants))


if __name__ == "__main__":
    main()
