"""Search for the modules that a loop calls: the model, parts of it, and losses."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_gputime._compat.torch_ import LOSSES, is_compiled
from lightning_gputime._instrumentation.compiled import around_calls
from lightning_gputime._instrumentation.module_hooks import hook_before
from lightning_gputime._instrumentation.patching import Attachments
from lightning_gputime._phases import is_metric


class Handlers(NamedTuple):
    """Functions that the hooks call."""

    enter: Callable[..., None]  # Before each call of a module.
    leave: Callable[..., None]  # After each call of a module, with its output.
    enter_loss: Callable[..., None]  # Before each call of a loss.


class CalledModules:
    """Hooks on the modules that the loop may call.

    A loop may call the model, or only parts of it. At first all modules have hooks. When a step
    ends, modules that were only called by other modules lose their hooks, because hooks cost time.
    The model keeps its hooks.
    """

    # Pass the handlers to each method, do not store them: they are methods of the owner of this
    # object, so the reference cycle would keep the model alive until the next garbage collection.

    def __init__(self, model: nn.Module, attachments: Attachments) -> None:
        self._model, self._attachments = model, attachments
        self.is_searching = False
        """True until a step has shown which modules the loop calls."""
        # All collections contain ids of modules.
        self.called: set[int] = set()
        """Modules that the loop has called directly, in any step."""
        self.nested: set[int] = set()
        """Modules that other modules called in this step."""
        self.not_losses: set[int] = set()
        """Called modules that are certainly no losses."""
        self._losses: set[int] = set()  # Modules that `hook_if_loss` has found to be losses.
        self._hooked: dict[int, list[Any]] = {}  # Hooks of each module except the model.

    def hook_model(self, handlers: Handlers) -> None:
        self._hook(self._model, handlers)

    def search(self, handlers: Handlers, *, everywhere: bool = False) -> None:
        """Add hooks to the modules inside the model; for `everywhere`, see `_modules_inside`."""
        # Do not use torch's global module hooks: they run for every module of the process (with 500
        # modules a forward took 925 us instead of 297 us), and disable torch.compile.
        self.is_searching = True
        for module in _modules_inside(self._model, everywhere, self._losses):
            if id(module) in self._hooked:
                continue
            if isinstance(module, LOSSES):
                self._hook_loss(module, handlers)
            else:
                self._hooked[id(module)] = self._hook(module, handlers)

    def end_search(self) -> None:
        """Remove the hooks of modules that only other modules have called.

        Call it at the end of a step with model calls.
        """
        self.is_searching = False
        if self.nested:
            self._remove_hooks([*(self._hooked.keys() & self.nested) - self.called])
            self.nested.clear()

    def hook_if_loss(
        self, module: nn.Module, output: Any, handlers: Handlers, *, is_first: bool
    ) -> bool:
        """If a module that the loop has called is a loss, hook it as a loss and return True.

        A loss of any class returns a scalar with gradients, and is called after another module. A
        model that returns its loss also returns such a scalar, but it is the first module called
        in a step, or it contains a module that the loop has called.

        Args:
            module: The module, whose call has ended.
            output: The result of the call.
            handlers: Functions that the new hook calls.
            is_first: True if this was the first call in the step.
        """
        is_scalar = isinstance(output, Tensor) and output.dim() == 0
        if is_first or not is_scalar or self._is_model_or_contains_called(module):
            self.not_losses.add(id(module))
            return False
        if output.grad_fn is None:
            return False  # A scalar without gradients may be a loss. Check its next call.
        self._losses.add(id(module))
        # Modules inside a loss are part of it.
        self._remove_hooks([id(inner) for inner in nn.Module.modules(module)])
        self._hook_loss(module, handlers)
        return True

    def find_bypassed(self) -> nn.Module | None:
        """Return a module whose class overrides `__call__`, so that its hooks are not called.

        Return None unless the loop seems to call a module inside it directly.
        """
        for module in self._model.modules():
            if type(module).__call__ is nn.Module.__call__ or id(module) in self.called:
                continue
            if any(id(inner) in self.called for inner in module.modules()):
                return module
        return None

    def _is_model_or_contains_called(self, module: nn.Module) -> bool:
        inside = (id(inner) for inner in nn.Module.modules(module) if inner is not module)
        return module is self._model or not self.called.isdisjoint(inside)

    def _hook(self, module: nn.Module, handlers: Handlers) -> list[Any]:
        hooks = around_calls(module, handlers.enter, handlers.leave)
        return [*map(self._attachments.add, hooks)]

    def _hook_loss(self, module: nn.Module, handlers: Handlers) -> None:
        hook = hook_before(module, handlers.enter_loss)
        self._hooked[id(module)] = [self._attachments.add(hook)]

    def _remove_hooks(self, keys: list[int]) -> None:
        for key in keys:
            for hook in self._hooked.pop(key, ()):
                self._attachments.drop(hook)


def _modules_inside(model: nn.Module, everywhere: bool, losses: set[int]) -> Iterator[nn.Module]:
    """Yield the modules inside a model whose hooks would be called, except ids in `losses`.

    With `everywhere`, include modules whose hooks make torch use a slower implementation.
    """
    # Hooks on children of a compiled module would be compiled, too. A scripted module does not call
    # its children in Python.
    if is_compiled(model) or isinstance(model, torch.jit.ScriptModule):
        return
    for child in nn.Module.children(model):
        # In eval mode, hooks disable the fast path of this layer. That would change the output of a
        # teacher model in the last bits.
        has_fast_path = isinstance(child, nn.TransformerEncoderLayer)
        is_excluded = isinstance(child, ParametrizationList) or is_metric(child)
        if is_excluded or id(child) in losses or (has_fast_path and not everywhere):
            continue
        yield child
        # Modules inside a loss are part of it.
        if not isinstance(child, LOSSES):
            yield from _modules_inside(child, everywhere, losses)
