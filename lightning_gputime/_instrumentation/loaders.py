"""Access to data loaders, which may be given alone, in a list or in a dict."""

from typing import Any

from torch.utils.data import Subset

_MAX_LOADERS = 10  # A longer list is a list of batches, not of loaders.


def attribute(owner: object, name: str) -> Any:
    """Return an attribute of a user's object; None if it is missing or raises."""
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def loaders_in(loader: object) -> list[object]:
    """Return a list of the loaders in a list, tuple or dict; for a single loader, a list of it."""
    inside = [*loader.values()] if isinstance(loader, dict) else loader
    if isinstance(inside, list | tuple) and 0 < len(inside) <= _MAX_LOADERS:
        return [*inside]
    return [loader]


def dataset_of(loader: object) -> object:
    """Return the dataset of a loader, without `Subset` wrappers."""
    dataset = attribute(loader, "dataset")
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset
