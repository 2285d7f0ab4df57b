"""The GitHub Action that compares step times: its shell steps, run like on a runner."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from processes import ENVIRONMENT
from test_compare import run

from lightning_gputime._auto_instrumentation.environment import VARIABLE
from lightning_gputime._runs import saved

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
ACTION = yaml.safe_load((ROOT / ".github/actions/compare/action.yml").read_text())
WORKFLOW = yaml.safe_load((ROOT / "examples/step_time.yml").read_text())
[STEP] = ACTION["runs"]["steps"]


def run_action(folder: Path, **inputs: str) -> tuple[int, str, str]:
    """Return the exit code, the outcome and the printed text."""
    all_inputs = {name: spec.get("default", "") for name, spec in ACTION["inputs"].items()} | inputs
    values = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: all_inputs[match[1]], text)
        for name, text in STEP["env"].items()
    }
    files = {name: str(folder / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEP["run"]],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, **values, **files},
        capture_output=True,
        text=True,
        check=False,
    )
    outcome = (folder / "GITHUB_OUTPUT").read_text().removeprefix("outcome=").strip()
    return done.returncode, outcome, done.stdout + done.stderr


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a folder with three saved runs in each of four folders."""
    added_ms = {"before": 0.0, "after same": 0.0, "slower": 1.5, "at bound": 0.75}
    for name, more_ms in added_ms.items():
        for i in range(3):
            (tmp_path / name).mkdir(exist_ok=True)
            timed = run(seed=7 * i + len(name), n=200, more={"backward": more_ms})
            saved.save(timed, tmp_path / name / f"{i}.json")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"after": "after same"}, (0, "passed")),
        ({"after": "slower"}, (1, "regression")),
        ({"after": "at bound"}, (0, "cannot tell")),
        ({"after": "at bound", "fail-if-uncertain": "true"}, (3, "cannot tell")),
        ({"after": "slower", "fail-above": "step:50% forward:50%"}, (0, "passed")),
        ({"after": "not there"}, (2, "error")),
    ],
)
def test_action_fails_according_to_the_outcome(
    inputs: dict[str, str], expected: tuple[int, str], runs: Path
) -> None:
    code, outcome, printed = run_action(runs, before="before", **inputs)
    assert (code, outcome) == expected, printed
    summary = (runs / "GITHUB_STEP_SUMMARY").read_text()
    assert summary.startswith("### Step time" if outcome != "error" else "")
    assert ("::warning::" in printed) == (expected == (0, "cannot tell"))


@pytest.mark.slow
def test_action_alternates_two_commands(tmp_path: Path) -> None:
    # Instead of a training, the commands copy saved runs.
    script = (
        f"import json, os, shutil, sys\nto = json.loads(os.environ[{VARIABLE!r}])['save_path']\n"
        "shutil.copy(sys.argv[1], to)\n"
    )
    (tmp_path / "train.py").write_text(script)
    for name, more_ms in (("old", 0.0), ("new", 1.5)):
        saved.save(run(n=200, more={"backward": more_ms}), tmp_path / f"{name}.json.gz")
    inputs = {"bench": "true", "before": "train.py old.json.gz", "after": "train.py new.json.gz"}
    code, outcome, printed = run_action(tmp_path, **inputs)
    assert (code, outcome) == (1, "regression"), printed
    assert "of 3 runs" in (tmp_path / "step-time.md").read_text()


def test_workflow_passes_known_inputs() -> None:
    steps: list[dict[str, Any]] = WORKFLOW["jobs"]["step-time"]["steps"]
    [used] = [step for step in steps if step.get("uses") == "./.github/actions/compare"]
    assert {*used["with"]} <= {*ACTION["inputs"]}
    assert any(ACTION["inputs"]["out"]["default"] in step.get("run", "") for step in steps)
