"""Where one phase ends and the next begins: models, losses, optimizers and backward, as marks."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch._C import _current_graph_task_id
from torch.nn.modules.loss import _Loss

from lightning_gputime._phases import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    AFTER_UPDATE,
    BACKWARD,
    FORWARD,
    LOSS,
    OPTIMIZER,
    OTHER,
)
from lightning_gputime._recorder import Recorder

__all__ = ["Boundaries"]


class _Removable(Protocol):
    def remove(self) -> None: ...


class Boundaries:
    """Puts marks at the boundaries of a training step, until it is removed.

    Args:
        recorder: Gets the marks.
        model: Its calls are `forward`, and those of its direct children where it is not called
            itself.
        optimizers: Their updates end `optimizer`.
        wrapper: What the trainer calls in place of `model` to run the training step (DDP), if so.
        backward: Whether to time `torch.autograd.backward`, by wrapping it.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        optimizers: Sequence[Any],
        *,
        wrapper: nn.Module | None = None,
        backward: bool = True,
    ) -> None:
        self._modules = _ModuleBoundary(recorder, model, wrapper)
        self.optimizers = [_OptimizerBoundary(recorder, optimizer) for optimizer in optimizers]
        self._backward = _BackwardBoundary(recorder, self.optimizers) if backward else None

    @property
    def updates(self) -> int:
        """How many optimizer updates were seen since the last `step_ended`."""
        return sum(optimizer.updates for optimizer in self.optimizers)

    def step_ended(self) -> None:
        """Must be called at the end of each step."""
        self._modules.step_ended()
        for optimizer in self.optimizers:
            optimizer.step_ended()

    def remove(self) -> None:
        """Takes everything off the model, the optimizers and torch. Safe to call twice."""
        self._modules.remove()
        for optimizer in self.optimizers:
            optimizer.remove()
        if self._backward is not None:
            self._backward.remove()


class _Hook:
    """A module hook of ours that does nothing on a copy of the module.

    Hooks travel with `copy.deepcopy(model)` and `torch.save(model)`. The copy gets a callable of
    the standard library that takes anything and returns None, so that an EMA copy is not timed,
    and a saved model loads where this package is not installed.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[nn.Module], None]) -> None:
        self._call = call

    def __call__(self, module: nn.Module, *_: Any) -> None:
        # Inside a compiled region a hook that touches Python state recompiles at every call.
        if not torch.compiler.is_compiling():
            self._call(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class _ModuleBoundary:
    """`forward`: from the call of a module to its return, outermost calls only."""

    def __init__(self, recorder: Recorder, model: nn.Module, wrapper: nn.Module | None) -> None:
        self._recorder = recorder
        self._model = model
        self._depth = 0
        self._calls = 0
        self._redirected = False
        self._handles: list[_Removable] = []
        self._children: dict[int, tuple[_Removable, ...]] = {}
        self._nested: set[int] = set()
        self._alone: set[int] = set()
        self._handles += self._time(model)
        if wrapper is not None:
            self._handles.append(_before(wrapper, self._redirect))
        for loss in _children(model):
            if isinstance(loss, _Loss):
                self._handles.append(_before(loss, self._enter_loss))
        self._time_children()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forget(list(self._children))

    def step_ended(self) -> None:
        """Takes the hooks off children that the model's own call covers: they would cost time.

        They come back when a step has no `forward` without them.
        """
        self._depth = 0
        if self._calls:
            self._forget([key for key in self._children if key in self._nested - self._alone])
        else:
            self._time_children()
        self._calls = 0
        self._nested.clear()

    def _time(self, module: nn.Module) -> tuple[_Removable, ...]:
        if module._compiled_call_impl is not None:
            return (_CompiledCall(module, self._enter, self._exit),)
        return _before(module, self._enter), _after(module, self._exit)

    def _time_children(self) -> None:
        for child in _children(self._model):
            if id(child) not in self._children and not isinstance(child, _Loss):
                self._children[id(child)] = self._time(child)

    def _forget(self, keys: list[int]) -> None:
        for key in keys:
            for handle in self._children.pop(key):
                handle.remove()

    def _redirect(self, module: nn.Module) -> None:
        self._redirected = True

    def _enter(self, module: nn.Module) -> None:
        # Activation checkpointing runs modules again inside backward; that is backward's time.
        if not self._recorder.is_here() or _current_graph_task_id() != -1:
            return
        if self._redirected and module is self._model:
            # The wrapper calls the model to run the whole training step, not to compute an output.
            self._redirected = False
            return
        self._depth += 1
        if self._depth > 1:
            self._nested.add(id(module))
            return
        self._calls += 1
        self._alone.add(id(module))
        self._recorder.mark(FORWARD)

    def _exit(self, module: nn.Module) -> None:
        # At depth 0 this is the return of a redirected training step.
        if self._depth == 0 or not self._recorder.is_here() or _current_graph_task_id() != -1:
            return
        self._depth -= 1
        if self._depth == 0:
            self._recorder.mark(AFTER_FORWARD)

    def _enter_loss(self, module: nn.Module) -> None:
        # A loss that the model computes inside its own call is part of that call.
        if self._depth == 0 and _current_graph_task_id() == -1:
            self._recorder.turn(AFTER_FORWARD, LOSS)


def _children(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the direct children of a module, and those in containers, which have no call."""
    if hasattr(model, "_orig_mod"):
        return  # A compiled module is called outside the compiled code, its children inside.
    for child in model.children():
        if type(child).forward is nn.Module.forward:
            yield from _children(child)
        elif not _is_metric(child):
            yield child


def _is_metric(module: nn.Module) -> bool:
    return any(cls.__module__.startswith("torchmetrics.") for cls in type(module).__mro__)


def _before(module: nn.Module, call: Callable[[nn.Module], None]) -> _Removable:
    return module.register_forward_pre_hook(_Hook(call), prepend=True)


def _after(module: nn.Module, call: Callable[[nn.Module], None]) -> _Removable:
    return module.register_forward_hook(_Hook(call), always_call=True)


class _CompiledCall:
    """Times a module that was compiled in place (`module.compile()`), outside the compiled code."""

    def __init__(
        self,
        module: nn.Module,
        enter: Callable[[nn.Module], None],
        leave: Callable[[nn.Module], None],
    ) -> None:
        compiled = module._compiled_call_impl
        assert compiled is not None

        def call(*args: Any, **kwargs: Any) -> Any:
            enter(module)
            try:
                return compiled(*args, **kwargs)
            finally:
                leave(module)

        self._module, self._compiled, self._call = module, compiled, call
        module._compiled_call_impl = call

    def remove(self) -> None:
        if self._module._compiled_call_impl is self._call:
            self._module._compiled_call_impl = self._compiled


class _OptimizerBoundary:
    """The end of `optimizer`, and its start where no backward precedes; `zero_grad` is `other`."""

    def __init__(self, recorder: Recorder, optimizer: Any) -> None:
        self._recorder = recorder
        self._optimizer = optimizer
        self._depth = 0
        self.updates = 0
        self._handles: list[_Removable] = [
            # Not traced, so that they keep firing when the step is compiled.
            optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step)),
            optimizer.register_step_post_hook(torch.compiler.disable(self._after_step)),
        ]
        self._zero_grad = self._wrap_zero_grad(optimizer.zero_grad)
        self._had_zero_grad = optimizer.__dict__.get("zero_grad")
        optimizer.zero_grad = self._zero_grad

    @property
    def is_stepping(self) -> bool:
        """Whether `optimizer.step` is running: a closure that it calls belongs to the update."""
        return self._depth > 0

    def step_ended(self) -> None:
        self._depth = self.updates = 0  # No post hook fires when `step` raises.

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._optimizer.__dict__.get("zero_grad") is self._zero_grad:
            del self._optimizer.zero_grad
            if self._had_zero_grad is not None:
                self._optimizer.zero_grad = self._had_zero_grad

    def _wrap_zero_grad(self, zero_grad: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(zero_grad)
        def timed(*args: Any, **kwargs: Any) -> None:
            if not torch.compiler.is_compiling() and self._recorder.label not in (
                OTHER,
                AFTER_UPDATE,
            ):
                self._recorder.mark(OTHER)
            zero_grad(*args, **kwargs)

        return timed

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        # With a closure, forward and backward are still to come.
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self._depth == 1 and closure is None and self._recorder.label != AFTER_BACKWARD:
            self._recorder.mark(OPTIMIZER)

    def _after_step(self, *_: Any) -> None:
        # A `step` that calls `super().step()` fires twice.
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0:
            self.updates += 1
            self._recorder.mark(AFTER_UPDATE)


class _BackwardBoundary:
    """`backward`: the calls of `torch.autograd.backward`, in which every `loss.backward()` ends."""

    def __init__(self, recorder: Recorder, optimizers: Sequence[_OptimizerBoundary]) -> None:
        self._recorder = recorder
        self._optimizers = optimizers
        self._returns_to: str | None = None
        if not isinstance(torch.autograd.backward, _TimedBackward):
            torch.autograd.backward = _TimedBackward(torch.autograd.backward)
        self._timed = torch.autograd.backward
        self._timed.boundaries.append(self)

    def enter(self) -> bool:
        """Returns whether `exit` must be called: not for a backward inside a backward."""
        recorder = self._recorder
        if self._returns_to is not None or not recorder.is_here():
            return False
        self._returns_to = FORWARD if recorder.label == FORWARD else AFTER_BACKWARD
        recorder.mark(BACKWARD)
        return True

    def exit(self) -> None:
        label, self._returns_to = self._returns_to or AFTER_BACKWARD, None
        if any(optimizer.is_stepping for optimizer in self._optimizers):
            label = OPTIMIZER
        self._recorder.mark(label)

    def remove(self) -> None:
        boundaries = self._timed.boundaries
        if self in boundaries:
            boundaries.remove(self)
        if not boundaries and torch.autograd.backward is self._timed:
            torch.autograd.backward = self._timed.backward


class _TimedBackward:
    """Stands in for `torch.autograd.backward` while a timer is attached.

    `Tensor.backward` looks that name up at each call, so this one place sees `loss.backward()`,
    `scaler.scale(loss).backward()`, `fabric.backward(loss)` and direct calls.
    """

    def __init__(self, backward: Callable[..., None]) -> None:
        self.backward = backward
        self.boundaries: list[_BackwardBoundary] = []
        functools.update_wrapper(self, backward)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        entered = [boundary for boundary in self.boundaries if boundary.enter()]
        try:
            self.backward(*args, **kwargs)
        finally:
            for boundary in entered:
                boundary.exit()
