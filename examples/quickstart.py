"""Train a small convolutional net on handwritten digits with Lightning, and time its phases.

The images come with scikit-learn, so nothing is downloaded. Times are logged to CSV and TensorBoard
under `lightning_logs`, and a table is printed at the end:

    python examples/quickstart.py
    tensorboard --logdir lightning_logs
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gputime import GPUPhaseTimer


class ConvNet(pl.LightningModule):
    """Classifier for 8 x 8 images."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * width, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, 10) for images of shape (batch, 1, 8, 8)."""
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the accuracy on one batch."""
        images, labels = batch
        self.log("val/accuracy", (self(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def digits() -> TensorDataset:
    """Return 1797 images of handwritten digits, scaled to 0..1, and their labels."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images, torch.tensor(data.target))


def main(max_epochs: int = 10, log_dir: str = "lightning_logs") -> GPUPhaseTimer:
    """Train, and return the timer."""
    pl.seed_everything(0)
    train, val = torch.utils.data.random_split(digits(), [1500, 297])
    timer = GPUPhaseTimer()
    trainer = pl.Trainer(
        max_epochs=max_epochs,
        callbacks=[timer],
        logger=[CSVLogger(log_dir, name="csv"), TensorBoardLogger(log_dir, name="tensorboard")],
        log_every_n_steps=10,
    )
    trainer.fit(
        ConvNet(),
        DataLoader(train, batch_size=64, shuffle=True),
        DataLoader(val, batch_size=297),
    )
    return timer


if __name__ == "__main__":
    main()
