import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")
def test_the_code_blocks_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    net = nn.Linear(4, 1)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    names: dict[str, Any] = {
        "torch": torch,
        "model": Regression(),
        "net": net,
        "loader": DataLoader(data, batch_size=4),
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
    }
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        exec(block, names)
    printed = capsys.readouterr().out
    assert printed.count("warm-up steps left out") == 3
    assert "of the time is backward" in printed


def test_every_command_names_a_file_that_is_there() -> None:
    for path in re.findall(r"(?:examples|benchmarks)/[\w/.]+\.(?:py|json|png)", README):
        assert (ROOT / path).is_file(), path


def test_every_test_that_is_named_is_there() -> None:
    names = re.findall(r"`(test_\w+)`", README)
    assert len(names) > 50
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert [name for name in names if f"def {name}(" not in tests] == []


def test_the_ci_runs_the_command_for_the_tests() -> None:
    [command] = [line for line in README.splitlines() if "python -m pytest" in line]
    install, run = command.removeprefix("python -m ").split(" && python -m ")
    script = (ROOT / ".ci/run").read_text()
    assert install.replace("pip install", "pip install --quiet") in script
    assert run in script
