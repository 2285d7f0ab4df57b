"""The page for coding agents: its commands work, and its list of pages has no broken links."""

import json
import re
import shlex
from pathlib import Path

import pytest
from conftest import Command
from processes import run
from test_compare import run as simulated_run

from lightning_gputime._runs import saved

DOCS = Path(__file__).parent.parent / "docs"
SKILL = (DOCS / "agents/SKILL.md").read_text()

SLOW = """
import time, torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, i):
        time.sleep(0.002)
        return torch.ones(8)
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for x in torch.utils.data.DataLoader(Data(), batch_size=8):
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
"""


def test_pages_for_agents_have_no_broken_links() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (DOCS / "llms.txt").read_text())
    assert len(links) > 10
    assert [link for link in links if not (DOCS / link).is_file()] == []


MEASURE, PROVE = (
    shlex.split(command.partition(" > ")[0])[1:]
    for command in re.findall(r"```sh\n\s*(.*?)\n\s*```", SKILL)
)


@pytest.mark.slow
def test_agent_command_finds_a_slow_loader(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLOW)
    diagnosis = json.loads(run("-m", "lightning_gputime", *MEASURE, cwd=tmp_path))["diagnosis"]
    assert diagnosis["code"] == "input-bound"
    assert diagnosis["advice"]
    entry = next(row for row in diagnosis["time_breakdown"]["rows"] if row["name"] == "data")
    assert entry["speed_up"] > 2
    assert Path(entry["lines"][0]["file"]).name == "train.py"


def test_agent_command_proves_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def save_run(script: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        saved.save(simulated_run(n=200, more={"data": 5.0 * (script == "train.py")}), path)

    monkeypatch.setattr("lightning_gputime._auto_instrumentation.command._save_run", save_run)
    monkeypatch.chdir(tmp_path)
    assert json.loads(command(*PROVE).out)["direction"] == "faster"
