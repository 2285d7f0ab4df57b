"""Fetches of a plain loop that does not iterate over `steps(loader)`."""

from threading import get_ident
from typing import Any
from weakref import WeakSet

from torch.utils.data import DataLoader

from lightning_gputime._compat.torch_ import dataset_of_iterator, loader_next
from lightning_gputime._instrumentation.patching import Calls, Subscription
from lightning_gputime._phases import DATA, OTHER
from lightning_gputime._record.state import PAUSED
from lightning_gputime._session.state import OFF
from lightning_gputime.hooks import GPUPhaseHooks


class Fetches:
    """Divide a loop as `steps(loader)` does: `data` is the fetch, and code around it is `other`.

    The training's dataset is that of the last fetch before the first update. Fetches from other
    datasets, such as for a validation, change nothing.

    Args:
        timer: The timer of the loop.
        loaders: All loaders of the process. They are only used while they exist.
    """

    def __init__(self, timer: GPUPhaseHooks, loaders: list[DataLoader[Any]]) -> None:
        self._timer = timer
        self._loaders = WeakSet(loaders)
        self._newest: object = None  # Dataset of the newest fetch.
        self._dataset: object = None
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
        """True once the training's dataset was found."""
        return self._dataset is not None

    def end_first_step(self) -> None:
        """Take the newest dataset for that of the training."""
        dataset = self._dataset = self._newest
        found = [loader for loader in self._loaders if loader.dataset is dataset]
        if dataset is not None and found:
            self._timer._know_loader(found[0], in_data=True)

    def _start_epoch(self, loader: DataLoader[Any], *_: Any) -> bool:
        if self._is_timed(loader.dataset):
            self._timer._session.recorder.mark(DATA)
            self._has_started = True
            if loader is not self._timer._loader:  # A script may make a loader for each epoch.
                self._timer._know_loader(loader, in_data=True)
        return False

    # As a listener of the iterators of loaders, see `Calls`

    def on_call_start(self, iterator: Any, *_: Any, **__: Any) -> bool:
        if self._dataset is None and get_ident() == self._timer._session.recorder.threads.home:
            self._newest = dataset_of_iterator(iterator)
            return False
        if not self._is_timed(dataset_of_iterator(iterator)):
            return False
        recorder = self._timer._session.recorder
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
        is_here = get_ident() == session.recorder.threads.home
        return is_here and dataset is self._dataset and session.steps.state is not OFF
