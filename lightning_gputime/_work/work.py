"""The work of each step of a loop: its items, and its FLOPs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import nan
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._messages import messages
from lightning_gputime._options import Options
from lightning_gputime._phases import BACKWARD
from lightning_gputime._record.clock import device_of
from lightning_gputime._record.recorder import AT_REST, OPEN, Recorder
from lightning_gputime._results.throughput import ThroughputReference
from lightning_gputime._work.flops import (
    Call,
    CallFlops,
    LeftBehindError,
    UncountableError,
    count_flops,
    describe_call,
)
from lightning_gputime._work.items import Items, number
from lightning_gputime._work.peaks import find_peak, matmul_tflops
from lightning_gputime._work.precision import dtype_of, precision_outside

_MAX_SHAPES, _MAX_CALLS = 8, 64
"""Shapes of calls that are counted of a module, each once; others are scaled by their elements.
They are counted again whenever what is trained changes, up to this number of calls in all."""

Key = tuple[Any, ...]
"""What calls of the same FLOPs have in common: the module, its state, and what it is given."""

# So many first parts of two keys are equal if only the arguments differ.
_MODULE = 4

_FIX = "pass flops= the FLOPs of an item, forward and backward"
_NO_ITEMS = "flops= is that of an item, and how many items a batch has is not known: pass items="
_NO_BATCH = "No batch is shown to flops=, as timer.steps(loader) does: pass the FLOPs of an item"

_requires_grad = attrgetter("requires_grad")
# Arguments that choose what is computed. Numbers may be others in each step, and choose little; so
# may strings inside of a batch, as the names of its files.
_FLAGS = (bool, type(None))
_CHOICES = (*_FLAGS, str)


class WorkCounter:
    """Adds up the work of the open step, until `take_step_work` hands it over as numbers.

    Args:
        options: Which items and FLOPs, and whether a matmul is measured.
        loop: What runs.
        recorder: Knows whether the open step is timed.
    """

    def __init__(self, options: Options, loop: Loop, recorder: Recorder) -> None:
        self._recorder = recorder
        self._loop = loop
        self._device = device_of(loop.model)
        self._items = Items(options.items)
        self._flops: Any = options.flops
        self._parts = loop.submodules if options.flops == "count" else {}
        self._measures_matmul = options.measure_peak
        self.reference = ThroughputReference(self._items.source, tuple(self._parts))
        """What the work per second is relative to."""
        self.is_due = False
        """Whether `measure` must be called before the next step begins."""
        self.add_call: Callable[..., None] | None = None if self._flops is None else self._add_call
        """Add a call of a model, in a step that is timed; None if calls are not needed."""
        self._parameters: dict[int, list[nn.Parameter]] = {}
        # None of a call that cannot be counted.
        self._counted: dict[Key, CallFlops | None] = {}
        self._uncounted: dict[Key, Call] = {}
        self._computed_in: dict[tuple[torch.dtype, bool], float] = {}
        self._warned: set[str] = set()
        self._unknown_steps = 0  # On end.
        if loop.compiled_step and self._flops is not None:
            self._see_compiled_step()
        self._step_items, self._batch_items = 0.0, self._items.fixed
        self._step_flops, self._batch_flops = 0.0, nan
        self._calls: list[Key] = []

    def _see_compiled_step(self) -> None:
        self.is_due = True  # No call of the model will be seen.
        if (dtype := dtype_of(self._loop.model)).itemsize <= 2:
            self._computed_in[dtype, False] = 1.0  # Else autocast may be in the step, unseen.
        if self._flops == "count":
            self._give_up(f"FLOPs of a step that is compiled as a whole are not counted: {_FIX}")

    # What a loop tells

    def add_batch(self, batch: Any) -> None:
        """Take the batch that the loop goes on with."""
        if self._recorder.state is OPEN:
            self._batch_items = self._items.of(batch)
            if callable(self._flops):
                self._batch_flops = self._of_function(batch)

    def end_batch(self) -> None:
        """End a batch; the step may go on with another one."""
        if self._recorder.state is AT_REST:
            return  # No step is timed.
        self._step_items += self._batch_items
        self._batch_items = self._items.fixed
        if callable(self._flops):
            self._step_flops += self._batch_flops
            self._batch_flops = nan

    def take_step_work(self) -> tuple[float, ...]:
        """End the last batch, and return the work of the step, see `StepRecord`."""
        items = self._step_items + self._batch_items
        self._step_items, self._batch_items = 0.0, self._items.fixed
        if self._flops is None:
            return (items,)  # As most have it, and at each step.
        return (items, *(self._of_calls() if self._flops == "count" else self._as_told(items)))

    def reset(self) -> None:
        """Forget the work of the open step: it is dropped."""
        self._step_items, self._batch_items = 0.0, self._items.fixed
        self._step_flops, self._batch_flops = 0.0, nan
        self._calls.clear()

    def _add_call(self, module: nn.Module, args: Any = (), kwargs: Any = None) -> None:
        try:
            if self._flops == "count":
                self._calls.append(self._key_of(module, args, kwargs or {}))
            elif not self._computed_in:
                self._computed_in.update(precision_outside(module, self._device))
                self.is_due = True
        except Exception as error:
            self._give_up(f"FLOPs are not counted any more: {error!r}")

    # FLOPs as the user tells them

    def _of_function(self, batch: Any) -> float:
        try:
            return number(self._flops(batch), "flops")
        except Exception as error:
            self._flops = None
            messages.warning("FLOPs are not counted any more, because flops failed: %s", error)
            return nan

    def _as_told(self, items: float) -> tuple[float, float, float]:
        """Return the FLOPs of a step: all of them, and by phase if two numbers were given."""
        option = self._flops
        if callable(option):
            flops = self._step_flops + self._batch_flops
            self._step_flops, self._batch_flops = 0.0, nan
        else:
            flops = items * sum(option) if isinstance(option, Sequence) else items * option
        self._unknown_steps = self._unknown_steps + 1 if flops != flops else 0
        if self._unknown_steps == 2:
            self._warn_once(_NO_BATCH if callable(option) else _NO_ITEMS)
        if not isinstance(option, Sequence):
            return flops, nan, nan
        forward = flops * option[0] / (sum(option) or nan)
        return flops, forward, flops - forward

    # FLOPs that are counted

    def _key_of(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Key:
        """Return the key of a call that begins here and now; keep what a count of it needs."""
        if id(module) not in self._parameters:
            self._parameters[id(module)] = [*module.parameters()]
        trained = bytes(map(_requires_grad, self._parameters[id(module)]))
        parts: list[Any] = [id(module), module.training, torch.is_grad_enabled(), trained]
        for name, value in (*enumerate(args), *kwargs.items()):
            parts.append(name)
            _add_shapes(value, parts, _CHOICES)
        key = tuple(parts)
        if key not in self._counted and self._has_room(key):
            self._counted[key] = None
            try:
                self._uncounted[key] = describe_call(module, args, kwargs, trained, self._device)
                self.is_due = True
            except UncountableError as error:
                self._warn_uncountable(error)
        return key

    def _has_room(self, key: Key) -> bool:
        alike = sum(one[:_MODULE] == key[:_MODULE] for one in self._counted)
        return alike < _MAX_SHAPES and len(self._counted) < _MAX_CALLS

    def _of_calls(self) -> Sequence[float]:
        """Return the FLOPs of the calls of a step: of the model, and as they ran."""
        calls = [self._of_call(key) for key in self._calls]
        self._calls.clear()
        known = [one for one in calls if one is not None]
        if not calls or len(known) < len(calls):
            return [nan] * (3 + 2 * len(self._parts))
        flops = [one.forward for one in known]
        # Inference outside of no_grad is recorded for a backward that never comes.
        if self._loop.optimizers or self._recorder.has_marked(BACKWARD):
            flops += [one.backward for one in known]
        return [sum(of) for of in zip(*flops, strict=True)]

    def _of_call(self, key: Key) -> CallFlops | None:
        if key in self._counted:
            return self._counted[key]
        # One shape too many: as the nearest of the same module, by its elements.
        n = _elements(key)
        like = [one for one in self._counted if one[:_MODULE] == key[:_MODULE] and _elements(one)]
        if not like:
            self._warn_once(f"What is trained of the model changes too often to count it: {_FIX}")
            return None
        nearest = min(like, key=lambda one: abs(_elements(one) - n))
        known = self._counted[nearest]
        if known is None:
            return None
        self._warn_once(
            f"The model was called with more than {_MAX_SHAPES} shapes: the FLOPs of further ones"
            " are scaled by the elements of the first tensor"
        )
        return known.scaled(n / _elements(nearest))

    def measure(self) -> None:
        """Count new calls, look the peak up, and measure it. No step may be timed."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # It stays due: a wait would break the capture.
        self.is_due = False
        try:
            new, self._uncounted = self._uncounted, {}
            # A copy may lead to the model itself, and to its hooks.
            is_open, self._loop.batch.is_open = self._loop.batch.is_open, False
            try:
                self._counted |= {key: self._count(call) for key, call in new.items()}
            finally:
                self._loop.batch.is_open = is_open
            if self._computed_in or self._flops != "count":
                self._measure_peak()
        except Exception as error:
            self._give_up(f"FLOPs are not counted any more: {error!r}")

    def _count(self, call: Call) -> CallFlops | None:
        try:
            found = count_flops(call, [*self._parts.values()])
        except LeftBehindError as error:
            self._give_up(f"FLOPs are not counted any more ({error}): {_FIX}")
            return None
        except UncountableError as error:
            self._warn_uncountable(error)
            return None
        if found.uncounted:
            named = ", ".join(found.uncounted)
            self._warn_once(f"No formula tells the FLOPs of {named}, which are left out: {_FIX}")
            if not found.forward[0]:
                return None  # Nothing is known of it.
        for of, flops in found.computed_in.items():
            self._computed_in[of] = self._computed_in.get(of, 0.0) + flops
        return found

    def _measure_peak(self) -> None:
        dtype = find_peak(self.reference, self._device, self._computed_in)
        if dtype is None or not self._measures_matmul:
            return
        self._measures_matmul = False
        try:
            self.reference.matmul_tflops = matmul_tflops(self._device, dtype)
        except Exception as error:
            messages.warning("No matmul could be measured: %r", error)

    def _give_up(self, why: str) -> None:
        self._warn_once(why)
        self._flops, self.is_due = None, False
        self._uncounted.clear()

    def _warn_uncountable(self, why: Exception) -> None:
        self._warn_once(f"The FLOPs of the model cannot be counted ({why}): {_FIX}")

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            messages.warning("%s.", message)
            self.reference.note = message


def _add_shapes(value: Any, parts: list[Any], choices: tuple[type, ...] = _FLAGS) -> None:
    if isinstance(value, Tensor):
        parts += (value.shape, value.requires_grad)
    elif isinstance(value, choices):
        parts.append(value)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            parts.append(key)
            _add_shapes(one, parts)
    elif isinstance(value, list | tuple):
        for one in value:
            _add_shapes(one, parts)


def _elements(key: Iterable[Any]) -> int:
    """Return the number of elements of the first tensor of a call."""
    return next((one.numel() for one in key if isinstance(one, torch.Size)), 0)
