"""The timer for a loop with Lightning's Fabric."""

import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar, Unpack

import torch
from torch import nn

from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._boundaries.patching import Subscription
from lightning_gputime._loop_timer import LoopTimer, Steps
from lightning_gputime._messages import format_value
from lightning_gputime._options import AllOptions, Options, takes_options
from lightning_gputime._timer import callers, never_raises

T = TypeVar("T")

_NOT_SET_UP = (
    "No step is timed: Fabric notifies callbacks of setup() alone. After setup_module() and"
    " setup_optimizers() call timer.on_after_setup(fabric, model, optimizer)."
)

_RAW = "optimizers must be as fabric.setup_optimizers(...) returns them, got {}"
# Updates of each optimizer in one step. A prefetcher has a few at the end of a loop.
_MAX_UPDATES = 10
_NO_LOADER = (
    "No step ends here: no loader of fabric.setup_dataloaders() is read. Write `for x in"
    " timer.steps(loader)`, or call timer.step() at the end of the loop's body."
)
_NO_LOOP = Loop(nn.Identity())


@takes_options
class FabricPhaseTimer(LoopTimer):
    """Log the time of each phase of the training steps of a loop with Fabric.

    `fabric.setup(model, optimizer)` starts a measurement of all models with trainable weights that
    were set up. After `setup_module` and `setup_optimizers`, of which Fabric does not notify
    callbacks, call `timer.on_after_setup(fabric, model, optimizer)`. Means go to `fabric.loggers`.

    A step ends where a loop asks a loader of `fabric.setup_dataloaders` for the next batch, if
    there was an update since the last step. So one batch with updates of two optimizers (GAN) is
    one step, and so are micro-batches whose gradients accumulate. For other loaders write
    `timer.steps(loader)`. Loaders read without grad, or in eval mode, are evaluations: they belong
    to no step.

    Args:
        log_every_n_steps: Number of steps averaged into one log.
        **options: Those of `TimerOptions`.

    Examples:
        >>> timer = FabricPhaseTimer()
        >>> fabric = Fabric(callbacks=[timer])
        >>> ...
        >>> timer.remove()
        >>> print(timer.summary())
    """

    _USE = "Nothing was set up: give it to Fabric(callbacks=[...]), and call fabric.setup()."

    def __init__(self, *, log_every_n_steps: int = 50, **options: Unpack[AllOptions]) -> None:
        super().__init__(Options(**options), log_every_n_steps)
        self._models: list[nn.Module] = []
        self._optimizers: list[Any] = []
        self._loop = _NO_LOOP
        self._trained_on = 0  # The loader whose loop has ended steps, by its id.

    def __getstate__(self) -> dict[str, Any]:
        # Fabric pickles its callbacks where it launches by spawn, before anything is set up.
        empty: dict[str, Any] = {"_models": [], "_optimizers": [], "_loop": _NO_LOOP}
        return {**super().__getstate__(), **empty}

    # Fabric's hooks

    def on_after_setup(self, fabric: Any, module: nn.Module, *optimizers: Any) -> None:
        """Start a new measurement, of all that was set up since `remove`.

        Fabric calls it in `setup`. After `setup_module` and `setup_optimizers` call it yourself.

        Args:
            fabric: The Fabric that has set it up.
            module: The model, as Fabric returns it.
            *optimizers: The optimizers, as Fabric returns them.

        Raises:
            TypeError: If an optimizer is not as Fabric returns it.
            ValueError: If a name or pattern of `modules` matches no module of the model.
        """
        for one in optimizers:
            if not _is_wrapper(one, "_FabricOptimizer"):
                raise TypeError(_RAW.format(format_value(one)))
        own = [*optimizers] or _optimizers_of(fabric)
        # One that is not trained is a part of the loss, say; with an optimizer it thaws later.
        if own or any(one.requires_grad for one in module.parameters()):
            self._models.append(module)
        self._optimizers += own
        if self._models:
            # Raises, before training, if a name is wrong.
            submodules = self._submodules(getattr(self._models[0], "module", self._models[0]))
            self._attach(fabric, submodules)

    @never_raises
    def _attach(self, fabric: Any, submodules: dict[str, nn.Module]) -> None:
        self._abort()
        one, *others = self._models
        self._loop = Loop(
            nn.ModuleList(self._models) if others else one,
            [one.optimizer for one in self._optimizers],
            # Their classes, one each: an optimizer of Fabric's holds its callbacks, and so what is
            # put on it would hold the timer.
            [type(one) for one in self._optimizers],
            pause_evaluation=True,
            submodules=submodules,
            needs_updates=True,
        )
        clock = self._clock_for(fabric.device, tell=fabric.is_global_zero)
        self._start_loop(clock, fabric.loggers)
        loaders, this = _loader_class(fabric), weakref.ref(self)
        self._patches.add(Subscription(loaders, "__iter__", this, _followed))
        weakref.finalize(self, self._patches.remove).atexit = False

    @never_raises
    def on_after_optimizer_step(self, **_: Any) -> None:
        """Warn where no loop ends steps. Fabric calls it."""
        if not self._session.was_attached:
            self._warn_once(_NOT_SET_UP)
        elif self._session.optimizer.updates > _MAX_UPDATES * len(self._optimizers):
            self._warn_once(_NO_LOADER)

    # For users

    def steps(self, iterable: Iterable[T]) -> Steps[T]:  # noqa: D102  # as of the base class
        if _is_wrapper(iterable, "_FabricDataLoader"):
            return Steps(lambda: iter(iterable), iterable)  # It is followed.
        return super().steps(iterable)

    # Loops over loaders

    def follow(self, items: Iterator[T], loader: object) -> Generator[T, None, None]:
        """Yield the batches of a loader of Fabric's, and end the steps."""
        before = self._step
        try:
            yield from self._iterate(items, loader)
        finally:
            if self._step > before:
                self._trained_on = id(loader)

    def _is_evaluation(self, loader: object) -> bool:
        if not torch.is_grad_enabled():
            return True
        # Some train in eval mode, as with frozen batch norms; or say `train()` after the fetch.
        is_unknown = self._session.forward.has_trained and id(loader) != self._trained_on
        return is_unknown and not any(one.training for one in self._models)

    # The end

    def _forget(self) -> None:
        self._models.clear()
        self._optimizers.clear()
        self._loop = _NO_LOOP
        self._patches.remove()

    def _finish(self) -> None:
        super()._finish()
        self._forget()

    def _detach(self) -> None:
        super()._detach()
        self._forget()


def _followed(call: Callable[[Any], Any], timers: list[Any]) -> Callable[[Any], Any]:
    """Return the replacement of `__iter__` of Fabric's loaders."""

    def followed(loader: Any) -> Any:
        items = call(loader)
        for timer in [one() for one in timers]:
            if timer is not None:
                items = timer.follow(items, loader)
        return items

    return followed


def _optimizers_of(fabric: Any) -> list[Any]:
    """Return the optimizers in the call of `fabric.setup`: its hook gets the model alone."""
    for known in callers():
        if known.get("self") is fabric and "optimizers" in known:
            return [one for one in known["optimizers"] if _is_wrapper(one, "_FabricOptimizer")]
    return []


# By name: `lightning.fabric` and `lightning_fabric` have a class each.


def _is_wrapper(thing: object, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(thing).__mro__)


def _loader_class(fabric: Any) -> Any:
    """Return the class of the loaders that a Fabric sets up."""
    module = next(kind.__module__ for kind in type(fabric).__mro__ if kind.__name__ == "Fabric")
    return sys.modules[f"{module.rpartition('.')[0]}.wrappers"]._FabricDataLoader
