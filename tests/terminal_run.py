"""Train a small net on terminals with a progress bar, and print what they show at the end.

python tests/terminal_run.py BAR,COLUMNS,RICH...

Each training has a separate process and terminal.
"""

import json
import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import terminals
import torch
from fake_lightning import trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gputime import GPUPhaseTimer

BARS: dict[str, Any] = {"tqdm": pl.callbacks.TQDMProgressBar, "rich": pl.callbacks.RichProgressBar}


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 256), nn.Linear(256, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.body(x).relu()), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(bar: str) -> None:
    warnings.simplefilter("ignore")
    data = TensorDataset(torch.randn(160, 8), torch.randn(160, 1))
    runner = trainer(GPUPhaseTimer(), BARS[bar](), max_epochs=2, enable_progress_bar=True)
    runner.fit(Net(), DataLoader(data, batch_size=4))
    print("training is over")


def main(cases: list[str]) -> None:
    shown = {}
    for case in cases:
        bar, columns, rich = case.split(",")
        process, terminal = terminals.fork(int(columns))
        if not process:
            if rich == "without":
                # Pretend that rich is not installed.
                sys.modules["rich"] = None  # type: ignore[assignment]
            train(bar)
            return
        shown[case] = terminals.read(process, terminal, int(columns))
    print(json.dumps(shown))


if __name__ == "__main__":
    main(sys.argv[1:])
