"""A timer for a plain loop that has none: the loop is found by its first update."""

import gc
import os
import sys
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_gputime._auto_instrumentation import options_of_all, tell_once, tells_errors
from lightning_gputime._messages import messages
from lightning_gputime._phases import BACKWARD

# No more: the script may be importing the package now, which imports torch; and a process that
# updates nothing, such as a loader's worker, needs no timer.

_FOUND = (
    "Timing the loop that trains %s: a step is one update of its %s. Other models, optimizers and"
    " evaluations are not shown; for these write GPUPhaseHooks with steps(loader) into the script."
)
_NOT_FOUND = (
    "No step is timed: %s. Write timer = GPUPhaseHooks(%s).attach() before the loop, and"
    " timer.step() at the end of its body."
)
_MICRO_BATCHES = (
    "One update has %d calls of backward: what lies between them, such as the fetch of a batch,"
    " counts for `other` or `loss`. If gradients accumulate, write a GPUPhaseHooks with"
    ' steps(loader) and accumulate_grad_batches="auto" into the script.'
)
_MAX_UPDATES = 50  # The loop is over when others have updated so often since its last update.


class PlainLoop:
    """Time the loop of the first optimizer that updates, unless a timer is at work by then."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self._wanted = wanted
        self._optimizer: Optimizer | None = None
        self._timer: Any = None
        self._updates = 0
        self._handle = register_optimizer_step_post_hook(self._update_ends)
        # Its children have it from this one: what trains may be any of them.
        if os.environ.setdefault("LIGHTNING_GPUTIME_PROCESS", str(os.getpid())) == str(os.getpid()):
            Finalize(None, self._tell_if_no_update, exitpriority=0)

    def _update_ends(self, optimizer: Optimizer, *_: Any) -> None:
        self._updates += 1
        if self._updates == 1:
            self._optimizer = optimizer
        if self._updates == 1 or (self._updates == _MAX_UPDATES and self._timer is not None):
            # Torch is going through its hooks: none may be added or removed before the next
            # backward.
            from lightning_gputime._boundaries.backward import ENGINE
            from lightning_gputime._boundaries.patching import Calls, Subscription

            calls = Calls(self._next_backward)
            self._subscription = Subscription(torch.autograd, ENGINE, calls)

    def _next_backward(self, *_: Any, **__: Any) -> None:
        self._subscription.remove()
        if self._timer is not None:
            self._let_go()
        elif self._optimizer is not None:
            self._attach(self._optimizer)
        if self._timer is None:
            self._handle.remove()

    @tells_errors()
    def _attach(self, optimizer: Optimizer) -> None:
        from lightning_gputime._auto_instrumentation import adding
        from lightning_gputime._timer import Timer
        from lightning_gputime.hooks import GPUPhaseHooks

        if timers := _instances_of(Timer):
            if not any(one._prints_on_stderr for one in timers):
                tell_once(adding.HAS_ONE)
            return
        models = _models_of(optimizer)
        kind = type(optimizer).__name__
        names = " and ".join(sorted({type(one).__name__ for one in models}))
        parameters = [id(one) for model in models for one in model.parameters()]
        if not models or len(parameters) > len({*parameters}):  # Several models share some.
            why = f"several modules have some, {names}" if models else "no module has any"
            why = f"of the parameters that {kind} updates {why}"
            messages.warning(_NOT_FOUND, why, "model, optimizer")
            return
        model = models[0] if len(models) == 1 else nn.ModuleList(models)
        timer = GPUPhaseHooks(model, optimizer, **options_of_all(self._wanted)).attach()
        optimizer.register_step_post_hook(self._step_ends)
        self._timer = timer
        if adding.show_at_exit(timer, self._wanted):
            messages.warning(_FOUND, names, kind)

    def _step_ends(self, *_: Any) -> None:
        self._updates = 1
        if self._timer is not None and self._optimizer is None:
            if (calls := self._timer._session.recorder.labels.count(BACKWARD)) > 1:
                self._timer._warn_once(_MICRO_BATCHES, calls)
            self._timer.step()
        elif self._timer is not None:
            # The step in which the timer was attached has no beginning.
            self._optimizer = None
            self._timer._session.begin()

    def _tell_if_no_update(self) -> None:
        has_children = sum(os.times()[2:4]) > 0.5  # In seconds: as of a launcher.
        has_timer = "lightning_gputime._timer" in sys.modules
        if has_children or has_timer or hasattr(sys, "last_value"):
            return
        from lightning_gputime._auto_instrumentation.command import FLAGS

        if misplaced := FLAGS.keys() & {one.partition("=")[0] for one in sys.argv[1:]}:
            messages.warning("Options of run stand before the script: %s", ", ".join(misplaced))
        else:
            why = "no second update" if self._updates else "no update"
            messages.warning(_NOT_FOUND, f"{why} by an optimizer of torch's was seen", "model")

    def _let_go(self) -> None:
        """End the timing where another loop runs: the script may need this one's model no more."""
        self._timer._finish()
        del self._timer._loop
        self._optimizer = self._timer = None


def _models_of(optimizer: Optimizer) -> list[nn.Module]:
    """Return the outermost modules that have parameters of an optimizer."""
    own = {id(one) for group in optimizer.param_groups for one in group["params"]}
    modules = [*filter(_is_model, _instances_of(nn.Module))]
    # By methods of the base class: others may give these names to their own things.
    inner = {id(child) for one in modules for child in nn.Module.children(one)}
    outermost = [one for one in modules if id(one) not in inner]
    return [one for one in outermost if any(id(p) in own for p in nn.Module.parameters(one))]


def _is_model(module: nn.Module) -> bool:
    # Not if its `__init__` has not run, nor the graph of a compiled optimizer.
    return "_modules" in vars(module) and "compile_subgraph_reason" not in vars(module)


def _instances_of(kind: type) -> list[Any]:
    # Not by `isinstance`, which a proxy may answer by an error.
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]
