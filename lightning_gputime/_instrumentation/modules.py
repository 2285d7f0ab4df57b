"""Submodules of the model: the option `modules`, and a sub-phase for each selected module."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from inspect import getattr_static
from itertools import accumulate
from threading import get_ident
from typing import Any, TypeGuard
from weakref import ref

import torch
from torch import Tensor, nn

from lightning_gputime._compat.torch_ import current_graph_task_id, is_wrapper, unwrapped
from lightning_gputime._instrumentation.compiled import around_calls
from lightning_gputime._instrumentation.patching import Attachments
from lightning_gputime._phases import BACKWARD, COMM, FORWARD, UNUSABLE, is_metric
from lightning_gputime._record.recorder import Recorder

Modules = int | str | Sequence[str]

ALL = "all"
"""Value of the option `modules` that selects all modules inside the model."""

MAX_MODULES = 100
"""Maximum number of modules that a depth or patterns select. Each adds 4 marks and 2 keys."""


def resolve(modules: Modules, model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that the option selects, by name, in the order of the model."""
    inner = unwrapped(model)
    # Keep duplicates: a module that is registered twice may be given by either name.
    named = dict(nn.Module.named_modules(inner, remove_duplicate=False))
    callables = _callables(inner)
    asked = [modules] if isinstance(modules, int | str) else modules
    # If a module is selected by a pattern and by its full name, use the full name.
    chosen = {id(callables[name]): name for name in _select(asked, callables)}
    if len(chosen) > MAX_MODULES:
        raise ValueError(
            f"modules={modules!r} selects {len(chosen)} modules of this model, and may select"
            f" {MAX_MODULES}, because each costs the host some tens of microseconds per call: give"
            " a smaller depth, a pattern such as 'layers.*', or names in full, which have no limit"
        )
    for name in filter(_is_name, asked):
        if not name or name not in named:
            known = ", ".join(name for name, _ in nn.Module.named_children(inner)) or "none inside"
            raise ValueError(f"modules: the model has no module {name!r}; it has {known}")
        if not _is_callable(named[name]):
            raise ValueError(
                f"modules: {name!r} only contains modules, and is never called: give '{name}.*'"
            )
        chosen[id(named[name])] = name
    return {
        _phase_name(chosen[id(module)]): module
        for module in nn.Module.modules(inner)
        if id(module) in chosen
    }


def _callables(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules inside a model that can be called, by their names without wrappers."""
    callables: dict[str, nn.Module] = {}
    plain_names = {"": ""}  # By full name. Outer modules come first.
    wrappers = set[str]()
    for name, module in model.named_modules():
        outer, _, last = name.rpartition(".")
        plain = plain_names[outer] if outer in wrappers else f"{plain_names[outer]}.{last}"
        plain = plain_names[name] = plain.strip(".")
        if is_wrapper(module):
            wrappers.add(name)
        if plain and _is_callable(module) and not is_metric(module):
            callables.setdefault(plain, module)
    return callables


def _is_callable(module: nn.Module) -> bool:
    # A ModuleList or ModuleDict cannot be called. Use `getattr_static`, because a scripted module
    # raises when its attributes are read.
    forward = getattr_static(type(module), "forward", None)
    return forward is not nn.Module.forward or "forward" in vars(module)


def _select(asked: Iterable[int | str], callables: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the modules that depths and patterns select."""
    found: list[str] = []
    for item in asked:
        if isinstance(item, int):
            # No error if the model contains no modules: a depth, unlike a pattern, is no typo.
            found += [name for name in callables if _depth(name, callables) <= item]
        elif item == ALL:
            found += callables
        elif not _is_name(item):
            names = [name for name in callables if _matches(name.split("."), item.split("."))]
            if not names:
                examples = ", ".join([*callables][:20]) or "none inside"
                raise ValueError(
                    f"modules: no module of the model matches {item!r} ('*' is any one part of a"
                    f" name, '**' is any number of parts); it has {examples}"
                )
            found += names
    return found


def _is_name(item: int | str) -> TypeGuard[str]:
    """Return whether an item of the option is a full name, not a depth or a pattern."""
    return isinstance(item, str) and item != ALL and not set(item) & set("*?[")


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[i:], pattern[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _depth(name: str, callables: Mapping[str, nn.Module]) -> int:
    # A ModuleList is never called, so it does not count as a level.
    return sum(outer in callables for outer in accumulate(name.split("."), "{}.{}".format))


def _phase_name(name: str) -> str:
    """Return the name of a module's sub-phase, with unusable characters replaced."""
    # A key of a ModuleDict can be any string. `comm` is reserved for waits.
    allowed = re.sub(f"[{UNUSABLE}]", "_", name)
    return f"{allowed}_" if allowed == COMM else allowed


class SubmoduleBoundary:
    """`forward/<name>` and `backward/<name>` of modules.

    Hooks on a module's output and input tensors mark its backward. It begins when the gradient of
    an output is ready, and ends when the gradient of an input is ready. If no input requires a
    gradient, it ends where the backward of another module begins, or with the backward of the
    model.
    """

    def __init__(
        self, recorder: Recorder, attachments: Attachments, parts: Mapping[str, nn.Module]
    ) -> None:
        self._recorder = recorder
        self._names = {id(module): name for name, module in parts.items()}
        self.labels: dict[tuple[str, int], tuple[str, str]] = {}
        """Labels of forward and backward, by the outer label and the id of the module.

        Cached, because a step needs hundreds. Empty until a module is called inside `forward`.
        """
        # For each running call: the outer label, and the `grad_fn` of each input by its id. None
        # for a call that is not timed.
        self._running: list[tuple[str, dict[int, Any]] | None] = []
        for module in parts.values():
            # `inside`: if the module is the model itself, `forward` must begin first and end last.
            for attachment in around_calls(module, self._enter, self._exit, inside=True):
                attachments.add(attachment)
        # Hooks on tensors in this step, and outputs by their ids, with the label that begins at
        # their gradients. The weak reference shows whether an id was reused.
        self._tensor_handles: list[Any] = []
        self._outputs: dict[int, tuple[ref[Tensor], str]] = {}

    def step_ended(self) -> None:
        self._running.clear()
        self._outputs.clear()
        # The next step may use the same input again, so remove the hooks.
        for handle in self._tensor_handles:
            handle.remove()
        self._tensor_handles.clear()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if get_ident() != self._recorder.threads.timed or current_graph_task_id() != -1:
            return
        outer = self._recorder.label or ""
        if outer != FORWARD and not outer.startswith(f"{FORWARD}/"):
            self._running.append(None)  # For example, inside a phase that the user named.
            return
        inputs = list(_tensors_with_grad((args, kwargs)))
        self._running.append((outer, {id(tensor): tensor.grad_fn for tensor in inputs}))
        label, backward_label = self._labels_of(outer, module)
        self._recorder.mark(label)
        for tensor in inputs:
            # If a timed module produced this input, the start of its backward at the same gradient
            # also ends this backward, so no hook is needed. Exception: a producer that contains
            # this module, as when a block is called twice in a row, does not start a phase there.
            begins = self._backward_begun_by(tensor)
            if begins is None or backward_label.startswith(f"{begins}/"):
                self._at_gradient(tensor, lambda: self._end(backward_label, _backward(outer)))

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        if get_ident() != self._recorder.threads.timed or current_graph_task_id() != -1:
            return
        call = self._running.pop() if self._running else None
        if call is None:
            return
        outer, inputs = call
        _, label = self._labels_of(outer, module)
        for tensor in _tensors_with_grad(output):
            # Skip an input that is returned unchanged: this module did not compute it. Also skip
            # the output of an inner module: its backward starts there, inside this backward.
            is_computed = inputs.get(id(tensor), self) is not tensor.grad_fn
            if is_computed and self._backward_begun_by(tensor) is None:
                self._at_gradient(tensor, lambda: self._begin(label))
                self._outputs[id(tensor)] = ref(tensor), label
        self._recorder.mark(outer)

    def _backward_begun_by(self, tensor: Tensor) -> str | None:
        """Return the backward label of the module that returned a tensor, or None."""
        output, label = self._outputs.get(id(tensor), (None, None))
        return label if output is not None and output() is tensor else None

    def _labels_of(self, outer: str, module: nn.Module) -> tuple[str, str]:
        found = self.labels.get((outer, id(module)))
        if found is None:
            label = f"{outer}/{self._names[id(module)]}"
            found = self.labels[outer, id(module)] = label, _backward(label)
        return found

    def _at_gradient(self, tensor: Tensor, call: Callable[[], None]) -> None:
        # On a GPU the autograd thread runs the hook, on the stream of the forward. On a CPU the
        # calling thread does.
        self._tensor_handles.append(tensor.register_hook(lambda _: call()))

    def _begin(self, label: str) -> None:
        # An inner module may have begun at the same gradient. Its label includes this label.
        if not self._is_inside(label):
            self._recorder.mark_in_backward(label)

    def _end(self, label: str, outer: str) -> None:
        # An inner module with the same input also ends here.
        if self._recorder.label == label or self._is_inside(label):
            self._recorder.mark_in_backward(outer)

    def _is_inside(self, label: str) -> bool:
        return (self._recorder.label or "").startswith(f"{label}/")


def _backward(label: str) -> str:
    return BACKWARD + label.removeprefix(FORWARD)


def _tensors_with_grad(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.requires_grad and torch.is_grad_enabled():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_with_grad(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_with_grad(item)
