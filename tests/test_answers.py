"""Programs of `benchmarks/answers.py` with a planted problem, judged with default options."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from lightning_gputime._diagnosis import Advice, Diagnosis, Entry, TimeBreakdown

pytest.importorskip("transformers")

import answers
import projects_cpu
import projects_gpu
from projects import Project


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Trainers warn.
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name",
    [
        "lightning: SVD in forward",
        "plain: JSON log rewritten in each step",
        "transformers: histograms of the weights",
    ],
)
def test_timer_names_the_planted_problem(name: str) -> None:
    [project] = (item for item in projects_cpu.PROJECTS if item.name == name)
    if project.missing:
        pytest.skip(f"{project.missing} not installed")
    answer = answers.check(project, 1, show=False, device="cpu", small=False)
    checks = {check: answer["checks"][check] for check in ("named", "code", "wrong")}
    assert checks == {"named": True, "code": True, "wrong": False}, answer
    assert answer["speed-up"] > 1.2
    assert answer["promised"] > 1.2


def test_programs_have_unique_names_and_known_culprits() -> None:
    programs = [*projects_cpu.PROJECTS, *projects_gpu.PROJECTS]
    assert max(Counter((item.device, item.name) for item in programs).values()) == 1
    planted = Counter(item.device for item in programs if item.culprits)
    assert {*planted} == {"cpu", "cuda"}
    assert min(planted.values()) >= 24
    assert len(programs) - planted.total() >= 8
    # Only options and entries of the breakdown have no file.
    culprits = {culprit for item in programs for culprit in item.culprits}
    code = {culprit for culprit in culprits if re.match(r"line:|[A-Z]\w+\.", culprit)}
    assert [culprit for culprit in code if not answers.lines_of(culprit)[0]] == []


def test_culprit_is_matched_by_its_name_or_its_lines() -> None:
    file, [number] = answers.lines_of("line:one-hot")
    for text in ("{0}:{1}", "`CharRNN.forward` ({0}:{1})", "{0}:{2}-{1} takes"):
        assert answers.names(text.format(file, number, number - 3), "line:one-hot")
    assert not answers.names(f"{file}:{number + 1}-{number + 3}", "line:one-hot")
    assert answers.names("`Photos` takes 2 ms", "Photos")
    assert not answers.names("`PhotosOfCats` takes 2 ms", "Photos")


NAMED = "host-bound: `EMA.update` takes 1 ms of 2 ms per step"
OTHER = "host-bound: `Net.forward` takes 1 ms of 2 ms per step"


def judged(
    diagnosis: Diagnosis,
    *codes: str,
    device: str = "cpu",
    culprits: tuple[str, ...] = ("EMA.update",),
    speed_up: float | None = None,
) -> Any:
    """Return the checks of a diagnosis of a removable problem, by name."""
    program: Any = None  # It does not run.
    project = Project(device, "plain: test", codes, culprits, program, is_removable=True)
    return answers.judge(project, diagnosis, speed_up)["checks"]


INPUT = Diagnosis("input-bound", "bound", headline=OTHER)
BOUND = Diagnosis("host-bound", "bound")
CASES = {
    "named and code": (replace(BOUND, headline=NAMED), "named code"),
    "code": (replace(BOUND, headline=OTHER), "code"),
    "named": (replace(INPUT, headline=NAMED), "named"),
    "wrong": (INPUT, "wrong"),
    "worth a look": (replace(INPUT, grade="worth a look"), ""),
    "advice": (replace(INPUT, headline="", advice=(Advice("", NAMED),)), "named"),
    # Only the first piece of advice counts.
    "second advice": (
        replace(INPUT, headline="", advice=(Advice("", OTHER), Advice("", NAMED))),
        "wrong",
    ),
    # Without a planted problem
    "control, host-bound": (BOUND, "false alarm"),
    "control, worth a look": (replace(BOUND, grade="worth a look"), ""),
    "control, balanced": (Diagnosis("compute-bound", "balanced"), ""),
    "control, accepted code": (Diagnosis("compute-bound", "bound"), ""),
}


@pytest.mark.parametrize("case", CASES)
def test_diagnosis_of_a_planted_problem_or_a_control_is_judged(case: str) -> None:
    diagnosis, expected = CASES[case]
    is_control = case.startswith("control")
    code, culprits = ("compute-bound", ()) if is_control else ("host-bound", ("EMA.update",))
    checks = judged(diagnosis, code, culprits=culprits)
    assert " ".join(name for name, has_passed in checks.items() if has_passed) == expected


@pytest.mark.parametrize(
    ("code", "is_right"),
    [
        ("host-bound", True),
        ("launch-bound", True),
        ("GPU-bound", False),
        ("compute-bound", False),
    ],
)
def test_pace_is_judged_on_a_gpu_only(code: str, is_right: bool) -> None:
    diagnosis = Diagnosis(code, "bound", headline=NAMED)
    assert judged(diagnosis, "host-bound", device="cuda")["pace"] == is_right
    assert "pace" not in judged(diagnosis, "host-bound")


@pytest.mark.parametrize(
    ("promised", "set_up_share", "true", "is_kept"),
    [
        (2.0, 0.0, 2.0, True),
        (2.35, 0.0, 2.0, True),
        (2.45, 0.0, 2.0, False),
        (1.55, 0.0, 2.0, False),
        (4 / 3, 0.0, 2.0, False),
        (4 / 3, 0.5, 2.0, True),  # Half of the recurring time is saved.
        (None, 0.0, 1.1, True),
        (None, 0.0, 2.0, False),
    ],
)
def test_promise_is_compared_with_the_true_speed_up(
    promised: float | None, set_up_share: float, true: float, is_kept: bool
) -> None:
    set_up = Entry("set-up", 1.0, set_up_share)
    found = Entry("EMA.update", 1.0, 1 - set_up_share, speed_up=promised)
    breakdown = TimeBreakdown((set_up, found), 2.0, "fit")
    diagnosis = Diagnosis("host-bound", "bound", "EMA.update", NAMED, breakdown)
    assert judged(diagnosis, "host-bound", speed_up=true)["promise"] == is_kept
    assert "promise" not in judged(diagnosis, "host-bound")
