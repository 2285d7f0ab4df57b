"""The items of a batch: by the sizes of its tensors alone, nothing on a device is read."""

from collections.abc import Callable, Iterator, Mapping
from math import isfinite, nan
from typing import Any

from torch import Tensor

from lightning_gputime._messages import messages

FIRST_DIMENSION = "first dimension of the batch's first tensor"

# A batch of more tensors than this is no batch of fields; a deeper one is none either.
_MAX_FIELDS, _MAX_DEPTH = 64, 8

Path = tuple[tuple[Any, Any], ...]


class Items:
    """Counts the items of batches.

    Args:
        option: A function of the batch, a number, or None for the size of the first tensor.
    """

    def __init__(self, option: Callable[[Any], Any] | float | None) -> None:
        self._function = option if callable(option) else None
        self.fixed = nan if option is None or callable(option) else float(option)
        """The items of each batch, if the option is a number; else NaN."""
        # Where the first tensor was in the last batch, with the types on the way: an index into
        # anything else might be work on the device.
        self._path: Path | None = None
        self.kind: Any = None
        self.key: Any = None
        """If the last batch was of this type, its first tensor was at this key, not deeper."""
        self.of: Callable[[Any], float] = self._of_first
        """Return the items of a batch; NaN if they are not known."""
        if self._function is not None:
            self.of = self._of_function
        elif option is not None:
            self.of = self._of_number

    @property
    def source(self) -> str:
        """What the items are."""
        if self._function is not None:
            return "as items= says"
        known = self.fixed == self.fixed
        return f"{self.fixed:g} a batch, as items= says" if known else FIRST_DIMENSION

    def _of_number(self, batch: Any) -> float:
        return self.fixed

    def _of_first(self, batch: Any) -> float:
        if self._path is not None:
            found: Any = batch
            try:
                for kind, key in self._path:
                    if type(found) is not kind:
                        raise LookupError
                    found = found[key]
                if isinstance(found, Tensor):
                    return int(found.shape[0])
            except Exception:
                pass  # It is another kind of batch than the last one.
        return self._search(batch)

    def _search(self, batch: Any) -> float:
        self._path = self.kind = None
        try:
            found = [*_tensors(batch, ())]
            sizes = {int(tensor.shape[0]) for _, tensor in found}
        except Exception:
            return nan
        # If the tensors do not agree, the first one may be an image, a table, or packed rows.
        if len(sizes) != 1:
            return nan
        self._path = found[0][0]
        if len(self._path) == 1:
            [(self.kind, self.key)] = self._path
        return float(sizes.pop())

    def _of_function(self, batch: Any) -> float:
        if self._function is None:
            return nan
        try:
            return number(self._function(batch), "items")
        except Exception as error:
            self._function = None
            messages.warning("Items are not counted any more, because items failed: %s", error)
            return nan


def number(value: Any, name: str) -> float:
    """Return the number that a user's function has returned.

    Raises:
        TypeError: If it is none, or lies on a device, where to read it would be a wait.
        ValueError: If it is below zero, or not finite.
    """
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            raise TypeError(
                f"{name} returned a tensor on {value.device}, and to read it the host would wait"
                " for the device: return a size, such as len(batch[0]) or batch[0].numel()"
            )
        value = value.item()
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must return a number, got {value!r:.80}")
    found = float(value)
    if not isfinite(found) or found < 0:
        raise ValueError(f"{name} must return a finite number of 0 or more, got {found}")
    return found


def _tensors(batch: Any, path: Path) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors in a batch that have a dimension, and the way to each."""
    if isinstance(batch, Tensor):
        if batch.dim():
            yield path, batch
        return
    if isinstance(batch, Mapping):
        # Its length need not be the number of its keys, as with a TensorDict.
        keys: Any = [*batch.keys()]
    elif isinstance(batch, list | tuple):
        keys = range(len(batch))
    else:
        return
    if len(path) >= _MAX_DEPTH or len(keys) > _MAX_FIELDS:
        raise ValueError("it is no batch of fields")
    for key in keys:
        yield from _tensors(batch[key], (*path, (type(batch), key)))
