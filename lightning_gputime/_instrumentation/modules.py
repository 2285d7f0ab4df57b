"""Parts of the model: which modules the option `modules` means, and their sub-phases."""

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

from lightning_gputime._compat.torch_ import (
    current_graph_task_id,
    is_wrapper,
    unwrapped,
)
from lightning_gputime._instrumentation.compiled import around_calls
from lightning_gputime._instrumentation.patching import Attachments
from lightning_gputime._phases import BACKWARD, COMM, FORWARD, UNUSABLE, is_metric
from lightning_gputime._record.recorder import Recorder

Modules = int | str | Sequence[str]

ALL = "all"
"""The option `modules` for all modules inside the model."""

MAX_MODULES = 100
"""How many modules a depth or patterns may mean: each has four boundaries and two logged means."""


def resolve(modules: Modules, model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that the option means, by name, in the order of the model."""
    inner = unwrapped(model)
    # A module that the model holds twice has two names.
    called, named = _called(inner), dict(nn.Module.named_modules(inner, remove_duplicate=False))
    asked = [modules] if isinstance(modules, int | str) else modules
    # Of a module that is asked for twice, the name counts that was given in full.
    chosen = {id(called[name]): name for name in _of_patterns(asked, called)}
    if len(chosen) > MAX_MODULES:
        raise ValueError(
            f"modules={modules!r} means {len(chosen)} modules of this model, and may mean"
            f" {MAX_MODULES}, because each takes the host some tens of microseconds a call: give a"
            " smaller depth, a pattern such as 'layers.*', or names in full, which have no limit"
        )
    for name in filter(_is_name, asked):
        if not name or name not in named:
            known = ", ".join(name for name, _ in nn.Module.named_children(inner)) or "none inside"
            raise ValueError(f"modules: the model has no module {name!r}; it has {known}")
        if not _is_callable(named[name]):
            raise ValueError(
                f"modules: {name!r} only holds modules, and is never called: give '{name}.*'"
            )
        chosen[id(named[name])] = name
    return {_usable(chosen[id(one)]): one for one in nn.Module.modules(inner) if id(one) in chosen}


def _called(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules inside a model that can be called, by their names without wrappers."""
    called: dict[str, nn.Module] = {}
    plain_names = {"": ""}  # By full name, the outer modules first.
    wrappers = set[str]()
    for name, module in model.named_modules():
        outer, _, last = name.rpartition(".")
        plain = plain_names[outer] if outer in wrappers else f"{plain_names[outer]}.{last}"
        plain = plain_names[name] = plain.strip(".")
        if is_wrapper(module):
            wrappers.add(name)
        if plain and _is_callable(module) and not is_metric(module):
            called.setdefault(plain, module)
    return called


def _is_callable(module: nn.Module) -> bool:
    # Not so a ModuleList or ModuleDict. A scripted module cannot be asked the usual way.
    forward = getattr_static(type(module), "forward", None)
    return forward is not nn.Module.forward or "forward" in vars(module)


def _of_patterns(asked: Iterable[int | str], called: Mapping[str, nn.Module]) -> list[str]:
    found: list[str] = []
    for one in asked:
        if isinstance(one, int):
            # Of a model without modules inside it means none, as "all" does: no typing error.
            found += [name for name in called if _depth(name, called) <= one]
        elif one == ALL:
            found += called
        elif not _is_name(one):
            names = [name for name in called if _matches(name.split("."), one.split("."))]
            if not names:
                some = ", ".join([*called][:20]) or "none inside"
                raise ValueError(
                    f"modules: no module of the model matches {one!r} ('*' stands for one part of a"
                    f" name, '**' for any number of them); it has {some}"
                )
            found += names
    return found


def _is_name(one: int | str) -> TypeGuard[str]:
    return isinstance(one, str) and one != ALL and not set(one) & set("*?[")


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[i:], pattern[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _depth(name: str, called: Mapping[str, nn.Module]) -> int:
    # A ModuleList is no depth of its own: nobody calls it.
    return sum(outer in called for outer in accumulate(name.split("."), "{}.{}".format))


def _usable(name: str) -> str:
    # What a ModuleDict was given as a key may be no name of a phase; `comm` is a wait.
    usable = re.sub(f"[{UNUSABLE}]", "_", name)
    return f"{usable}_" if usable == COMM else usable


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
        # Made once, as a step has hundreds; none where no module was called inside `forward`.
        self.labels: dict[tuple[str, int], tuple[str, str]] = {}
        # For each call that is not over: the label before it, and its inputs.
        self._open: list[tuple[str, dict[int, Any]] | None] = []
        for module in parts.values():
            # Where the part is the model itself, `forward` begins before it, and ends after it.
            for one in around_calls(module, self._enter, self._exit, inside=True):
                attachments.add(one)
        # Of this step: hooks on tensors, and by their ids the tensors whose gradient begins a part,
        # with its label. An id may be used again.
        self._tensor_handles: list[Any] = []
        self._outputs: dict[int, tuple[ref[Tensor], str]] = {}

    def step_ended(self) -> None:
        self._open.clear()
        self._outputs.clear()
        # An input that needs a gradient may be used again in the next step: no hook may stay on it.
        for handle in self._tensor_handles:
            handle.remove()
        self._tensor_handles.clear()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if get_ident() != self._recorder.threads.timed or current_graph_task_id() != -1:
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
            begins = self._part_begun_by(tensor)
            if begins is None or own.startswith(f"{begins}/"):
                self._at_gradient(tensor, lambda: self._end(own, _backward(outer)))

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        if get_ident() != self._recorder.threads.timed or current_graph_task_id() != -1:
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
            if is_own and self._part_begun_by(tensor) is None:
                self._at_gradient(tensor, lambda: self._begin(label))
                self._outputs[id(tensor)] = ref(tensor), label
        self._recorder.mark(outer)

    def _part_begun_by(self, tensor: Tensor) -> str | None:
        """Return the label of the part whose output a tensor is, or None."""
        known, label = self._outputs.get(id(tensor), (None, None))
        return label if known is not None and known() is tensor else None

    def _labels_of(self, outer: str, module: nn.Module) -> tuple[str, str]:
        found = self.labels.get((outer, id(module)))
        if found is None:
            label = f"{outer}/{self._names[id(module)]}"
            found = self.labels[outer, id(module)] = label, _backward(label)
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
