"""A timer for a plain loop that has none: the loop is found by its first update."""

import gc
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_gputime._auto_instrumentation.adding import options_of_all, show_at_exit
from lightning_gputime._boundaries.backward import ENGINE
from lightning_gputime._boundaries.patching import Calls, patch_function
from lightning_gputime._compile_skip import skip_compile
from lightning_gputime._messages import messages
from lightning_gputime._session import lifetimes
from lightning_gputime.hooks import GPUPhaseHooks

_FOUND = (
    "Timing the loop that trains %s: a step is one update of its %s. Other models and optimizers"
    " are not seen; for these write GPUPhaseHooks(model, optimizers) into the script."
)
_NOT_FOUND = (
    "No step is timed: of the parameters that %s updates %s. Write"
    " timer = GPUPhaseHooks(model, optimizer).attach() before the loop, and timer.step() at the end"
    " of its body."
)


@skip_compile
class PlainLoop:
    """Time the loop of the first optimizer that updates, unless a timer is at work by then."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self._wanted = wanted
        self._optimizer: Optimizer | None = None
        self._timer: GPUPhaseHooks | None = None
        self._handle = register_optimizer_step_post_hook(self._first_update)

    def _first_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._optimizer is None:
            # Torch is going through its hooks: none may be added or removed before the next
            # backward.
            self._optimizer = optimizer
            calls = Calls(self._next_backward)
            self._subscription = patch_function(torch.autograd, ENGINE, calls)

    def _next_backward(self, *_: Any, **__: Any) -> bool:
        self._subscription.remove()
        self._handle.remove()
        if self._optimizer is not None and not lifetimes.is_any_attached():
            self._attach(self._optimizer)
        return False

    def _attach(self, optimizer: Optimizer) -> None:
        models = _models_of(optimizer)
        kind = type(optimizer).__name__
        names = " and ".join(sorted({type(one).__name__ for one in models}))
        if not models or _share_parameters(models):
            why = f"several modules have some, {names}" if models else "no module has any"
            messages.warning(_NOT_FOUND, kind, why)
            return
        model = models[0] if len(models) == 1 else nn.ModuleList(models)
        timer = GPUPhaseHooks(model, optimizer, **options_of_all(self._wanted)).attach()
        optimizer.register_step_post_hook(self._step_ends)
        self._timer = timer
        show_at_exit(timer, self._wanted)
        messages.warning(_FOUND, names, kind)

    def _step_ends(self, *_: Any) -> None:
        timer = self._timer
        if timer is None:
            return
        if self._optimizer is not None:
            # The step in which the timer was attached has no beginning.
            self._optimizer = None
            timer._session.begin(0)
        else:
            timer.step()


def _models_of(optimizer: Optimizer) -> list[nn.Module]:
    """Return the outermost modules that have parameters of an optimizer."""
    own = {id(one) for group in optimizer.param_groups for one in group["params"]}
    # Not by `isinstance`, which a proxy may answer by an error.
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    inner = {id(child) for one in modules for child in one.children()}
    outermost = [one for one in modules if id(one) not in inner]
    return [one for one in outermost if any(id(each) in own for each in one.parameters())]


def _share_parameters(models: list[nn.Module]) -> bool:
    every = [id(one) for model in models for one in model.parameters()]
    return len(every) > len({*every})
