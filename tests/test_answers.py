"""Programs of `benchmarks/answers.py` with a planted problem, end to end with default options."""

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Trainers warn.
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("answers")


@pytest.mark.parametrize(
    "name",
    [
        "lightning: metric of all predictions so far",
        "plain: photos augmented before resizing",
        "transformers: histograms of the weights",
    ],
)
def test_timer_names_the_planted_problem(answers: Any, name: str) -> None:
    [project] = (item for item in answers.projects_cpu.PROJECTS if item.name == name)
    answer = answers.check(project, 1, show=False, device="cpu", small=False)
    checks = {check: answer["checks"][check] for check in ("named", "code", "wrong")}
    assert checks == {"named": True, "code": True, "wrong": False}, answer
    assert answer["speed-up"] > 1.2
    assert answer["promised"] > 1.2


def test_every_program_is_declared_once_per_device(answers: Any) -> None:
    programs = (*answers.projects_cpu.PROJECTS, *answers.projects_gpu.PROJECTS)
    assert max(Counter((item.device, item.name) for item in programs).values()) == 1
    assert sum(bool(item.culprits) for item in programs) >= 40
    # Each culprit is code of the programs, or an option.
    found = {name: answers.lines_of(name)[0] for item in programs for name in item.culprits}
    assert {name for name, file in found.items() if not file and name.startswith("line:")} == set()


def test_culprit_is_matched_by_its_name_or_its_lines(answers: Any) -> None:
    file, [number] = answers.lines_of("line:one-hot")
    for text in ("{0}:{1}", "`CharRNN.forward` ({0}:{1})", "{0}:{2}-{1} takes"):
        assert answers.names(text.format(file, number, number - 3), "line:one-hot")
    assert not answers.names(f"{file}:{number + 1}-{number + 3}", "line:one-hot")
    assert answers.names("`Photos` takes 2 ms", "Photos")
    assert not answers.names("`PhotosOfCats` takes 2 ms", "Photos")
