"""Time training, validation and test of a model, and log the times to TensorBoard.

python examples/evaluation.py
tensorboard --logdir lightning_logs
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from quickstart import ConvNet, digits
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gputime import GPUPhaseTimer


class Evaluated(ConvNet):
    """Model of quickstart.py with a test step."""

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the accuracy on one batch."""
        images, labels = batch
        self.log("test/accuracy", (self(images).argmax(1) == labels).float().mean())


def main(max_epochs: int = 10, log_dir: str = "lightning_logs") -> dict[str, Tensor]:
    """Train and test; return the metrics."""
    pl.seed_everything(0)
    train, val, test = torch.utils.data.random_split(digits(), [1200, 297, 300])
    timer, logger = GPUPhaseTimer(), TensorBoardLogger(log_dir, name="evaluation")
    trainer = pl.Trainer(
        max_epochs=max_epochs,
        callbacks=[timer],
        logger=logger,
        log_every_n_steps=5,
    )
    model = Evaluated()
    trainer.fit(model, DataLoader(train, batch_size=64), DataLoader(val, batch_size=64))
    metrics = dict(trainer.callback_metrics)
    trainer.test(model, DataLoader(test, batch_size=64), verbose=False)
    return {**metrics, **trainer.callback_metrics}


if __name__ == "__main__":
    for key, value in main().items():
        print(f"{key:32} {value:.3f}")
