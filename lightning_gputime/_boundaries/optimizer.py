"""The updates of optimizers, as marks."""

import weakref
from typing import Any

from torch._C import _current_graph_task_id
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_gputime._boundaries.attach import Removable, StandIn, listen
from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._phases import AFTER_BACKWARD, AFTER_UPDATE, BACKWARD, OPTIMIZER, OTHER
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._untraced import untraced


@untraced
class OptimizerBoundary:
    """The end of `optimizer`, and its start where no backward precedes.

    The hooks that torch has for all optimizers together see also those that are made or replaced
    later, and those inside wrappers that have no hooks. An optimizer is the loop's if it was given,
    or if a parameter of the model is one of its own.
    """

    def __init__(self, recorder: Recorder, loop: Loop) -> None:
        self._recorder = recorder
        self._model = loop.model
        self._parameters: set[int] = set()
        # Whether an optimizer, by its id, is the loop's. An id may be used again.
        self._judged: dict[int, tuple[weakref.ref[Any], bool]] = {}
        self.depth = 0
        """How many calls of `step` are running; one that calls `super().step()` is two."""
        self.updates = 0
        """How many updates there were in this step."""
        self.has_any = False
        """Whether there are optimizers whose updates are seen."""
        # What the time went to before an update inside a backward.
        self._interrupted = BACKWARD
        self._stand_ins: list[StandIn] = []
        self._handles: list[Removable] = []
        try:
            self._hook([_inmost(optimizer) for optimizer in loop.optimizers])
        except BaseException:
            self.remove()
            raise

    def _hook(self, given: list[Any]) -> None:
        self.has_any = bool(given)
        self._judged = {id(one): (weakref.ref(one), True) for one in given}
        is_compiled = any(map(_is_compiled, given))
        alone = [one for one in given if _is_compiled(one) or not _has_hooks(one)]
        self._stand_ins = [listen(one, "step", self) for one in alone]
        if is_compiled:
            # A compiled step has the hooks that it finds in it, and ours would break its graph.
            for one in given:
                if one not in alone:
                    self._handles.append(one.register_step_pre_hook(self._before_step))
                    self._handles.append(one.register_step_post_hook(self._after_step))
        else:
            self._handles.append(register_optimizer_step_pre_hook(self._before_step))
            self._handles.append(register_optimizer_step_post_hook(self._after_step))

    def step_ended(self) -> int:
        """Returns how many updates there were."""
        updates, self.updates = self.updates, 0
        self.depth = 0  # No post hook fires when `step` raises.
        return updates

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for stand_in in self._stand_ins:
            stand_in.forget(self)

    def call_begins(self, closure: Any = None, **_: Any) -> bool:
        """Is told of a call that has a stand-in."""
        self._begin(closure)
        return True

    def call_ends(self, result: Any = None) -> None:
        """Is told of its end."""
        self._end()

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_ours(optimizer):
            self._begin(kwargs.get("closure", args[1] if len(args) > 1 else None))

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self._is_ours(optimizer):
            self._end()

    def _begin(self, closure: Any) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        label = self._recorder.label
        if _current_graph_task_id() != -1:
            self._interrupted = label or BACKWARD
            self._recorder.mark_in_backward(OPTIMIZER)
        # After a backward `optimizer` has begun already, with what is unscaled and clipped.
        elif label != AFTER_BACKWARD and closure is None:
            # With a closure, forward and backward are still to come.
            self._recorder.mark(OPTIMIZER)

    def _end(self) -> None:
        if self.depth:
            self.depth -= 1
        if self.depth:
            return
        # A scaler that skips the update calls no hook at all: a step without one is taken for
        # skipped.
        self.updates += 1
        if _current_graph_task_id() != -1:
            self._recorder.mark_in_backward(self._interrupted)
        else:
            self._recorder.mark(AFTER_UPDATE)

    def _is_ours(self, optimizer: Any) -> bool:
        judged = self._judged.get(id(optimizer))
        if judged is None or judged[0]() is not optimizer:
            judged = self._judged[id(optimizer)] = (weakref.ref(optimizer), self._judge(optimizer))
            self.has_any |= judged[1]
        return judged[1]

    def _judge(self, optimizer: Any) -> bool:
        own = {id(one) for group in optimizer.param_groups for one in group["params"]}
        if not own & self._parameters:
            # Those of the model may be others by now.
            self._parameters = {id(one) for one in self._model.parameters()}
        return not own.isdisjoint(self._parameters)


@untraced
class ZeroGradBoundary:
    """`zero_grad` ends `loss`: it is `other`. Torch has no hook for it."""

    def __init__(self, recorder: Recorder, optimizer: Any) -> None:
        self._recorder = recorder
        self._stand_in = listen(optimizer, "zero_grad", self)

    def call_begins(self, *_: Any, **__: Any) -> bool:
        """Marks the begin; what follows is `other`, too."""
        if self._recorder.label not in (OTHER, AFTER_UPDATE):
            self._recorder.mark(OTHER)
        return False

    def call_ends(self, result: Any = None) -> None:
        """Is never told."""

    def remove(self) -> None:
        self._stand_in.forget(self)


def _inmost(optimizer: Any) -> Any:
    """Returns the optimizer inside wrappers that are optimizers in name only.

    They lack what hooks need, because they never called `super().__init__`: Accelerate's, torch's
    `PostLocalSGDOptimizer`. What they call in the end may be no update, but that of the inmost is.
    """
    while not _has_hooks(optimizer):
        inner = [one for one in vars(optimizer).values() if isinstance(one, Optimizer)]
        if not inner:
            break
        optimizer = inner[0]
    return optimizer


def _has_hooks(optimizer: Any) -> bool:
    return hasattr(optimizer, "_optimizer_step_post_hooks")


def _is_compiled(optimizer: Any) -> bool:
    return hasattr(vars(optimizer).get("step"), "_torchdynamo_orig_callable")
