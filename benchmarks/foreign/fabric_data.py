"""Run an example of Fabric on small made data, in place of what it downloads.

The names that it imports stay as they are: what is behind some of them is made here.
"""

import importlib
import os
import runpy
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset


class MadeImages(Dataset[tuple[torch.Tensor, int]]):
    """Random images, in place of MNIST and CelebA."""

    shape, n = (1, 28, 28), 640

    def __init__(self, *_: Any, **__: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self._images = torch.rand((64, *self.shape), generator=generator)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self._images[i % 64], i % 10


class MadeFaces(MadeImages):
    """As large as DCGAN has them."""

    shape, n = (3, 64, 64), 320


class _Tasks:
    """Tasks of Omniglot's shape: five ways, with ten samples each."""

    def sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(50, 1, 28, 28), torch.arange(5).repeat_interleave(10)


class _Tasksets:
    train = validation = test = _Tasks()


def _package(name: str, folder: str) -> Any:
    """Make a package whose own `__init__` is not run: it wants what cannot be built here."""
    package = sys.modules[name] = ModuleType(name)
    package.__path__ = [os.path.join(folder, *name.split("."))]
    return package


def _without_builds(folder: str) -> None:
    """Import the parts of learn2learn and cherry that are Python alone."""
    l2l = _package("learn2learn", folder)
    vision = _package("learn2learn.vision", folder)
    for name in ("learn2learn.vision.models", "learn2learn.data"):
        _package(name, folder)
    l2l.nn = importlib.import_module("learn2learn.nn")
    l2l.algorithms, l2l.vision = _package("learn2learn.algorithms", folder), vision
    l2l.algorithms.MAML = importlib.import_module("learn2learn.algorithms.maml").MAML
    l2l.vision.models = importlib.import_module("learn2learn.vision.models.cnn4")
    l2l.vision.benchmarks = ModuleType("benchmarks")
    l2l.vision.benchmarks.get_tasksets = lambda *_, **__: _Tasksets()
    cherry = _package("cherry", folder)
    cherry.optim = importlib.import_module("cherry.optim")


def main(script: str, *words: str) -> None:
    """Run a script with the words of its command line."""
    sys.argv = [script, *words]
    sys.path.insert(0, os.getcwd())
    torch.set_num_threads(1)
    if "dcgan" in script or "image" in script:
        import torchvision.datasets
        import torchvision.transforms

        torchvision.datasets.MNIST, torchvision.datasets.CelebA = MadeImages, MadeFaces
    if "meta_learning" in script:
        _without_builds(os.environ["FOREIGN_LEARN2LEARN"])
        if "fabric" in script:
            dist.init_process_group("gloo")
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
