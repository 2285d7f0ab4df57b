"""Programs of `benchmarks/answers.py` with a planted problem, judged with default options."""

import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from lightning_gputime._diagnosis import Advice, Diagnosis, Entry, TimeBreakdown

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def answers() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("answers")


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
def test_timer_names_the_planted_problem(answers: Any, name: str) -> None:
    [project] = (item for item in answers.projects_cpu.PROJECTS if item.name == name)
    if project.missing:
        pytest.skip(f"{project.missing} not installed")
    answer = answers.check(project, 1, show=False, device="cpu", small=False)
    checks = {check: answer["checks"][check] for check in ("named", "code", "wrong")}
    assert checks == {"named": True, "code": True, "wrong": False}, answer
    assert answer["speed-up"] > 1.2
    assert answer["promised"] > 1.2


def test_programs_have_unique_names_and_known_culprits(answers: Any) -> None:
    programs = [*answers.projects_cpu.PROJECTS, *answers.projects_gpu.PROJECTS]
    assert max(Counter((item.device, item.name) for item in programs).values()) == 1
    planted = Counter(item.device for item in programs if item.culprits)
    assert {*planted} == {"cpu", "cuda"}
    assert min(planted.values()) >= 24
    assert len(programs) - planted.total() >= 8
    # Only options and entries of the breakdown have no file.
    culprits = {culprit for item in programs for culprit in item.culprits}
    code = {culprit for culprit in culprits if re.match(r"line:|[A-Z]\w+\.", culprit)}
    assert [culprit for culprit in code if not answers.lines_of(culprit)[0]] == []


def test_culprit_is_matched_by_its_name_or_its_lines(answers: Any) -> None:
    file, [number] = answers.lines_of("line:one-hot")
    for text in ("{0}:{1}", "`CharRNN.forward` ({0}:{1})", "{0}:{2}-{1} takes"):
        assert answers.names(text.format(file, number, number - 3), "line:one-hot")
    assert not answers.names(f"{file}:{number + 1}-{number + 3}", "line:one-hot")
    assert answers.names("`Photos` takes 2 ms", "Photos")
    assert not answers.names("`PhotosOfCats` takes 2 ms", "Photos")


NAMED = "host-bound: `EMA.update` takes 1 ms of 2 ms per step"
OTHER = "host-bound: `Net.forward` takes 1 ms of 2 ms per step"


def judged(
    answers: Any,
    diagnosis: Diagnosis,
    *codes: str,
    device: str = "cpu",
    culprits: tuple[str, ...] = ("EMA.update",),
    speed_up: float | None = None,
) -> Any:
    """Return the checks of a diagnosis of a removable problem, by name."""
    project = answers.Project(device, "plain: test", codes, culprits, print, is_removable=True)
    return answers.judge(project, diagnosis, speed_up)["checks"]


INPUT = Diagnosis("input-bound", "bound", headline=OTHER)


@pytest.mark.parametrize(
    ("diagnosis", "passed"),
    [
        (Diagnosis("host-bound", "bound", headline=NAMED), "named code"),
        (Diagnosis("host-bound", "bound", headline=OTHER), "code"),
        (replace(INPUT, headline=NAMED), "named"),
        (INPUT, "wrong"),
        (replace(INPUT, grade="worth a look"), ""),
        (replace(INPUT, headline="", advice=(Advice("", NAMED),)), "named"),
        # Only the first piece of advice counts.
        (replace(INPUT, headline="", advice=(Advice("", OTHER), Advice("", NAMED))), "wrong"),
    ],
)
def test_diagnosis_of_a_planted_problem_is_judged(
    answers: Any, diagnosis: Diagnosis, passed: str
) -> None:
    checks = judged(answers, diagnosis, "host-bound")
    assert checks == {name: name in passed.split() for name in ("named", "code", "wrong")}


@pytest.mark.parametrize(
    ("code", "grade", "is_false_alarm"),
    [
        ("host-bound", "bound", True),
        ("host-bound", "worth a look", False),
        ("compute-bound", "balanced", False),
        ("compute-bound", "bound", False),  # The accepted code.
    ],
)
def test_diagnosis_of_a_control_is_judged(
    answers: Any, code: str, grade: Any, is_false_alarm: bool
) -> None:
    checks = judged(answers, Diagnosis(code, grade), "compute-bound", culprits=())
    assert checks == {"false alarm": is_false_alarm}


def test_pace_is_judged_on_a_gpu_only(answers: Any) -> None:
    codes = ("host-bound", "launch-bound", "GPU-bound", "compute-bound")
    all_checks = [
        judged(answers, Diagnosis(code, "bound", headline=NAMED), "host-bound", device="cuda")
        for code in codes
    ]
    assert [checks["pace"] for checks in all_checks] == [True, True, False, False]
    assert "pace" not in judged(answers, Diagnosis("host-bound", "bound"), "host-bound")


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
    answers: Any, promised: float | None, set_up_share: float, true: float, is_kept: bool
) -> None:
    set_up = Entry("set-up", 1.0, set_up_share)
    found = Entry("EMA.update", 1.0, 1 - set_up_share, speed_up=promised)
    breakdown = TimeBreakdown((set_up, found), 2.0, "fit")
    diagnosis = Diagnosis("host-bound", "bound", "EMA.update", NAMED, breakdown)
    assert judged(answers, diagnosis, "host-bound", speed_up=true)["promise"] == is_kept
    assert "promise" not in judged(answers, diagnosis, "host-bound")


@pytest.mark.usefixtures("one_thread")
def test_answers_are_counted_and_saved(
    answers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: Mapping[str, Mapping[str, bool]] = {
        "plain: right": {"named": True, "code": True, "wrong": False},
        "plain: wrong": {"named": False, "code": False, "wrong": True},
        "plain: control": {"false alarm": False},
    }

    answer = dict.fromkeys(("code", "grade", "headline", "promised", "speed-up", "seconds"), "")

    def check(project: Any, rounds: int, **variant: Any) -> dict[str, Any]:
        return {**answer, "checks": checks[project.name]}  # Raises for the broken program.

    programs = [
        SimpleNamespace(device="cpu", name=name, missing=[]) for name in (*checks, "plain: broken")
    ]
    monkeypatch.setattr(answers, "check", check)
    monkeypatch.setattr(answers, "logging", MagicMock())  # Keep the levels of the loggers.
    monkeypatch.setattr(answers.projects_cpu, "PROJECTS", programs)
    path = tmp_path / "answers.json"
    monkeypatch.setattr(sys, "argv", ["answers.py", "--device", "cpu", "--out", str(path)])
    answers.main()
    saved = json.loads(path.read_text())
    counts = {"named": "1 of 2", "code": "1 of 2", "wrong": "1 of 2", "false alarm": "0 of 1"}
    assert {name: saved[name] for name in counts} == counts
    assert [*saved["answers"]] == [*checks]
    passed = {name: row["passed"].split(", ") for name, row in saved["answers"].items()}
    expected = {name: [*filter(found.get, found)] or [""] for name, found in checks.items()}
    assert passed == expected
    assert [*saved["skipped"]] == ["plain: broken"]
