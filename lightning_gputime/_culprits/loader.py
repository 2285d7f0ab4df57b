"""Stages of a DataLoader without workers: its sampler, its dataset and its `collate_fn`."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_gputime._culprits.places import source_of
from lightning_gputime._culprits.workers import LoaderWorkers
from lightning_gputime._instrumentation.loaders import dataset_of, loaders_in
from lightning_gputime._instrumentation.patching import Subscription, do_nothing
from lightning_gputime._measurement.culprits import (
    COLLATE,
    DATASET,
    SAMPLER,
    LoaderStages,
    Stage,
    short_name,
)


class StagedLoaders:
    """Time the stages of loaders whose iterators are made while it is attached.

    The sampler and `collate_fn` of a loader are replaced while `iter(loader)` runs. Only the
    iterator keeps the stand-ins, which add two Python calls per batch.

    Args:
        find: Returns the loader, or several in a list or dict.
        now_ns: The host's clock.
        add: Takes the stages of each loader before its first batch.
    """

    def __init__(
        self,
        find: Callable[[], object],
        now_ns: Callable[[], int],
        add: Callable[[Any], Any],
    ) -> None:
        self._find, self._now_ns, self._add = find, now_ns, add
        self._replaced: list[tuple[Any, dict[str, Any]]] = []
        self._iter = Subscription(DataLoader, "__iter__", self)

    def put_on(self) -> None:
        self._iter.put_on()

    def remove(self) -> None:
        self._iter.remove()
        self._find = do_nothing  # What finds the loader may hold the timer.

    # As a listener of `DataLoader.__iter__`, see `Calls`

    def on_call_start(self, loader: Any, *_: Any, **__: Any) -> bool:
        found = loaders_in(self._find())
        # A loader of accelerate iterates over the one inside.
        known = [getattr(outer, "base_dataloader", outer) for outer in found]
        if not any(loader is inner for inner in known):
            return False
        own = vars(loader)
        if loader.num_workers:
            called = [*_stages_of(loader)][1:]  # Without the sampler, which the main process runs.
            workers = self._add(LoaderWorkers(loader.num_workers, *called))
            user_init = own.get("worker_init_fn")
            self._replaced.append((loader, {"worker_init_fn": user_init}))
            own["worker_init_fn"] = workers.init(user_init)
            return True
        indices = "sampler" if loader.batch_sampler is None else "batch_sampler"
        kept = {name: own[name] for name in (indices, "collate_fn") if name in own}
        if len(kept) < 2 or not callable(kept["collate_fn"]):
            return False  # A loader that keeps them elsewhere.
        sums = self._add(LoaderStages(*_stages_of(loader)))
        stages = _Stages(kept[indices], kept["collate_fn"], self._now_ns, sums)
        self._replaced.append((loader, kept))
        own.update({indices: stages, "collate_fn": stages.collate})
        return True

    def on_call_end(self, _: Any) -> None:
        if self._replaced:  # Else Ctrl-C came before the loader was prepared.
            loader, kept = self._replaced.pop()
            vars(loader).update(kept)


class _Stages:
    """Stand in for the sampler of a loader, and for its `collate_fn` by a method."""

    def __init__(
        self, indices: Any, collate: Any, now_ns: Callable[[], int], sums: LoaderStages
    ) -> None:
        self._indices, self._collate = indices, collate
        self._now_ns, self._sums = now_ns, sums
        self._sampler_ns = self._has_indices_ns = 0  # Of the batch that is made now.

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Any]:
        now_ns = self._now_ns
        start_ns = now_ns()
        for index in self._indices:
            self._has_indices_ns = now_ns()
            self._sampler_ns = self._has_indices_ns - start_ns
            yield index
            start_ns = now_ns()

    def collate(self, examples: Any) -> Any:
        start_ns = self._now_ns()
        collated = self._collate(examples)
        end_ns = self._now_ns()
        self._sums.add(self._sampler_ns, start_ns - self._has_indices_ns, end_ns - start_ns)
        return collated


def _stages_of(loader: Any) -> Iterator[Stage]:
    """Yield what is called in each stage."""
    own_batches = type(loader.batch_sampler).__module__.partition(".")[0] != "torch"
    sampler = loader.batch_sampler if own_batches and loader.batch_sampler else loader.sampler
    yield Stage(SAMPLER, type(sampler).__name__, source_of(type(sampler).__iter__))
    dataset = dataset_of(loader)
    kind = type(dataset)
    if isinstance(dataset, IterableDataset):
        method = "__iter__"
    else:
        method = "__getitems__" if hasattr(kind, "__getitems__") else "__getitem__"
    yield Stage(DATASET, f"{kind.__name__}.{method}", source_of(getattr(kind, method, None)))
    # The Trainer of transformers wraps its collator in one that removes columns.
    collate = getattr(loader.collate_fn, "data_collator", loader.collate_fn)
    is_function = hasattr(collate, "__qualname__")
    name = short_name(collate.__qualname__) if is_function else type(collate).__name__
    yield Stage(COLLATE, name, source_of(collate if is_function else type(collate).__call__))
