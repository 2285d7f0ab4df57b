"""The updates of optimizers, as marks."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

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
from lightning_gputime._instrumentation.loop import Loop
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
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._record.state import IDLE, OPEN


class OptimizerBoundary:
    """The end of `optimizer`, and its start where no backward precedes.

    The hooks that torch has for all optimizers together see also those that are made or replaced
    later, and those inside wrappers that have no hooks. An optimizer is the loop's if it was given,
    or if a parameter of the model is one of its own.
    """

    def __init__(self, recorder: Recorder, attachments: Attachments, loop: Loop) -> None:
        self._recorder = recorder
        self._model = loop.model
        self._parameters: set[int] = set()
        # Whether another optimizer, by its id, is the loop's. An id may be used again.
        self._judged: dict[int, tuple[weakref.ref[Any], bool]] = {}
        self.depth = 0
        """How many calls of `step` are running; one that calls `super().step()` is two."""
        self.updates = 0
        """How many updates there were in this step; like `depth` it is reset where that ends."""
        self.was_tried = False
        """Whether a trainer has begun an update in this step, which it may have skipped."""
        self.ended_early = False
        """Whether the newest update was over where a step ended by it, as by its own hook."""
        self._batch = loop.batch
        # Whether the loop is one's own: then what precedes a closure is no code of a trainer.
        self._is_own = loop.pause_evaluation is not False
        # What the time went to before an update inside a backward, or inside a model call.
        self._interrupted: str | None = None
        given = [*_updating(loop.optimizers)]
        self.has_any = bool(given)
        """Whether there are optimizers whose updates are seen."""
        # By their ids; kept, so that no id is used again.
        self._given = {id(one): one for one in given}
        is_compiled = any(map(is_step_compiled, given))
        alone = [one for one in given if is_step_compiled(one) or not has_step_hooks(one)]
        for one in alone:
            attachments.add(Subscription(one, "step", Calls(self._begin, self._end)))
        # What an update does around the one inside, such as gather or average weights, is its, too.
        self._is_wrapped = False
        calls = Calls(self._enter_wrapper, self._leave_wrapper)
        for one in loop.optimizers:
            if not isinstance(one, Optimizer) or hasattr(one, "averager"):
                attachments.add(Subscription(one, "step", calls))
        pre_post = [(register_optimizer_step_pre_hook, register_optimizer_step_post_hook)]
        if is_compiled:
            # A compiled step has the hooks that it finds in it, and ours would break its graph.
            others = [one for one in given if one not in alone]
            pre_post = [(one.register_step_pre_hook, one.register_step_post_hook) for one in others]
        for before, after in pre_post:
            attachments.add(Registration(before, self._before_step))
            attachments.add(Registration(after, self._after_step))

    def patch_zero_grad(self, attachments: Attachments, loop: Loop) -> None:
        """Let `zero_grad` end `loss`: it is `other`, and so is what follows. Torch has no hook."""
        for optimizer in (*loop.optimizers, *loop.optimizer_wrappers):
            # Of a wrapper the optimizer inside: a copy of the wrapper would keep the stand-in, and
            # so clear the gradients of the original.
            inner = [*_updating([optimizer])][-1]
            attachments.add(Subscription(inner, "zero_grad", Calls(self._zero_grad_begins)))

    def update_begins(self) -> None:
        """Mark that a trainer is about to run an update, which it may still skip."""
        self.was_tried = True
        # After a backward, `optimizer` has begun already.
        if self._recorder.label != AFTER_BACKWARD:
            self._recorder.mark(OPTIMIZER)

    def reset(self) -> None:
        """Forget the updates of a step that has ended. No hook is called if `step` raises."""
        self.updates = self.depth = 0
        self.was_tried = False

    def _zero_grad_begins(self, *_: Any, **__: Any) -> bool:
        recorder = self._recorder
        # Inside a backward it belongs to an update there.
        if (
            recorder.state is OPEN
            and recorder.label not in (OTHER, AFTER_UPDATE)
            and current_graph_task_id() == -1
            and not (self.ended_early and recorder.label == DATA)
        ):
            recorder.mark(OTHER)
        return False

    def _enter_wrapper(self, *_: Any, **__: Any) -> None:
        self._is_wrapped = True

    def _leave_wrapper(self, result: Any = None) -> None:
        self._is_wrapped = False
        if self.updates and self._recorder.state is not IDLE:
            self._recorder.mark(AFTER_UPDATE)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder = self._recorder
        try:
            # At rest it is enough to count its end.
            if recorder.state is IDLE:
                return
            if id(optimizer) not in self._given and not self._is_ours(optimizer):
                return
            if self.depth and (running := steps_on_stack()) is not None:
                # No hook is called after an update that raised.
                self.depth = min(self.depth, running - 1)
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            is_marked = recorder.label == AFTER_BACKWARD and not recorder.watcher.is_located
            if is_marked and closure is None and not self.depth:
                # The most common case of `_begin`, without another call.
                self.depth, self.ended_early, self._interrupted = 1, False, None
            else:
                self._begin(closure)
        except Exception as error:
            self._fail(error)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        recorder = self._recorder
        try:
            if id(optimizer) not in self._given and not self._is_ours(optimizer):
                return
            is_simple = self.depth == 1 and self._interrupted is None and not self._is_wrapped
            if is_simple and recorder.state is not IDLE:
                # The most common case of `_end`, without another call.
                self.depth = 0
                self.updates += 1
                recorder.mark(AFTER_UPDATE)
            else:
                self._end()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._recorder.warn_once("An update of an optimizer could not be timed: %r", error)

    @property
    def has_updated(self) -> bool:
        """Whether an update was seen, or tried, in the open step, or ends here, in its own hook."""
        if self.updates or self.was_tried:
            return True
        return bool(self.depth or self.ended_early) and bool(steps_on_stack())

    def end_early(self) -> None:
        """End the update that is running, where a step ends: at its own end it is over."""
        if steps_on_stack():
            self.depth = 1
            self._end()
            self.ended_early = True

    def _begin(self, closure: Any = None, **_: Any) -> None:
        self.ended_early = False
        self.depth += 1
        if self.depth > 1:
            return
        label, self._interrupted = self._recorder.label, None
        # After a backward `optimizer` has begun already, with what is unscaled and clipped.
        if label == AFTER_BACKWARD and closure is None and not self._recorder.watcher.is_located:
            return
        if current_graph_task_id() != -1:
            self._interrupted = label or BACKWARD
            self._recorder.mark_in_backward(OPTIMIZER)
        elif closure is None or label == AFTER_BACKWARD or self._is_own:
            # With a closure, forward and backward are still to come. But the update may have
            # something to do before, such as SAM its ascent.
            if label == FORWARD:
                # A layer that learns by itself: when its update is over the model's call goes on.
                self._interrupted = label
            self._recorder.mark(OPTIMIZER)

    def _end(self, result: Any = None) -> None:
        if self.depth:
            self.depth -= 1
        elif self.ended_early:
            return
        if self.depth:
            return
        # A scaler that skips the update calls no hook at all: a step without one is taken for
        # skipped.
        self.updates += 1
        if self._recorder.state is IDLE or self._is_wrapped:
            return
        if current_graph_task_id() != -1:
            self._recorder.mark_in_backward(self._interrupted or BACKWARD)
        else:
            self._recorder.mark(self._interrupted or AFTER_UPDATE)

    def _is_ours(self, optimizer: Any) -> bool:
        # Outside of a batch another callback may train a part of the model with its own optimizer.
        if not self._batch.is_open:
            return False
        judged = self._judged.get(id(optimizer))
        if judged is None or judged[0]() is not optimizer:
            judged = self._judged[id(optimizer)] = (weakref.ref(optimizer), self._judge(optimizer))
            self.has_any |= judged[1]
        return judged[1]

    def _judge(self, optimizer: Any) -> bool:
        own = {id(one) for one in parameters_of(optimizer)}
        if not own & self._parameters:
            # Those of the model may be others by now.
            self._parameters = {id(one) for one in nn.Module.parameters(self._model)}
        return not own.isdisjoint(self._parameters)


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters that an optimizer updates; none where its groups are not torch's."""
    try:
        return [one for group in optimizer.param_groups for one in group["params"]]
    except (AttributeError, KeyError, TypeError, IndexError):
        return []


def is_optimizer(one: Any) -> bool:
    """Return whether it is an optimizer of torch's, or one around it, as DeepSpeed's are."""
    if isinstance(one, Optimizer):
        return True
    inner = getattr(one, "__dict__", {}).get("optimizer")
    return isinstance(inner, Optimizer) and hasattr(one, "zero_grad")


def _updating(optimizers: Sequence[Any]) -> Iterator[Any]:
    """Yield what updates parameters: optimizers, and those inside wrappers around them.

    A wrapper that never called `super().__init__` lacks what hooks need: Accelerate's, torch's
    `PostLocalSGDOptimizer`. Fabric's has it from the optimizer inside. What a wrapper calls in the
    end may be no update, but that of the optimizer inside is.
    """
    for optimizer in optimizers:
        inner = [one for one in vars(optimizer).values() if isinstance(one, Optimizer)]
        if inner:
            yield from _updating(inner[:1])
        # A wrapper with hooks and a `step` of its own updates parameters itself, too.
        has_own_step = has_step_hooks(optimizer) and type(optimizer).step is not Optimizer.step
        if not inner or has_own_step:
            yield optimizer
