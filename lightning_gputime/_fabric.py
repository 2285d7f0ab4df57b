"""The hooks by which Lightning's Fabric calls a timer, and its loaders."""

import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar
from weakref import ReferenceType, ref

import torch
from lightning.fabric import Fabric, wrappers
from torch import nn

from lightning_gputime._boundaries.attach import StandIn, listen_while_alive
from lightning_gputime._boundaries.loop import Loop
from lightning_gputime._guard import never_raises
from lightning_gputime._options import Options, check_int
from lightning_gputime._phases import OTHER
from lightning_gputime._record.clock import clock_for
from lightning_gputime._results.means import MeanLog
from lightning_gputime._run.iteration import Steps
from lightning_gputime._timer import Timer

T = TypeVar("T")


class FabricTimer(Timer):
    """A timer that Fabric calls, and whose loaders it follows.

    Args:
        options: How steps are timed.
        log_every_n_steps: How many steps are averaged into one log.
    """

    _USE = "Nothing was set up: give it to Fabric(callbacks=[...]), and call fabric.setup()."

    def __init__(self, options: Options, *, log_every_n_steps: int) -> None:
        super().__init__(options)
        check_int("log_every_n_steps", log_every_n_steps, 1, "steps in one logged mean")
        self._log_every_n_steps = log_every_n_steps
        self._stand_in: StandIn | None = None
        self._models: list[nn.Module] = []
        # Those that were set up, and those that have updated, in the order of their first update.
        self._optimizers: list[Any] = []
        self._updated: list[Any] = []
        self._step = 0
        # Whether the open step has an update, and whether it has any batch.
        self._has_updated = self._has_batches = False
        # How many loaders of training batches are read now.
        self._loaders = 0
        self._hear()

    def __getstate__(self) -> dict[str, Any]:
        # Fabric pickles its callbacks where it launches by spawn, before anything is set up.
        empty: dict[str, Any] = {
            "_stand_in": None,
            "_models": [],
            "_optimizers": [],
            "_updated": [],
        }
        return {**super().__getstate__(), **empty}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hear()

    def _hear(self) -> None:
        # The callback's own hook is told of no optimizer, and of `setup` alone.
        for name in ("setup", "setup_module", "setup_optimizers"):
            listen_while_alive(Fabric, name, self, _told)

    # Fabric's hooks

    def set_up(self, fabric: Any, found: tuple[Any, ...]) -> None:
        """Starts a new measurement, of all that was set up since `remove`.

        Args:
            fabric: Who has set it up.
            found: What its method returned.
        """
        models = [one for one in found if isinstance(one, nn.Module)]
        # One that is not trained is a part of the loss, say.
        self._models += [
            model for model in models if any(one.requires_grad for one in model.parameters())
        ]
        self._optimizers += [one for one in found if isinstance(one, wrappers._FabricOptimizer)]
        if self._models:
            # Raises, before training, if a name is wrong.
            submodules = self._submodules(getattr(self._models[0], "module", self._models[0]))
            self._attach(fabric, submodules)

    @never_raises
    def _attach(self, fabric: Any, submodules: dict[str, nn.Module]) -> None:
        self._abort()
        self._step, self._loaders = 0, 0
        self._has_updated = self._has_batches = False
        one, *others = self._models
        self._start(
            self._options.clock or clock_for(fabric.device, tell=fabric.is_global_zero),
            Loop(
                nn.ModuleList(self._models) if others else one,
                [one.optimizer for one in self._optimizers],
                # Their classes, one each: an optimizer of Fabric's holds its callbacks, and so what
                # is put on it would hold the timer.
                [type(one) for one in self._optimizers],
                pause_evaluation=True,
                submodules=submodules,
            ),
            MeanLog(self._options.prefix, self._log_every_n_steps, fabric.loggers),
        )
        if self._stand_in is None:
            loaders = wrappers._FabricDataLoader
            self._stand_in = listen_while_alive(loaders, "__iter__", self, _followed)
        self._session.begin(0)

    @never_raises
    def on_after_optimizer_step(self, *, optimizer: Any, **_: Any) -> None:
        """Ends a step, if no loader does."""
        if all(one is not optimizer for one in self._updated):
            self._updated.append(optimizer)
        self._has_updated = True
        if not self._loaders and optimizer is self._updated[-1]:
            self._end_step()

    # For users

    def steps(self, loader: Iterable[T]) -> Steps[T]:
        """Yields the items of a loader that is none of Fabric's, and ends the steps.

        Args:
            loader: The loader.

        Returns:
            An iterator with the loader's length, if it has one.
        """
        if isinstance(loader, wrappers._FabricDataLoader):
            items: Any = iter(loader)  # It is followed.
        else:
            items = self.follow(iter(loader), loader)
        return Steps(items, loader)

    def remove(self) -> None:
        """Ends the measurement: reads and logs the last steps, and takes all hooks off."""
        if self._session.is_attached:
            if self._has_updated:
                self._end_step()
            self._finish()
        self._forget()

    # What a loader tells

    def follow(self, items: Iterator[T], loader: object) -> Generator[T, None, None]:
        """Yields the batches of a loader, and says where each begins."""
        trains = self._loader_begins(loader)
        try:
            while True:
                self._fetch_begins()
                try:
                    item = next(items)
                except StopIteration:
                    return
                self._batch_begins(item)
                yield item
        finally:
            self._loader_ends(trains)

    def _loader_begins(self, loader: object) -> bool:
        trains = self._trains()
        if trains:
            try:
                self._begin_epoch(loader)
            except Exception as error:
                self._give_up(error)
        self._loaders += trains
        return trains

    def _begin_epoch(self, loader: object) -> None:
        session = self._session
        if self._has_updated:
            self._end_step()
        session.loads(loader, in_data=False)
        self._know_batch(loader)
        if self._has_batches and not self._loaders:
            # Gradients accumulate from one epoch to the next; what lies between is no step's.
            session.pause()
            session.resume()
        elif not self._loaders:
            session.begin(self._step)

    @never_raises
    def _fetch_begins(self) -> None:
        if self._trains():
            if self._has_updated:
                self._end_step()
            elif self._has_batches:
                self._session.batch_ends()
            self._session.fetch_begins()
        else:
            # A mark of its own: the one before may be the end of an update.
            self._session.part_begins(OTHER)
            self._session.pause()

    @never_raises
    def _batch_begins(self, batch: object) -> None:
        if self._trains():
            self._has_batches = True
            self._session.batch_begins()
            self._session.takes(batch)

    @never_raises
    def _loader_ends(self, trains: bool) -> None:
        # A loader may be given up after another measurement has begun.
        self._loaders = max(self._loaders - trains, 0)
        if trains:
            if self._has_updated and self._session.is_left(self._step):
                self._step += 1
                self._has_updated = self._has_batches = False
            self._session.compare_ranks()

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and any(one.training for one in self._models)

    def _end_step(self) -> None:
        self._has_updated = self._has_batches = False
        self._session.end_step(self._step)
        self._step += 1

    # The end

    def _forget(self) -> None:
        for several in (self._models, self._optimizers, self._updated):
            several.clear()
        if self._stand_in is not None:
            self._stand_in.forget(ref(self))
            self._stand_in = None

    def _detach(self) -> None:
        self._abort()
        self._forget()


def _followed(
    call: Callable[[Any], Any], timers: list[ReferenceType[FabricTimer]]
) -> Callable[[Any], Any]:
    """Returns what takes the place of `__iter__` of Fabric's loaders."""

    def followed(loader: Any) -> Any:
        items = call(loader)
        for timer in [one() for one in timers]:
            if timer is not None:
                items = timer.follow(items, loader)
        return items

    return followed


def _told(call: Callable[..., Any], timers: list[ReferenceType[FabricTimer]]) -> Callable[..., Any]:
    """Returns what takes the place of a method of Fabric's that sets something up."""

    @functools.wraps(call, updated=())
    def told(fabric: Any, *args: Any, **kwargs: Any) -> Any:
        found = call(fabric, *args, **kwargs)
        for timer in [one() for one in timers]:
            if timer is not None and any(one is timer for one in fabric._callbacks):
                timer.set_up(fabric, found if isinstance(found, tuple) else (found,))
        return found

    return told
