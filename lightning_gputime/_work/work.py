"""What each step of a loop works on: its items, and its FLOPs."""

from collections.abc import Callable, Sequence
from math import nan
from typing import Any

import torch
from torch import nn

from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._messages import messages
from lightning_gputime._options import Options
from lightning_gputime._phases import BACKWARD
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.state import AT_REST, OPEN
from lightning_gputime._results.work import Yardstick
from lightning_gputime._work.calls import ALIKE, Call, Key, call_of, elements, key_of, trained
from lightning_gputime._work.copies import UncountableError
from lightning_gputime._work.flops import Count, Flops, count
from lightning_gputime._work.items import Items, number
from lightning_gputime._work.measure import Measure

MOST_SHAPES, MOST_CALLS = 8, 64
"""Calls of so many shapes are counted of a module, each once; others are scaled by their elements.
As often as what is trained of it changes, but no more than so many calls in all."""

_FIX = "pass flops= the FLOPs of an item, forward and backward"
_NO_ITEMS = "flops= is that of an item, and how many items a batch has is not known: pass items="
_NO_BATCH = "No batch is shown to flops=, as timer.steps(loader) does: pass the FLOPs of an item"


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
        # Inference outside of no_grad is recorded for a backward that never comes.
        self._may_infer = not loop.optimizers
        self._parts = loop.submodules if self._counts else {}
        self.yardstick = Yardstick(items_by=self._items.told_by, parts=tuple(self._parts))
        """What the work is held against."""
        self._measure = Measure(self.yardstick, loop, times_matmul=options.measure_peak)
        self.is_due = False
        """Whether `measure` must be called before the next step begins."""
        self.note: Callable[..., None] | None = None if options.flops is None else self._note
        """Must be told of each call of a model in a step that is timed; None if it need not."""
        self._parameters: dict[int, list[nn.Parameter]] = {}
        # Of each call that was counted; None of one that cannot be.
        self._known: dict[Key, Count | None] = {}
        self._new: dict[Key, Call] = {}
        self._told: set[str] = set()
        if loop.compiled_step and options.flops is not None:
            self.is_due = True  # No call of the model will be seen.
            if self._counts:
                self._give_up(
                    f"FLOPs of a step that is compiled as a whole are not counted: {_FIX}"
                )
        # Of the open batch, and of the open step.
        self._untold = nan if self._items.fixed is None else self._items.fixed
        self._batch_items, self._batch_flops = self._untold, nan
        self._step_items = self._step_flops = 0.0
        self._calls: list[Key] = []
        self._unknown = 0  # steps on end

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
        self._unknown = self._unknown + 1 if of_step[0] != of_step[0] else 0
        if self._unknown == 2 and not self._counts:
            self._tell_once(_NO_BATCH if callable(self._option) else _NO_ITEMS)
        load = (self._step_items, *of_step)
        self._step_items = self._step_flops = 0.0
        self._calls.clear()
        return load

    # FLOPs of the calls

    def _note(self, module: nn.Module, args: Any = (), kwargs: Any = None) -> None:
        try:
            if self._counts:
                key = self._key_of(module, args, kwargs)
                if self._has_room(key):
                    # As they are now: they may have been replaced.
                    self._parameters[id(module)] = [*module.parameters()]
                    key = self._key_of(module, args, kwargs)
                    if self._has_room(key):
                        self._new[key] = call_of(key, module, args, kwargs, self._measure.device)
                        self.is_due = True
                self._calls.append(key)
            elif not self._measure.is_known:
                self._measure.see(module)
                self.is_due = True
        except Exception as error:
            self._give_up(f"FLOPs are not counted any more: {error!r}")

    def _key_of(self, module: nn.Module, args: Any, kwargs: Any) -> Key:
        return key_of(module, trained(self._parameters.get(id(module), ())), args, kwargs)

    def _has_room(self, key: Key) -> bool:
        if key in self._known or key in self._new:
            return False
        all_calls = [*self._known, *self._new]
        alike = sum(one[:ALIKE] == key[:ALIKE] for one in all_calls)
        return alike < MOST_SHAPES and len(all_calls) < MOST_CALLS

    def _of_calls(self) -> Sequence[float]:
        """Returns the FLOPs of the calls of the step: of the model, and as they ran."""
        of_calls = [self._of_call(key) for key in self._calls]
        if not of_calls or None in of_calls:
            return [nan] * (3 + 2 * len(self._parts))
        counts = [one for one in of_calls if one is not None]
        runs_backward = not self._may_infer or self._recorder.has_marked(BACKWARD)
        whole = _sum([one.whole for one in counts], runs_backward)
        ran = [whole.forward, whole.backward + whole.recomputed]
        for name in self._parts:
            part = _sum([one.parts[name] for one in counts if name in one.parts], runs_backward)
            ran += [part.forward, part.backward + part.recomputed]
        return [whole.forward + whole.backward, *ran]

    def _of_call(self, key: Key) -> Count | None:
        if key in self._known:
            return self._known[key]
        if key in self._new:
            return None
        # One shape too many: as the nearest of the same module, by its elements.
        n = elements(key)
        like = [one for one in self._known if one[:ALIKE] == key[:ALIKE] and elements(one)]
        nearest = min(like, key=lambda one: abs(elements(one) - n), default=key)
        known = self._known.get(nearest)
        if not like:
            self._tell_once(f"What is trained of the model changes too often to count it: {_FIX}")
        if known is None:
            return None
        self._tell_once(
            f"The model was called with more than {MOST_SHAPES} shapes: the FLOPs of further ones"
            " are scaled by the elements of the first tensor"
        )
        factor = n / elements(nearest)
        parts = {name: one.scaled(factor) for name, one in known.parts.items()}
        return Count(known.whole.scaled(factor), parts, (), {})

    def measure(self) -> None:
        """Counts what is new, looks the peak up, and measures it. No step may be timed."""
        if self._measure.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # It stays due: a wait would break the capture.
        self.is_due = False
        try:
            new, self._new = self._new, {}
            is_open, self._loop.batch.is_open = self._loop.batch.is_open, False
            try:
                for key, call in new.items():
                    self._known[key] = self._count(call)
            finally:
                self._loop.batch.is_open = is_open
            if self._measure.is_known or not self._counts:
                self._measure.take(self._give_note)
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
            if not found.whole.forward:
                return None  # Nothing is known of it.
        self._measure.add(found)
        return found

    def _give_note(self, why: str) -> None:
        self.yardstick.note = self.yardstick.note or why

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


def _sum(flops: Sequence[Flops], runs_backward: bool) -> Flops:
    return Flops(
        sum([one.forward for one in flops]),
        sum([one.backward for one in flops]) * runs_backward,
        sum([one.recomputed for one in flops]) * runs_backward,
    )


def _total(option: Any) -> float:
    return float(sum(option)) if isinstance(option, tuple | list) else float(option)


def _split(option: Any, flops: float) -> tuple[float, float, float]:
    """Returns FLOPs as they are told: all of them, and by phase if two numbers were given."""
    if not isinstance(option, tuple | list):
        return flops, nan, nan
    forward = flops * option[0] / (sum(option) or nan)
    return flops, forward, flops - forward
