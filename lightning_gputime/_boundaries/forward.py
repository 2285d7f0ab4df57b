"""`forward`: the calls of models, and of losses that are modules, as marks."""

from collections.abc import Iterator
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch._C import _current_graph_task_id
from torch.nn.modules.loss import _Loss

from lightning_gputime._boundaries.attach import Removable, hook_after, hook_before
from lightning_gputime._boundaries.compiled import CompiledCall, is_compiled
from lightning_gputime._boundaries.evaluation import EvaluationBoundary
from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._phases import AFTER_FORWARD, FORWARD, LOSS
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._untraced import untraced


@untraced
class ForwardBoundary:
    """`forward`: from the call of a module to its return, outermost calls only."""

    def __init__(self, recorder: Recorder, loop: Loop) -> None:
        self._recorder = recorder
        self._model = model = loop.model
        self._pause_evaluation = loop.pause_evaluation
        self._trains = bool(loop.optimizers)
        self._depth = 0
        self.calls = 0
        """How often the model, or a part of it, was called in this step."""
        self.was_ever_called = False
        self._redirected = False
        self._evaluates = False
        self._evaluation = EvaluationBoundary(recorder, model)
        self._handles: list[Removable] = []
        self._children: dict[int, tuple[Removable, ...]] = {}
        self._nested: set[int] = set()
        self._alone: set[int] = set()
        self._handles += self._time(model)
        if loop.wrapper is not None:
            self._handles.append(hook_before(loop.wrapper, self._redirect))
        for loss in _children(model):
            if isinstance(loss, _Loss):
                self._handles.append(hook_before(loss, self._enter_loss))
        self._time_children()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forget(list(self._children))

    def step_ended(self, timed: bool) -> None:
        """Takes the hooks off children that the model's own call covers: they would cost time.

        They come back when a step that is timed has no `forward` without them.
        """
        self._depth = 0
        self.was_ever_called |= self.calls > 0
        if not timed:
            self._nested.clear()
        elif not self.calls:
            self._time_children()
        elif self._nested:
            self._forget([*(self._children.keys() & self._nested) - self._alone])
            self._nested.clear()
        self.calls = 0

    def _time(self, module: nn.Module) -> tuple[Removable, ...]:
        if module._compiled_call_impl is not None:
            return (CompiledCall(module, self._enter, self._exit),)
        return hook_before(module, self._enter), hook_after(module, self._exit)

    def _time_children(self) -> None:
        for child in _children(self._model):
            if id(child) not in self._children and not isinstance(child, _Loss):
                self._children[id(child)] = self._time(child)

    def _forget(self, keys: list[int]) -> None:
        for key in keys:
            for handle in self._children.pop(key):
                handle.remove()

    def _redirect(self, module: nn.Module, *_: Any) -> None:
        self._redirected = True

    def _enter(self, module: nn.Module, *_: Any) -> None:
        recorder = self._recorder
        if get_ident() != recorder.thread:
            if not recorder.is_resting_here() or (self._trains and _is_evaluation(module)):
                return
            self.calls += 1  # Another timer may ask whose backward follows.
            if not recorder.starts_in_capture():
                return
        # Activation checkpointing runs modules again inside backward; that is backward's time.
        if _current_graph_task_id() != -1:
            return
        if self._redirected and module is self._model:
            # The wrapper calls the model to run the whole training step, not to compute an output.
            self._redirected = False
            return
        self._depth += 1
        if self._depth > 1:
            self._nested.add(id(module))
            return
        if self._pause_evaluation:
            self._evaluates = _is_evaluation(module)
            if self._evaluates:
                self._evaluation.call_begins()
                return
            recorder.resume(FORWARD)
        self.calls += 1
        self._alone.add(id(module))
        recorder.mark(FORWARD)

    def _exit(self, module: nn.Module, *_: Any) -> None:
        # At depth 0 this is the return of a redirected training step.
        if not self._depth or get_ident() != self._recorder.thread:
            return
        if _current_graph_task_id() != -1:
            return
        self._depth -= 1
        if self._depth == 0 and not self._evaluates:
            self._recorder.mark(AFTER_FORWARD)

    def _enter_loss(self, module: nn.Module, *_: Any) -> None:
        # A loss that the model computes inside its own call is part of that call.
        if self._depth == 0 and _current_graph_task_id() == -1:
            self._recorder.mark_instead(AFTER_FORWARD, LOSS)


def _children(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the direct children of a module, and those in containers, which have no call."""
    if is_compiled(model):
        return  # It is called outside the compiled code, its children inside.
    for child in model.children():
        if type(child).forward is nn.Module.forward and not is_compiled(child):
            yield from _children(child)
        elif not _is_metric(child):
            yield child


def _is_evaluation(module: nn.Module) -> bool:
    return not (module.training or torch.is_grad_enabled())


def _is_metric(module: nn.Module) -> bool:
    return any(cls.__module__.startswith("torchmetrics.") for cls in type(module).__mro__)
