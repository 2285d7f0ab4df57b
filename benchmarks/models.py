"""Models, batches and a minimal Trainer, shared by the benchmarks."""

import logging
import warnings
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class Task(pl.LightningModule):
    """LightningModule that trains a net with cross entropy and AdamW."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.flatten(0, -2), y.flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def _gpt12() -> tuple[nn.Module, Batch]:
    from projects import GPT  # Imports transformers.

    tokens = torch.randint(0, 32768, (14, 513))
    return GPT(32768, 768, 12), (tokens[:, :-1], tokens[:, 1:])


def _mlp() -> tuple[nn.Module, Batch]:
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers), (torch.randn(64, 64), torch.randint(0, 64, (64,)))


def _resnet50() -> tuple[nn.Module, Batch]:
    from torchvision.models import resnet50

    net = resnet50().to(memory_format=torch.channels_last)
    return net, (torch.randn(96, 3, 224, 224), torch.randint(0, 1000, (96,)))


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "mlp": _mlp,
    "gpt12": _gpt12,
    "resnet50": _resnet50,
}


def load(name: str, device: torch.device) -> tuple[Task, Batch]:
    """Return a task in bfloat16 and a batch, both on the device."""
    net, (x, y) = MODELS[name]()
    if x.is_floating_point():
        x = x.to(torch.bfloat16)
    return Task(net.to(device, torch.bfloat16)), (x.to(device), y.to(device))


class Repeat:
    """Loader that yields a batch n times. Lightning would take a list for several loaders."""

    def __init__(self, batch: object, n: int) -> None:
        self._batch, self._n = batch, n

    def __iter__(self) -> Iterator[object]:
        return repeat(self._batch, self._n)

    def __len__(self) -> int:
        return self._n


def bare_trainer(**options: Any) -> pl.Trainer:
    """Return a single-device Trainer without logger, checkpoints and progress bar."""
    bare = {
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**(bare | options))


def be_quiet() -> None:
    """Silence warnings and Lightning's messages."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
