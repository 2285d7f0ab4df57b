"""Timers that are added to a script from outside, and the timer of a plain loop."""

import os
import sys
import time
import weakref
from collections.abc import Callable
from itertools import count
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import distributed, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, get_worker_info

from lightning_gputime._auto_instrumentation.environment import BEGAN, timer_options, warn_once
from lightning_gputime._compat.torch_ import (
    dataset_of_iterator,
    loader_next,
    settings_of_iterator,
)
from lightning_gputime._instrumentation.patching import Calls, Subscription
from lightning_gputime._loader import CulpritSums, TimedLoader
from lightning_gputime._loader.stages import StagedLoaders
from lightning_gputime._messages import messages
from lightning_gputime._phases import AFTER_BACKWARD, DATA, OTHER
from lightning_gputime._record.recorder import PAUSED
from lightning_gputime._session.session import OFF
from lightning_gputime._timer import Timer
from lightning_gputime.hooks import GPUPhaseHooks

_HAS_TIMER = (
    "The script has a timer, so `run` adds none and uses the timer of the script. Of the options of"
    " `run`, only save_path has an effect."
)
_MIN_OTHER_UPDATES = 3  # Minimum number of updates by other optimizers that end a timed loop.
_MICRO_BATCHES = (
    "One update has %d calls of backward: time between them, such as the fetch of a batch,"
    " counts as `other` or `loss`. If you accumulate gradients, add GPUPhaseHooks with"
    ' steps(loader) and accumulate_grad_batches="auto" to the script.'
)
_SAVED = "The run up to the error is saved in %s"

_timers_of_script = WeakSet[Timer]()


def use_timer_of_script(timer: Timer, wanted: dict[str, Any]) -> None:
    """Save the run of the script's timer when Python exits, on rank zero."""
    warn_once(_HAS_TIMER)
    if timer not in _timers_of_script and _rank() in (None, "0"):
        _timers_of_script.add(timer)
        path = path_to_save(wanted)
        if timer._live_file.path is None:  # Otherwise `save_path` was passed to the timer.
            timer._live_file.start(path)
        Finalize(None, _print_and_save, (timer, path), {"prints": False}, exitpriority=0)


def replace_with_timer(
    adder: object, callbacks: list[Any], timer: Timer, wanted: dict[str, Any]
) -> bool:
    """Replace the callback `adder` with a timer, or use a timer in the list and return False."""
    if others := [callback for callback in callbacks if isinstance(callback, Timer)]:
        use_timer_of_script(others[0], wanted)
        return False
    # Replace in place, because the Trainer is iterating over this list.
    callbacks[callbacks.index(adder)] = timer
    timer._print_on_stderr()
    return True


def finish_at_exit(timer: Timer, wanted: dict[str, Any], *, prints: bool = True) -> Finalize | None:
    """Print the table and save the run when Python exits, on rank zero.

    Return a function that prints and saves now instead; None on other ranks, which send their times
    to rank zero when Python exits.
    """
    timer._print_on_stderr()
    if _rank() not in (None, "0"):
        Finalize(None, _finish, (timer,), exitpriority=0)
        return None
    path = path_to_save(wanted)
    timer._live_file.start(path)
    # Unlike `atexit`, this runs in child processes of `multiprocessing`, but not after `os.fork`.
    return Finalize(None, _print_and_save, (timer, path), {"prints": prints}, exitpriority=0)


def _rank() -> str | None:
    """Return the rank of this process; None if unknown.

    Call it when a timer is added: the process group may be gone when Python exits.
    """
    if distributed.is_available() and distributed.is_initialized():
        return str(distributed.get_rank())
    return os.environ.get("RANK")


_file_numbers = count(1)
_began_s = float(os.environ.get(BEGAN, time.time()))  # Unix time at which `run` began.


def path_to_save(wanted: dict[str, Any]) -> str | None:
    """Return `save_path`, extended if another timer of the script or its subprocesses uses it.

    Example: "run.json.gz" for the first timer, "run-2.json.gz" for the second, and
    "run-4711.json.gz" for the first of a child process that is no rank.
    """
    if (path := wanted.get("save_path")) is None:
        return None
    number = next(_file_numbers)
    parts: list[int] = []
    if _rank() is None and parent_process() is not None:
        parts.append(os.getpid())
    if number > 1:
        parts.append(number)
    return _unused(_extended(path, *parts))


def _unused(path: str) -> str:
    """Return the path, with the process id if a file was saved there since `run` began."""
    if not os.path.exists(path) or os.path.getmtime(path) < _began_s:
        return path
    unused = _extended(path, os.getpid())
    warn_once(
        "Another process of this run has already saved %s. This process saves to %s.", path, unused
    )
    return unused


def _extended(path: str, *parts: object) -> str:
    """Return the path with parts after its name, such as "run-2.json.gz" for "run.json.gz"."""
    name, dot, endings = Path(path).name.partition(".")
    return str(Path(path).with_name("-".join([name, *map(str, parts)]) + dot + endings))


def _print_and_save(timer: Any, path: str | None, *, prints: bool) -> None:
    """Remove a timer and save its run. Print the table if wanted, or if the training failed."""
    try:
        has_failed = hasattr(sys, "last_value")  # An error has ended the script.
        is_unfinished = timer._session.is_attached or timer._is_aborted
        if hasattr(timer, "remove"):
            timer.remove()
        has_steps = timer.last_step is not None
        if has_steps and (prints or (has_failed and is_unfinished)):
            timer._print_on_stderr()
            timer._show(is_wanted=True)
        if has_steps and path is not None:
            if not timer._live_file.wrote(path):
                path = _unused(path)
            timer.save(path)
            if has_failed:
                messages.warning(_SAVED, path)
    except Exception as error:
        messages.warning("The table could not be shown, or the run could not be saved: %r", error)


def _finish(timer: Any) -> None:
    try:
        timer._finish()
    except Exception as error:
        messages.warning("The times of this rank could not be sent: %r", error)


class _Dataset:
    """Reference to a training dataset. Once that is gone, the next of its class replaces it."""

    def __init__(self, dataset: object) -> None:
        self._refer_to(dataset)

    def _refer_to(self, dataset: object) -> None:
        self._kind = type(dataset)
        try:
            self._dataset: Callable[[], object | None] = weakref.ref(dataset)
        except TypeError:  # Some objects, such as a list, have no weak references.
            self._dataset = lambda: dataset

    def accepts(self, dataset: object) -> bool:
        """Return True for this dataset, or for one that replaces it from now on."""
        current = self._dataset()
        # A script may create a new dataset for each epoch.
        if current is None and type(dataset) is self._kind:
            self._refer_to(dataset)
            return True
        return current is dataset


class EarlyStages(StagedLoaders):
    """Timer of the stages of all loaders (sampler, dataset, collate), while no timer is attached.

    It keeps the times by iterator. Once a timer knows which iterators belong to its training,
    `move` adds their times to the sums of this timer.
    """

    def __init__(self) -> None:
        super().__init__(self._is_included, time.perf_counter_ns, self._remember_newest)
        self._newest: Any = None  # Times of the loader whose iterator is under construction.
        self._by_iterator = WeakKeyDictionary[Any, Any]()

    def remove(self) -> None:
        """Stop timing, and forget all times. Unlike the base class, this can be attached again."""
        self._iter.remove()
        self._by_iterator.clear()

    def move(self, iterator: Any, sums: CulpritSums) -> None:
        if (loader := self._by_iterator.pop(iterator, None)) is not None:
            sums.add_loader(loader)

    def on_call_end(self, iterator: Any) -> None:
        super().on_call_end(iterator)
        if iterator is not None and self._newest is not None:
            self._by_iterator[iterator] = self._newest
        self._newest = None

    def _is_included(self, _: object) -> bool:
        # An attached timer, such as a Trainer's, times its loaders itself.
        others = (listener for listener in self._iter.patch.listeners if listener is not self)
        is_attached = any(isinstance(other, StagedLoaders) for other in others)
        return get_worker_info() is None and not is_attached

    def _remember_newest(self, loader: TimedLoader) -> TimedLoader:
        # `on_call_end` is called next, with the iterator of this loader.
        self._newest = loader
        return loader


class TimedLoop:
    """A loop whose steps end with the updates of one optimizer.

    It is split as `steps(loader)` does: a fetch is `data`, other code `other`. The training
    datasets are all datasets from which the first timed step fetches with gradients enabled.
    Fetches from other datasets, such as a validation's, are ignored. In the order of events:

    1. `_step_ends` is called after each update. The first begins the first timed step.
    2. In that step, `on_call_start` collects the iterators from which it fetches.
    3. At its end, `_find_datasets` takes their datasets as the training datasets.
    4. From then on, `_start_epoch`, `on_call_start` and `on_call_end` mark `data`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        models: list[nn.Module],
        wanted: dict[str, Any],  # Options of the timer, and `save_path`.
        early: EarlyStages,  # Stages of the iterators that were created before the timer.
    ) -> None:
        self.optimizer, self._early = optimizer, early
        # Number of consecutive updates by other optimizers after which the loop is over.
        self.ends_after = _MIN_OTHER_UPDATES
        self._has_updated = False  # True after the first update.
        self._iterators: list[Any] = []  # Iterators of loaders that the first timed step reads.
        self._datasets: list[_Dataset] = []  # Training datasets; empty until that step has ended.
        self._awaits_first_fetch = False  # True from `iter(loader)` until the first fetch.
        model = models[0] if len(models) == 1 else nn.ModuleList(models)
        self._timer = GPUPhaseHooks(model, optimizer, **timer_options(wanted))
        # The timer also listens to `iter(loader)`, but needs `_start_epoch` to have passed it the
        # loader. So subscribe first.
        calls = Calls(self._start_epoch, self._keep_only_settings)
        starts = Subscription(DataLoader, "__iter__", calls)
        starts.attach()
        self._timer.attach()
        self._timer._session.attach_until_end(starts)
        self._hook = optimizer.register_step_post_hook(self._step_ends)
        self._show = finish_at_exit(self._timer, wanted)
        self.is_shown = self._show is not None

    def tolerate(self, n: int) -> None:
        """Allow about twice as many updates of others as the `n` between two of this loop."""
        self.ends_after = max(self.ends_after, 2 * n + _MIN_OTHER_UPDATES)

    def end(self) -> bool:
        """Stop timing. If more than warm-up steps were timed, show the result and return True."""
        timer = self._timer
        self._hook.remove()
        timer._finish()
        del timer._loop  # Release the model, which the script may no longer need.
        has_steps = len(timer.history()) > timer._options.timed_warmup_steps
        if self._show is not None:
            if has_steps:
                self._show()
            else:
                self._show.cancel()
        return has_steps

    def _step_ends(self, *_: Any) -> None:
        """End a step, after an update. The first timed step starts after the first update."""
        session = self._timer._session
        if not self._has_updated:
            # The timer was attached inside this step, so the next is the first to be timed.
            self._has_updated = True
            session.begin_step()
            # From here on, `on_call_start` and `on_call_end` time the fetches.
            if (entry := loader_next()) is not None:
                session.attach_until_end(Subscription(*entry, self))
            return
        if not self._datasets:
            self._find_datasets()
            n_backward = session.recorder.open.labels.count(AFTER_BACKWARD)
            # Without a loader, nothing tells whether these are micro-batches.
            if n_backward > 1 and not self._datasets:
                self._timer._warn_once(_MICRO_BATCHES, n_backward)
        self._timer.step()

    def _find_datasets(self) -> None:
        """Take the datasets that the first timed steps have read as the training datasets."""
        for iterator in self._iterators:
            self._datasets.append(_Dataset(dataset_of_iterator(iterator)))
            self._early.move(iterator, self._timer._culprits)
        self._early.remove()
        if self._iterators:
            self._keep_only_settings(self._iterators[-1])
        self._iterators = []

    def _start_epoch(self, loader: DataLoader[Any], *_: Any) -> bool:
        """Start `data` if a training loader starts an epoch. Return True if it does."""
        if not self._is_timed(loader.dataset):
            return False
        self._timer._session.recorder.mark(DATA)
        self._awaits_first_fetch = True
        # Let the timer keep the loader while its iterator is created, to time its stages.
        self._timer._read_loader(loader, in_data=True)
        return True

    def _keep_only_settings(self, iterator: Any) -> None:
        """Let the timer keep the settings of a loader, but not the loader.

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
        elif not self._awaits_first_fetch:
            # The end of the step has marked `data`, but the fetch only starts now: the time until
            # now is `other`.
            recorder.mark_instead(OTHER, of=DATA)
            recorder.mark(DATA)
        self._awaits_first_fetch = False
        return True

    def on_call_end(self, batch: Any) -> None:
        if batch is None:  # The epoch has ended, or the loader has raised.
            self._timer._session.recorder.mark(OTHER)
        else:
            self._timer._session.batch_begins(batch)

    def _is_timed(self, dataset: object) -> bool:
        session = self._timer._session
        if not self._datasets or session.mode is OFF or not torch.is_grad_enabled():
            return False
        if get_ident() != session.recorder.threads.home:
            return False
        return any(training.accepts(dataset) for training in self._datasets)
