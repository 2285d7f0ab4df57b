"""Stages of a DataLoader without workers: its sampler, its dataset and its `collate_fn`."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_gputime._boundaries.patching import Subscription, do_nothing
from lightning_gputime._culprits.places import source_of
from lightning_gputime._measurement.culprits import LoaderStages, Stage, short_name

_MAX_LOADERS = 10  # More side by side are the batches themselves.


class StagedLoaders:
    """Time the stages of loaders whose iterators are made while it is attached.

    What a loader reads from is replaced while `iter(loader)` runs, and put back at its end: only
    the iterator keeps the stand-ins, which add two Python calls to a batch.

    Args:
        find: Returns the loader, or several in a list or dict.
        now_ns: The host's clock.
        add: Takes the stages of each loader before its first batch.
    """

    def __init__(
        self,
        find: Callable[[], object],
        now_ns: Callable[[], int],
        add: Callable[[LoaderStages], LoaderStages],
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
        if loader.num_workers or not any(loader is known for known in _several(self._find())):
            return False
        indices = "sampler" if loader.batch_sampler is None else "batch_sampler"
        own = vars(loader)
        kept = {name: own[name] for name in (indices, "collate_fn") if name in own}
        if len(kept) < 2 or not callable(kept["collate_fn"]):
            return False  # A loader that keeps them elsewhere.
        batch = _Batch(self._now_ns, self._add(LoaderStages(*_stages_of(loader))))
        self._replaced.append((loader, kept))
        own[indices] = _TimedIndices(kept[indices], batch)
        own["collate_fn"] = _TimedCollate(kept["collate_fn"], batch)
        return True

    def on_call_end(self, _: Any) -> None:
        if self._replaced:  # Else Ctrl-C came before the loader was prepared.
            loader, kept = self._replaced.pop()
            vars(loader).update(kept)


def _several(loader: object) -> list[object]:
    """Return the loaders in a list or dict; of a loader of accelerate, the one inside."""
    inside = [*loader.values()] if isinstance(loader, dict) else loader
    is_several = isinstance(inside, list | tuple) and len(inside) <= _MAX_LOADERS
    several: Iterable[object] = inside if is_several else [loader]  # type: ignore[assignment]
    return [getattr(known, "base_dataloader", known) for known in several]


class _Batch:
    """The batch that a loader is making."""

    __slots__ = ("has_indices_ns", "now_ns", "sampler_ns", "stages")

    def __init__(self, now_ns: Callable[[], int], stages: LoaderStages) -> None:
        self.now_ns, self.stages = now_ns, stages
        self.sampler_ns = self.has_indices_ns = 0


class _TimedIndices:
    """Stand in for a sampler."""

    def __init__(self, indices: Any, batch: _Batch) -> None:
        self._indices, self._batch = indices, batch

    def __len__(self) -> int:
        return len(self._indices)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_indices" not in vars(self):
            raise AttributeError(name)
        return getattr(self._indices, name)

    def __iter__(self) -> Iterator[Any]:
        batch, now_ns = self._batch, self._batch.now_ns
        start_ns = now_ns()
        for index in self._indices:
            batch.has_indices_ns = now_ns()
            batch.sampler_ns = batch.has_indices_ns - start_ns
            yield index
            start_ns = now_ns()


class _TimedCollate:
    """Stand in for a `collate_fn`."""

    def __init__(self, collate: Callable[[Any], Any], batch: _Batch) -> None:
        self._collate, self._batch = collate, batch

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._collate,)

    def __call__(self, examples: Any) -> Any:
        batch = self._batch
        start_ns = batch.now_ns()
        collated = self._collate(examples)
        end_ns = batch.now_ns()
        dataset_ns, collate_ns = start_ns - batch.has_indices_ns, end_ns - start_ns
        batch.stages.add(batch.sampler_ns, dataset_ns, collate_ns)
        return collated


def _same(found: Any) -> Any:
    return found


def _stages_of(loader: Any) -> Iterator[Stage]:
    """Yield what is called in each stage."""
    own_batches = type(loader.batch_sampler).__module__.partition(".")[0] != "torch"
    sampler = loader.batch_sampler if own_batches and loader.batch_sampler else loader.sampler
    yield Stage("sampler", type(sampler).__name__, source_of(type(sampler).__iter__))
    dataset = loader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    kind = type(dataset)
    if isinstance(dataset, IterableDataset):
        method = "__iter__"
    else:
        method = "__getitems__" if hasattr(kind, "__getitems__") else "__getitem__"
    yield Stage("dataset", f"{kind.__name__}.{method}", source_of(getattr(kind, method, None)))
    # The Trainer of transformers puts one around its own that removes columns.
    collate = getattr(loader.collate_fn, "data_collator", loader.collate_fn)
    name = short_name(getattr(collate, "__qualname__", type(collate).__name__))
    call = collate if hasattr(collate, "__qualname__") else type(collate).__call__
    yield Stage("collate", name, source_of(call))
