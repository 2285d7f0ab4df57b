"""Planted bottlenecks of `benchmarks/answers.py`, end to end with default options."""

import importlib
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
    "name", ["lightning: slow collate", "plain: slow __getitem__", "transformers: slow callback"]
)
def test_timer_finds_planted_bottleneck(answers: Any, name: str) -> None:
    plant = next(plant for plant in answers.PLANTS if plant.name == name)
    outcome = answers.check(plant, pairs=1)
    assert not {"code", "grade", "entry", "slowdown"} & {*outcome.failures}
    assert outcome.gain > 1.2
    assert outcome.speed_up > 1.2


def test_every_plant_is_declared_once(answers: Any) -> None:
    names = [plant.name for plant in answers.PLANTS]
    assert len(set(names)) == len(names)
    assert sum(not plant.is_balanced for plant in answers.PLANTS) >= 40


def test_planted_line_is_matched_with_a_range_of_lines(answers: Any) -> None:
    lines = answers.SOURCE.read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if "clip(model)" in line)
    text = f"`optimizer` is planted_projects.py:{number - 2}-{number + 1}"
    assert answers.names(text, "line:clip(model)")
    assert not answers.names(f"planted_projects.py:{number + 1}-{number + 3}", "line:clip(model)")
    assert answers.names("`Photos` takes 2 ms", "Photos")
