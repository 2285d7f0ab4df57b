"""Check the answers of a timer with default options on programs with a planted problem.

    python benchmarks/answers.py --device cpu --list
    python benchmarks/answers.py --device cpu --only EMA --only lightning --load 2
    python benchmarks/answers.py --device cuda --out benchmarks/results/answers.json

The true speed-up is the time per step with the problem divided by the time without, both without a
timer. Then the program runs with its problem and a timer, whose diagnosis is judged:

- named: the headline or the first piece of advice names a culprit, or its file and line
- code, pace: the verdict code is accepted, and so is, on a GPU, the pace that it implies
- promise: the promised speed-up is within 20 % of the truth, if the problem is removable
- wrong: the grade is "bound", and neither a culprit is named nor the code accepted
- false alarm: a control, in which nothing is planted, is "bound" with another code
"""

import contextlib
import inspect
import io
import logging
import re
import time
import warnings
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import projects
import projects_cpu
import projects_gpu
import torch
from gates import load
from projects import PACES, Project, Run
from record import environment, new_parser, save

CHECKS = ("named", "code", "pace", "promise", "wrong", "false alarm")
TOLERANCE = 0.2
"""Maximum error of a promised speed-up, as a fraction of the true speed-up."""
ONCE = ("set-up", "sanity check", "first step", "tear-down")
"""Entries of the time breakdown that occur once."""


def judge(project: Project, diagnosis: Any, speed_up: float | None) -> dict[str, Any]:
    """Return the answer to a program, and the results of the checks that apply."""
    rows = diagnosis.time_breakdown.rows if diagnosis.time_breakdown else ()
    promise = next((row.speed_up for row in rows if row.name == diagnosis.entry), None)
    if promise is not None:
        # The true speed-up is that of a long training, in which set-up takes no time.
        recurring_share = 1 - sum(row.share for row in rows if row.name in ONCE)
        promise = 1 / max(1 - (1 - 1 / promise) / recurring_share, 0.01)
    answer = {
        "code": diagnosis.code,
        "grade": diagnosis.grade,
        "headline": diagnosis.headline,
        "advice": [advice.text for advice in diagnosis.advice[:1]],
        "speed-up": speed_up and round(speed_up, 2),
        "promised": promise and round(promise, 2),
    }
    has_code, is_bound = diagnosis.code in project.codes, diagnosis.grade == "bound"
    if not project.culprits:
        return {**answer, "checks": {"false alarm": is_bound and not has_code}}
    text = "\n".join([diagnosis.headline, *answer["advice"]])
    is_named = any(names(text, culprit) for culprit in project.culprits)
    checks = {"named": is_named, "code": has_code}
    if project.paces:
        checks["pace"] = PACES.get(diagnosis.code) in project.paces
    if project.is_removable and speed_up is not None:
        checks["promise"] = abs((promise or 1.0) / speed_up - 1) <= TOLERANCE
    return {**answer, "checks": {**checks, "wrong": is_bound and not is_named and not has_code}}


def names(text: str, culprit: str) -> bool:
    """Return whether a text names a culprit, or lines of it."""
    if re.search(rf"(?<!\w){re.escape(culprit)}(?!\w)", text):
        return True
    file, lines = lines_of(culprit)
    places = re.findall(rf"{re.escape(file)}:(\d+)(?:-(\d+))?", text) if file else []
    return any(int(a) < lines.stop and lines.start <= int(b or a) for a, b in places)


def lines_of(culprit: str) -> tuple[str, range]:
    """Return the file and the lines of a function or a marked line; no file for an option."""
    for module in (projects, projects_cpu, projects_gpu):
        source = Path(inspect.getfile(module))
        for number, line in enumerate(source.read_text().splitlines(), start=1):
            if culprit.startswith("line:") and line.endswith(culprit.replace("line:", "# line: ")):
                return source.name, range(number, number + 1)
        with contextlib.suppress(AttributeError):
            function = attrgetter(culprit)(module)
            if inspect.isfunction(function):
                lines, first = inspect.getsourcelines(function)
                return source.name, range(first, first + len(lines))
    return "", range(0)


def run(project: Project, **variant: Any) -> Run:
    """Run a program once, without its output."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return project.run(**variant)


def check(project: Project, rounds: int, *, show: bool, **variant: Any) -> dict[str, Any]:
    """Measure the true speed-up of a program, then judge its diagnosis."""
    start_s, times = time.perf_counter(), {True: list[float](), False: list[float]()}
    # Without a timer first, which also loads the libraries. A control has no clean variant.
    for planted in (False, True) * rounds if project.culprits else (True,):
        times[planted].append(run(project, planted=planted, timed=False, **variant).wall_s)
    speed_up = min(times[True]) / min(times[False]) if times[False] else None
    summary = run(project, planted=True, **variant).summary
    assert summary is not None
    if show:
        print(summary, *summary.advice, sep="\n")
    answer = judge(project, summary.diagnosis, speed_up)
    return {**answer, "seconds": round(time.perf_counter() - start_s, 1)}


def main() -> None:
    """Check the selected programs."""
    parser = new_parser(__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--only", action="append", help="programs with this in the name")
    parser.add_argument("--list", action="store_true", help="list the programs, and run none")
    parser.add_argument("--rounds", type=int, default=1, help="pairs of runs for the true speed-up")
    parser.add_argument("--load", type=int, default=0, help="number of busy processes")
    parser.add_argument("--small", action="store_true", help="test the GPU programs on a CPU")
    parser.add_argument("--show", action="store_true", help="print the summaries")
    arguments = parser.parse_args()
    chosen = [
        project
        for project in (*projects_cpu.PROJECTS, *projects_gpu.PROJECTS)
        if project.device == ("cuda" if arguments.small else arguments.device)
        and any(word in project.name for word in arguments.only or [""])
    ]
    if arguments.list:
        print(*(project.name for project in chosen), sep="\n")
        return
    for name in ("lightning.pytorch", "pytorch_lightning", "transformers", "lightning_gputime"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    variant = {"device": arguments.device, "small": arguments.small, "show": arguments.show}
    answers, skipped = dict[str, dict[str, Any]](), dict[str, str]()
    with load(arguments.load):
        for project in chosen:
            try:
                assert not project.missing, f"{project.missing} not installed"
                answer = answers[project.name] = check(project, arguments.rounds, **variant)
            except Exception as error:
                print(f"{project.name:<50} skipped: {error!r}", flush=True)
                skipped[project.name] = repr(error)
                continue
            checks = [name if right else f"no {name}" for name, right in answer["checks"].items()]
            print(
                f"{project.name:<50} {answer['code']:<16} {answer['grade']:<12}",
                f"{answer['promised']} of {answer['speed-up']}: {', '.join(checks)}",
                f"({answer['seconds']} s)\n    {answer['headline']}",
                flush=True,
            )
    found = [answer["checks"] for answer in answers.values()]
    columns = {name: [checks[name] for checks in found if name in checks] for name in CHECKS}
    counts = {name: f"{sum(values)} of {len(values)}" for name, values in columns.items()}
    print(*(f"{name}: {count}" for name, count in counts.items()), sep="\n")
    if arguments.out:
        packages = [name for name in ("torch", "lightning") if find_spec(name)]
        header = environment(*["gpu"] * torch.cuda.is_available(), "host", "python", *packages)
        header |= {"load": arguments.load, **environment("command"), **counts}
        rows = {}
        for name, answer in answers.items():
            passed = [check for check, has_passed in answer["checks"].items() if has_passed]
            kept = ("code", "grade", "speed-up", "promised", "headline")
            rows[name] = {key: answer[key] for key in kept} | {"passed": ", ".join(passed)}
        save(arguments.out, {**header, "skipped": skipped, "answers": rows})


if __name__ == "__main__":
    main()
