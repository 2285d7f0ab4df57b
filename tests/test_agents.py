"""The page for coding agents: its commands work, and its list of pages has no broken links."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ENVIRONMENT

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


@pytest.mark.slow
def test_agent_commands_find_and_prove_the_fix_of_a_slow_loader(tmp_path: Path) -> None:
    measure, prove = re.findall(r"```sh\n\s*(.*?)\n\s*```", SKILL)
    (tmp_path / "train.py").write_text(SLOW)
    (tmp_path / "train_new.py").write_text(
        SLOW.replace("batch_size=8", "batch_size=8, num_workers=4")
    )

    def run(command: str) -> str:
        words = shlex.split(command.partition(" > ")[0])
        return subprocess.run(
            [sys.executable, "-m", "lightning_gputime", *words[1:]],
            cwd=tmp_path,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    diagnosis = json.loads(run(measure))["diagnosis"]
    assert diagnosis["code"] == "input-bound"
    assert diagnosis["advice"]
    entry = next(row for row in diagnosis["time_breakdown"]["rows"] if row["name"] == "data")
    assert entry["speed_up"] > 2
    assert Path(entry["lines"][0]["file"]).name == "train.py"
    # The answer is certain after 3 turns.
    prove = prove.replace("--turns 5", "--turns 3")
    assert json.loads(run(prove))["direction"] == "faster"
