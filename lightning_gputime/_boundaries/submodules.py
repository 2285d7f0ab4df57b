"""Sub-phases of `forward` and `backward`: the share of a module."""

from collections.abc import Callable, Iterator, Mapping
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch.utils.weak import WeakIdKeyDictionary

from lightning_gputime._boundaries.compiled import patch_compiled_call
from lightning_gputime._boundaries.patching import Attachments, hook_after, hook_before
from lightning_gputime._phases import BACKWARD, FORWARD
from lightning_gputime._record.recorder import Recorder
from lightning_gputime._untraced import untraced


@untraced
class SubmoduleBoundary:
    """`forward/<name>` and `backward/<name>` of modules.

    Backward is marked by hooks on a module's outputs and inputs: it begins when the gradient of an
    output is there, and ends when that of an input is. Where no input needs one, it ends with the
    whole backward, or where that of another part begins.
    """

    def __init__(
        self, recorder: Recorder, attachments: Attachments, parts: Mapping[str, nn.Module]
    ) -> None:
        self._recorder = recorder
        self._names = {id(module): name for name, module in parts.items()}
        # Each is made once: a step has hundreds.
        self._labels: dict[tuple[str, int], tuple[str, str]] = {}
        # For each call that is not over: the label before it, and its inputs.
        self._open: list[tuple[str, dict[int, Any]] | None] = []
        for module in parts.values():
            if module._compiled_call_impl is not None:
                attachments.add(patch_compiled_call(module, self._enter, self._exit))
            else:
                # Where the part is the model itself, `forward` begins before it, and ends after it.
                enter = hook_before(module, self._enter, first=False, with_kwargs=True)
                attachments.add(enter)
                attachments.add(hook_after(module, self._exit, first=True))
        # Of this step: hooks on tensors, and the tensors whose gradient begins a part, with that.
        self._tensor_handles: list[Any] = []
        self._outputs = WeakIdKeyDictionary()

    @property
    def was_called(self) -> bool:
        """Whether any of the modules was called inside `forward`."""
        return bool(self._labels)

    def step_ended(self) -> None:
        """Must be called at the end of each step."""
        self._open.clear()
        self._outputs.clear()
        # An input that needs a gradient may be used again in the next step: no hook may stay on it.
        for handle in self._tensor_handles:
            handle.remove()
        self._tensor_handles.clear()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if get_ident() != self._recorder.thread or _current_graph_task_id() != -1:
            return
        outer = self._recorder.label or ""
        if outer != FORWARD and not outer.startswith(f"{FORWARD}/"):
            self._open.append(None)  # Inside a phase that was named by hand.
            return
        inputs = list(_tensors_with_grad((args, kwargs)))
        self._open.append((outer, {id(tensor): tensor.grad_fn for tensor in inputs}))
        label, own = self._labels_of(outer, module)
        self._recorder.mark(label)
        for tensor in inputs:
            # Where the input is the output of a part, that part's begin is this one's end; unless
            # it is this one's parent, as where a layer is called twice in a row.
            begins = self._outputs.get(tensor)
            if begins is None or own.startswith(f"{begins}/"):
                self._at_gradient(tensor, lambda: self._end(own, _backward(outer)))

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        if get_ident() != self._recorder.thread or _current_graph_task_id() != -1:
            return
        if not self._open:
            return
        opened = self._open.pop()
        if opened is None:
            return
        outer, inputs = opened
        _, label = self._labels_of(outer, module)
        for tensor in _tensors_with_grad(output):
            # An input that is returned as it is has no work behind it; and what a part inside this
            # one returned begins that, and so this one.
            is_own = inputs.get(id(tensor), self) is not tensor.grad_fn
            if is_own and tensor not in self._outputs:
                self._at_gradient(tensor, lambda: self._begin(label))
                self._outputs[tensor] = label
        self._recorder.mark(outer)

    def _labels_of(self, outer: str, module: nn.Module) -> tuple[str, str]:
        """Returns what the module is inside `outer`, in forward and in backward."""
        found = self._labels.get((outer, id(module)))
        if found is None:
            label = f"{outer}/{self._names[id(module)]}"
            found = self._labels[outer, id(module)] = label, _backward(label)
        return found

    def _at_gradient(self, tensor: Tensor, call: Callable[[], None]) -> None:
        # On a GPU the engine's thread calls it, on the stream of the forward; on a CPU the
        # caller's.
        self._tensor_handles.append(tensor.register_hook(lambda _: call()))

    def _begin(self, label: str) -> None:
        # A part inside this one that ends with it has begun already.
        if not self._is_inside(label):
            self._recorder.mark_in_backward(label)

    def _end(self, label: str, outer: str) -> None:
        # A part inside this one may begin with the same input, and so end with it.
        if self._recorder.label == label or self._is_inside(label):
            self._recorder.mark_in_backward(outer)

    def _is_inside(self, label: str) -> bool:
        return (self._recorder.label or "").startswith(f"{label}/")


def _backward(label: str) -> str:
    return BACKWARD + label.removeprefix(FORWARD)


@untraced
def _tensors_with_grad(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.requires_grad and torch.is_grad_enabled():
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors_with_grad(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors_with_grad(one)
