"""The items of a batch: by the sizes of its tensors alone, nothing on a device is read."""

from collections.abc import Callable, Iterator, Mapping
from math import isfinite, nan
from typing import Any

from torch import Tensor

from lightning_gputime._messages import messages

FIRST_DIMENSION = "first dimension of the batch's first tensor"
_HAVE_TENSORS = (Tensor, Mapping, list, tuple)
# A batch of more tensors than this is no batch of fields; a deeper one is none either.
_MAX_FIELDS, _MAX_DEPTH = 64, 8


class Items:
    """The number of items in a batch: as an option says, or the size of the first tensor."""

    def __init__(self, option: Callable[[Any], Any] | float | None) -> None:
        self._function = option if callable(option) else None
        # The items of each batch, if the option is a number.
        self.fixed = nan if option is None or callable(option) else float(option)
        # A type of batches, and where the first tensor is in them; None if they are tensors.
        self._kind: Any = None
        self._key: Any = None
        # Returns the items of a batch; NaN if they are not known.
        self.of: Callable[[Any], float] = self._of_first
        if option is not None:
            self.of = self._of_function if self._function else lambda _: self.fixed

    @property
    def source(self) -> str:
        """What the items are."""
        if self._function is not None:
            return "as items= says"
        known = self.fixed == self.fixed
        return f"{self.fixed:g} a batch, as items= says" if known else FIRST_DIMENSION

    def _of_first(self, batch: Any) -> float:
        if type(batch) is self._kind:
            try:
                first: Any = batch if self._key is None else batch[self._key]
                size: int = first.shape[0]
                return size
            except Exception:
                pass  # It has other contents than the last one.
        return self._search(batch) if isinstance(batch, _HAVE_TENSORS) else nan

    def _search(self, batch: Any) -> float:
        self._kind = None
        # Rows that were not put together: a dimension of theirs counts no rows.
        if isinstance(batch, list) and batch and isinstance(batch[0], Mapping):
            return nan
        try:
            found = [*_tensors(batch, ())]
            sizes = {int(tensor.shape[0]) for _, tensor in found}
        except Exception:
            return nan
        # If the tensors do not agree, the first one may be an image, a table, or packed rows.
        if len(sizes) != 1:
            return nan
        keys = found[0][0]
        if len(keys) <= 1:
            self._kind, self._key = type(batch), keys[0] if keys else None
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
    """Return the number that a user's function has returned; raise if it is none to count with."""
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


def _tensors(batch: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yield the tensors in a batch that have a dimension, and the keys that lead to each."""
    if isinstance(batch, Tensor):
        if batch.dim():
            yield keys, batch
        return
    if isinstance(batch, Mapping):
        # Its length need not be the number of its keys, as with a TensorDict.
        inside: Any = [*batch.keys()]
    elif isinstance(batch, list | tuple):
        inside = range(len(batch))
    else:
        return
    if len(keys) >= _MAX_DEPTH or len(inside) > _MAX_FIELDS:
        raise ValueError("it is no batch of fields")
    for key in inside:
        yield from _tensors(batch[key], (*keys, key))
