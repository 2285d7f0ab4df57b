"""Timers that are added to plain loops. A loop is found by its first optimizer update."""

import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from lightning_gputime._auto_instrumentation.environment import suppress_errors, warn_once
from lightning_gputime._messages import messages

if TYPE_CHECKING:
    from lightning_gputime._auto_instrumentation.adding import EarlyStages, TimedLoop

# Import nothing else of this package here. `import torch` loads this module, perhaps while the
# script is importing this package. And a process without updates, such as a loader's worker, does
# not need a timer.

_FOUND = (
    "Timing the loop that trains %s: each update of its %s ends a step. Other optimizers and"
    " evaluations are not timed. To time them, add GPUPhaseHooks with steps(loader) to the script."
)
_NOT_FOUND = (
    "No step is timed: %s. Write timer = GPUPhaseHooks(%s).attach() before the loop, and"
    " timer.step() at the end of its body."
)
_FOUND_NEXT = "Timing the loop that trains %s, the next training loop of this process."
_MISSED = (
    "Some training loops are not shown, because they are too short or come after many other loops."
    " To time them, add GPUPhaseHooks to the script."
)
_NO_CALLBACK = (
    "No step is timed: the Trainer of %s did not call the callback that run adds. Pass a"
    " timer to the Trainer, or reinstall lightning-gputime."
)
_MAX_LOOPS = 20  # Each prints a table, so that more would hide the output of the script.
_MAX_SHORT_LOOPS = 3  # After this many in a row, time no loop: to find each model takes 0.1 s.
_LAUNCHER_CPU_S = 0.5  # CPU time of its children from which on a process is taken for a launcher.
_PROCESS = "LIGHTNING_GPUTIME_PROCESS"  # Environment variable with the id of the first process.


class PlainLoops:
    """Timers of plain loops, one after another.

    The first optimizer that updates in a loop defines its steps. The loop is over once other
    optimizers have updated several times since the last update of that optimizer:

    1. `_update_ends` is called after each update, and counts the updates of other optimizers.
    2. If there are enough, the next backward calls `_switch_to`, which ends the loop.
    3. `_try_to_time` finds the models of the new optimizer, and starts its `TimedLoop`.
    """

    def __init__(self, wanted: dict[str, Any]) -> None:
        self._wanted = wanted
        self._loop: TimedLoop | None = None
        self._n_loops = 0  # Number of loops that were found.
        self._shows = False  # True on rank zero once a loop has been found.
        self._n_short_loops = 0  # Number of consecutive loops with only warm-up steps.
        self._has_missed = False  # True if a loop is not shown.
        # Number of updates of other optimizers since the last update of the timed loop.
        self._n_other_updates = 0
        self._untimeable = WeakSet[Optimizer]()  # Optimizers whose updates start no loop.
        # Weak reference to the timer of a running Trainer, which times its own loop.
        self._trainer_timer: Callable[[], Any] = lambda: None
        self._early: EarlyStages | None = None  # See `_early_stages`.
        self._cancel_first_iter = _at_first_iter(lambda: self._early_stages().attach())
        self._handle = register_optimizer_step_post_hook(self._update_ends)
        # Child processes inherit this id: only the first process reports that no loop was found.
        os.environ.setdefault(_PROCESS, str(os.getpid()))
        Finalize(None, self._report, exitpriority=0)

    def _update_ends(self, optimizer: Optimizer, *_: Any) -> None:
        """Count an update, and look for a new loop once the timed loop seems to be over."""
        loop = self._loop
        if loop is not None and loop.optimizer is optimizer:
            # The loop continues. `TimedLoop._step_ends` has already ended the step.
            if self._n_other_updates:
                loop.tolerate(self._n_other_updates)
                self._n_other_updates = 0
            return
        timer = self._trainer_timer()
        if optimizer in self._untimeable or (timer is not None and timer._session.is_attached):
            return
        self._n_other_updates += 1
        if self._n_other_updates != (1 if loop is None else loop.ends_after):
            return  # The search starts only once; later updates are counted, too.
        if self._n_loops >= _MAX_LOOPS or self._n_short_loops >= _MAX_SHORT_LOOPS:
            self._has_missed = True
            return
        # Later, so that a script that only imports torch starts faster.
        from lightning_gputime._compat.torch_ import backward_entry
        from lightning_gputime._instrumentation.patching import Calls, Subscription

        reference = ref(optimizer)

        def switch(*_: Any, **__: Any) -> None:
            subscription.remove()
            self._switch_to(reference())

        # Switch in the next backward. Now torch is iterating over its hooks, which must not be
        # changed meanwhile.
        subscription = Subscription(*backward_entry(), Calls(switch))
        subscription.attach()

    @suppress_errors()
    def _switch_to(self, optimizer: Optimizer | None) -> None:
        """Unless the timed loop has continued, end it, and time the loop of an optimizer."""
        if (loop := self._loop) is not None:
            if self._n_other_updates < loop.ends_after:
                return
            # If this optimizer updates again, two optimizers alternate in one training. Show each
            # of them once.
            self._untimeable.add(loop.optimizer)
            is_shown = loop.end()
            self._early_stages().attach()
            self._has_missed |= not is_shown
            self._n_short_loops = 0 if is_shown else self._n_short_loops + 1
            self._loop = None
        self._n_other_updates = 0
        if optimizer is None or self._n_short_loops >= _MAX_SHORT_LOOPS:
            return
        self._untimeable.add(optimizer)  # Do not try again if an error follows.
        from lightning_gputime._auto_instrumentation import adding
        from lightning_gputime._timer import Timer

        timers = _instances_of(Timer)
        attached = [timer for timer in timers if timer._session.is_attached]
        # Timers that were added to the script print on stderr.
        if of_script := [timer for timer in timers if not timer._prints_on_stderr]:
            attached_of_script = [timer for timer in attached if not timer._prints_on_stderr]
            adding.use_timer_of_script((attached_of_script or of_script)[0], self._wanted)
            self._handle.remove()
            return
        if attached:  # A Trainer's timer, which was added to the script.
            self._trainer_timer = ref(attached[0])
        elif not self._try_to_time(optimizer):
            return
        self._untimeable.discard(optimizer)

    def _try_to_time(self, optimizer: Optimizer) -> bool:
        """Time the loop in which an optimizer updates, or warn and return False."""
        from lightning_gputime._auto_instrumentation import adding
        from lightning_gputime._compat import lightning_, transformers_
        from lightning_gputime._compat.python_ import running_module

        self._n_loops += 1
        models = _models_of(optimizer)
        kind = type(optimizer).__name__
        names = " and ".join(sorted({type(model).__name__ for model in models}))
        parameters = [id(p) for model in models for p in nn.Module.parameters(model)]
        module = running_module(lightning_.TRAINING | transformers_.TRAINING)
        if module:  # Such as "lightning.pytorch.trainer.trainer" or "transformers.trainer".
            warn_once(_NO_CALLBACK, module.rpartition(".trainer")[0].removesuffix(".trainer"))
        elif not models:
            why = f"no module has parameters that {kind} updates"
            warn_once(_NOT_FOUND, why, "model, optimizer")
        elif len(parameters) > len({*parameters}):
            why = f"several modules that {kind} updates share parameters: {names}"
            warn_once(_NOT_FOUND, why, "model, optimizer")
        else:
            self._loop = adding.TimedLoop(optimizer, models, self._wanted, self._early_stages())
            self._shows = self._loop.is_shown
            if self._shows and self._n_loops == 1:
                messages.warning(_FOUND, names, kind)
            elif self._shows:
                messages.warning(_FOUND_NEXT, names)
            return True
        return False

    def _early_stages(self) -> "EarlyStages":
        """Return the timer of the stages of loaders that are read between the timed loops."""
        if self._early is None:
            self._cancel_first_iter()
            from lightning_gputime._auto_instrumentation.adding import EarlyStages

            self._early = EarlyStages()
        return self._early

    def _report(self) -> None:
        """Warn at exit if no loop, or not every loop, was timed."""
        if self._shows and self._has_missed:
            messages.warning(_MISSED)
        times = os.times()  # In seconds. The children of a launcher train.
        is_launcher = times.children_user + times.children_system > _LAUNCHER_CPU_S
        has_timer = "lightning_gputime._timer" in sys.modules
        is_child = os.environ[_PROCESS] != str(os.getpid())
        has_failed = hasattr(sys, "last_value")
        if is_child or is_launcher or has_timer or has_failed:
            return
        from lightning_gputime._auto_instrumentation.command import FLAGS

        if misplaced := FLAGS.keys() & {text.partition("=")[0] for text in sys.argv[1:]}:
            messages.warning("Options of run must precede the script: %s", ", ".join(misplaced))
        else:
            why = "no update by a torch optimizer"
            if self._n_other_updates == 1:
                why = "no second update by a torch optimizer"
            elif self._n_other_updates:
                why = "no backward between the updates of a torch optimizer"
            messages.warning(_NOT_FOUND, f"{why} was found", "model")


def _at_first_iter(call: Callable[[], object]) -> Callable[[], None]:
    """Call a function at the first `iter(loader)`. Return a function that cancels the call.

    Patch `DataLoader` by hand, because a `Subscription` would import dynamo in each process.
    """
    original = DataLoader.__iter__

    @wraps(original)
    def first_iter(loader: Any) -> Any:
        if DataLoader.__iter__ is not first_iter:
            # A timer, or other code, has wrapped this function: pass the call on, without `call`.
            return original(loader)
        cancel()
        with suppress_errors():
            call()
        # A subclass may have called `super().__iter__()`, so `iter(loader)` would recurse.
        return DataLoader.__iter__(loader)

    def cancel() -> None:
        if DataLoader.__iter__ is first_iter:
            type.__setattr__(DataLoader, "__iter__", original)

    type.__setattr__(DataLoader, "__iter__", first_iter)
    return cancel


def _models_of(optimizer: Optimizer) -> list[nn.Module]:
    """Return the outermost modules that have parameters of the optimizer."""
    from lightning_gputime._compat.torch_ import is_compiled_graph
    from lightning_gputime._instrumentation.loop import parameters_of

    updated = {id(p) for p in parameters_of(optimizer)}
    modules = []
    for module in _instances_of(nn.Module):
        with suppress(AttributeError):  # Its `__init__` has not run.
            next(nn.Module.children(module), None)
            if not is_compiled_graph(module):
                modules.append(module)
    # Call methods of `nn.Module`, because a user's module may redefine them.
    inner = {id(child) for module in modules for child in nn.Module.children(module)}
    outermost = [module for module in modules if id(module) not in inner]
    return [m for m in outermost if any(id(p) in updated for p in nn.Module.parameters(m))]


def _instances_of(kind: type) -> list[Any]:
    # `isinstance` reads `__class__`, which may raise in a proxy.
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]
