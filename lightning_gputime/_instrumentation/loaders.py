"""Loaders as a trainer or a user gives them: one, or several in a list or dict."""

from typing import Any

from torch.utils.data import Subset

_MAX_LOADERS = 10  # A longer list contains the batches themselves.


def attribute(owner: object, name: str) -> Any:
    """Return an attribute of an object of the user; None if it has none, or raises."""
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def loaders_in(loader: object) -> list[object]:
    """Return the loaders in a list or dict; else the loader itself."""
    inside = [*loader.values()] if isinstance(loader, dict) else loader
    if isinstance(inside, list | tuple) and 0 < len(inside) <= _MAX_LOADERS:
        return [*inside]
    return [loader]


def dataset_of(loader: object) -> object:
    """Return the dataset of a loader, also if the loader reads a subset of it."""
    dataset = attribute(loader, "dataset")
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset
