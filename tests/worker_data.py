"""Datasets for workers of loaders. Spawned workers import this module, so it imports only torch."""

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Tensor:
        # A number from each random generator shows if timing changes what a worker draws.
        drawn = [random.random(), float(np.random.random()), float(torch.rand(1))]
        return torch.tensor([*drawn, float(index)])


class FailingSamples(Dataset[Tensor]):
    """A dataset whose third batch of two fails."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if index == 4:
            raise ValueError("bad sample")
        return torch.zeros(2)


class Repeated(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(60.0).view(20, 3)


def announce(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert type(info.dataset) is Numbers
