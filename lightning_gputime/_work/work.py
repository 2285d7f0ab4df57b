"""What each step of a loop works on: its items, and its FLOPs."""

from collections.abc import Callable, Sequence
from math import nan
from typing import Any

import torch
from torch import nn

from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._messages import messages
from lightning_gputime._options import Options
from lightning_gputime._record.clock import device_of
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.state import AT_REST, OPEN
from lightning_gputime._results.work import Yardstick
from lightning_gputime._work.calls import Call, Key, call_of, elements, key_of
from lightning_gputime._work.copies import UncountableError
from lightning_gputime._work.flops import Count, Flops, count
from lightning_gputime._work.items import Items, number
from lightning_gputime._work.matmul import matmul_tflops
from lightning_gputime._work.peaks import device_name, peak_tflops, precision_of

MOST_SHAPES = 8
"""Calls of so many shapes are counted, each once; others are scaled by their elements."""

_NUMBER = "as flops= says"
_FIX = "pass flops= the FLOPs of an item, forward and backward"


class Work:
    """Adds up what the open step works on, until `seal` hands it over as numbers.

    Args:
        options: Which items and FLOPs, and whether a matmul is measured.
        loop: What runs.
        recorder: Tells whether the open step is timed.
    """

    def __init__(self, options: Options, loop: Loop, recorder: Recorder) -> None:
        self._recorder = recorder
        self._items = Items(options.items)
        self._option: Any = options.flops
        self._counts = options.flops == "count"
        self._loop = loop
        self._parts = loop.submodules if self._counts else {}
        self.yardstick = Yardstick(items_by=self._items.told_by, parts=tuple(self._parts))
        """What the work is held against."""
        self._measures_peak = options.measure_peak
        self._has_looked = False
        self.is_due = False
        """Whether `measure` must be called before the next step begins."""
        self.note: Callable[..., None] | None = None if options.flops is None else self._note
        """Must be told of each call of a model in a step that is timed; None if it need not."""
        self._device = device_of(loop.model)
        self._parameter = _dtype_of(loop.model)
        # Of each call that was counted; None of one that cannot be.
        self._known: dict[Key, Count | None] = {}
        self._new: dict[Key, Call] = {}
        self._told: set[str] = set()
        if loop.compiled_step and options.flops is not None:
            self._take_precision()  # No call of the model will be seen.
            if self._counts:
                self._give_up(
                    f"FLOPs of a step that is compiled as a whole are not counted: {_FIX}"
                )
        # Of the open batch, and of the open step.
        self._untold = nan if self._items.fixed is None else self._items.fixed
        self._batch_items, self._batch_flops = self._untold, nan
        self._step_items = self._step_flops = 0.0
        self._calls: list[Key] = []

    def takes(self, batch: Any) -> None:
        """Must be told of each batch, when it is there."""
        if self._recorder.state is OPEN:
            self._batch_items = self._items.of(batch)
            if self._option is not None and callable(self._option):
                self._batch_flops = self._of_function(batch)

    def batch_ends(self) -> None:
        """Must be told of the end of each batch."""
        if self._recorder.state is AT_REST:
            return  # No step is timed.
        items, self._batch_items = self._batch_items, self._untold
        self._step_items += items
        if self._option is not None and not self._counts:
            option = self._option
            flops = self._batch_flops if callable(option) else items * _total(option)
            self._step_flops += flops
            self._batch_flops = nan

    def forget(self) -> None:
        """Forgets what the open step has worked on: it is dropped."""
        self._batch_items, self._batch_flops = self._untold, nan
        self._step_items = self._step_flops = 0.0
        self._calls.clear()

    def seal(self) -> tuple[float, ...]:
        """Ends the last batch, and returns what the step has worked on, see `StepRecord`."""
        if self._option is None:
            # As most have it, and at each step.
            items = self._step_items + self._batch_items
            self._step_items, self._batch_items = 0.0, self._untold
            return (items,)
        self.batch_ends()
        of_step = self._of_calls() if self._counts else _split(self._option, self._step_flops)
        load = (self._step_items, *of_step)
        self._step_items = self._step_flops = 0.0
        self._calls.clear()
        return load

    # FLOPs of the calls

    def _note(self, module: nn.Module, args: Any = (), kwargs: Any = None) -> None:
        try:
            if not self.yardstick.precision:
                self._take_precision()
            if self._counts:
                key = key_of(module, args, kwargs)
                self._calls.append(key)
                if key not in self._known and len(self._known) + len(self._new) < MOST_SHAPES:
                    self._new[key] = call_of(module, args, kwargs, self._device)
                    self.is_due = True
        except Exception as error:
            self._give_up(f"FLOPs are not counted any more: {error!r}")

    def _take_precision(self) -> None:
        """Takes what is computed in here and now."""
        precision = precision_of(self._device, self._parameter)
        self.yardstick.precision, self._dtype = precision.name, precision.dtype
        self.is_due = True

    def _of_calls(self) -> Sequence[float]:
        """Returns the FLOPs of the calls of the step: of the model, and as they ran."""
        of_calls = [self._of_call(key) for key in self._calls]
        if not of_calls or None in of_calls:
            return [nan] * (3 + 2 * len(self._parts))
        counts = [one for one in of_calls if one is not None]
        whole = _sum([one.whole for one in counts])
        ran = [whole.forward, whole.backward + whole.recomputed]
        for name in self._parts:
            part = _sum([one.parts[name] for one in counts if name in one.parts])
            ran += [part.forward, part.backward + part.recomputed]
        return [whole.forward + whole.backward, *ran]

    def _of_call(self, key: Key) -> Count | None:
        if key in self._known:
            return self._known[key]
        if key in self._new:
            return None
        # One shape too many: as one of the same module, by its elements.
        like = [one for one in self._known if one[:3] == key[:3] and elements(one)]
        known = self._known[like[-1]] if like else None
        if known is None:
            return None
        self._tell_once(
            f"The model was called with more than {MOST_SHAPES} shapes: the FLOPs of further ones"
            " are scaled by the elements of the first tensor"
        )
        factor = elements(key) / elements(like[-1])
        parts = {name: one.scaled(factor) for name, one in known.parts.items()}
        return Count(known.whole.scaled(factor), parts, ())

    def measure(self) -> None:
        """Looks the peak up, measures it, and counts what is new. No step may be timed."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # It stays due: a wait would break the capture.
        self.is_due = False
        try:
            self._hold_against()
            new, self._new = self._new, {}
            is_open, self._loop.batch.is_open = self._loop.batch.is_open, False
            try:
                for key, call in new.items():
                    self._known[key] = self._count(call)
            finally:
                self._loop.batch.is_open = is_open
        except Exception as error:
            self._give_up(f"FLOPs are not counted any more: {error!r}")

    def _count(self, call: Call) -> Count | None:
        try:
            found = count(call, self._parts)
        except UncountableError as error:
            self._tell_once(f"The FLOPs of the model cannot be counted ({error}): {_FIX}")
            return None
        if found.uncounted:
            named = ", ".join(found.uncounted)
            self._tell_once(f"No formula tells the FLOPs of {named}, which are left out: {_FIX}")
        return found

    def _hold_against(self) -> None:
        yardstick = self.yardstick
        if yardstick.peak_tflops is None and not self._has_looked:
            self._has_looked = True
            name = device_name(self._device)
            yardstick.peak_tflops = peak_tflops(name, yardstick.precision)
            if yardstick.peak_tflops is None:
                what = f"{yardstick.precision} peak is known of {name}"
                yardstick.note = yardstick.note or f"no {what}: there is no MFU"
        if self._measures_peak:
            self._measures_peak = False
            try:
                yardstick.matmul_tflops = matmul_tflops(self._device, self._dtype)
            except Exception as error:
                messages.warning("No matmul could be measured: %r", error)

    # FLOPs that the user tells

    def _of_function(self, batch: Any) -> float:
        try:
            return number(self._option(batch), "flops")
        except Exception as error:
            self._option = None
            messages.warning("FLOPs are not counted any more, because flops failed: %s", error)
            return nan

    def _give_up(self, why: str) -> None:
        self._tell_once(why)
        self._counts, self._option, self.is_due = False, None, False
        self._new.clear()

    def _tell_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            messages.warning("%s.", message)
            self.yardstick.note = message


def _sum(flops: Sequence[Flops]) -> Flops:
    return Flops(
        sum([one.forward for one in flops]),
        sum([one.backward for one in flops]),
        sum([one.recomputed for one in flops]),
    )


def _total(option: Any) -> float:
    return float(sum(option)) if isinstance(option, tuple | list) else float(option)


def _split(option: Any, flops: float) -> tuple[float, float, float]:
    """Returns FLOPs as they are told: all of them, and by phase if two numbers were given."""
    if not isinstance(option, tuple | list):
        return flops, nan, nan
    forward = flops * option[0] / (sum(option) or nan)
    return flops, forward, flops - forward


def _dtype_of(model: nn.Module) -> torch.dtype:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.get_default_dtype()
