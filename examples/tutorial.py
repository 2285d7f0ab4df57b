"""Train a model, and apply four changes that the timer suggests: see docs/tutorial.md.

    python examples/tutorial.py                                  # as found
    python examples/tutorial.py --workers                        # then add a flag per change:
    python examples/tutorial.py --workers --rare-checks --large-batch --bf16
    python examples/tutorial.py --all --json tutorial.json       # all five variants

The images come with scikit-learn. A run takes less than a minute on a GPU. On a CPU, the net is
smaller.
"""

import argparse
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_gputime import GPUPhaseTimer

CHANGES = ("workers", "rare_checks", "large_batch", "bf16")
BATCH, LARGE_BATCH = 32, 512


class AugmentedDigits(Dataset[tuple[Tensor, int]]):
    """Handwritten digits, each distorted when it is loaded."""

    def __init__(self, images: int, size: int) -> None:
        data = load_digits()
        self._images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
        self._labels, self._n, self._size = data.target, images, size

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        index %= len(self._images)
        # Elastic distortion: shift each pixel by blurred noise.
        moves = torch.randn(1, 2, self._size, self._size)
        for _ in range(8):
            moves = nn.functional.avg_pool2d(moves, 5, stride=1, padding=2)
        straight = torch.eye(2, 3)[None]
        grid = nn.functional.affine_grid(straight, [1, 1, *moves.shape[2:]], align_corners=False)
        grid = grid + 0.5 * moves.permute(0, 2, 3, 1)
        image = nn.functional.grid_sample(self._images[index][None], grid, align_corners=False)[0]
        return image + 0.1 * torch.randn_like(image), int(self._labels[index])


class ConvNet(pl.LightningModule):
    """Classifier for digits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inputs, layers = 1, []
        for _ in range(6):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            inputs = width
        self.net = nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class AccuracyCurve(pl.Callback):
    """Callback that computes the accuracy on some images every n steps."""

    def __init__(self, images: Dataset[tuple[Tensor, int]], n: int, every_n_steps: int) -> None:
        self._every, self.curve = every_n_steps, list[float]()
        self._images = torch.stack([images[index][0] for index in range(n)])
        self._labels = torch.tensor([images[index][1] for index in range(n)])

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Add a point to the curve."""
        if trainer.global_step % self._every == 0:
            found = module.net(self._images.to(module.device)).argmax(1).cpu()
            self.curve.append((found == self._labels).float().mean().item())


def train(
    changes: Sequence[str] = (),
    *,
    steps: int = 150,
    width: int = 0,
    timer: GPUPhaseTimer | None = None,
) -> dict[str, Any]:
    """Train with the given changes, and return the measurements.

    Args:
        changes: Names from `CHANGES`.
        steps: Number of batches; fewer for large batches on a CPU.
        width: Number of channels of the net. 0: 96 on a GPU, 4 on a CPU.
        timer: The timer; default: a new timer.
    """
    pl.seed_everything(0, verbose=False)
    on_gpu = torch.cuda.is_available()
    width = width or (96 if on_gpu else 4)
    size = 32 if on_gpu else 16
    batch = LARGE_BATCH if "large_batch" in changes else BATCH
    if not on_gpu and batch > BATCH:
        steps = max(steps // 5, 10)
    workers = min(16, os.cpu_count() or 1) if "workers" in changes else 0
    images = AugmentedDigits(steps * batch, size)
    curve = AccuracyCurve(images, 128, 50 if "rare_checks" in changes else 1)
    loader = DataLoader(
        images,
        batch_size=batch,
        num_workers=workers,
        pin_memory=on_gpu and workers > 0,
    )
    timer = timer or GPUPhaseTimer()
    trainer = pl.Trainer(
        max_epochs=1,
        devices=1,
        precision="bf16-mixed" if "bf16" in changes else "32-true",
        callbacks=[timer, curve],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(ConvNet(width), loader)
    summary = timer.summary()
    return {
        "changes": [*changes],
        "verdict": summary.verdict,
        "next": [*summary.advice],
        "batch": batch,
        "workers": workers,
        "images_per_sec": summary.items_per_sec,
        "step_ms": summary.step.mean_ms,
        "share": {name: row.share for name, row in summary.rows.items()},
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }


def main(
    changes: Sequence[str] = (), *, all_of_them: bool = False, path: str = "", **options: Any
) -> list[dict[str, Any]]:
    """Train once, or with 0, 1, ... all changes if `all_of_them`, and return the results."""
    ways = [CHANGES[:n] for n in range(len(CHANGES) + 1)] if all_of_them else [changes]
    results = [train(way, **options) for way in ways]
    for result in results:
        speed = f"{result['images_per_sec']:10,.0f} images/s"
        print(f"{speed}  {', '.join(result['changes']) or 'as found'}: {result['verdict']}")
    if path:
        Path(path).write_text("[" + ",\n ".join(map(json.dumps, results)) + "]\n")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for change in CHANGES:
        parser.add_argument(f"--{change.replace('_', '-')}", action="store_true")
    parser.add_argument("--all", action="store_true", help="all changes, one after another")
    parser.add_argument("--json", default="", metavar="FILE", help="write the results")
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    chosen = [change for change in CHANGES if getattr(args, change)]
    main(chosen, all_of_them=args.all, path=args.json, steps=args.steps)
