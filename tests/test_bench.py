"""`bench`, which alternates two commands until the answer is certain."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Command
from processes import ENVIRONMENT
from scipy import stats
from test_compare import run

from lightning_gputime._runs import saved

TRAIN = """\
import sys
if len(sys.argv) > 1: sys.exit(int(sys.argv[1]))
import torch
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(60):
    net(torch.ones(2, 2)).sum().backward()
    optimizer.step()
print("trained")
"""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return each command that ran, and its file. A command is the ms that it adds to a step."""
    runs: list[tuple[str, str]] = []

    def fake(command: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        runs.append((command, f"{path.parent.name}/{path.name}"))
        saved.save(run(len(runs), 200, more={"backward": float(command)}), path)

    monkeypatch.setattr("lightning_gputime._auto_instrumentation.command._save_run", fake)
    return runs


def test_bench_alternates_commands_and_saves_each_into_a_folder(
    ran: list[tuple[str, str]], tmp_path: Path, command: Command
) -> None:
    folder = tmp_path / "new" / "runs"
    out, err = command("bench", "0", "0.0", "--turns", "2", "--out", folder)
    assert ran == [
        ("0", "before/001.json.gz"),
        ("0.0", "after/001.json.gz"),
        ("0.0", "after/002.json.gz"),
        ("0", "before/002.json.gz"),
    ]
    first, second, where = err.splitlines()
    assert first.startswith("bench: turn 1 of 2: One run per side: ")
    assert second.startswith("bench: turn 2 of 2: no significant change of the step: ")
    assert where == f"bench: the runs are in {folder}"
    # Bench tests only once here, so `compare` prints the same for the folders.
    assert command("compare", folder / "before", folder / "after").out == out


@pytest.mark.parametrize(
    ("after", "bounds", "turns", "code"),
    [
        ("1.5", [], 3, 0),  # 10 % slower, which is certain at the first test.
        ("0", [], 7, 0),  # Equal commands are never certain to be equal.
        ("0", ["step:5%"], 3, 0),
        ("1.5", ["step:5%"], 3, 1),
        ("0.75", ["step:5%"], 7, 3),  # At the bound.
        ("1.5", ["5%", "forward:50%"], 3, 1),
        ("1.5", ["forward:0%", "step:5%"], 3, 1),  # One regression decides.
        ("0", ["forward:0%", "step:5%"], 7, 3),  # A single pass does not decide.
    ],
)
def test_bench_ends_once_the_answer_is_certain(
    after: str,
    bounds: list[str],
    turns: int,
    code: int,
    ran: list[tuple[str, str]],
    tmp_path: Path,
    command: Command,
) -> None:
    # The noise of a run's mean step is about 0.3 %.
    options = ["--turns", "7", "--out", tmp_path / "runs", *(f"--fail-above={b}" for b in bounds)]
    err = command("bench", *options, "--", "0", after, code=code).err
    assert len(ran) == 2 * turns
    assert ("Regression: " in err) is (code == 1)
    assert code != 3 or "Cannot tell whether " in err


@pytest.mark.usefixtures("ran")
def test_repeated_tests_of_bench_share_the_error_rate(tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "runs"
    commands = (
        ["bench", "0", "0", "--turns=4", f"--out={folder}"],
        ["compare", folder / "before", folder / "after"],
    )
    found = [json.loads(command(*arguments, "--json").out) for arguments in commands]
    several, once = (result["step"]["error_ms"] for result in found)
    # After 3 of 4 turns, bench uses (3 / 4)**2 of the 2 % for the step, and then the rest.
    freedoms = {"noise within the runs": 44, "spread between them": 6}
    chance = 0.02 * 7 / 16
    wider = [
        stats.t.ppf(1 - chance / 2, n) / stats.t.ppf(1 - 0.02 / 2, n) for n in freedoms.values()
    ]
    assert any(several / once == pytest.approx(ratio, rel=1e-4) for ratio in wider)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "b"], "before must be a command such as train.py, got ''"),
        (["a", " "], "after must be a command such as train.py, got ' '"),
        (["a", "b", "--turns", "1"], "--turns must be 2 or more, got 1"),
        (["a", "b", "--out", "."], "--out must be a new folder: . has files"),
        (["0", "0", "--fail-above", "lost:2%"], "no phase 'lost'; they have step, data, forward"),
    ],
)
def test_bench_refuses_invalid_arguments_before_running(
    arguments: list[str],
    message: str,
    ran: list[tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert message in command("bench", *arguments, code=2).err
    assert len(ran) == arguments.count("--fail-above")  # Only the first command.


BENCH = (sys.executable, "-m", "lightning_gputime", "bench")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BENCH, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_bench_stops_when_a_command_fails(folder: Path) -> None:
    message = "bench: `{}` failed with exit code {}, so the bench stopped\n"
    killed = bench("python -c 'exit(137)'", "train.py")
    assert killed.returncode == 137
    assert killed.stderr == message.format("python -c 'exit(137)'", 137)
    done = bench("train.py", "python train.py 3", "--out", "runs")
    assert done.returncode == 2, done.stderr
    assert done.stderr.endswith(message.format("python train.py 3", 3))
    # Only the comparison goes to stdout. The first command ran and was saved.
    assert ("trained" in done.stderr, done.stdout) == (True, "")
    assert len(saved.load(folder / "runs" / "before" / "001.json.gz").measured) > 24


@pytest.mark.slow
def test_bench_passes_an_interrupt_to_its_command_and_ends(folder: Path) -> None:
    # Like a Trainer, the command takes time to end, and succeeds.
    (folder / "train.py").write_text(
        "import time\ntry:\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    time.sleep(1)\n    print('tidied up', flush=True)\n"
    )
    process = subprocess.Popen(
        [*BENCH, "train.py", "train.py"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # A process group, like at a terminal.
    )
    assert process.stderr is not None
    while "ready" not in process.stderr.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "tidied up" in err
    assert err.endswith("bench: `train.py` failed with exit code 130, so the bench stopped\n")
