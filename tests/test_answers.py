"""Programs of `benchmarks/answers.py` with a planted problem, judged with default options."""

import importlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

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
