"""The work of each step of a loop: its items, and its FLOPs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite, nan
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._messages import WarnOnce, messages
from lightning_gputime._options import Options
from lightning_gputime._phases import BACKWARD, EXCLUDED
from lightning_gputime._record.clock import device_of
from lightning_gputime._record.recorder import AT_REST, OPEN, Recorder
from lightning_gputime._results.sums import ThroughputReference
from lightning_gputime._work.flops import (
    Call,
    CallFlops,
    UncountableError,
    count_flops,
    describe_call,
)
from lightning_gputime._work.peaks import dtype_of, dtype_of_call, fill_in_peak, precision_of

FIRST_DIMENSION = "the first dimension of the batch's first tensor"
_HAVE_TENSORS = (Tensor, Mapping, list, tuple)
# A batch of more tensors than this is no batch of fields; a deeper one is none either.
_MAX_FIELDS, _MAX_DEPTH = 64, 8

_MAX_CALLS = 16  # Kinds of calls that are counted: by module, shapes, and what is trained.

# What calls of the same FLOPs have in common: the module, its state, and what it is given.
Key = tuple[Any, ...]

_FIX = "pass flops= the FLOPs of an item, forward and backward"
_NO_ITEMS = "flops= is that of an item, and how many items a batch has is not known: pass items="
_TOO_MANY = (
    f"The model was called in more than {_MAX_CALLS} ways (by shapes, and by what is trained):"
    f" the FLOPs of steps with further ones are not known. For all, {_FIX}"
)

_requires_grad = attrgetter("requires_grad")


class WorkCounter:
    """The work of the open step, until `take_step_work` hands it over as numbers."""

    def __init__(self, options: Options, loop: Loop, recorder: Recorder) -> None:
        self._recorder = recorder
        self._loop = loop
        self._device = device_of(loop.model)
        self._items = Items(options.items)
        self._flops: Any = options.flops
        self.reference = ThroughputReference(self._items.source)
        self.is_due = False  # Whether to call `measure` before the next step begins.
        # To call with each call of a model, in a step that is timed.
        self.add_call: Callable[..., None] | None = None if self._flops is None else self._add_call
        self._parameters: dict[int, list[nn.Parameter]] = {}
        # A description of a call until it is counted.
        self._counted: dict[Key, Call | CallFlops] = {}
        self._calls: list[Key] = []
        self._precision: str | None = None  # None until a call of the model is seen.
        self._tell_once = WarnOnce()
        self._unknown_steps = 0  # On end.
        self._step_items, self._batch_items = 0.0, self._items.fixed
        if loop.compiled_step and self._flops is not None:
            # No call of the model will be seen, nor autocast in the step.
            self._precision, self.is_due = "", True
            if (dtype := dtype_of(loop.model)).itemsize <= 2:
                self._set_dtype(loop.model, dtype)
            if self._flops == "count":
                self._give_up(UncountableError("its step is compiled as a whole"))

    # What a loop tells

    def add_batch(self, batch: Any) -> None:
        if self._recorder.state is OPEN and self._recorder.label != EXCLUDED:
            self._batch_items = self._items.of(batch)

    def end_batch(self) -> None:
        """End a batch; the step may go on with another one."""
        if self._recorder.state is AT_REST:
            return  # No step is timed.
        self._step_items += self._batch_items
        self._batch_items = self._items.fixed

    def take_step_work(self) -> tuple[float, ...]:
        """End the last batch, and return the work of the step, see `StepRecord`."""
        items = self._step_items + self._batch_items
        self._step_items, self._batch_items = 0.0, self._items.fixed
        if self._flops is None:
            return (items,)  # As most have it, and at each step.
        return (items, *(self._of_calls() if self._flops == "count" else self._as_told(items)))

    def reset(self) -> None:
        self._step_items, self._batch_items = 0.0, self._items.fixed
        self._calls.clear()

    def _add_call(self, module: nn.Module, args: Any = (), kwargs: Any = None) -> None:
        try:
            if self._precision is None:
                self._set_dtype(module, dtype_of_call(module, self._device))
            if self._flops == "count":
                self._calls.append(self._key_of(module, args, kwargs or {}))
        except Exception as error:
            self._give_up(error)

    def _set_dtype(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._precision = precision_of(module, dtype, self._device)
        self.is_due = True

    def _as_told(self, items: float) -> tuple[float, float, float]:
        """Return the FLOPs of a step: all of them, and by phase if two numbers were given."""
        if isinstance(self._flops, Sequence):
            forward, backward = (items * one for one in self._flops)
            flops = forward + backward
        else:
            flops, forward, backward = items * self._flops, nan, nan
        self._unknown_steps = self._unknown_steps + 1 if flops != flops else 0
        if self._unknown_steps == 2:
            self._warn_once(_NO_ITEMS)
        return flops, forward, backward

    # FLOPs that are counted

    def _key_of(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Key:
        """Return the key of a call that begins here and now; keep what a count of it needs."""
        if id(module) not in self._parameters:
            self._parameters[id(module)] = [*module.parameters()]
        trained = bytes(map(_requires_grad, self._parameters[id(module)]))
        parts: list[Any] = [id(module), module.training, torch.is_grad_enabled(), trained]
        for name, value in (*enumerate(args), *kwargs.items()):
            # A string chooses what is computed, but none inside of a batch, as a file's name.
            parts += (name, value) if isinstance(value, str) else (name,)
            _add_shapes(value, parts)
        key = tuple(parts)
        if key not in self._counted and len(self._counted) >= _MAX_CALLS:
            self._warn_once(_TOO_MANY)
        elif key not in self._counted:
            self._counted[key] = describe_call(module, args, kwargs, trained, self._device)
            self.is_due = True
        return key

    def _of_calls(self) -> tuple[float, float, float]:
        """Return the FLOPs of the calls of a step: of the model, and by phase as they ran."""
        known = [self._counted.get(key) for key in self._calls]
        self._calls.clear()
        calls = [one for one in known if isinstance(one, tuple)]
        if not calls or len(calls) < len(known):
            return nan, nan, nan
        forward, backward, again = (sum(of) for of in zip(*calls, strict=True))
        # Inference outside of no_grad is recorded for a backward that never comes.
        if not (self._loop.optimizers or BACKWARD in self._recorder.phases):
            return forward, forward, 0.0
        return forward + backward, forward, backward + again

    def measure(self) -> None:
        """Count new calls, and look the peak up. No step may be timed."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # It stays due: a wait would break the capture.
        self.is_due = False
        try:
            self._count_new_calls()
            if self._precision is not None:
                fill_in_peak(self.reference, self._device, self._precision)
        except Exception as error:
            self._give_up(error)

    def _count_new_calls(self) -> None:
        new = {key: one for key, one in self._counted.items() if isinstance(one, Call)}
        # A copy may lead to the model itself, and to its hooks.
        is_open, self._loop.batch.is_open = self._loop.batch.is_open, False
        try:
            for key, call in new.items():
                self._counted[key], uncounted = count_flops(call)
                if uncounted:
                    named = f"No formula tells the FLOPs of {', '.join(uncounted)}"
                    self._warn_once(f"{named}, which are left out: {_FIX}")
        finally:
            self._loop.batch.is_open = is_open

    def _give_up(self, error: Exception) -> None:
        why = str(error).strip().partition("\n")[0][:200]
        if not isinstance(error, UncountableError):
            why = f"{type(error).__name__}: {why}"
        self._flops, self.is_due = None, False
        self._counted.clear()
        self._warn_once(f"The FLOPs of the model cannot be counted ({why}): {_FIX}")

    def _warn_once(self, message: str) -> None:
        self._tell_once(f"{message}.")
        self.reference.note = message


def _add_shapes(value: Any, parts: list[Any]) -> None:
    if isinstance(value, Tensor):
        parts += (value.shape, value.requires_grad)
    elif value is None or isinstance(value, bool):
        parts.append(value)  # Other numbers may differ in each step, and choose little.
    elif isinstance(value, Mapping):
        for key, one in value.items():
            parts.append(key)
            _add_shapes(one, parts)
    elif isinstance(value, list | tuple):
        for one in value:
            _add_shapes(one, parts)


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
            messages.warning("Items are not counted any more, because items failed: %s", error)
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
