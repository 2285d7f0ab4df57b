"""Fetches of a plain loop that does not iterate over `steps(loader)`."""

import time
import weakref
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, get_worker_info

from lightning_gputime._compat.torch_ import (
    dataset_of_iterator,
    loader_next,
    settings_of_iterator,
)
from lightning_gputime._instrumentation.patching import Calls, Subscription, do_nothing
from lightning_gputime._loader import StagedLoaders
from lightning_gputime._measurement.culprits import CulpritSums, Loader
from lightning_gputime._phases import DATA, OTHER
from lightning_gputime._record.state import PAUSED
from lightning_gputime._session.session import OFF
from lightning_gputime.hooks import GPUPhaseHooks


class _Dataset:
    """Reference to a dataset of the training, weak if possible.

    Once the dataset is gone, the next dataset of its class replaces it: a script may create a new
    dataset for each epoch.
    """

    def __init__(self, dataset: object) -> None:
        self._kind = type(dataset)
        self._dataset = _reference_to(dataset)

    def accepts(self, dataset: object) -> bool:
        """Return True for the dataset. Also accept its replacement, which then is the dataset."""
        current = self._dataset()
        if current is None and type(dataset) is self._kind:
            self._dataset = _reference_to(dataset)
            return True
        return current is dataset


def _reference_to(dataset: object) -> Callable[[], object | None]:
    try:
        return weakref.ref(dataset)
    except TypeError:  # Some objects, such as a list, have no weak references.
        return lambda: dataset


class EarlyStages(StagedLoaders):
    """Timer of the stages of all loaders (sampler, dataset, collate), while no timer is attached.

    It keeps the times by iterator. `move` adds them to the sums of a timer, once the timer knows
    which iterators belong to its training.
    """

    def __init__(self) -> None:
        super().__init__(self._is_included, time.perf_counter_ns, self._add_loader)
        # Adds the times of the iterator under construction to the sums of a timer.
        self._add_newest: Callable[[CulpritSums], object] = do_nothing
        # The same for each iterator that was constructed.
        self._add_by_iterator = WeakKeyDictionary[Any, Callable[[CulpritSums], object]]()

    def remove(self) -> None:
        """Stop timing, and forget all times. Unlike the base class, this can be attached again."""
        self._iter.remove()
        self._add_by_iterator.clear()

    def move(self, iterator: Any, sums: CulpritSums) -> None:
        """Move the times of an iterator to the sums of a timer."""
        if (add := self._add_by_iterator.pop(iterator, None)) is not None:
            add(sums)

    def on_call_end(self, iterator: Any) -> None:
        super().on_call_end(iterator)
        if iterator is not None:
            self._add_by_iterator[iterator] = self._add_newest
        self._add_newest = do_nothing

    def _is_included(self, _: object) -> bool:
        # An attached timer, such as a Trainer's, times its loaders itself.
        others = (listener for listener in self._iter.patch.listeners if listener is not self)
        is_attached = any(isinstance(other, StagedLoaders) for other in others)
        return get_worker_info() is None and not is_attached

    def _add_loader(self, loader: Loader) -> Loader:
        self._add_newest = partial(CulpritSums.add_loader, loader=loader)
        return loader


class Fetches:
    """Listener that splits a loop as `steps(loader)` does: a fetch is `data`, other code `other`.

    The training datasets are all datasets from which the first timed step fetches with gradients
    enabled. Fetches from other datasets, such as a validation's, are ignored.

    Args:
        timer: The timer of the loop.
        early: Stages of the iterators that were created before the timer was attached.
    """

    def __init__(self, timer: GPUPhaseHooks, early: EarlyStages) -> None:
        self._timer = timer
        self._early = early
        self._iterators: list[Any] = []  # Iterators of the first step.
        self._datasets: list[_Dataset] = []  # Training datasets; empty in the first step.
        self._has_started = False  # True from `iter(loader)` until the first fetch.
        # The timer also listens to `iter(loader)`, but needs `_start_epoch` to have passed it the
        # loader. So subscribe first.
        self.starts = Subscription(
            DataLoader, "__iter__", Calls(self._start_epoch, self._read_settings)
        )
        self.starts.attach()

    def attach(self) -> None:
        """Listen to the iterators of all loaders until the timer is removed."""
        if (entry := loader_next()) is not None:
            self._timer._session.attach_until_end(Subscription(*entry, self))

    @property
    def are_timed(self) -> bool:
        """True once the training datasets are found."""
        return bool(self._datasets)

    def end_first_step(self) -> None:
        """Use the datasets of the first step as the training datasets."""
        for iterator in self._iterators:
            self._datasets.append(_Dataset(dataset_of_iterator(iterator)))
            self._early.move(iterator, self._timer._culprits)
        self._early.remove()
        if self._iterators:
            self._read_settings(self._iterators[-1])
        self._iterators = []

    def _start_epoch(self, loader: DataLoader[Any], *_: Any) -> bool:
        """Start `data` if a training loader starts an epoch. Return True if it does."""
        if not self._is_timed(loader.dataset):
            return False
        self._timer._session.recorder.mark(DATA)
        self._has_started = True
        # While the iterator is created, the timer keeps the loader, to time its stages.
        self._timer._read_loader(loader, in_data=True)
        return True

    def _read_settings(self, iterator: Any) -> None:
        """Let the timer keep the loader's settings instead of the loader.

        A script may create a loader for each epoch, whose workers exit once it is deleted.
        """
        self._timer._read_loader(settings_of_iterator(iterator), in_data=True)

    # Listener of loader iterators, see `Calls`

    def on_call_start(self, iterator: Any, *_: Any, **__: Any) -> bool:
        recorder = self._timer._session.recorder
        if not self._datasets:  # In the first step: remember what it fetches from.
            is_training = get_ident() == recorder.threads.home and torch.is_grad_enabled()
            if is_training and iterator not in self._iterators:
                self._iterators.append(iterator)
            return False
        if not self._is_timed(dataset_of_iterator(iterator)):
            return False
        self._timer._session.fetch_begins()
        if recorder.state is PAUSED:
            recorder.resume(DATA)
        elif not self._has_started:
            # The end of the step has marked `data`, but the fetch only starts now: the time until
            # now is `other`.
            recorder.mark_instead(DATA, OTHER)
            recorder.mark(DATA)
        self._has_started = False
        return True

    def on_call_end(self, batch: Any) -> None:
        if batch is None:  # The epoch has ended, or the loader has raised.
            self._timer._session.recorder.mark(OTHER)
        else:
            self._timer._session.batch_begins(batch)

    def _is_timed(self, dataset: object) -> bool:
        """Return True for a training dataset whose fetch can be timed now."""
        session = self._timer._session
        if not self._datasets or session.mode is OFF or not torch.is_grad_enabled():
            return False
        if get_ident() != session.recorder.threads.home:
            return False
        return any(training.accepts(dataset) for training in self._datasets)
