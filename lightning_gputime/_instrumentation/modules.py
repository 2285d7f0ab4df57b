"""Submodules of the model: the option `modules`, and a sub-phase for each selected module."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from inspect import getattr_static
from itertools import accumulate
from threading import get_ident
from typing import Any, NamedTuple, TypeGuard
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
            f"modules={modules!r} selects {len(chosen)} modules of this model, but at most"
            f" {MAX_MODULES} are allowed, because each costs the host some tens of microseconds per"
            " call: give a smaller depth, a pattern such as 'layers.*', or full names (no limit)"
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
    plain_names = {"": ""}  # Names without wrappers, by full name.
    wrappers = set[str]()  # Full names.
    for name, module in model.named_modules():
        # The parent is in `plain_names`, because `named_modules` yields it before its children.
        parent, _, last = name.rpartition(".")
        plain = plain_names[parent]
        if parent not in wrappers:
            plain = f"{plain}.{last}".strip(".")
        plain_names[name] = plain
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
            # A depth that selects nothing is no error, because unlike a pattern it is no typo.
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
    """Return the number of modules on the path to a module, including the module itself."""
    # A ModuleList is never called, so it does not count.
    return sum(outer in callables for outer in accumulate(name.split("."), "{}.{}".format))


def _phase_name(name: str) -> str:
    """Return the name of a module's sub-phase, with unusable characters replaced."""
    # A key of a ModuleDict can be any string. `comm` is reserved for waits.
    allowed = re.sub(f"[{UNUSABLE}]", "_", name)
    return f"{allowed}_" if allowed == COMM else allowed


class _Labels(NamedTuple):
    """Labels of a module."""

    forward: str
    backward: str


class SubmoduleBoundary:
    """`forward/<name>` and `backward/<name>` of modules.

    Hooks on the output and input tensors of a module mark its backward. That backward begins when
    the gradient of an output is ready, and ends when the gradient of an input is ready. If no input
    requires a gradient, it ends where the backward of another module begins, or with the backward
    of the model.
    """

    def __init__(
        self, recorder: Recorder, attachments: Attachments, parts: Mapping[str, nn.Module]
    ) -> None:
        self._recorder = recorder
        self._names = {id(module): name for name, module in parts.items()}
        self.labels: dict[tuple[str, int], _Labels] = {}
        """Labels of each module, by the label around its call and the id of the module.

        Cached, because a step needs hundreds. Empty until a module is called inside `forward`.
        """
        # For each running call: the label around it, and the `grad_fn` of each input tensor by the
        # id of the tensor. None for a call that is not timed.
        self._running: list[tuple[str, dict[int, Any]] | None] = []
        for module in parts.values():
            # `inside`: if the module is the model itself, `forward` must begin first and end last.
            for attachment in around_calls(module, self._enter, self._exit, inside=True):
                attachments.add(attachment)
        self._tensor_handles: list[Any] = []  # Hooks on tensors in this step.
        # Outputs by their ids, and the label that begins at the gradient of each output. The weak
        # reference shows whether an id was reused.
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
            # If another timed module, the producer, returned this input, the producer's backward
            # begins at the gradient of the input, which ends the backward of this module without a
            # hook. Exception: `_begin_backward` ignores a producer that contains this module, as
            # when a block is called twice in a row.
            producer = self._backward_begun_by(tensor)
            if producer is None or backward_label.startswith(f"{producer}/"):
                self._at_gradient(
                    tensor, lambda: self._end_backward(backward_label, _backward_label(outer))
                )

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
            # the output of an inner module: the backward of that module begins at its gradient.
            key = id(tensor)
            is_input = key in inputs and inputs[key] is tensor.grad_fn
            if not is_input and self._backward_begun_by(tensor) is None:
                self._at_gradient(tensor, lambda: self._begin_backward(label))
                self._outputs[key] = ref(tensor), label
        self._recorder.mark(outer)

    def _backward_begun_by(self, tensor: Tensor) -> str | None:
        """Return the backward label of the timed module that computed a tensor, or None."""
        output, label = self._outputs.get(id(tensor), (None, None))
        return label if output is not None and output() is tensor else None

    def _labels_of(self, outer: str, module: nn.Module) -> _Labels:
        found = self.labels.get((outer, id(module)))
        if found is None:
            label = f"{outer}/{self._names[id(module)]}"
            found = _Labels(forward=label, backward=_backward_label(label))
            self.labels[outer, id(module)] = found
        return found

    def _at_gradient(self, tensor: Tensor, call: Callable[[], None]) -> None:
        # On a GPU the autograd thread runs the hook, on the stream of the forward. On a CPU the
        # calling thread does.
        self._tensor_handles.append(tensor.register_hook(lambda _: call()))

    def _begin_backward(self, label: str) -> None:
        # The backward of an inner module may have begun at the same gradient, and continues.
        if not self._is_inside(label):
            self._recorder.mark_in_backward(label)

    def _end_backward(self, label: str, outer: str) -> None:
        # The backward of an inner module with the same input also ends here.
        if self._recorder.label == label or self._is_inside(label):
            self._recorder.mark_in_backward(outer)

    def _is_inside(self, label: str) -> bool:
        """Return whether the current label is a sub-phase of `label`."""
        return (self._recorder.label or "").startswith(f"{label}/")


def _backward_label(label: str) -> str:
    """Return the label of the backward of a `forward/<name>`: `backward/<name>`."""
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
