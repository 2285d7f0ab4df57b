"""Stages of a DataLoader: in its workers, or in the main process without workers."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_gputime._compat.names import report_missing
from lightning_gputime._compat.python_ import definition_of
from lightning_gputime._compat.torch_ import FETCHERS, pin_loop
from lightning_gputime._culprits.workers import LoaderWorkers
from lightning_gputime._instrumentation.loaders import dataset_of
from lightning_gputime._instrumentation.patching import Subscription, do_nothing
from lightning_gputime._measurement.culprits import (
    COLLATE,
    DATASET,
    SAMPLER,
    LoaderStages,
    Source,
    Stage,
    short_name,
)


class StagedLoaders:
    """Timer of the stages of loaders whose iterators are created while it is attached.

    While `iter(loader)` runs, it replaces the sampler and `collate_fn` of a loader without workers,
    or the `worker_init_fn` of a loader with workers. Only the iterator keeps the replacements.

    Args:
        includes: Function that returns True for a loader to time.
        now_ns: The host's clock.
        add_loader: Takes new, empty sums for a loader. Returns the sums to add its times to: those
            of an earlier iterator of the same loader, or the new sums.
    """

    def __init__(
        self,
        includes: Callable[[object], bool | None],
        now_ns: Callable[[], int],
        add_loader: Callable[[Any], Any],
    ) -> None:
        self._includes, self._now_ns, self._add_loader = includes, now_ns, add_loader
        # For each running call of `iter`, the objects whose attributes were replaced, and the
        # original attributes.
        self._replaced: list[list[tuple[Any, dict[str, Any]]]] = []
        self._iter = Subscription(DataLoader, "__iter__", self)

    def attach(self) -> None:
        self._iter.attach()

    def remove(self) -> None:
        self._iter.remove()
        self._includes = do_nothing  # The original function may refer to the timer.

    # Listener of `DataLoader.__iter__`, see `Calls`

    def on_call_start(self, loader: Any, *_: Any, **__: Any) -> bool:
        if not self._includes(loader):
            return False
        if loader.num_workers:
            report_missing(*FETCHERS)
            worker_stages = [*_stages_of(loader)][1:]  # The sampler runs in the main process.
            workers = self._add_loader(LoaderWorkers(loader.num_workers, *worker_stages))
            self._replace_for_workers(loader, workers)
            return True
        attributes = vars(loader)
        sampler_name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler, collate = attributes.get(sampler_name), attributes.get("collate_fn")
        if sampler is None or not callable(collate):
            return False  # A subclass of `DataLoader` stores these objects elsewhere.
        sums = self._add_loader(LoaderStages(*_stages_of(loader)))
        stages = _Stages(sampler, collate, self._now_ns, sums)
        self._replaced.append([(loader, {sampler_name: sampler, "collate_fn": collate})])
        attributes.update({sampler_name: stages, "collate_fn": stages.collate})
        return True

    def on_call_end(self, _: Any) -> None:
        if self._replaced:  # It is empty if Ctrl-C interrupted `on_call_start`.
            for owner, originals in self._replaced.pop():
                vars(owner).update(originals)

    def _replace_for_workers(self, loader: Any, workers: LoaderWorkers) -> None:
        user_init = vars(loader).get("worker_init_fn")
        originals: list[tuple[Any, dict[str, Any]]] = [(loader, {"worker_init_fn": user_init})]
        self._replaced.append(originals)
        vars(loader)["worker_init_fn"] = workers.init(user_init)
        if loader.pin_memory and (found := pin_loop()) is not None:
            module, name = found
            loop = getattr(module, name)
            originals.append((module, {name: loop}))
            setattr(module, name, workers.pin_times.timed(loop))


class _Stages:
    """Replacement for a loader's sampler. Its method `collate` replaces `collate_fn`."""

    def __init__(
        self, indices: Any, collate: Any, now_ns: Callable[[], int], sums: LoaderStages
    ) -> None:
        self._indices, self._collate = indices, collate
        self._now_ns, self._sums = now_ns, sums
        self._sampler_ns = 0  # Time in the sampler for the current batch.
        self._indices_ready_ns = 0  # Host time when the sampler returned its indices.

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Any]:
        now_ns = self._now_ns
        self._sums.start_iterator()
        start_ns = now_ns()
        for index in self._indices:
            self._indices_ready_ns = now_ns()
            self._sampler_ns = self._indices_ready_ns - start_ns
            yield index
            start_ns = now_ns()
        self._sums.end_iterator()

    def collate(self, examples: Any) -> Any:
        start_ns = self._now_ns()
        collated = self._collate(examples)
        end_ns = self._now_ns()
        # The loader reads the dataset between the sampler and `collate_fn`.
        dataset_ns = start_ns - self._indices_ready_ns
        self._sums.add(self._sampler_ns, dataset_ns, end_ns - start_ns)
        return collated


def _source_of(function: Any) -> Source | None:
    """Return where a function or method is defined; None if that is unknown."""
    found = definition_of(function)
    if found is None:
        return None
    file, line, name = found
    return Source(file, line, line, short_name(name))


def _stages_of(loader: Any) -> Iterator[Stage]:
    """Yield the sampler, the dataset and `collate_fn` of a loader, with the function of each."""
    sampler = loader.batch_sampler
    if sampler is None or type(sampler).__module__.partition(".")[0] == "torch":
        # The batch samplers of torch only group the indices that the sampler yields.
        sampler = loader.sampler
    yield Stage(SAMPLER, type(sampler).__name__, _source_of(type(sampler).__iter__))
    dataset = dataset_of(loader)
    kind = type(dataset)
    if isinstance(dataset, IterableDataset):
        method = "__iter__"
    else:
        method = "__getitems__" if hasattr(kind, "__getitems__") else "__getitem__"
    yield Stage(DATASET, f"{kind.__name__}.{method}", _source_of(getattr(kind, method, None)))
    # The transformers Trainer wraps its collator to remove columns.
    collate = getattr(loader.collate_fn, "data_collator", loader.collate_fn)
    is_function = hasattr(collate, "__qualname__")
    name = short_name(collate.__qualname__) if is_function else type(collate).__name__
    yield Stage(COLLATE, name, _source_of(collate if is_function else type(collate).__call__))
