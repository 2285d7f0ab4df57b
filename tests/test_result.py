"""Results as JSON and Markdown: the schema, their size, and the commands that print them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from fake_loop import with_facts
from processes import ENVIRONMENT
from test_compare import run, saved_to
from test_schema import GOLDEN, filled_run

from lightning_gputime import Run, compare, load
from lightning_gputime._auto_instrumentation.environment import BEGAN, VARIABLE
from lightning_gputime._ledger.rows import LineRow, PhasePart
from lightning_gputime._runs.result import result_of

jsonschema = pytest.importorskip("jsonschema")

SCHEMA = json.loads(
    Path(__file__).parent.parent.joinpath("docs/reference/result.schema.json").read_text()
)
MAX_BRIEF_CHARS = 6000  # 2,000 tokens of three characters each.

each_format = pytest.mark.parametrize("flag", ["--json", "--brief"])


def parse_valid(text: str) -> dict[str, Any]:
    """Return a result from JSON that must follow the schema."""
    result: dict[str, Any] = json.loads(text)
    jsonschema.Draft202012Validator(SCHEMA).validate(result)
    return result


def paths_of(value: Any, path: str = "") -> set[str]:
    """Return the paths of all values, such as `.rows.step`."""
    if isinstance(value, dict):
        return {path}.union(*(paths_of(item, f"{path}.{key}") for key, item in value.items()))
    if isinstance(value, list):
        return {path}.union(*(paths_of(item, f"{path}[]") for item in value))
    return {path}


def with_line() -> Run:
    """Return a run in which a line takes all of forward."""
    measured, line = run(1, 300), LineRow("f", "a.py", 7, phases={"forward": PhasePart(5.0)})
    return replace(measured, _summary=with_facts(measured.summary(), lines=(line,)))


@each_format
@pytest.mark.parametrize("name", [path.name for path in sorted(GOLDEN.glob("run-*.json"))])
def test_result_of_each_version_of_a_file_follows_the_schema(
    name: str, flag: str, command: Command
) -> None:
    result = parse_valid(command("show", GOLDEN / name, flag).out)
    assert (result["kind"], result["brief"]) == ("run", flag == "--brief")


def test_brief_result_is_short_and_its_keys_are_all_in_the_full_result() -> None:
    for measured in (run(1, 300), with_line(), filled_run(), load(GOLDEN / "run-5.1.json")):
        full, brief = result_of(measured), result_of(measured, brief=True)
        assert paths_of(json.loads(json.dumps(brief))) <= paths_of(json.loads(json.dumps(full)))
        assert len(json.dumps(brief)) < MAX_BRIEF_CHARS


def test_brief_result_stays_short_for_many_phases_and_long_texts() -> None:
    measured = run(1, 100, more={f"{'phase' * 9}{i}": 1.0 for i in range(60)})
    long = replace(measured.environment, device="x" * 10_000)
    brief = result_of(replace(measured, environment=long), brief=True)
    assert len(json.dumps(brief)) < MAX_BRIEF_CHARS


@pytest.fixture
def compared(tmp_path: Path, command: Command) -> Callable[..., str]:
    """Return a function that compares two runs, whose backward differs, and returns the output."""
    paths = saved_to(tmp_path, *(run(i, 300, more={"backward": float(i)}) for i in range(2)))

    def compared(*options: str, code: int = 0) -> str:
        return str(command("compare", *paths, *options, code=code).out)

    return compared


@each_format
def test_comparison_fits_the_schema(flag: str, compared: Callable[..., str]) -> None:
    result = parse_valid(compared("--fail-above", "step:1%", flag, code=1))
    assert result["outcome"] == "regression"
    assert result["rows"]["backward"]["direction"] == "slower"
    full = result_of(compare(run(0, 300), run(1, 300, more={"backward": 1.0})))
    assert paths_of(result) - {".outcome"} <= paths_of(json.loads(json.dumps(full)))


def test_markdown_has_outcome_and_table(compared: Callable[..., str]) -> None:
    markdown = compared("--fail-above", "step:1%", "--markdown", code=1)
    heading, _, outcome, _, title, _, header, rule, *rows = markdown.splitlines()
    assert heading == "### Step time"
    assert outcome == "**Regression: step is slower by more than 1 %.**"
    assert title.startswith("A typical step in ms: before")
    assert header.startswith("| phase | before | after | change |")
    assert {row.count("|") for row in (header, rule, *rows) if row.startswith("|")} == {8}
    assert "% slower: backward" in compared("--markdown").splitlines()[2]


SCRIPT = """
import torch
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
print("{not JSON")
for number in range(30):
    net(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    if number == 20:
        raise KeyError
"""


SAVES_RUNS = """
import json, os, pathlib, sys
path = pathlib.Path(json.loads(os.environ["LIGHTNING_GPUTIME"])["save_path"])
golden = pathlib.Path(sys.argv[1]).read_text()
for end in sys.argv[2:]:
    text = golden.replace('"device": "text"', f'"device": "GPU{end}"')
    path.with_stem(path.stem + end).write_text(text)
"""


@pytest.mark.parametrize(
    ("ends", "code"),
    [([], 2), ([""], 0), (["", "-2", "-10"], 0), (["-4711"], 0)],
    ids=["no training", "a training", "three trainings", "only a subprocess trains"],
)
def test_run_prints_and_saves_each_training(
    ends: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    for variable in (VARIABLE, BEGAN, "PYTHONPATH"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    script, folder = tmp_path / "train.py", tmp_path / "new"
    script.write_text(SAVES_RUNS)
    arguments = ["--brief", "--save-path", folder / "saved.json", script, GOLDEN / "run-6.0.json"]
    out, err = command("run", *arguments, *reversed(ends), code=code)
    printed = [parse_valid(line)["environment"]["device"] for line in out.splitlines()]
    saved = [load(folder / f"saved{end}.json").environment.device for end in ends]
    assert printed == saved == [f"GPU{end}" for end in ends]
    assert len([*folder.glob("*")]) == len(ends)
    assert ("no run was saved" in err) == (not ends)


@pytest.mark.slow
def test_run_prints_nothing_but_the_result(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "lightning_gputime", "run", "--brief", "--warmup-steps", "2"]
    done = subprocess.run(
        [*command, "--save-path", "saved.json", "train.py"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "{not JSON" in done.stderr) == (1, True)
    assert parse_valid(done.stdout)["steps"] > 10
    assert load(tmp_path / "saved.json").summary().steps > 10
