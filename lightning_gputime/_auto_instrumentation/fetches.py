"""Fetches of a plain loop that does not iterate over `steps(loader)`."""

import time
import weakref
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.utils.data import DataLoader, get_worker_info

from lightning_gputime._compat.torch_ import (
    dataset_of_iterator,
    loader_next,
    settings_of_iterator,
)
from lightning_gputime._culprits.loader import StagedLoaders
from lightning_gputime._instrumentation.patching import Calls, Subscription, do_nothing
from lightning_gputime._measurement.culprits import CulpritSums, Loader, Workers
from lightning_gputime._phases import DATA, OTHER
from lightning_gputime._record.state import PAUSED
from lightning_gputime._session.state import OFF
from lightning_gputime.hooks import GPUPhaseHooks


class _Known:
    """A dataset, which is not kept alive. A later dataset of its class may take its place."""

    def __init__(self, dataset: object) -> None:
        self._kind = type(dataset)
        self._find: Callable[[], object | None] = _find(dataset)

    def is_same(self, dataset: object) -> bool:
        known = self._find()
        if known is None and type(dataset) is self._kind:  # Each epoch has a new dataset.
            self._find, known = _find(dataset), dataset
        return known is dataset


def _find(dataset: object) -> Callable[[], object | None]:
    try:
        return weakref.ref(dataset)
    except TypeError:  # For example, a list.
        return lambda: dataset


class EarlyStages:
    """Time the stages of all loaders until a timer is attached.

    It is called as a listener of `DataLoader.__iter__`, see `Calls`.
    """

    def __init__(self) -> None:
        self._staged = StagedLoaders(_is_in_main_process, time.perf_counter_ns, self)
        # Adds the stages of the iterator that is being made to the sums of a timer.
        self._newest: Callable[[CulpritSums], object] = do_nothing
        # The same function of each iterator that was made.
        self._adds = WeakKeyDictionary[Any, Callable[[CulpritSums], object]]()
        self._iter = Subscription(DataLoader, "__iter__", self)

    def start(self) -> None:
        self._iter.put_on()

    def stop(self) -> None:
        self._iter.remove()
        self._adds.clear()

    def move(self, iterator: Any, sums: CulpritSums) -> None:
        """Move the stages of an iterator to the sums of a timer."""
        if (add := self._adds.pop(iterator, None)) is not None:
            add(sums)

    def on_call_start(self, loader: Any, *_: Any) -> bool:
        # A timer that is attached, such as that of a Trainer, times its loaders itself.
        has_timer = any(isinstance(other, StagedLoaders) for other in self._iter.patch.listeners)
        return not has_timer and self._staged.on_call_start(loader)

    def on_call_end(self, iterator: Any) -> None:
        self._staged.on_call_end(iterator)
        if iterator is not None:
            self._adds[iterator] = self._newest
        self._newest = do_nothing

    # As sums of the stages

    def add_loader(self, loader: Loader) -> Loader:
        self._newest = partial(CulpritSums.add_loader, loader=loader)
        return loader

    def add_workers(self, workers: Workers) -> Workers:
        self._newest = partial(CulpritSums.add_workers, workers=workers)
        return workers


def _is_in_main_process(_: object) -> bool:
    return get_worker_info() is None


class Fetches:
    """Divide a loop as `steps(loader)` does: `data` is the fetch, and code around it is `other`.

    The training's datasets are those that the first timed step fetches from with gradients enabled.
    Other fetches, such as those of a validation, change nothing.

    Args:
        timer: The timer of the loop.
        loaders: All loaders of the process. They are only used while they exist.
        early: Stages of the iterators that were made before the timer was attached.
    """

    def __init__(
        self, timer: GPUPhaseHooks, loaders: list[DataLoader[Any]], early: EarlyStages
    ) -> None:
        self._timer = timer
        self._loaders = WeakSet(loaders)
        self._early = early
        self._iterators: list[Any] = []  # Iterators of the first step.
        self._datasets: list[_Known] = []
        self._known: list[Any] = []  # Loaders of the datasets, or settings of their iterators.
        self._newest = -1  # Place of the loader that the timer knows.
        self._has_started = False  # `iter(loader)` has run, and no batch was fetched since.
        # Subscribed before the timer, which then times the stages of a loader that is new.
        self.starts = Subscription(
            DataLoader, "__iter__", Calls(self._start_epoch, self._has_new_iterator)
        )
        self.starts.put_on()

    def attach(self) -> None:
        """Listen to all loaders until the timer is removed."""
        if (entry := loader_next()) is not None:
            self._timer._session.attach_until_end(Subscription(*entry, self))

    @property
    def are_timed(self) -> bool:
        """True once the training's datasets were found."""
        return bool(self._datasets)

    def end_first_step(self) -> None:
        """Take the datasets of the first step for those of the training."""
        for iterator in self._iterators:
            dataset = dataset_of_iterator(iterator)
            self._datasets.append(_Known(dataset))
            found = [loader for loader in self._loaders if loader.dataset is dataset]
            # A script may iterate over a loader that it does not keep.
            self._known.append(found[0] if found else settings_of_iterator(iterator))
            self._early.move(iterator, self._timer._culprits)
            self._newest = len(self._known) - 1
        self._early.stop()
        if self._known:
            self._timer._know_loader(self._known[-1], in_data=True)
        self._iterators = []

    def _start_epoch(self, loader: DataLoader[Any], *_: Any) -> bool:
        """Start `data` if a training loader starts an epoch. Return True if the loader is new."""
        place = self._place_of(loader.dataset)
        if place is None:
            return False
        self._timer._session.recorder.mark(DATA)
        self._has_started = True
        is_kept = self._known[place] is loader
        if not is_kept or self._newest != place:
            self._newest = place
            self._timer._know_loader(loader, in_data=True)
        return not is_kept

    def _has_new_iterator(self, iterator: Any) -> None:
        """Let go of a loader that was made for this epoch, so that its workers can end."""
        self._known[self._newest] = settings_of_iterator(iterator)
        self._timer._know_loader(self._known[self._newest], in_data=True)

    # As a listener of the iterators of loaders, see `Calls`

    def on_call_start(self, iterator: Any, *_: Any, **__: Any) -> bool:
        recorder = self._timer._session.recorder
        if not self._datasets:
            is_training = get_ident() == recorder.threads.home and torch.is_grad_enabled()
            if is_training and iterator not in self._iterators:
                self._iterators.append(iterator)
            return False
        if self._place_of(dataset_of_iterator(iterator)) is None:
            return False
        if recorder.state is PAUSED:
            recorder.resume(DATA)
        elif not self._has_started:
            # Time since the last update has the label `data`, but is `other`.
            recorder.mark_instead(DATA, OTHER)
            recorder.mark(DATA)
        self._has_started = False
        return True

    def on_call_end(self, batch: Any) -> None:
        if batch is None:  # The epoch has ended, or the loader has raised.
            self._timer._session.recorder.mark(OTHER)
        else:
            self._timer._session.open_step.batch_begins(batch)

    def _place_of(self, dataset: object) -> int | None:
        """Return the place of a dataset if its fetches are timed now, or None."""
        session = self._timer._session
        if not self._datasets or session.steps.state is OFF or not torch.is_grad_enabled():
            return None
        if get_ident() != session.recorder.threads.home:
            return None
        places = (place for place, known in enumerate(self._datasets) if known.is_same(dataset))
        return next(places, None)
