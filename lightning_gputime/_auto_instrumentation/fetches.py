"""Fetches of a plain loop that does not iterate over `steps(loader)`."""

import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader

from lightning_gputime._compat.torch_ import (
    dataset_of_iterator,
    loader_next,
    settings_of_iterator,
)
from lightning_gputime._instrumentation.patching import Calls, Subscription
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


class Fetches:
    """Divide a loop as `steps(loader)` does: `data` is the fetch, and code around it is `other`.

    The training's datasets are those that the first timed step fetches from with gradients enabled.
    Other fetches, such as those of a validation, change nothing.

    Args:
        timer: The timer of the loop.
        loaders: All loaders of the process. They are only used while they exist.
    """

    def __init__(self, timer: GPUPhaseHooks, loaders: list[DataLoader[Any]]) -> None:
        self._timer = timer
        self._loaders = WeakSet(loaders)
        self._iterators: list[Any] = []  # Iterators of the first step.
        self._datasets: list[_Known] = []
        self._has_started = False  # `iter(loader)` has run, and no batch was fetched since.

    def attach(self) -> None:
        """Listen to all loaders until the timer is removed."""
        if (entry := loader_next()) is not None:
            session = self._timer._session
            session.attach_until_end(Subscription(*entry, self))
            start = Calls(self._start_epoch)
            session.attach_until_end(Subscription(DataLoader, "__iter__", start))

    @property
    def are_timed(self) -> bool:
        """True once the training's datasets were found."""
        return bool(self._datasets)

    def end_first_step(self) -> None:
        """Take the datasets of the first step for those of the training."""
        datasets = [dataset_of_iterator(iterator) for iterator in self._iterators]
        self._datasets = [_Known(dataset) for dataset in datasets]
        if self._iterators:
            newest, dataset = self._iterators[-1], datasets[-1]
            found = [loader for loader in self._loaders if loader.dataset is dataset]
            # A script may iterate over a loader that it does not keep.
            loader = found[0] if found else settings_of_iterator(newest)
            self._timer._know_loader(loader, in_data=True)
        self._iterators = []

    def _start_epoch(self, loader: DataLoader[Any], *_: Any) -> bool:
        if self._is_timed(loader.dataset):
            self._timer._session.recorder.mark(DATA)
            self._has_started = True
        return False

    # As a listener of the iterators of loaders, see `Calls`

    def on_call_start(self, iterator: Any, *_: Any, **__: Any) -> bool:
        recorder = self._timer._session.recorder
        if not self._datasets:
            is_training = get_ident() == recorder.threads.home and torch.is_grad_enabled()
            if is_training and iterator not in self._iterators:
                self._iterators.append(iterator)
            return False
        if not self._is_timed(dataset_of_iterator(iterator)):
            return False
        if recorder.state is PAUSED:
            recorder.resume(DATA)
        elif not self._has_started:
            # The step has started with `data`, at the end of an update.
            recorder.mark_instead(DATA, OTHER)
            recorder.mark(DATA)
        self._has_started = False
        return True

    def on_call_end(self, batch: Any) -> None:
        if batch is None:  # The epoch has ended, or the loader has raised.
            self._timer._session.recorder.mark(OTHER)
        else:
            self._timer._session.open_step.batch_begins(batch)

    def _is_timed(self, dataset: object) -> bool:
        session = self._timer._session
        is_here = get_ident() == session.recorder.threads.home and torch.is_grad_enabled()
        is_known = any(known.is_same(dataset) for known in self._datasets)
        return is_here and is_known and session.steps.state is not OFF
