"""`lightning-gputime bench`: two commands in turns, until the answer is certain."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats
from test_compare import run

from lightning_gputime.__main__ import main
from lightning_gputime._saved_runs import saved

TRAIN = """\
import sys, torch
if len(sys.argv) > 1: sys.exit(int(sys.argv[1]))
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(60):
    net(torch.ones(2, 2)).sum().backward()
    optimizer.step()
print("trained")
"""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The commands that were run, and where each saved its run: `MS`, how much longer a step is."""
    runs: list[tuple[str, str]] = []

    def fake(command: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        runs.append((command, f"{path.parent.name}/{path.name}"))
        one = run(len(runs), 200, more={"backward": float(command)})
        saved.save(replace(one, name=""), path)

    monkeypatch.setattr("lightning_gputime._auto_instrumentation.command._save_run", fake)
    return runs


def test_commands_take_turns_and_what_they_save_is_a_folder_each(
    ran: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "runs"
    assert main(["bench", "0", "0.0", "--turns", "2", "--out", str(folder)]) == 0
    assert ran == [
        ("0", "before/001.json.gz"),
        ("0.0", "after/001.json.gz"),
        ("0.0", "after/002.json.gz"),
        ("0", "before/002.json.gz"),
    ]
    out, err = capsys.readouterr()
    first, second, where = err.splitlines()
    assert first.startswith("bench: turn 1 of 2: ")
    assert "; with one run a side this may be chance: " in first
    assert second.startswith("bench: turn 2 of 2: no significant change of the step: ")
    assert where == f"bench: the runs are in {folder}"
    # One look, so what is printed is what the command says of the folders.
    main(["compare", str(folder / "before"), str(folder / "after")])
    assert capsys.readouterr().out == out


# The noise of a run's mean step is some 0.3 %.
@pytest.mark.parametrize(
    ("after", "bounds", "turns", "code"),
    [
        ("1.5", [], 3, 0),  # 10 % slower: certain at the first look.
        ("-1.5", [], 3, 0),  # And faster.
        ("0", [], 7, 0),  # Equal: it is never certain that they differ.
        ("0", ["step:5%"], 3, 0),  # Certainly not 5 % slower.
        ("1.5", ["step:5%"], 3, 1),
        ("0.75", ["step:5%"], 7, 0),  # Just at the bound.
        ("1.5", ["5%", "forward:50%"], 3, 1),
        ("1.5", ["forward:0%", "step:5%"], 3, 1),  # One that is above is enough.
        ("0", ["forward:0%", "step:5%"], 7, 0),  # One that is below is not.
    ],
)
def test_it_ends_when_the_answer_is_certain(
    after: str,
    bounds: list[str],
    turns: int,
    code: int,
    ran: list[tuple[str, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [f"--fail-above={bound}" for bound in bounds]
    command = ["bench", "--turns", "7", "--out", str(tmp_path / "runs"), *given, "--", "0", after]
    assert main(command) == code
    assert len(ran) == 2 * turns
    assert "warning" not in capsys.readouterr().err


def test_the_chance_is_split_by_the_looks(
    ran: list[tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [str(tmp_path / "runs" / side) for side in ("before", "after")]
    errors = []
    for command in (
        ["bench", "0", "0", "--turns=4", f"--out={tmp_path / 'runs'}"],
        ["compare", *sides],
    ):
        assert main([*command, "--json"]) == 0
        errors.append(json.loads(capsys.readouterr().out)["step"]["error_ms"])
    # After 3 and 4 turns it looks: 1 % of chance each, in place of the step's 2 %.
    by = {
        "the noise within the runs": 44,
        "the spread between them": 6,
    }
    wider = [stats.t.ppf(1 - 0.01 / 2, n) / stats.t.ppf(1 - 0.02 / 2, n) for n in by.values()]
    assert any(errors[0] / errors[1] == pytest.approx(one, rel=1e-4) for one in wider)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["", "b"], "before must be a command such as train.py, got ''"),
        (["a", " "], "after must be a command such as train.py, got ' '"),
        (["a", "b", "--turns", "1"], "--turns must be 2 or more, got 1"),
        (["a", "b", "--out", "."], "--out must be a new folder: . has files"),
        (["0", "0", "--fail-above", "lost:2%"], "no phase 'lost'; they have step, data, forward"),
    ],
)
def test_what_is_wrong_is_said_at_once(
    arguments: list[str],
    told: str,
    ran: list[tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    assert told in capsys.readouterr().err
    assert len(ran) == arguments.count("--fail-above")  # The first command alone.


BENCH = (sys.executable, "-m", "lightning_gputime", "bench")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("code", "expected"), [(7, 7), (1, 2)])  # 1 means slower.
def test_a_command_that_fails_ends_it_with_its_exit_code(
    code: int, expected: int, folder: Path
) -> None:
    command = [*BENCH, "train.py", f"python train.py {code}", "--out", "runs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == expected, done.stderr
    assert done.stderr.endswith(
        f"bench: `python train.py {code}` ended with exit code {code}, and the bench with it\n"
    )
    # What a command prints is no part of the comparison, and the first was run and saved.
    assert ("trained" in done.stderr, done.stdout) == (True, "")
    assert len(saved.load(folder / "runs" / "before" / "001.json.gz").measured) > 24


@pytest.mark.slow
def test_a_command_that_trains_nothing_is_told(folder: Path) -> None:
    command = [*BENCH, "python -c 'print(1)'", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "`python -c 'print(1)'` saved no run: it must train" in done.stderr


@pytest.mark.slow
def test_an_interrupt_is_the_commands_and_ends_the_bench(folder: Path) -> None:
    # A command that takes its time to end, and ends well, as a Trainer does.
    (folder / "train.py").write_text(
        "import time\ntry:\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    time.sleep(1)\n    print('tidied up', flush=True)\n"
    )
    process = subprocess.Popen(
        [*BENCH, "train.py", "train.py"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # A group of processes of its own, as at a terminal.
    )
    assert process.stderr is not None
    while "ready" not in process.stderr.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "tidied up" in said
    assert said.endswith("bench: `train.py` ended with exit code 130, and the bench with it\n")
