"""The work of each step of a loop: its items, and the FLOPs of each."""

from collections.abc import Callable, Iterator, Mapping
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gputime._instrumentation.forward import OnCall
from lightning_gputime._instrumentation.loop import Loop
from lightning_gputime._instrumentation.peaks import (
    device_name,
    dtype_of,
    dtype_of_call,
    peaks_tflops,
    precision_of,
)
from lightning_gputime._measurement.sums import ThroughputReference
from lightning_gputime._messages import messages
from lightning_gputime._phases import IN_NO_STEP
from lightning_gputime._record.clock import device_of
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.state import IDLE, OPEN

FIRST_DIMENSION = "the first dimension of the batch's first tensor"
_HAVE_TENSORS = (Tensor, Mapping, list, tuple)
# A batch of more tensors than this is no batch of fields; a deeper one is none either.
_MAX_FIELDS, _MAX_DEPTH = 64, 8

_NO_ITEMS = "flops= is that of an item, and how many items a batch has is not known: pass items="


class WorkCounter:
    """The items of the open step, until `take_items` hands them over."""

    def __init__(self, items: Any, flops: Any, loop: Loop, recorder: Recorder) -> None:
        self._recorder = recorder
        self._items = Items(items)
        self._step_items, self._batch_items = 0.0, self._items.fixed
        self.reference = ThroughputReference(self._items.source)
        self._has_flops = flops is not None
        self._unknown_steps = 0  # On end.
        if not self._has_flops:
            return
        self._device = device_of(loop.model)
        self._name = device_name(self._device)
        self._peaks = peaks_tflops(self._name)
        several = isinstance(flops, list | tuple)
        forward, backward = flops if several else (nan, nan)
        total = forward + backward if several else float(flops)
        self.reference.flops = (total, forward, backward)
        if loop.compiled_step and (dtype := dtype_of(loop.model)).itemsize <= 2:
            # No call of the model will be seen, nor autocast in the step.
            self._set_precision(loop.model, dtype)

    @property
    def on_call(self) -> OnCall:
        """What to call in each call of a model, in a step that is timed."""
        return self._see_precision if self._has_flops else None

    def add_batch(self, batch: Any) -> None:
        if self._recorder.state is OPEN and self._recorder.label not in IN_NO_STEP:
            self._batch_items = self._items.of(batch)

    def end_batch(self) -> None:
        """End a batch; the step may go on with another one."""
        if self._recorder.state is IDLE:
            return  # No step is timed.
        self._step_items += self._batch_items
        self._batch_items = self._items.fixed

    def take_items(self) -> float:
        """End the last batch, and return the items of the step; NaN if they are not known."""
        items = self._step_items + self._batch_items
        self._step_items, self._batch_items = 0.0, self._items.fixed
        if self._has_flops:
            self._unknown_steps = self._unknown_steps + 1 if items != items else 0
            if self._unknown_steps == 2 and self.reference.note != _NO_ITEMS:
                messages.warning(_NO_ITEMS)
                self.reference.note = _NO_ITEMS
        return items

    def reset(self) -> None:
        self._step_items, self._batch_items = 0.0, self._items.fixed

    def _see_precision(self, model: nn.Module) -> None:
        if self.reference.precision or self.reference.note:
            return
        try:
            self._set_precision(model, dtype_of_call(model, self._device))
        except Exception as error:  # Such as of parameters without a shape.
            self.reference.note = f"the precision is not known ({error!r:.100}): there is no MFU"

    def _set_precision(self, model: nn.Module, dtype: torch.dtype) -> None:
        precision = self.reference.precision = precision_of(model, dtype, self._device)
        self.reference.peak_tflops = self._peaks.get(precision)
        if precision not in self._peaks:
            why = f"no {precision} peak is known of {self._name}"
            self.reference.note = f"{why}: there is no MFU"


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
        if self._function is not None:
            return "the function items="
        known = self.fixed == self.fixed
        return f"items={self.fixed:g}" if known else FIRST_DIMENSION

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
            return _number(self._function(batch))
        except Exception as error:
            self._function = None
            messages.warning("Items are not counted any more, because items failed: %r", error)
            return nan


def _number(value: Any) -> float:
    """Return the number that a user's function has returned; raise if it is none to count with."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            raise TypeError(
                f"items returned a tensor on {value.device}, and to read it the host would wait"
                " for the device: return a size, such as len(batch[0]) or batch[0].numel()"
            )
        value = value.item()
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"items must return a number, got {value!r:.80}")
    found = float(value)
    if not isfinite(found) or found < 0:
        raise ValueError(f"items must return a finite number of 0 or more, got {found}")
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
