"""`optimizer`: marks at the updates of optimizers."""

import weakref
from collections.abc import Set
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_gputime._compat.torch_ import (
    current_graph_task_id,
    has_step_hooks,
    is_step_compiled,
    steps_on_stack,
)
from lightning_gputime._instrumentation.loop import Loop, parameters_of
from lightning_gputime._instrumentation.patching import (
    Attachments,
    Calls,
    Registration,
    Subscription,
)
from lightning_gputime._phases import (
    AFTER_BACKWARD,
    AFTER_UPDATE,
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    OTHER,
)
from lightning_gputime._record.recorder import IDLE, OPEN, Recorder

_FAILED = "An update of an optimizer could not be timed: %r"


class _OtherOptimizer(NamedTuple):
    """An optimizer that was not given to the loop.

    The reference shows whether another optimizer has reused its id.
    """

    reference: weakref.ref[Any]
    updates_model: bool


class OptimizerBoundary:
    """Marks the end of the phase `optimizer`, and the start if no backward precedes it.

    The optimizers of a loop are those given to it, and others that update its model. Time between a
    backward and an update already counts as `optimizer`, see `resolve_labels`. torch's global
    optimizer hooks also run for optimizers that are created later, or that are inside wrappers
    without hooks.

    Each running call of `step` has an entry in `running`: the label that follows it. The state is
    the innermost entry, with the cases of tests/conformance.py and tests/test_steps.py:

    | entry   | event                              | next entry      | case                        |
    |---------|------------------------------------|-----------------|-----------------------------|
    | none    | call of `step`                     | `AFTER_UPDATE`  | standard step               |
    | none    | call of `step` in a backward       | `BACKWARD`      | updates_inside_the_backward |
    | any     | call of `step` in a model call     | `FORWARD`       | update inside a model call  |
    | a label | call of `super().step()`           | None            | update that calls its base  |
    | None    | return                             | the outer entry | update that calls its base  |
    | a label | return, which ends the update      | the outer entry | standard step               |
    | any     | exception: corrected at next call  | unchanged       | update_that_raises          |
    | any     | end of the loop's step: ends early | none            | called_in_an_optimizer_hook |

    After an early end, the return does nothing. `_ended_early` is True until the next call in a
    timed step.
    """

    def __init__(self, recorder: Recorder, attachments: Attachments, loop: Loop) -> None:
        self._recorder, self._model, self._batch = recorder, loop.model, loop.batch
        # By id. The references prevent an id from being reused.
        self._given = {
            id(updating): updating
            for optimizer in loop.optimizers
            for updating in _updating(optimizer)
        }
        self.has_any = bool(self._given)
        """True once the loop has an optimizer whose updates call our hooks."""
        self._parameters: set[int] = set()  # Ids of the model's parameters.
        self._others: dict[int, _OtherOptimizer] = {}  # Optimizers that were not given, by id.
        self.running: list[str | None] = []
        """Label that follows each running call of `step`, outermost first. None for a call of
        `super().step()`, which is part of an update."""
        self.updates = 0
        """Number of updates in this step."""
        # True if a trainer or GradScaler tried an update in this step, and perhaps skipped it.
        self._was_tried = False
        # True if a step ended inside the newest update, for example in a hook of the optimizer.
        self._ended_early = False
        self._trains_in_closure = loop.trains_in_closure
        self._is_in_wrapper = False  # True while the `step` of a wrapper is running.
        self._listen(attachments, loop)

    def _listen(self, attachments: Attachments, loop: Loop) -> None:
        given = [*self._given.values()]
        # Check for compiled steps before `step` is patched: the patch would hide them.
        compiled = [optimizer for optimizer in given if is_step_compiled(optimizer)]
        # A patch replaces the hooks where hooks are missing, or would break the compiled graph.
        patched = [item for item in given if item in compiled or not has_step_hooks(item)]
        for optimizer in patched:
            attachments.add(Subscription(optimizer, "step", Calls(self._begin, self._end)))
        # A wrapper may gather or average weights around the inner update, so its return, not that
        # of the inner update, ends `optimizer`.
        calls = Calls(self._enter_wrapper, self._leave_wrapper)
        for optimizer in loop.optimizers:
            # `PostLocalSGDOptimizer` is a wrapper with an attribute `averager`.
            if not isinstance(optimizer, Optimizer) or hasattr(optimizer, "averager"):
                attachments.add(Subscription(optimizer, "step", calls))
        if loop.needs_updates:
            # A GradScaler that skips an update calls no hooks, but its call ends the step.
            attempts = Calls(self._scaler_begins)
            attachments.add(Subscription(torch.GradScaler, "step", attempts))
        registers = [(register_optimizer_step_pre_hook, register_optimizer_step_post_hook)]
        if compiled:
            # torch compiles global hooks into a compiled step, and ours would break its graph.
            # Instead, hook each optimizer without a compiled step.
            registers = [
                (optimizer.register_step_pre_hook, optimizer.register_step_post_hook)
                for optimizer in given
                if optimizer not in patched
            ]
        for before, after in registers:
            attachments.add(Registration(before, self._before_step))
            attachments.add(Registration(after, self._after_step))

    def patch_zero_grad(self, attachments: Attachments, loop: Loop) -> None:
        """Patch `zero_grad`, which has no hook. Its call ends `loss`, and starts `other`."""
        for optimizer in (*loop.optimizers, *loop.optimizer_wrappers):
            # Patch the optimizer inside a wrapper: a copy of the wrapper would keep the patch, and
            # clear the gradients of the original.
            updating = _updating(optimizer)[-1]
            attachments.add(Subscription(updating, "zero_grad", Calls(self._zero_grad_begins)))

    def not_updated(self, trained: Set[int]) -> tuple[str, ...]:
        """Return the names of modules and parameters that are trained, but never updated.

        A module stands for its parameters if no optimizer updates any of them.

        Args:
            trained: Ids of the tensors that have gradients.
        """
        others = [other.reference() for other in self._others.values() if other.updates_model]
        updated = {
            id(parameter)
            for optimizer in (*self._given.values(), *others)
            for parameter in parameters_of(optimizer)
        }
        if updated.isdisjoint(trained):
            return ()  # The optimizers have other tensors, such as shards of the parameters.
        updated_paths = set[str]()
        # For each parameter that is not updated: the modules that contain it, the outermost first,
        # and its own name.
        missed: list[list[str]] = []
        for name, parameter in nn.Module.named_parameters(self._model):
            if id(parameter) in trained:
                paths = [*accumulate(name.split("."), "{}.{}".format)]
                if id(parameter) in updated:
                    updated_paths.update(paths)
                else:
                    missed.append(paths)
        outermost = (next(path for path in paths if path not in updated_paths) for paths in missed)
        return tuple(dict.fromkeys(outermost))

    def update_begins(self) -> None:
        """Start an update that a trainer has announced, and may still skip."""
        self._was_tried = True
        # Time after a backward already counts as `optimizer` if an update follows.
        if self._recorder.label != AFTER_BACKWARD:
            self._recorder.mark(OPTIMIZER)

    def reset(self) -> None:
        """Forget the updates of a step that has ended, including calls of `step` that raised."""
        self.updates = 0
        self.running.clear()
        self._was_tried = False

    def _scaler_begins(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> bool:
        """Note that a gradient scaler tries an update, which it may skip."""
        updating = _updating(optimizer)[-1]  # The outermost: users may have given a wrapper.
        if id(updating) in self._given or self._admit_other(updating):
            self._was_tried = True
        return False

    def _admit_other(self, optimizer: Any) -> bool:
        """Return True if an optimizer that was not given updates the model in a batch.

        Remember each such optimizer. From the first on, `has_any` is True.
        """
        # Outside of a batch, ignore it: a callback may train a part of the model with it.
        if not self._batch.is_open:
            return False
        known = self._others.get(id(optimizer))
        if known is not None and known.reference() is optimizer:
            return known.updates_model
        updated = {id(parameter) for parameter in parameters_of(optimizer)}
        if not updated & self._parameters:
            # Collect the ids again, because the model may have new parameters.
            parameters = nn.Module.parameters(self._model)
            self._parameters = {id(parameter) for parameter in parameters}
        updates_model = not updated.isdisjoint(self._parameters)
        self._others[id(optimizer)] = _OtherOptimizer(weakref.ref(optimizer), updates_model)
        self.has_any |= updates_model
        return updates_model

    def _zero_grad_begins(self, *_: Any, **__: Any) -> bool:
        """Start `other`. Return False, because the end of `zero_grad` needs no mark."""
        recorder = self._recorder
        is_other = recorder.label in (OTHER, AFTER_UPDATE)
        # If a hook of the optimizer has ended the step, this call must not end the next `data`.
        is_after_early_end = self._ended_early and recorder.label == DATA
        may_mark = recorder.state is OPEN and not is_other and not is_after_early_end
        # Inside a backward, `zero_grad` is part of an update.
        if may_mark and current_graph_task_id() == -1:
            recorder.mark(OTHER)
        return False

    def _enter_wrapper(self, *_: Any, **__: Any) -> None:
        self._is_in_wrapper = True

    def _leave_wrapper(self, result: Any = None) -> None:
        self._is_in_wrapper = False
        if self.updates and self._recorder.state is not IDLE:
            self._recorder.mark(AFTER_UPDATE)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder = self._recorder
        try:
            if recorder.state is IDLE:
                return  # In an untimed step, `_after_step` counts the updates.
            if id(optimizer) not in self._given and not self._admit_other(optimizer):
                return
            if self.running and (n_on_stack := steps_on_stack()) is not None:
                # A `step` that raised has called no hook at its end: keep the calls on the stack,
                # without the call that begins now.
                del self.running[n_on_stack - 1 :]
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if recorder.label == AFTER_BACKWARD and closure is None and not self.running:
                # Same as `_begin`, inlined, because it is the most common case.
                self._ended_early = False
                self.running.append(AFTER_UPDATE)
            else:
                self._begin(closure)
        except Exception as error:
            self._recorder.warn_once(_FAILED, error)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        recorder = self._recorder
        try:
            if id(optimizer) not in self._given and not self._admit_other(optimizer):
                return
            is_plain = self.running == [AFTER_UPDATE] and not self._is_in_wrapper
            if is_plain and recorder.state is not IDLE:
                # Same as `_end`, inlined, because it is the most common case.
                self.running.clear()
                self.updates += 1
                recorder.mark(AFTER_UPDATE)
            else:
                self._end()
        except Exception as error:
            self._recorder.warn_once(_FAILED, error)

    @property
    def has_updated(self) -> bool:
        """True if the open step had an update, even if it was skipped, or an update is running."""
        if self.updates or self._was_tried:
            return True
        # A `step` that raised is also in `running`, so look at the stack. In untimed steps it is
        # empty, but an early end of a timed step has shown that this loop ends steps in updates.
        may_be_running = bool(self.running) or self._ended_early
        return may_be_running and bool(steps_on_stack())

    def end_early(self) -> None:
        """End the running update now, because a step ends inside it. Its return is then ignored."""
        # An earlier `step` that raised may still be in `running`, so look at the stack.
        if steps_on_stack():
            del self.running[1:]
            self._end()
            self._ended_early = True

    def _begin(self, closure: Any = None, **_: Any) -> None:
        """Start a call of `step`. Mark `optimizer`, unless its time already counts as that."""
        recorder = self._recorder
        label = recorder.label
        self._ended_early = False
        # True for the update of a trainer whose closure starts with the training step.
        trains_first = closure is not None and self._trains_in_closure and not self.running
        if self.running and label != FORWARD:
            self.running.append(None)  # `step` has called `super().step()`.
        elif label == AFTER_BACKWARD and closure is None:
            # Time after a backward, with unscaling and clipping, already counts as `optimizer`, so
            # no mark is needed. `_before_step` inlines this branch.
            self.running.append(AFTER_UPDATE)
        elif current_graph_task_id() != -1:
            # In a hook on gradients.
            self.running.append(label or BACKWARD)
            recorder.mark_in_backward(OPTIMIZER)
        elif label == FORWARD and not trains_first:
            # Local learning: a layer updates itself inside a model call.
            self.running.append(FORWARD)
            recorder.mark(OPTIMIZER)
        else:
            self.running.append(AFTER_UPDATE)
            # Mark even before a closure, which runs forward and backward: an update may do other
            # work before it calls the closure, such as the ascent step of SAM.
            if label == AFTER_BACKWARD or not trains_first:
                recorder.mark(OPTIMIZER)

    def _end(self, result: Any = None) -> None:
        """End a call of `step`. If it is an update, count it, and mark what follows."""
        if not self.running and self._ended_early:
            return  # `end_early` has already ended this update.
        # In an untimed step, hooks do not add to `running`.
        label_after = self.running.pop() if self.running else AFTER_UPDATE
        if label_after is None:
            return  # The outer `step` continues.
        # Skipped updates are not counted, because a GradScaler then calls no hooks.
        self.updates += 1
        recorder = self._recorder
        if recorder.state is IDLE or (self._is_in_wrapper and label_after == AFTER_UPDATE):
            return
        if current_graph_task_id() != -1:
            recorder.mark_in_backward(label_after)
        else:
            recorder.mark(label_after)


def _updating(optimizer: Any) -> list[Any]:
    """Return the optimizers that update parameters in a `step`, the outermost last.

    These are an optimizer, or those inside a wrapper. A wrapper that never calls
    `super().__init__`, such as Accelerate's or torch's `PostLocalSGDOptimizer`, does not support
    hooks. Its `step` may also skip the update, but each `step` of the inner optimizer is an update.
    """
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    if not inner:
        return [optimizer]
    # A wrapper that supports hooks and overrides `step` also updates parameters itself.
    has_own_step = has_step_hooks(optimizer) and type(optimizer).step is not Optimizer.step
    return [*_updating(inner[0]), *[optimizer] * has_own_step]
