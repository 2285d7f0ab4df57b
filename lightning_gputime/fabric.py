"""The timer for a loop with Lightning's Fabric: its hooks and its loaders tell where steps end."""

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar, Unpack

import torch
from lightning.fabric import wrappers
from torch import nn

from lightning_gputime._boundaries.loop import Batch, Loop
from lightning_gputime._boundaries.patching import Subscription
from lightning_gputime._messages import format_value
from lightning_gputime._options import AllOptions, Options, check_int, takes_options
from lightning_gputime._phases import BACKWARD, FETCH, OTHER
from lightning_gputime._record.clock import clock_for
from lightning_gputime._results.means import MeanLog
from lightning_gputime._timer import Steps, Timer, callers, never_raises

T = TypeVar("T")

_NOT_SET_UP = (
    "No step is timed: Fabric tells of setup() alone. After setup_module() and setup_optimizers()"
    " call timer.on_after_setup(fabric, model, optimizer)."
)

_RAW = "optimizers must be what fabric.setup_optimizers(...) returns: it tells of updates, got {}"
_MANY = 10  # Steps without a loader. A prefetcher has a few at the end of an epoch.
_NO_LOADER = (
    "Steps end where no loader is read: with the update of the optimizer that was seen last. What"
    " is between two of them is `data`, an evaluation too. Write `for x in timer.steps(loader)`."
)


@takes_options
class FabricPhaseTimer(Timer):
    """Log how long the phases of each training step take, for `Fabric(callbacks=[...])`.

    It starts with `fabric.setup(model, optimizer)`, and times all models that are set up and have
    trainable weights. One that is set up after an update starts a new measurement. Fabric tells
    nobody of `setup_module` and `setup_optimizers`: call `timer.on_after_setup(fabric, model,
    optimizer)` after them. The means go to `fabric.loggers`.

    A step ends where a loader of `fabric.setup_dataloaders` is asked for the next batch, if there
    was an update since the last: a batch with the updates of two optimizers (GAN) is one step, and
    so are micro-batches whose gradients accumulate. A loader that is read in eval mode or without
    grad is an evaluation, and belongs to no step. For any other loader say `steps(loader)`; else a
    step ends with the update of the optimizer that was seen last, and what follows is `data`.

    Args:
        log_every_n_steps: How many steps are averaged into one log.
        **options: Those of `TimerOptions`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has an impossible value.

    Example:
        >>> timer = FabricPhaseTimer()
        >>> fabric = Fabric(callbacks=[timer])
        >>> ...
        >>> timer.remove()
        >>> print(timer.summary())
    """

    _USE = "Nothing was set up: give it to Fabric(callbacks=[...]), and call fabric.setup()."

    def __init__(
        self,
        *,
        log_every_n_steps: int = 50,
        **options: Unpack[AllOptions],
    ) -> None:
        super().__init__(Options(**options))
        self._log_every_n_steps = check_int(
            "log_every_n_steps", log_every_n_steps, 1, "steps in one logged mean"
        )
        self._models: list[nn.Module] = []
        # Those that were set up, and those that have updated, in the order of their first update.
        self._optimizers: list[Any] = []
        self._updated: list[Any] = []
        self._step = 0
        # Whether the open step has an update, and whether it has any batch.
        self._has_updated = self._has_batches = False
        # What reads batches of training from loaders now, by its id, and the steps since one did.
        self._readers = set[int]()
        self._alone = 0
        # Whether the newest update was one of models in eval mode, as with frozen batch norms.
        self._trains_in_eval = False
        # The training loader that was read last, by its id.
        self._trained_on = 0
        # Closed where calls of the model do not tell that they are an evaluation's.
        self._batch = Batch()

    def __getstate__(self) -> dict[str, Any]:
        # Fabric pickles its callbacks where it launches by spawn, before anything is set up.
        empty: dict[str, Any] = {"_models": [], "_optimizers": [], "_updated": []}
        return {**super().__getstate__(), **empty}

    # Fabric's hooks

    def on_after_setup(self, fabric: Any, module: nn.Module, *optimizers: Any) -> None:
        """Start a new measurement, of all that was set up since `remove`.

        Fabric calls it in `setup`. After `setup_module` and `setup_optimizers` call it yourself.

        Args:
            fabric: Who has set it up.
            module: The model, as Fabric returns it.
            *optimizers: The optimizers, as Fabric returns them.

        Raises:
            TypeError: If an optimizer is not as Fabric returns it.
            ValueError: If the model has none of the `modules` of a name or a pattern.
        """
        for one in optimizers:
            if not isinstance(one, wrappers._FabricOptimizer):
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
        self._step, self._readers, self._trains_in_eval = 0, set(), False
        self._has_updated = self._has_batches = False
        one, *others = self._models
        loop = Loop(
            nn.ModuleList(self._models) if others else one,
            [one.optimizer for one in self._optimizers],
            # Their classes, one each: an optimizer of Fabric's holds its callbacks, and so what is
            # put on it would hold the timer.
            [type(one) for one in self._optimizers],
            pause_evaluation=True,
            submodules=submodules,
        )
        self._batch = loop.batch
        clock = self._options._clock or clock_for(fabric.device, tell=fabric.is_global_zero)
        means = MeanLog(self._options.prefix, self._log_every_n_steps, fabric.loggers)
        self._start(clock, loop, means)
        loaders, this = wrappers._FabricDataLoader, weakref.ref(self)
        self._patches.add(Subscription(loaders, "__iter__", this, _followed))
        weakref.finalize(self, self._patches.remove).atexit = False
        self._session.begin()

    @never_raises
    def on_after_optimizer_step(self, *, optimizer: Any, **_: Any) -> None:
        """End a step, if no loader does."""
        if not self._session.was_attached:
            self._warn_once(_NOT_SET_UP)
        if all(one is not optimizer for one in self._updated):
            self._updated.append(optimizer)
        self._has_updated = True
        self._trains_in_eval = not any(one.training for one in self._models)
        if not self._readers and optimizer is self._updated[-1]:
            self._end_step()
            self._session.update_has_ended_step()
            self._alone += 1
            if self._alone == _MANY:
                self._warn_once(_NO_LOADER)

    # For users

    def steps(self, loader: Iterable[T]) -> Steps[T]:
        """Yield the items of a loader that is none of Fabric's, and end the steps.

        Args:
            loader: The loader.

        Returns:
            What can be iterated as often as the loader, and has its length and attributes.
        """
        if isinstance(loader, wrappers._FabricDataLoader):
            return Steps(lambda: iter(loader), loader)  # It is followed.
        return Steps(lambda: self.follow(iter(loader), loader), loader)

    def remove(self) -> None:
        """End the measurement: read and log the last steps, and take all hooks off."""
        if self._session.is_attached:
            if self._has_updated:
                self._end_step()
            self._finish()
        self._forget()

    # What a loader tells

    def follow(self, items: Iterator[T], loader: object) -> Generator[T, None, None]:
        """Yield the batches of a loader, and tell the session where each begins."""
        try:
            while True:
                self._fetch_begins(id(items), loader)
                try:
                    item = next(items)
                except StopIteration:
                    if id(items) in self._readers:
                        # The body may go on, as with two loaders that are zipped.
                        self._session.recorder.mark(OTHER)
                    return
                self._batch_begins(item)
                yield item
        finally:
            self._reader_ends(id(items))

    @never_raises
    def _fetch_begins(self, reader: int, loader: object) -> None:
        session, is_known = self._session, reader in self._readers
        # The body of a loop that has trained may say `train()` only after the first fetch.
        if not is_known and id(loader) == self._trained_on:
            self._trains_in_eval |= torch.is_grad_enabled()
        if not self._trains():
            # A mark of its own: the one before may be the end of an update.
            session.recorder.mark(OTHER)
            session.recorder.pause()
            # In eval mode without grad a call of the model tells by itself what it is.
            tells = not (torch.is_grad_enabled() or any(one.training for one in self._models))
            self._batch.is_open = tells or not self._updated
            return
        self._batch.is_open = True
        if self._has_updated:
            self._end_step()
        if not is_known:
            self._reader_begins(loader)
            self._readers.add(reader)
        if self._has_batches:
            session.batch_ends()
        session.recorder.resume_or_mark(FETCH)

    def _reader_begins(self, loader: object) -> None:
        session = self._session
        self._know_loader(loader)
        if not self._readers and self._has_batches and BACKWARD in session.recorder.phases:
            # Gradients accumulate from one epoch to the next; what lies between is no step's.
            session.loop_goes_on()
        elif not self._readers:
            # Batches that were looked at alone, as for a mean, are no step's either.
            self._has_batches = False
            session.begin()
        self._trained_on, self._alone = id(loader), 0

    @never_raises
    def _batch_begins(self, batch: object) -> None:
        if self._trains():
            self._has_batches = True
            self._session.batch_begins()
            self._session.work.add_batch(batch)

    @never_raises
    def _reader_ends(self, reader: int) -> None:
        self._batch.is_open = True
        if reader not in self._readers:
            return
        self._readers.remove(reader)
        if self._has_updated and self._session.is_left(self._step):
            self._step += 1
            self._has_updated = self._has_batches = False
        elif self._session.is_attached and not (self._readers or self._updated):
            self._has_batches = False
            self._session.begin()  # What was only read belongs to no step.
        self._session.compare_ranks()

    def _trains(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        return self._trains_in_eval or any(one.training for one in self._models)

    def _end_step(self) -> None:
        self._has_updated = self._has_batches = False
        self._session.end_step(self._step)
        self._step += 1

    # The end

    def _forget(self) -> None:
        for several in (self._models, self._optimizers, self._updated):
            several.clear()
        self._patches.remove()

    def _detach(self) -> None:
        self._abort()
        self._forget()


def _followed(call: Callable[[Any], Any], timers: list[Any]) -> Callable[[Any], Any]:
    """Return what takes the place of `__iter__` of Fabric's loaders."""

    def followed(loader: Any) -> Any:
        items = call(loader)
        for timer in [one() for one in timers]:
            if timer is not None:
                items = timer.follow(items, loader)
        return items

    return followed


def _optimizers_of(fabric: Any) -> list[Any]:
    """Return the optimizers that `fabric.setup` has at hand: its hook is given the model alone."""
    for known in callers():
        if known.get("self") is fabric and "optimizers" in known:
            kind = wrappers._FabricOptimizer
            return [one for one in known["optimizers"] if isinstance(one, kind)]
    return []
